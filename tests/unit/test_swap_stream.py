"""Moves on a stream: their bits, and the order that they keep with the stream of the steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from swapping import (
    BLOCKS,
    PLACES,
    STORES,
    bits_of,
    check_bits_come_back,
    check_moves_in_order,
    finish,
    overwrite,
    page_pools,
    slot_pools,
    state_of,
)
from yocolm.engine import swap_stream
from yocolm.engine.state import PagedState
from yocolm.engine.swap import SwapStore
from yocolm.engine.swap_space import Move
from yocolm.engine.swap_stream import StreamMover
from yocolm.errors import ConfigError

NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
EVERY_DEVICE = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NO_GPU)])
EVERY_DTYPE = pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64]
)


def mover_of(state: PagedState) -> StreamMover:
    return StreamMover(page_pools(state), slot_pools(state), BLOCKS, PLACES)


@EVERY_DEVICE
@EVERY_DTYPE
@pytest.mark.parametrize("stores", [name for name in STORES if name != "nothing"])
def test_every_bit_comes_back(device: str, dtype: torch.dtype, stores: str) -> None:
    state = state_of(stores, dtype, device)
    mover = mover_of(state)
    check_bits_come_back(mover, state)
    mover.close()


@EVERY_DEVICE
@pytest.mark.parametrize(("chunk", "slab"), [(1, 1), (3000, 3000), (3000, 2000), (1 << 20, 5000)])
def test_chunks_and_slabs_of_all_sizes(
    device: str, chunk: int, slab: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swap_stream, "CHUNK", chunk)
    monkeypatch.setattr(swap_stream, "SLAB", slab)
    state = state_of(device=device)
    mover = mover_of(state)
    check_bits_come_back(mover, state)
    check_moves_in_order(mover, state, 300)
    rates = mover.measure()
    assert min(rates) > 1e3
    mover.close()


def test_neighbours_cross_together() -> None:
    state = state_of("pages")
    mover = mover_of(state)
    runs = [(start, len(rows)) for start, rows in mover._blocks.runs([0, 1, 2, 4, 6, 7])]
    assert runs == [(0, 3), (3, 1), (4, 2)]


class Recorder:
    """Stands in for a device: writes down what is asked of it, and ends moves when told to."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.finished = 0
        self.num_events = 0
        self.current = "compute"

    def Stream(self, device: torch.device) -> Any:
        return StreamStub(self, "side")

    def current_stream(self, device: torch.device) -> Any:
        return StreamStub(self, self.current)

    @contextmanager
    def stream(self, stream: StreamStub) -> Iterator[None]:
        self.current, before = stream.name, self.current
        yield
        self.current = before

    def Event(self) -> EventStub:
        self.num_events += 1
        return EventStub(self, self.num_events - 1)


class StreamStub:
    def __init__(self, recorder: Recorder, name: str) -> None:
        self.recorder, self.name = recorder, name

    def wait_stream(self, other: StreamStub) -> None:
        self.recorder.done.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: EventStub) -> None:
        self.recorder.done.append(f"{self.name} waits for event {event.number}")


class EventStub:
    def __init__(self, recorder: Recorder, number: int) -> None:
        self.recorder, self.number = recorder, number

    def record(self, stream: StreamStub) -> None:
        self.recorder.done.append(f"event {self.number} on {stream.name}")

    def query(self) -> bool:
        return self.number < self.recorder.finished

    def synchronize(self) -> None:
        self.recorder.done.append(f"host waits for event {self.number}")


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    made = Recorder()
    monkeypatch.setattr(torch, "get_device_module", lambda device: made)
    for name in ("_gather", "_scatter"):
        original = getattr(swap_stream, name)

        def noted(*args: Any, name: str = name, original: Any = original) -> Any:
            made.done.append(f"{name[1:]} on {made.current}")
            return original(*args)

        monkeypatch.setattr(swap_stream, name, noted)
    return made


def test_moves_wait_for_the_steps_and_later_steps_for_moves(recorder: Recorder) -> None:
    mover = mover_of(state_of())
    mover.start(Move(1, True, ((3, 0),), (2, 0)))
    mover.start(Move(2, False, ((5, 0),), (4, 0)))
    assert recorder.done == [
        "side waits for compute",
        "gather on side",
        "event 0 on side",
        "side waits for compute",
        "scatter on side",
        "event 1 on side",
    ]
    recorder.done.clear()
    assert mover.poll() == [] == recorder.done
    mover.wait(0.01)
    recorder.finished = 1
    mover.wait(60)
    assert mover.poll() == [(1, None)] and recorder.done == ["compute waits for event 0"]
    recorder.finished = 2
    assert mover.poll() == [(2, None)] and recorder.done[1:] == ["compute waits for event 1"]
    mover.wait(60)  # nothing is under way


def test_closing_waits_for_what_is_under_way(recorder: Recorder) -> None:
    mover = mover_of(state_of())
    mover.start(Move(1, True, ((3, 0),)))
    recorder.done.clear()
    mover.close()
    assert recorder.done == ["host waits for event 0"]


def test_memory_that_is_short_fails_the_move(monkeypatch: pytest.MonkeyPatch) -> None:
    state = state_of()
    mover = mover_of(state)

    def fail(*_: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(swap_stream, "_gather", fail)
        mover.start(Move(1, True, ((3, 0),)))
        assert finish(mover, 1) == [(1, "state could not be moved: out of memory")]
    check_bits_come_back(mover, state)


def test_memory_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swap_stream, "SLAB", 1 << 60)
    state = state_of()
    with pytest.raises(ConfigError, match="no memory for swap_space of .* give less"):
        StreamMover(page_pools(state), slot_pools(state), 1 << 50, 0)


@NO_GPU
def test_what_a_step_is_still_writing_goes_out_written() -> None:
    state = state_of(device="cuda")
    store = SwapStore(state, BLOCKS, PLACES, "memory")
    busy = torch.randn(4096, 4096, device="cuda")
    for _ in range(50):  # the step is far behind the host
        busy = torch.nn.functional.normalize(busy @ busy)
    overwrite(page_pools(state), 3, 0.25)
    store.start(Move(1, True, ((3, 0),)))
    store.start(Move(2, False, ((5, 0),)))
    assert finish(store, 2) == [(1, None), (2, None)]
    assert bits_of(page_pools(state), 5) == bits_of(page_pools(state), 3)
    assert all((pool[5] == 0.25).all() for pool in page_pools(state))
    store.close()


@NO_GPU
def test_a_gpu_does_not_swap_to_files() -> None:
    with pytest.raises(ConfigError, match="use 'memory'"):
        SwapStore(state_of(device="cuda"), BLOCKS, PLACES, "file")
