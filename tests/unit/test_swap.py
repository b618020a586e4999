"""What comes back from the swap space is what went there, and nothing that fails goes unsaid."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from yocolm.engine.state import PagedState
from yocolm.engine.swap import Kind, SwapStore
from yocolm.engine.swap_space import Move
from yocolm.models.spec import ModelSpec, Store

PAGES, SLOTS, BLOCKS, PLACES = 12, 5, 8, 3
GLOBALS = (Store("global_kv", 2, 8, 12, 3), Store("global_kv", 1, 5, 5, 1))
WINDOW = Store("window_kv", 2, 6, 6, 1, window=7)
RECURRENT = Store("recurrent", 3, 4, 6, 1)
STORES = {
    "all": (RECURRENT, WINDOW, *GLOBALS),
    "pages": GLOBALS,
    "states": (WINDOW, RECURRENT),
    "nothing": (),
}
KINDS: tuple[Kind, ...] = ("file", "memory")
EVERY_KIND = pytest.mark.parametrize("kind", KINDS)
TIMEOUT = 60.0


def spec_of(*stores: Store) -> ModelSpec:
    return ModelSpec(stores, (), (), 0, 0, 0, 0, True, 0, 0, 0)


def state_of(stores: str = "all", dtype: torch.dtype = torch.float32) -> PagedState:
    """Filled with random bits, NaN among them."""
    state = PagedState(spec_of(*STORES[stores]), PAGES, 4, SLOTS, dtype)
    draw = torch.Generator().manual_seed(3)
    for pool in pools_of(state):
        bits = pool.view(torch.uint8)
        bits.copy_(torch.randint(256, bits.shape, generator=draw, dtype=torch.uint8))
    return state


def page_pools(state: PagedState) -> list[torch.Tensor]:
    return [pool for pair in state.pages for pool in pair]


def slot_pools(state: PagedState) -> list[torch.Tensor]:
    return [*(pool for pair in state.rings for pool in pair), *state.recurrent]


def pools_of(state: PagedState) -> list[torch.Tensor]:
    return page_pools(state) + slot_pools(state)


def bits_of(pools: list[torch.Tensor], row: int) -> list[bytes]:
    return [pool[row].contiguous().view(torch.uint8).numpy().tobytes() for pool in pools]


def overwrite(pools: list[torch.Tensor], row: int, value: float) -> None:
    for pool in pools:
        pool[row] = value


def finish(store: SwapStore, count: int) -> list[tuple[int, str | None]]:
    ended: list[tuple[int, str | None]] = []
    while len(ended) < count:
        store.wait(TIMEOUT)
        more = store.poll()
        assert more, "nothing ended in time"
        ended += more
    assert len(ended) == count
    return ended


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., SwapStore]]:
    stores: list[SwapStore] = []

    def open_store(state: PagedState, kind: Kind = "file", **arguments: Any) -> SwapStore:
        folder = str(tmp_path) if kind == "file" else None
        stores.append(SwapStore(state, BLOCKS, PLACES, kind, **{"directory": folder, **arguments}))
        return stores[-1]

    yield open_store
    for store in stores:
        store.close()


@EVERY_KIND
@pytest.mark.parametrize("stores", STORES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_every_bit_comes_back(
    kind: Kind, stores: str, dtype: torch.dtype, opened: Callable[..., SwapStore]
) -> None:
    state = state_of(stores, dtype)
    store = opened(state, kind)
    pages, slots = page_pools(state), slot_pools(state)
    gone, back, blocks = [7, 2, 9, 4, 11], [1, 3, 4, 5, 6], [3, 4, 6, 0, 7]
    before = [bits_of(pages, page) for page in gone], bits_of(slots, 2)
    others = {page: bits_of(pages, page) for page in (0, 2, 7, 8, 9, 10, 11)}
    other_slots = {slot: bits_of(slots, slot) for slot in (0, 1, 3)}
    store.start(Move(5, True, tuple(zip(gone, blocks, strict=True)), (2, 1)))
    assert finish(store, 1) == [(5, None)]
    for page in back:
        overwrite(pages, page, 1.5)
    store.start(Move(6, False, tuple(zip(back, blocks, strict=True)), (4, 1)))
    assert finish(store, 1) == [(6, None)]
    assert ([bits_of(pages, page) for page in back], bits_of(slots, 4)) == before
    assert {page: bits_of(pages, page) for page in others} == others
    assert {slot: bits_of(slots, slot) for slot in other_slots} == other_slots


@EVERY_KIND
def test_a_move_without_a_state_or_without_pages(
    kind: Kind, opened: Callable[..., SwapStore]
) -> None:
    state = state_of()
    store = opened(state, kind)
    page, slot = bits_of(page_pools(state), 3), bits_of(slot_pools(state), 3)
    moves = [Move(1, True, ((3, 0),)), Move(2, True, (), (3, 2)), Move(3, True)]
    moves += [Move(4, False, ((5, 0),)), Move(5, False, (), (1, 2))]
    for move in moves:
        store.start(move)
    assert finish(store, 5) == [(ticket, None) for ticket in range(1, 6)]
    assert bits_of(page_pools(state), 5) == page and bits_of(slot_pools(state), 1) == slot


@EVERY_KIND
def test_thousands_of_moves_in_order(kind: Kind, opened: Callable[..., SwapStore]) -> None:
    """Each move sees what all before it have done, and none behind it."""
    state, expected = state_of(), state_of()
    store, draw = opened(state, kind), random.Random(7)
    outside: dict[str, dict[int, list[bytes]]] = {"page": {}, "slot": {}}
    here = {
        "page": [bits_of(page_pools(expected), page) for page in range(PAGES)],
        "slot": [bits_of(slot_pools(expected), slot) for slot in range(SLOTS)],
    }
    for ticket in range(3000):
        out = draw.random() < 0.5
        known = range(BLOCKS) if out else sorted(outside["page"])
        blocks = draw.sample(known, min(len(known), draw.randint(0, 4)))
        pages = tuple(zip(draw.sample(range(1, PAGES), len(blocks)), blocks, strict=True))
        place = draw.choice(range(PLACES) if out else sorted(outside["slot"]) or [None])
        slot = None if place is None else (draw.randrange(1, SLOTS), place)
        store.start(Move(ticket, out, pages, slot))
        for what, pairs in (("page", pages), ("slot", [slot] if slot else [])):
            for row, there in pairs:
                if out:
                    outside[what][there] = here[what][row]
                else:
                    here[what][row] = outside[what][there]
    assert finish(store, 3000) == [(ticket, None) for ticket in range(3000)]
    assert [bits_of(page_pools(state), page) for page in range(PAGES)] == here["page"]
    assert [bits_of(slot_pools(state), slot) for slot in range(SLOTS)] == here["slot"]
