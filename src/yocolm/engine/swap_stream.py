"""Moves between a GPU's pools and the host's pinned memory, on a stream of their own."""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from yocolm.engine.swap_space import Move, Mover
from yocolm.errors import ConfigError

CHUNK = 32 << 20  # bytes of pages that are gathered on the device at once
SLAB = 256 << 20  # bytes pinned at once: the allocator rounds up to a power of two
_PAUSE = 2e-4  # seconds between two looks at what is waited for
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


class _UnderWay(NamedTuple):
    ticket: int
    event: Any
    error: str | None


class StreamMover(Mover):
    """Moves in the order of one stream, which waits for the stream of the steps, never that for it.

    Pages are gathered on the device, where the kernels of a step have theirs, and cross in as few
    copies as their blocks have runs; a slot crosses in one copy for each of its tensors.

    Args:
        page_pools, slot_pools: all on one device, [pages or slots, ...].

    Raises:
        ConfigError: so much memory cannot be pinned.
    """

    def __init__(
        self, page_pools: list[Tensor], slot_pools: list[Tensor], num_blocks: int, num_places: int
    ) -> None:
        device = (page_pools + slot_pools)[0].device
        self._device, self._runtime = device, torch.get_device_module(device)
        self._stream = self._runtime.Stream(device)
        self._pages = _Words(page_pools)
        self._slots = _Words(slot_pools)
        self._blocks = _Host(num_blocks, self._pages, pinned=device.type != "cpu")
        self._places = _Host(num_places, self._slots, pinned=device.type != "cpu")
        self._under_way: deque[_UnderWay] = deque()
        # The device's memory must not get another owner while it is being written.
        self._end = weakref.finalize(self, _synchronize, self._under_way)

    @torch.inference_mode()
    def start(self, move: Move) -> None:
        # The step that wrote what goes out, and the last reader of what is overwritten, first.
        self._stream.wait_stream(self._runtime.current_stream(self._device))
        error = None
        with self._runtime.stream(self._stream):
            try:
                self._move_pages(move)
                if move.state is not None:
                    self._move_slot(move.out, *move.state)
            except RuntimeError as failed:  # no memory to gather in
                error = f"state could not be moved: {failed}"
            event = self._runtime.Event()
            event.record(self._stream)
        self._under_way.append(_UnderWay(move.ticket, event, error))

    def poll(self) -> list[tuple[int, str | None]]:
        ended = []
        compute = self._runtime.current_stream(self._device)
        while self._under_way and self._under_way[0].event.query():
            ticket, event, error = self._under_way.popleft()
            compute.wait_event(event)
            ended.append((ticket, error))
        return ended

    def wait(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while self._under_way and not self._under_way[0].event.query():
            if time.monotonic() >= deadline:
                return
            time.sleep(_PAUSE)

    def close(self) -> None:
        _synchronize(self._under_way)
        self._blocks.slabs.clear()
        self._places.slabs.clear()

    @torch.inference_mode()
    def measure(self) -> tuple[float, float]:
        """Bytes a second out and in, of pages that are gathered and scattered."""
        words = self._pages if self._pages.row_bytes else self._slots
        count = max(1, CHUNK // words.row_bytes)
        here = [view.new_empty(count, view.shape[1]) for view in words.views]
        there = torch.empty(count, sum(words.widths), dtype=words.dtype, pin_memory=self._pinned)
        rows = torch.arange(count, device=self._device)

        def out() -> None:
            there.copy_(_gather(here, rows), non_blocking=True)

        def back() -> None:
            _scatter(here, rows, there.to(self._device, non_blocking=True), words.widths)

        return self._rate(out, count * words.row_bytes), self._rate(back, count * words.row_bytes)

    def _rate(self, transfer: Callable[[], None], num_bytes: int) -> float:
        transfer()  # finds memory
        self._runtime.synchronize(self._device)
        begin = time.perf_counter()
        transfer()
        self._runtime.synchronize(self._device)
        return num_bytes / (time.perf_counter() - begin)

    @property
    def _pinned(self) -> bool:
        return self._device.type != "cpu"

    def _move_pages(self, move: Move) -> None:
        words = self._pages
        if not words.row_bytes:
            return
        pairs = sorted(move.pages, key=lambda pair: pair[1])
        most = max(1, CHUNK // words.row_bytes)
        for at in range(0, len(pairs), most):
            chunk = pairs[at : at + most]
            pages = torch.tensor([page for page, _ in chunk], pin_memory=self._pinned)
            pages = pages.to(self._device, non_blocking=True)
            runs = list(self._blocks.runs([block for _, block in chunk]))
            if move.out:
                staged = _gather(words.views, pages)
                for start, host in runs:
                    host.copy_(staged[start : start + len(host)], non_blocking=True)
            else:
                shape = (len(chunk), sum(words.widths))
                staged = torch.empty(shape, dtype=words.dtype, device=self._device)
                for start, host in runs:
                    staged[start : start + len(host)].copy_(host, non_blocking=True)
                _scatter(words.views, pages, staged, words.widths)

    def _move_slot(self, out: bool, slot: int, place: int) -> None:
        words = self._slots
        if not words.row_bytes:
            return
        ((_, host),) = self._places.runs([place])
        for view, part in zip(words.views, host[0].split(words.widths), strict=True):
            if out:
                part.copy_(view[slot], non_blocking=True)
            else:
                view[slot].copy_(part, non_blocking=True)


class _Words:
    """``pools`` as [rows, words of each], of the widest type that fits all: bits are moved."""

    def __init__(self, pools: list[Tensor]) -> None:
        sizes = [pool[0].numel() * pool.element_size() for pool in pools]
        fitting = (t for t in _WORDS if all(size % t.itemsize == 0 for size in sizes))
        self.dtype = next(fitting)
        self.row_bytes = sum(sizes)
        self.views = [pool.view(len(pool), -1).view(self.dtype) for pool in pools]
        self.widths = [view.shape[1] for view in self.views]


class _Host:
    """Memory of the host for ``count`` rows of ``words``, in slabs."""

    def __init__(self, count: int, words: _Words, pinned: bool) -> None:
        self._per_slab = max(1, SLAB // max(1, words.row_bytes))
        width = sum(words.widths)
        self.slabs: list[Tensor] = []
        try:
            for at in range(0, count if width else 0, self._per_slab):
                rows = min(self._per_slab, count - at)
                self.slabs.append(torch.empty(rows, width, dtype=words.dtype, pin_memory=pinned))
        except RuntimeError as error:
            self.slabs.clear()
            raise ConfigError(
                f"no memory for swap_space of {count * words.row_bytes} bytes ({error}); give less"
            ) from error

    def runs(self, numbers: list[int]) -> Iterator[tuple[int, Tensor]]:
        """Sorted ``numbers`` as runs of neighbours in a slab: (index of the first, rows)."""
        start = 0
        for i in range(1, len(numbers) + 1):
            ends = i == len(numbers) or numbers[i] != numbers[i - 1] + 1
            if ends or numbers[i] % self._per_slab == 0:
                slab, first = divmod(numbers[start], self._per_slab)
                yield start, self.slabs[slab][first : first + i - start]
                start = i


def _gather(views: Sequence[Tensor], rows: Tensor) -> Tensor:
    return torch.cat([view.index_select(0, rows) for view in views], dim=1)


def _scatter(views: Sequence[Tensor], rows: Tensor, staged: Tensor, widths: list[int]) -> None:
    for view, part in zip(views, staged.split(widths, dim=1), strict=True):
        view.index_copy_(0, rows, part)


def _synchronize(under_way: deque[_UnderWay]) -> None:
    for move in under_way:
        move.event.synchronize()
