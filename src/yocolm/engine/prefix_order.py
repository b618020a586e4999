"""In what order the prefix cache evicts: GreedyDual-Size, for pages and for states apart."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

from yocolm.engine.prefix_nodes import Checkpoint, Node

Item = TypeVar("Item", bound=Hashable)


class Ranking(Generic[Item]):
    """Items by priority, the lowest first, of equal ones the one that was put first.

    ``clock`` is GreedyDual's: the highest priority evicted so far. What is used anew gets its
    priority on top of it, and so ages without being touched.
    """

    def __init__(self) -> None:
        self.clock = 0.0
        self._heap: list[tuple[float, int, Item]] = []
        self._current: dict[Item, int] = {}  # the serial number of the entry that counts
        self._serial = 0

    def __len__(self) -> int:
        return len(self._current)

    def __iter__(self) -> Iterator[Item]:
        return iter(self._current)

    def put(self, item: Item, priority: float) -> None:
        """Add ``item``, or give it another priority."""
        self._serial += 1
        self._current[item] = self._serial
        heapq.heappush(self._heap, (priority, self._serial, item))
        if len(self._heap) > 2 * len(self._current) + 64:
            self._heap = [entry for entry in self._heap if self._current.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)

    def discard(self, item: Item) -> None:
        self._current.pop(item, None)

    def pop(self, priority: Callable[[Item], float]) -> tuple[float, Item] | None:
        """Remove the lowest. One whose ``priority`` has grown meanwhile is put back with that."""
        while self._heap:
            old, serial, item = heapq.heappop(self._heap)
            if self._current.get(item) != serial:
                continue
            now = priority(item)
            if now > old:
                self.put(item, now)
                continue
            del self._current[item]
            return old, item
        return None

    def advance(self, evicted: float) -> None:
        """Set the clock to the priority of what was evicted."""
        self.clock = max(self.clock, evicted)

    def clear(self) -> None:
        self._heap.clear()
        self._current.clear()

    def check(self) -> None:
        """Assert that every item has its entry, and that few entries are outdated."""
        valid = sum(self._current.get(item) == serial for _, serial, item in self._heap)
        assert valid == len(self._current), "an item of the ranking has no entry"


class Order:
    """Ranks what may be evicted by its clock at the last use plus seconds saved per byte.

    pages: leaves of which the cache alone has the page, and checkpoints with a page of their own
    for their tail. states: all checkpoints.
    """

    def __init__(
        self,
        stateful: bool,
        page_size: int,
        page_bytes: int,
        slot_bytes: int,
        seconds: Callable[[int, int], float],
    ) -> None:
        self.pages: Ranking[Node | Checkpoint] = Ranking()
        self.states: Ranking[Checkpoint] = Ranking()
        self._stateful = stateful
        self._page_size = page_size
        self._page_bytes, self._slot_bytes = max(page_bytes, 1), max(slot_bytes, 1)
        self._seconds = seconds

    def put_leaf(self, node: Node) -> None:
        self.pages.put(node, self._leaf_priority(node))

    def touch(self, checkpoint: Checkpoint, base: int | None = None) -> None:
        """Rank ``checkpoint`` as used just now. ``base`` as in Checkpoint, if it is known."""
        checkpoint.base = checkpoint.nearest() if base is None else base
        checkpoint.slot_since = self.states.clock
        checkpoint.page_since = self.pages.clock
        self.states.put(checkpoint, self._state_priority(checkpoint))
        if checkpoint.tail_page is not None:
            self.pages.put(checkpoint, self._tail_priority(checkpoint))

    def forget(self, checkpoint: Checkpoint) -> None:
        self.states.discard(checkpoint)
        self.pages.discard(checkpoint)

    def pop_page(self) -> tuple[float, Node | Checkpoint] | None:
        """The leaf, or the checkpoint with a tail, to evict next for a page."""
        return self.pages.pop(self._page_priority_now)

    def pop_state(self) -> tuple[float, Checkpoint] | None:
        """The checkpoint to evict next for a slot."""
        return self.states.pop(self._state_priority_now)

    def clear(self) -> None:
        self.pages.clear()
        self.states.clear()

    def check(self) -> None:
        self.pages.check()
        self.states.check()

    # What a checkpoint saves grows when one that it was a short way from is evicted.

    def _state_priority_now(self, checkpoint: Checkpoint) -> float:
        checkpoint.base = checkpoint.nearest()
        return self._state_priority(checkpoint)

    def _page_priority_now(self, item: Node | Checkpoint) -> float:
        if isinstance(item, Checkpoint):
            item.base = item.nearest()
            return self._tail_priority(item)
        for checkpoint in item.checkpoints.values():
            checkpoint.base = checkpoint.nearest()
        return self._leaf_priority(item)

    def _state_priority(self, checkpoint: Checkpoint) -> float:
        return checkpoint.slot_since + self._saved(checkpoint) / self._slot_bytes

    def _tail_priority(self, checkpoint: Checkpoint) -> float:
        return checkpoint.page_since + self._saved(checkpoint) / self._page_bytes

    def _leaf_priority(self, node: Node) -> float:
        """What the checkpoints of a leaf save, over the pages that only they make useful."""
        if not self._stateful:
            stop = node.depth * self._page_size
            return node.since + self._seconds(stop - self._page_size, stop) / self._page_bytes
        if not node.checkpoints:
            return -math.inf
        checkpoints = node.checkpoints.values()
        first = min(checkpoint.base for checkpoint in checkpoints) // self._page_size
        saved = sum(self._saved(checkpoint) for checkpoint in checkpoints)
        return node.since + saved / (max(node.depth - first, 1) * self._page_bytes)

    def _saved(self, checkpoint: Checkpoint) -> float:
        return self._seconds(checkpoint.base, checkpoint.num_tokens)
