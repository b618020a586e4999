"""What lies outside of the device's pools, as numbers, and what it takes to move it there and back.

Content of a page goes to a *block*, content of a slot to a *place*. The bytes behind them belong to
``engine/swap.py``.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from yocolm.errors import ConfigError


class _Numbers:
    """The numbers ``0 .. size - 1``, each free or taken, lowest free one first.

    Lowest first keeps runs of numbers together, which are moved at once, and a file short.
    """

    def __init__(self, size: int, what: str) -> None:
        self.size = size
        self._what = what
        self._fresh = 0  # this and all above were never handed out
        self._returned: list[int] = []  # a heap
        self._taken: set[int] = set()

    @property
    def num_free(self) -> int:
        return self.size - len(self._taken)

    def alloc(self, count: int) -> list[int] | None:
        if count > self.num_free:
            return None
        again = min(count, len(self._returned))
        numbers = [heapq.heappop(self._returned) for _ in range(again)]
        numbers += range(self._fresh, self._fresh + count - again)
        self._fresh += count - again
        self._taken.update(numbers)
        return numbers

    def free(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            assert 0 <= number < self.size, f"there is no {self._what} {number}"
            assert number in self._taken, f"{self._what} {number} is freed twice"
            self._taken.remove(number)
            heapq.heappush(self._returned, number)

    def check(self) -> None:
        unused = [number for number in range(self._fresh) if number not in self._taken]
        assert sorted(self._returned) == unused, f"free {self._what}s differ from the unused ones"
        assert self._fresh <= self.size, f"more {self._what}s than there are were handed out"


class SwapSpace:
    """Hands out ``num_blocks`` blocks for pages and ``num_places`` places for slots, from 0 on."""

    def __init__(self, num_blocks: int, num_places: int) -> None:
        if min(num_blocks, num_places) < 0:
            raise ConfigError(
                f"a swap space of {num_blocks} blocks and {num_places} places cannot be: "
                "give 0 or more of each"
            )
        self._blocks = _Numbers(num_blocks, "block")
        self._places = _Numbers(num_places, "place")

    @classmethod
    def sized(cls, space_bytes: int, page_bytes: int, slot_bytes: int, max_seqs: int) -> SwapSpace:
        """What fits into ``space_bytes``: places for up to ``max_seqs`` slots in at most half of it
        (all of it without pages; ``max_seqs`` that take nothing without state), blocks in what is
        left. 0 bytes: nothing.

        Args:
            page_bytes, slot_bytes: of one page in all global KVs (0: the model has none), and of
                one sequence's constant-size state (0: it has none).

        Raises:
            ConfigError: so little that not even one page and one slot fit.
        """
        least = page_bytes + slot_bytes
        if space_bytes == 0 or least == 0:
            return cls(0, 0)
        if space_bytes < least:
            raise ConfigError(
                f"swap_space of {space_bytes} bytes holds no sequence: a page takes {page_bytes} "
                f"and a state {slot_bytes} bytes. Give at least {least}, or 0 to do without"
            )
        places = max_seqs
        if slot_bytes:
            share = min(max(slot_bytes, space_bytes // 2), space_bytes - page_bytes)
            places = min(max_seqs, (share if page_bytes else space_bytes) // slot_bytes)
        blocks = (space_bytes - places * slot_bytes) // page_bytes if page_bytes else 0
        return cls(blocks, places)

    @property
    def num_blocks(self) -> int:
        return self._blocks.size

    @property
    def num_places(self) -> int:
        return self._places.size

    @property
    def num_free_blocks(self) -> int:
        return self._blocks.num_free

    @property
    def num_free_places(self) -> int:
        return self._places.num_free

    def alloc_blocks(self, count: int) -> list[int] | None:
        """``count`` blocks, or None if too few are free."""
        return self._blocks.alloc(count)

    def alloc_place(self) -> int | None:
        """A place, or None if all are taken."""
        places = self._places.alloc(1)
        return None if places is None else places[0]

    def free_blocks(self, blocks: Iterable[int]) -> None:
        """Give back ``blocks``. No move from or to them may be under way."""
        self._blocks.free(blocks)

    def free_place(self, place: int) -> None:
        """Give back ``place``. No move from or to it may be under way."""
        self._places.free([place])

    def check(self) -> None:
        """Assert that every number is either free, once, or taken."""
        self._blocks.check()
        self._places.check()


@dataclass(frozen=True, slots=True)
class Move:
    """Content of one sequence to be moved ``out`` of the device's pools, or back in.

    Until its ticket is reported, whatever it names must keep its owner, and must not be written.

    pages: (page, block) pairs; state: (slot, place), if there is one to be moved.
    """

    ticket: int
    out: bool
    pages: tuple[tuple[int, int], ...] = ()
    state: tuple[int, int] | None = None


class Mover(Protocol):
    """Carries out moves beside the steps, in the order in which they were started."""

    def start(self, move: Move) -> None:
        """Begin ``move``, and return at once."""
        ...

    def poll(self) -> list[tuple[int, str | None]]:
        """Tickets that ended since the last call, in order, each with what failed, if it did."""
        ...

    def wait(self, timeout: float) -> None:
        """Return when there is a ticket to poll, or nothing under way, or after ``timeout`` s."""
        ...

    def close(self) -> None:
        """Drop what is under way, and all that was moved out."""
        ...
