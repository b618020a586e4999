"""Moves pages and slots out of the device's pools and back in, beside the steps, bit for bit."""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from queue import Empty, SimpleQueue
from typing import Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from yocolm.engine.settings import available_memory
from yocolm.engine.state import PagedState
from yocolm.engine.swap_file import MOST_PIECES, SwapFile
from yocolm.engine.swap_space import Move, Mover
from yocolm.engine.swap_stream import StreamMover
from yocolm.errors import ConfigError
from yocolm.ops.native.memory import empty_huge

Kind = Literal["file", "memory"]
BATCH = 1 << 20  # bytes moved at once: a thread that is to end waits for no more
CLOSED = "the swap space was closed"
NICENESS = 10  # a step that uses all cores is slowed by a tenth while moves go on, not to a third
_PROBE = 32 << 20  # bytes moved to measure
_PROBE_SECONDS = 0.1  # after which a measurement ends, whatever it has moved
_LAST_WAIT = 10.0  # seconds in which a thread comes to its end


class Rates(NamedTuple):
    """Bytes a second."""

    out: float
    back: float


class SwapStore(Mover):
    """What holds the content of pages and slots that were moved out of ``state``.

    A thread of its own moves them on the CPU, a stream of its own on a GPU. One thread, the one
    that runs the steps, calls the methods.

    Args:
        num_blocks, num_places: room for so many pages and slots.
        kind: "file": a file without a name (only for state on the CPU); "memory": the host's,
            pinned where the state is on a GPU.
        directory: of the file; None: ``YOCOLM_SWAP_DIR``, or a folder for temporary files with
            room.

    Raises:
        ConfigError: no file can be made there, or there is no room for it, or no memory.
    """

    def __init__(
        self,
        state: PagedState,
        num_blocks: int,
        num_places: int,
        kind: Kind,
        directory: str | None = None,
    ) -> None:
        page_pools = [pool for pair in state.pages for pool in pair]
        slot_pools = [*(pool for pair in state.rings for pool in pair), *state.recurrent]
        pools = [*page_pools, *slot_pools]
        on_cpu = not pools or pools[0].device.type == "cpu"
        if kind == "file" and not on_cpu:
            raise ConfigError(f"state on {pools[0].device} is not swapped to files; use 'memory'")
        self._num_rows = [_num_rows(page_pools), _num_rows(slot_pools)]
        self._num_outside = [num_blocks, num_places]
        page_bytes, slot_bytes = _row_bytes(page_pools), _row_bytes(slot_pools)
        self.num_bytes = num_blocks * page_bytes + num_places * slot_bytes
        if kind == "memory":
            _require_memory(self.num_bytes)
        self._closed = False
        self._mover: _OwnThread | StreamMover
        if on_cpu:
            medium = SwapFile(self.num_bytes, directory) if kind == "file" else None
            self._mover = _OwnThread(
                _Rows(page_pools, 0),
                _Rows(slot_pools, num_blocks * page_bytes),
                medium or _Memory(self.num_bytes),
            )
        else:
            self._mover = StreamMover(page_pools, slot_pools, num_blocks, num_places)

    def start(self, move: Move) -> None:
        """Begin ``move``, after all that were started before, and return at once.

        What was launched before on the current stream comes first: a page is not moved out before
        the step that wrote it is through, nor overwritten before its last reader is. Copies that
        were planned for what is moved must have been made.
        """
        assert not self._closed, "a move after the end"
        rows, outside = self._num_rows, self._num_outside
        for pairs, count, room in (
            (move.pages, rows[0], outside[0]),
            ((move.state,) if move.state else (), rows[1], outside[1]),
        ):
            for row, there in pairs if count else ():
                assert 0 <= row < count and 0 <= there < room, f"{move} names what is not there"
        self._mover.start(move)

    def poll(self) -> list[tuple[int, str | None]]:
        """Tickets that ended since the last call, in order, each with what failed, if it did.

        What was moved in is seen by all that is launched from now on. After a failed move in, the
        pages and the slot hold nothing of use; after one out, the blocks and the place do.
        """
        return self._mover.poll()

    def wait(self, timeout: float) -> None:
        """Return when there is a ticket to poll, or nothing under way, or after ``timeout`` s."""
        self._mover.wait(timeout)

    def close(self) -> None:
        """Drop all that was moved out. Moves that have not ended fail. May be called again."""
        self._closed = True
        self._mover.close()

    def measure(self) -> Rates:
        """Bytes a second out and back in, tried in less than 0.3 s, beside what is stored.

        That is with nothing else to do: steps that use all cores leave about 0.8 GB/s.
        """
        return Rates(*self._mover.measure())


class _Medium(Protocol):
    """Where rows go: bytes from 0 on."""

    @property
    def name(self) -> str: ...

    def write(self, offset: int, pieces: Sequence[np.ndarray]) -> None: ...

    def read(self, offset: int, pieces: Sequence[np.ndarray]) -> None: ...

    def close(self) -> None: ...


class _Memory:
    """``num_bytes`` of memory, which the system lends when they are written."""

    name = "memory"

    def __init__(self, num_bytes: int) -> None:
        try:
            self._bytes = empty_huge((num_bytes,), torch.uint8).numpy()
        except (OSError, MemoryError, RuntimeError) as error:
            raise ConfigError(
                f"no memory for swap_space of {num_bytes} bytes ({error}); give less"
            ) from error

    def write(self, offset: int, pieces: Sequence[np.ndarray]) -> None:
        for piece in pieces:
            self._bytes[offset : offset + piece.nbytes] = piece
            offset += piece.nbytes

    def read(self, offset: int, pieces: Sequence[np.ndarray]) -> None:
        for piece in pieces:
            piece[:] = self._bytes[offset : offset + piece.nbytes]
            offset += piece.nbytes

    def close(self) -> None:
        self._bytes = np.empty(0, np.uint8)


class _Rows:
    """One number's bytes in all of ``pools``, which lie one behind the other in a medium.

    base: where those of number 0 begin there.
    """

    def __init__(self, pools: list[Tensor], base: int) -> None:
        self.views = [_bytes_of(pool) for pool in pools]
        self.base = base
        self.row_bytes = _row_bytes(pools)

    def batches(self, pairs: Sequence[tuple[int, int]]) -> Iterator[tuple[int, list[np.ndarray]]]:
        """(row, place outside) pairs as offsets in the medium and the pieces to be moved from
        there on: neighbours outside go together, up to ``BATCH`` bytes."""
        if not self.row_bytes:
            return
        most = max(1, min(BATCH // self.row_bytes, MOST_PIECES // len(self.views)))
        run: list[int] = []
        first = 0
        for row, there in sorted(pairs, key=lambda pair: pair[1]):
            if run and (there != first + len(run) or len(run) == most):
                yield self._batch(first, run)
                run = []
            if not run:
                first = there
            run.append(row)
        if run:
            yield self._batch(first, run)

    def _batch(self, first: int, rows: list[int]) -> tuple[int, list[np.ndarray]]:
        pieces = [view[row] for row in rows for view in self.views]
        return self.base + first * self.row_bytes, pieces


class _OwnThread(Mover):
    """Moves by a thread of its own, which neither copies on the thread of the steps nor holds
    Python's lock while it moves bytes. It ends when this is closed, or gone."""

    def __init__(self, pages: _Rows, slots: _Rows, medium: _Medium) -> None:
        self._pages, self._slots, self._medium = pages, slots, medium
        self._under_way = 0
        self._ended: list[tuple[int, str | None]] = []
        self._thread = _Thread(pages, slots, medium)
        self._end = weakref.finalize(self, _Thread.end, self._thread)
        self._thread.start()

    def start(self, move: Move) -> None:
        self._under_way += 1
        self._thread.moves.put(move)

    def poll(self) -> list[tuple[int, str | None]]:
        while self._receive(0):
            pass
        ended, self._ended = self._ended, []
        return ended

    def wait(self, timeout: float) -> None:
        if self._under_way and not self._ended:
            self._receive(timeout)

    def close(self) -> None:
        self._end()

    def measure(self) -> tuple[float, float]:
        views = self._pages.views or self._slots.views
        return _rates(self._medium, [min(BATCH, view.shape[1]) for view in views] or [BATCH])

    def _receive(self, timeout: float) -> bool:
        try:
            self._ended.append(self._thread.ended.get(timeout > 0, timeout))
        except Empty:
            return False
        self._under_way -= 1
        return True


class _Thread(threading.Thread):
    """Carries out moves until it is ended. It knows nothing of its owner, who may go any time."""

    def __init__(self, pages: _Rows, slots: _Rows, medium: _Medium) -> None:
        super().__init__(name="yocolm-swap", daemon=True)
        self._pages, self._slots, self._medium = pages, slots, medium
        self._ending = False
        self.moves: SimpleQueue[Move | None] = SimpleQueue()
        self.ended: SimpleQueue[tuple[int, str | None]] = SimpleQueue()

    def run(self) -> None:
        _give_way()
        try:
            while (move := self.moves.get()) is not None:
                self.ended.put((move.ticket, self._error(move)))
        finally:
            self._medium.close()

    def end(self) -> None:
        """Finish the batch that is being moved, and nothing else."""
        self._ending = True
        self.moves.put(None)
        # A garbage collection in this very thread may be what ends it.
        if threading.current_thread() is not self:
            self.join(_LAST_WAIT)

    def _error(self, move: Move) -> str | None:
        """Carry out ``move``: why it failed, if it did."""
        try:
            transfer = self._medium.write if move.out else self._medium.read
            for rows, pairs in (
                (self._pages, move.pages),
                (self._slots, (move.state,) if move.state else ()),
            ):
                for offset, pieces in rows.batches(pairs):
                    if self._ending:
                        return CLOSED
                    transfer(offset, pieces)
        except Exception as error:  # whatever it is, it is this move that failed
            way = "written to" if move.out else "read from"
            reason = getattr(error, "strerror", None) or error
            return f"state could not be {way} {self._medium.name}: {reason}"
        return None


def _rates(medium: _Medium, sizes: list[int]) -> tuple[float, float]:
    """Bytes a second that a further medium of the same kind writes and reads, in pieces of
    ``sizes`` bytes."""
    if isinstance(medium, SwapFile):
        probe: _Medium = SwapFile(_PROBE, medium.directory)
    else:
        probe = _Memory(_PROBE + BATCH * len(sizes))
    times = max(1, min(BATCH // sum(sizes), MOST_PIECES // len(sizes)))
    pieces = [np.ones(size, np.uint8) for size in sizes * times]
    batch_bytes = sum(piece.nbytes for piece in pieces)
    batches, rates = max(1, _PROBE // batch_bytes), []
    try:
        for transfer in (probe.write, probe.read):
            begin, seconds, done = time.perf_counter(), 0.0, 0
            while done < batches and seconds < _PROBE_SECONDS:
                transfer(done * batch_bytes, pieces)
                done += 1
                seconds = time.perf_counter() - begin
            batches = done
            rates.append(done * batch_bytes / seconds)
    finally:
        probe.close()
    return rates[0], rates[1]


def _require_memory(num_bytes: int) -> None:
    """Refuse in time what would have the system end processes."""
    free = available_memory()
    if num_bytes > free:
        raise ConfigError(
            f"swap_space needs {num_bytes / 2**30:.2f} GiB of memory, of which "
            f"{free / 2**30:.2f} GiB are free; give less, or do without (swap_space=0)"
        )


def _give_way() -> None:
    """Let the threads of the steps run before this one, where the system knows threads apart."""
    if sys.platform != "linux":
        return
    thread = threading.get_native_id()
    try:
        niceness = os.getpriority(os.PRIO_PROCESS, thread) + NICENESS
        os.setpriority(os.PRIO_PROCESS, thread, min(niceness, 19))
    except OSError:  # not permitted in some sandboxes
        pass


def _num_rows(pools: Sequence[Tensor]) -> int:
    return len(pools[0]) if pools else 0


def _row_bytes(pools: Sequence[Tensor]) -> int:
    return sum(pool[0].numel() * pool.element_size() for pool in pools)


def _bytes_of(pool: Tensor) -> np.ndarray:
    """[rows, bytes of each] that share memory with ``pool``, whatever its dtype."""
    return pool.view(torch.uint8).view(len(pool), -1).numpy()
