"""State with random bits, of tiny models with stores of all kinds, and its bits by number."""

from __future__ import annotations

import random

import torch

from yocolm.engine.state import PagedState
from yocolm.engine.swap_space import Move, Mover
from yocolm.models.spec import ModelSpec, Store

PAGES, SLOTS, BLOCKS, PLACES = 12, 5, 8, 3
# Sizes that no type wider than the elements divides.
GLOBALS = (Store("global_kv", 2, 8, 12, 3), Store("global_kv", 1, 5, 7, 1))
WINDOW = Store("window_kv", 1, 5, 3, 1, window=7)
RECURRENT = Store("recurrent", 3, 5, 7, 1)
STORES = {
    "all": (RECURRENT, WINDOW, *GLOBALS),
    "pages": GLOBALS,
    "states": (WINDOW, RECURRENT),
    "nothing": (),
}
TIMEOUT = 60.0


def spec_of(*stores: Store) -> ModelSpec:
    return ModelSpec(stores, (), (), 0, 0, 0, 0, True, 0, 0, 0)


def state_of(
    stores: str = "all", dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> PagedState:
    """Filled with random bits, NaN among them."""
    state = PagedState(spec_of(*STORES[stores]), PAGES, 3, SLOTS, dtype, device)
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
    return [pool[row].cpu().view(torch.uint8).numpy().tobytes() for pool in pools]


def overwrite(pools: list[torch.Tensor], row: int, value: float) -> None:
    for pool in pools:
        pool[row] = value


def finish(store: Mover, count: int) -> list[tuple[int, str | None]]:
    ended: list[tuple[int, str | None]] = []
    while len(ended) < count:
        store.wait(TIMEOUT)
        more = store.poll()
        assert more, "nothing ended in time"
        ended += more
    assert len(ended) == count
    return ended


def check_bits_come_back(store: Mover, state: PagedState) -> None:
    """Scattered pages and a slot go out and come back elsewhere; nothing else changes."""
    pages, slots = page_pools(state), slot_pools(state)
    gone, back, blocks = [7, 2, 9, 4, 11], [1, 3, 4, 5, 6], [3, 4, 6, 0, 7]
    before = [bits_of(pages, page) for page in gone], bits_of(slots, 2)
    others = {page: bits_of(pages, page) for page in (0, 2, 7, 8, 9, 10, 11)}
    other_slots = {slot: bits_of(slots, slot) for slot in (0, 1, 3)}
    store.start(Move(5, True, tuple(zip(gone, blocks, strict=True)), (2, 1)))
    assert finish(store, 1) == [(5, None)]
    for page in back:
        overwrite(pages, page, 1.5)
    overwrite(slots, 4, 1.5)
    store.start(Move(6, False, tuple(zip(back, blocks, strict=True)), (4, 1)))
    assert finish(store, 1) == [(6, None)]
    assert ([bits_of(pages, page) for page in back], bits_of(slots, 4)) == before
    assert {page: bits_of(pages, page) for page in others} == others
    assert {slot: bits_of(slots, slot) for slot in other_slots} == other_slots


def check_moves_in_order(store: Mover, state: PagedState, count: int) -> None:
    """Of ``count`` random moves each sees what all before it have done, and none behind it."""
    draw = random.Random(7)
    outside: dict[str, dict[int, list[bytes]]] = {"page": {}, "slot": {}}
    here = {
        "page": [bits_of(page_pools(state), page) for page in range(PAGES)],
        "slot": [bits_of(slot_pools(state), slot) for slot in range(SLOTS)],
    }
    for ticket in range(count):
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
    assert finish(store, count) == [(ticket, None) for ticket in range(count)]
    assert [bits_of(page_pools(state), page) for page in range(PAGES)] == here["page"]
    assert [bits_of(slot_pools(state), slot) for slot in range(SLOTS)] == here["slot"]
