"""What comes back from the swap space is what went there, and nothing that fails goes unsaid."""

from __future__ import annotations

import errno
import gc
import os
import resource
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from swapping import (
    BLOCKS,
    GLOBALS,
    PLACES,
    SLOTS,
    STORES,
    TIMEOUT,
    bits_of,
    check_bits_come_back,
    check_moves_in_order,
    finish,
    page_pools,
    slot_pools,
    spec_of,
    state_of,
)
from yocolm.engine.state import PagedState
from yocolm.engine.swap import CLOSED, NICENESS, Kind, SwapStore
from yocolm.engine.swap_space import Move
from yocolm.errors import ConfigError

Open = Callable[..., SwapStore]
KINDS: tuple[Kind, ...] = ("file", "memory")
EVERY_KIND = pytest.mark.parametrize("kind", KINDS)
EVERY_DTYPE = pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64]
)
OUT = Move(1, True, ((3, 0), (4, 1)), (2, 0))
BACK = Move(2, False, ((5, 0), (6, 1)), (4, 0))


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    stores: list[SwapStore] = []

    def open_store(state: PagedState, kind: Kind = "file") -> SwapStore:
        stores.append(SwapStore(state, BLOCKS, PLACES, kind, str(tmp_path)))
        return stores[-1]

    yield open_store
    for store in stores:
        store.close()


@EVERY_KIND
@pytest.mark.parametrize("stores", STORES)
@EVERY_DTYPE
def test_every_bit_comes_back(kind: Kind, stores: str, dtype: torch.dtype, opened: Open) -> None:
    state = state_of(stores, dtype)
    check_bits_come_back(opened(state, kind), state)


@EVERY_KIND
def test_a_move_without_a_state_or_without_pages(kind: Kind, opened: Open) -> None:
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
def test_thousands_of_moves_in_order(kind: Kind, opened: Open) -> None:
    state = state_of()
    check_moves_in_order(opened(state, kind), state, 3000)


@pytest.mark.parametrize(("batch", "most"), [(1, 1024), (3000, 1024), (1 << 20, 9), (1 << 20, 1)])
def test_neighbours_go_together_within_bounds(
    batch: int, most: int, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``BATCH`` bytes, or one page, and the most pieces of a call."""
    monkeypatch.setattr("yocolm.engine.swap.BATCH", batch)
    monkeypatch.setattr("yocolm.engine.swap.MOST_PIECES", most)
    monkeypatch.setattr("yocolm.engine.swap_file.MOST_PIECES", most)
    sizes: list[tuple[int, int]] = []
    call = os.pwritev

    def noted(fd: int, pieces: list[memoryview], offset: int) -> int:
        sizes.append((sum(len(piece) for piece in pieces), len(pieces)))
        return call(fd, pieces, offset)

    monkeypatch.setattr(os, "pwritev", noted)
    state = state_of("pages")
    store = opened(state)
    page_bytes = sum(map(len, bits_of(page_pools(state), 1)))
    store.start(Move(1, True, tuple((page, page - 1) for page in range(1, BLOCKS + 1))))
    assert finish(store, 1) == [(1, None)]
    assert all(size <= max(batch, page_bytes) and pieces <= most for size, pieces in sizes)
    if most > 4:
        together = max(1, min(batch // page_bytes, most // 4))
        assert len(sizes) == -(-BLOCKS // together)
    check_bits_come_back(store, state)


def test_moves_of_what_is_not_there_are_caught(opened: Open) -> None:
    store = opened(state_of())
    for move in (
        Move(1, True, ((12, 0),)),
        Move(1, True, ((3, BLOCKS),)),
        Move(1, True, (), (SLOTS, 0)),
        Move(1, True, (), (1, -1)),
    ):
        with pytest.raises(AssertionError, match="what is not there"):
            store.start(move)


def short_call(call: Callable[..., int], most: int) -> Callable[..., int]:
    """Moves no more than ``most`` bytes at once."""

    def short(fd: int, pieces: list[memoryview], offset: int) -> int:
        cut, left = [], most
        for piece in pieces:
            cut.append(piece[:left])
            left -= len(cut[-1])
        return call(fd, cut, offset)

    return short


@pytest.mark.parametrize("most", [1, 7, 500, 1000])
def test_the_system_may_take_less_than_it_is_given(
    most: int, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("pwritev", "preadv"):
        monkeypatch.setattr(os, name, short_call(getattr(os, name), most))
    state = state_of()
    check_bits_come_back(opened(state), state)


def test_systems_without_vectors(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pwritev")
    monkeypatch.delattr(os, "preadv")
    state = state_of()
    check_bits_come_back(opened(state), state)
    check_moves_in_order(opened(state), state, 50)


@pytest.mark.parametrize(
    ("failing", "message"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "No space left on device"),
        (OSError(errno.EIO, os.strerror(errno.EIO)), "Input/output error"),
        (MemoryError("none"), "none"),
        (0, "not taken"),
    ],
)
def test_a_write_that_fails_fails_its_move_and_no_other(
    failing: Exception | int, message: str, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> int:
        if isinstance(failing, Exception):
            raise failing
        return failing

    state = state_of()
    store = opened(state)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", fail)
        store.start(OUT)
        ((ticket, error),) = finish(store, 1)
    assert ticket == 1 and error is not None
    assert message in error and "could not be written to the swap file in" in error
    check_bits_come_back(store, state)


def test_a_full_disk(opened: Open) -> None:
    """A limit on the size of files stands in for it."""
    state = state_of()
    store = opened(state)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        store.start(OUT)
        ((_, error),) = finish(store, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert error is not None and os.strerror(errno.EFBIG) in error
    check_bits_come_back(store, state)


def test_what_was_never_written_is_not_read(opened: Open) -> None:
    store = opened(state_of())
    store.start(BACK)
    ((ticket, error),) = finish(store, 1)
    assert ticket == 2 and error is not None
    assert "read from the swap file" in error and "too short" in error


class Gate:
    """Holds calls of ``pwritev`` back until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._call, self.open, self.reached = os.pwritev, threading.Event(), threading.Event()
        monkeypatch.setattr(os, "pwritev", self)

    def __call__(self, *arguments: Any) -> int:
        self.reached.set()
        assert self.open.wait(TIMEOUT)
        return self._call(*arguments)


def test_nobody_waits_for_a_slow_disk(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    state = state_of()
    store, gate = opened(state), Gate(monkeypatch)
    expected = bits_of(page_pools(state), 3)
    store.start(OUT)
    store.start(BACK)
    assert gate.reached.wait(TIMEOUT)
    assert store.poll() == []
    store.wait(0)
    store.wait(0.01)
    assert store.poll() == []
    gate.open.set()
    assert finish(store, 2) == [(1, None), (2, None)]
    assert bits_of(page_pools(state), 5) == expected
    store.wait(TIMEOUT)  # nothing is under way


def test_closing_while_moves_are_under_way(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("yocolm.engine.swap.BATCH", 1)  # the first move is cut off, too
    store, gate = opened(state_of()), Gate(monkeypatch)
    for ticket in range(4):
        store.start(Move(ticket, True, ((3, 0), (4, 1)), (2, 0)))
    assert gate.reached.wait(TIMEOUT)
    thread = threading.Thread(target=store.close)
    thread.start()
    gate.open.set()
    thread.join(TIMEOUT)
    errors = dict(store.poll())
    assert list(errors) == [0, 1, 2, 3] and errors[3] == CLOSED
    store.close()
    store.wait(TIMEOUT)
    assert store.poll() == []
    with pytest.raises(AssertionError, match="after the end"):
        store.start(OUT)


@EVERY_KIND
def test_its_thread_goes_with_it(kind: Kind, tmp_path: Path) -> None:
    known = set(threading.enumerate())
    store = SwapStore(state_of(), BLOCKS, PLACES, kind, str(tmp_path))
    store.start(OUT)
    (thread,) = set(threading.enumerate()) - known
    gone = weakref.ref(store)
    del store
    gc.collect()
    assert gone() is None and not thread.is_alive()


def test_its_thread_may_be_the_one_that_lets_it_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A garbage collection runs in any thread, and a thread cannot wait for itself."""
    gate = Gate(monkeypatch)
    stores = [SwapStore(state_of(), BLOCKS, PLACES, "file", str(tmp_path))]
    (thread,) = (t for t in threading.enumerate() if t.name == "yocolm-swap")

    def drop(*arguments: Any) -> int:
        stores.clear()
        gc.collect()
        return gate(*arguments)

    monkeypatch.setattr(os, "pwritev", drop)
    gate.open.set()
    stores[0].start(OUT)
    thread.join(TIMEOUT)
    assert not thread.is_alive() and not stores


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux knows threads apart")
def test_the_threads_of_the_steps_come_first(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    call = os.pwritev

    def look(*arguments: Any) -> int:
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return call(*arguments)

    monkeypatch.setattr(os, "pwritev", look)
    before = os.getpriority(os.PRIO_PROCESS, 0)
    store = opened(state_of())
    store.start(OUT)
    assert finish(store, 1) == [(1, None)]
    assert set(found) == {min(19, before + NICENESS)}
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


def test_the_file_has_no_name(tmp_path: Path, opened: Open) -> None:
    store = opened(state_of())
    store.start(OUT)
    finish(store, 1)
    assert list(tmp_path.iterdir()) == []


EXIT = """
import sys, threading
sys.path[:0] = {paths!r}
from swapping import BLOCKS, PLACES, state_of
from yocolm.engine.swap import SwapStore
from yocolm.engine.swap_space import Move
store = SwapStore(state_of(), BLOCKS, PLACES, {kind!r}, {folder!r})
for ticket in range(20_000):
    store.start(Move(ticket, ticket % 2 == 0, ((3, 0), (4, 1)), (2, 0)))
{end}
"""


@pytest.mark.parametrize(
    ("kind", "end", "status"),
    [("file", "store.cycle = store", 0), ("memory", "raise SystemExit(3)", 3)],
)
def test_the_interpreter_ends_with_moves_under_way(
    kind: Kind, end: str, status: int, tmp_path: Path
) -> None:
    root = Path(__file__).parents[2]
    paths = [str(root / "src"), str(root / "tests")]
    code = EXIT.format(paths=paths, kind=kind, folder=str(tmp_path), end=end)
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=TIMEOUT
    )
    assert (ended.returncode, ended.stderr) == (status, "")
    assert list(tmp_path.iterdir()) == []


@EVERY_KIND
@pytest.mark.parametrize("stores", STORES)
def test_measured_beside_what_is_stored(kind: Kind, stores: str, opened: Open) -> None:
    state = state_of(stores)
    store = opened(state, kind)
    expected = bits_of(page_pools(state), 3), bits_of(slot_pools(state), 2)
    store.start(OUT)
    rates = store.measure()
    assert 1e5 < rates.out < 1e13 and 1e5 < rates.back < 1e13
    store.start(BACK)
    assert finish(store, 2) == [(1, None), (2, None)]
    assert (bits_of(page_pools(state), 5), bits_of(slot_pools(state), 4)) == expected


def test_more_than_there_is_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    state = PagedState(spec_of(*GLOBALS), 2, 4, 2, torch.float32)
    with pytest.raises(ConfigError, match="of memory, of which .* are free; give less"):
        SwapStore(state, 1 << 50, 0, "memory")
    monkeypatch.setattr("yocolm.engine.swap.available_memory", lambda: 1 << 70)
    with pytest.raises(ConfigError, match="no memory for swap_space of .* give less"):
        SwapStore(state, 1 << 50, 0, "memory")
