"""Who owns which page of the global KV and which slot of the constant-size state.

Only numbers are handed out here; the tensors behind them belong to ``engine/state.py``.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable
from typing import Literal, NamedTuple

from yocolm.errors import ConfigError

SCRATCH = 0
"""The page, and the slot, that pads write to. It is never handed out."""


class Pool:
    """Reference-counted numbers ``1 .. size - 1``, lowest free one first.

    ``size`` includes the scratch number 0, so it is also the leading size of the tensors.
    """

    def __init__(self, size: int, what: str) -> None:
        if size < 2:
            raise ConfigError(f"{size} {what}s are too few: one is scratch, so give at least 2")
        self.size = size
        self._what = what
        self._free = list(range(SCRATCH + 1, size))
        self._references = [0] * size

    @property
    def capacity(self) -> int:
        """How many numbers there are to hand out when all are free."""
        return self.size - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    def alloc(self, count: int) -> list[int] | None:
        """``count`` numbers with one reference each, or None if too few are free."""
        if count > self.num_free:
            return None
        numbers = [heapq.heappop(self._free) for _ in range(count)]
        for number in numbers:
            self._references[number] = 1
        return numbers

    def fork(self, numbers: Iterable[int]) -> None:
        """Add one reference to each of ``numbers``, which must be in use."""
        for number in numbers:
            assert self._references[number] > 0, f"{self._what} {number} is free: cannot be shared"
            self._references[number] += 1

    def free(self, numbers: Iterable[int]) -> None:
        """Drop one reference to each of ``numbers``; those without any are free again."""
        for number in numbers:
            assert self._references[number] > 0, f"{self._what} {number} is freed twice"
            self._references[number] -= 1
            if self._references[number] == 0:
                heapq.heappush(self._free, number)

    def references(self, number: int) -> int:
        return self._references[number]

    def check(self) -> None:
        """Assert that every number but scratch is either free, once, or referred to."""
        assert self._references[SCRATCH] == 0, f"the scratch {self._what} was handed out"
        unused = [n for n in range(SCRATCH + 1, self.size) if self._references[n] == 0]
        assert min(self._references) >= 0, f"a {self._what} has a negative reference count"
        assert sorted(self._free) == unused, f"free {self._what}s differ from the unused ones"


class PagePool(Pool):
    """Pages of the global KV, ``page_size`` tokens each. Page 0 is scratch."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        if page_size < 1:
            raise ConfigError(f"page_size={page_size} must be at least 1")
        super().__init__(num_pages, "page")
        self.page_size = page_size

    def pages_for(self, num_tokens: int) -> int:
        """How many pages hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.page_size)


class SlotPool(Pool):
    """Slots of the window and recurrent state, one for each running sequence. Slot 0 is scratch."""

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots, "slot")


class Copy(NamedTuple):
    """Content of page or slot ``src`` to be copied to ``dst``."""

    kind: Literal["page", "slot"]
    src: int
    dst: int


class PendingCopies:
    """Copies that are to be made before the next step, each on behalf of the owner of ``dst``.

    Until then each keeps a reference to ``src``, whose owner may give it back any time: it must
    not be handed out, and written, before it is copied. When the owner of ``dst`` gives that back,
    the copy is dropped: it would overwrite what the next owner writes there. Where the owner does
    not tell, the copy keeps a reference to ``dst`` as well (``hold``).
    """

    def __init__(self, page_pool: PagePool, slot_pool: SlotPool) -> None:
        self._pools: dict[str, Pool] = {"page": page_pool, "slot": slot_pool}
        self._pending: list[tuple[object, Copy, list[int]]] = []

    @property
    def pending(self) -> bool:
        return bool(self._pending)

    def add(self, owner: object, copy: Copy, hold: bool = False) -> None:
        for _, known, _ in self._pending:  # all are made at once, so none can read what another
            if known.kind == copy.kind and known.dst == copy.src:  # has written: from its source
                copy = copy._replace(src=known.src)
                break
        held = [copy.src, copy.dst] if hold else [copy.src]
        self._pools[copy.kind].fork(held)
        self._pending.append((owner, copy, held))

    def drop(self, owner: object) -> None:
        """Forget the copies on behalf of ``owner``."""
        if not self._pending:
            return
        dropped = [pending for pending in self._pending if pending[0] is owner]
        self._pending = [pending for pending in self._pending if pending[0] is not owner]
        self._free(dropped)

    def waits_for(self, owner: object) -> bool:
        """Whether a copy is to be made on behalf of ``owner``."""
        return any(pending[0] is owner for pending in self._pending)

    def issue(self) -> tuple[Copy, ...]:
        """Hand over all copies, to be made now: nothing may be allocated before they are."""
        if not self._pending:
            return ()
        issued, self._pending = self._pending, []
        self._free(issued)
        return tuple(copy for _, copy, _ in issued)

    def references(self) -> Counter[tuple[str, int]]:
        """How many references are kept, by kind and number."""
        return Counter((copy.kind, n) for _, copy, held in self._pending for n in held)

    def _free(self, pending: list[tuple[object, Copy, list[int]]]) -> None:
        for _, copy, held in pending:
            self._pools[copy.kind].free(held)
