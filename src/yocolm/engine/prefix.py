"""Prefix cache: what was computed for earlier requests, for later ones that begin alike.

Pages of the global KV are nodes of a trie, keyed by their very tokens: no hash can collide. Where
a model has constant-size state as well, a page is of no use without that state at the same
boundary: so a hit ends at a checkpoint, a kept state, whose pages are all cached.

Who holds what: a node, and a checkpoint, keep one reference each to their page or slot. Sequences
have references of their own, all of them given and taken here, so that the number of pages that
only the cache refers to is known at any time. One that refers to the page of a node refers to the
pages above it, too, so those that nobody refers to can be given back leaf by leaf. Only copies
that are still to be made may keep a slot, or the page of a tail, without telling.

What goes first (GreedyDual-Size, for pages and for states apart): the lowest clock at the last use
plus seconds saved per byte. A leaf that leads to no checkpoint saves nothing and goes before all
others, and then the pages above it that only it made useful.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from yocolm.engine.pages import SCRATCH, PagePool, SlotPool
from yocolm.engine.prefix_check import check_cache
from yocolm.engine.prefix_nodes import TOKEN_BYTES, Checkpoint, Cursor, Match, Node, PrefixStats
from yocolm.engine.prefix_order import Order


class PrefixCache:
    """The cache over the pages and slots of ``pages`` and ``slots``.

    ``stateful``: the model has constant-size state, so that a hit needs a checkpoint. ``seconds``
    predicts how long it takes to compute tokens ``start .. stop - 1`` of a prompt; ``page_bytes``
    and ``slot_bytes`` are the sizes of a page and of a slot.
    """

    def __init__(
        self,
        pages: PagePool,
        slots: SlotPool,
        *,
        stateful: bool,
        page_bytes: int,
        slot_bytes: int,
        seconds: Callable[[int, int], float],
    ) -> None:
        self.stats = PrefixStats()
        self.stateful = stateful
        self._pages, self._slots = pages, slots
        self._page_size = pages.page_size
        self._order = Order(stateful, pages.page_size, page_bytes, slot_bytes, seconds)
        self._root = Node(None, b"", SCRATCH, 0, 0.0)
        self._nodes: list[Node | None] = [None] * pages.size  # by page
        self._idle = bytearray(pages.size)  # 1: the page of a node that only the cache refers to
        self._tails: dict[int, int] = {}  # page -> of how many checkpoints it holds the tail
        self._watched: set[int] = set()  # of nodes that are, or were, tails: copied untold
        self._checkpoints: dict[int, Checkpoint] = {}  # by slot
        self._num_nodes = 0
        self._num_idle = 0

    @property
    def num_pages(self) -> int:
        """How many pages the cache refers to, those that sequences refer to as well included."""
        return self._num_nodes + sum(self._nodes[page] is None for page in self._tails)

    @property
    def num_states(self) -> int:
        return len(self._checkpoints)

    @property
    def num_evictable(self) -> int:
        """How many pages would be free if the cache gave all back."""
        self._settle()
        return self._num_idle + sum(
            self._nodes[page] is None and self._pages.references(page) == count
            for page, count in self._tails.items()
        )

    # Look-up

    def match(self, tokens: np.ndarray, limit: int) -> Match:
        """The longest part of ``tokens`` (int64, from the first on) that need not be computed.

        It has at most ``limit`` tokens. Changes nothing and takes no reference.
        """
        data = _bytes(tokens)
        step = self._page_size * TOKEN_BYTES
        path = [self._root]
        for start in range(0, len(data) - step + 1, step):
            node = path[-1].children.get(data[start : start + step])
            if node is None:
                break
            path.append(node)
        shared = path[-1].depth * self._page_size
        limit = max(min(limit, len(data) // TOKEN_BYTES), 0)
        del path[limit // self._page_size + 1 :]
        if not self.stateful:
            return self._matched(path, path[-1].depth * self._page_size, None, shared, data)
        while path:
            node = path[-1]
            if node.checkpoints:
                room = limit - node.depth * self._page_size
                at = node.depth * step
                found = node.longest(data[at : at + step], min(room, self._page_size - 1))
                if found is not None:
                    return self._matched(path, found.num_tokens, found, shared, data)
            path.pop()
        return self._matched([self._root], 0, None, shared, data)

    def _matched(
        self, path: list[Node], length: int, found: Checkpoint | None, shared: int, data: bytes
    ) -> Match:
        return Match(
            length,
            tuple(node.page for node in path[1:]),
            None if found is None else found.tail_page,
            None if found is None else found.slot,
            shared,
            path[-1] if len(path) > 1 else None,
            len(data) // TOKEN_BYTES,
        )

    # References of sequences

    def take(self, match: Match) -> list[int]:
        """Give a sequence references to ``match.pages``, and return these.

        Counts the query: call it for a miss, too. The tail page and the slot are not held: before
        anything is reclaimed, refer to them in their pools until they are copied, or ``adopt``.
        """
        assert match.cursor is None or match.cursor.alive, "the match is out of date"
        self.stats.queries += 1
        self.stats.query_tokens += match.num_queried
        if match.length > 0:
            self.stats.hits += 1
            self.stats.hit_tokens += match.length
        if match.slot is not None:
            self._order.touch(self._checkpoints[match.slot])
        self.hold(match.pages)
        return list(match.pages)

    def put_back(self, match: Match) -> None:
        """Undo ``take``: there is no room for the sequence, which will ask again."""
        self.stats.queries -= 1
        self.stats.query_tokens -= match.num_queried
        self.stats.hits -= match.length > 0
        self.stats.hit_tokens -= match.length
        self.release(match.pages)

    def adopt(self, match: Match) -> bool:
        """Move the state of a hit to the caller instead of having it copied.

        The references of the cache to ``match.slot`` and ``match.tail_page`` become the caller's,
        to write to, and the checkpoint is forgotten: for when there is no room for both. False,
        and nothing, if others refer to them: they are in use, or copies of them are to be made.
        """
        checkpoint = None if match.slot is None else self._checkpoints.get(match.slot)
        if checkpoint is None or self._slots.references(checkpoint.slot) > 1:
            return False
        tail_page = checkpoint.tail_page
        if tail_page is not None and self._pages.references(tail_page) > 1:
            return False
        self._slots.fork((checkpoint.slot,))
        self._pages.fork(() if tail_page is None else (tail_page,))
        self._drop(checkpoint)
        return True

    def hold(self, pages: Iterable[int]) -> None:
        """Add a reference of a sequence to each of ``pages``."""
        for page in pages:
            self._pages.fork((page,))
            if self._idle[page]:
                self._set_busy(page)

    def release(self, pages: Iterable[int]) -> None:
        """Drop a reference of a sequence to each of ``pages``."""
        for page in pages:
            self._pages.free((page,))
            node = self._nodes[page]
            if node is not None:
                node.since = self._order.pages.clock
                self._set_idle_if(node)

    # What is kept

    def extend(
        self, cursor: Cursor | None, tokens: np.ndarray, pages: Sequence[int]
    ) -> tuple[Cursor | None, list[int]]:
        """Cache ``pages``, the full pages behind ``cursor`` that hold ``tokens`` (int64).

        The caller has a reference to each, and to those above. Where the same tokens are cached
        already it gets that page in exchange. Returns the place behind them and the pages that
        the caller has references to from now on.
        """
        data = _bytes(tokens)
        step = self._page_size * TOKEN_BYTES
        assert len(data) == len(pages) * step, "the tokens are not those of full pages"
        node = self._node(cursor)
        assert not self._idle[node.page], "the caller has no reference to the pages above"
        kept: list[int] = []
        for index, page in enumerate(pages):
            key = data[index * step : (index + 1) * step]
            child = node.children.get(key)
            if child is None:
                child = self._add_node(node, key, page)
            elif child.page != page:
                self.hold((child.page,))
                self.release((page,))
            kept.append(child.page)
            node = child
        return (None if node is self._root else node), kept

    def wants_state(self, cursor: Cursor | None, num_tokens: int, tail: np.ndarray) -> bool:
        """Whether the state after ``num_tokens`` tokens may be kept, and is not yet.

        ``tail``: the tokens behind the full pages, which end at ``cursor``.
        """
        if not self.stateful or num_tokens == 0:
            return False
        return self._tail(cursor, num_tokens, tail) not in self._node(cursor).checkpoints

    def keep_state(
        self,
        cursor: Cursor | None,
        num_tokens: int,
        tail: np.ndarray,
        slot: int,
        tail_page: int | None,
        parent_tokens: int | None = None,
    ) -> bool:
        """Keep the state after ``num_tokens`` tokens, which is in ``slot`` or to be copied there.

        ``cursor`` and ``tail`` as in ``wants_state``; the tail's KV is in ``tail_page``, to which
        the cache refers from now on. The caller's reference to ``slot`` becomes the cache's. If the
        state is there already, or none is wanted, the slot is freed instead and False returned.
        ``parent_tokens``: the boundary from which these tokens would else be computed, if known.
        While a copy into ``slot`` is still to be made, keep one more reference to it.
        """
        node, key = self._node(cursor), self._tail(cursor, num_tokens, tail)
        if not self.stateful or num_tokens == 0 or key in node.checkpoints:
            self._slots.free((slot,))
            if key in node.checkpoints:
                self._order.touch(node.checkpoints[key])
            return False
        tail_page = tail_page if key else None
        checkpoint = Checkpoint(node, key, num_tokens, slot, tail_page)
        node.checkpoints[key] = checkpoint
        self._checkpoints[slot] = checkpoint
        if tail_page is not None:
            self._pages.fork((tail_page,))
            self._tails[tail_page] = self._tails.get(tail_page, 0) + 1
            self._watch_if(tail_page)
        self._order.touch(checkpoint, parent_tokens)
        return True

    def drop_state(self, slot: int) -> None:
        """Forget the checkpoint in ``slot``, if there is one: the copy into it was never made."""
        checkpoint = self._checkpoints.get(slot)
        if checkpoint is not None:
            self._drop(checkpoint)

    # Eviction

    def can_reclaim(self, count: int) -> bool:
        """Whether ``count`` pages are free or can be."""
        self._settle()
        missing = count - self._pages.num_free
        return missing <= self._num_idle or missing <= self.num_evictable

    def reclaim_pages(self, count: int) -> bool:
        """Evict until ``count`` pages are free. False, without evicting any, if that cannot be."""
        if not self.can_reclaim(count):
            return False
        pinned: list[tuple[Node | Checkpoint, float]] = []
        while self._pages.num_free < count:
            lowest = self._order.pop_page()
            if lowest is None:
                break
            priority, item = lowest
            page = item.page if isinstance(item, Node) else item.tail_page
            assert page is not None
            if self._pages.references(page) > self._cached(page):
                pinned.append((item, priority))
                continue
            self._order.pages.advance(priority)
            if isinstance(item, Node):
                self._evict(item)
            else:
                self._evict_state(item)
        for item, priority in pinned:
            self._order.pages.put(item, priority)
        return self._pages.num_free >= count

    def reclaim_slot(self) -> bool:
        """Evict a checkpoint unless a slot is free. False, without evicting any, if none can be:
        a slot that is yet to be copied would not be free."""
        pinned: list[tuple[Checkpoint, float]] = []
        while self._slots.num_free == 0:
            lowest = self._order.pop_state()
            if lowest is None:
                break
            priority, checkpoint = lowest
            if self._slots.references(checkpoint.slot) > 1:
                pinned.append((checkpoint, priority))
                continue
            self._order.states.advance(priority)
            self._evict_state(checkpoint)
        for checkpoint, priority in pinned:
            self._order.states.put(checkpoint, priority)
        return self._slots.num_free > 0

    def clear(self) -> None:
        """Give everything back. No sequence may refer to a place in the cache any more."""
        for checkpoint in list(self._checkpoints.values()):
            self._drop(checkpoint)
        for page, node in enumerate(self._nodes):
            if node is not None:
                node.alive = False
                self._nodes[page] = None
                self._pages.free((page,))
        self._root.children.clear()
        self._watched.clear()
        self._idle = bytearray(self._pages.size)
        self._num_nodes = self._num_idle = 0
        self._order.clear()

    # Nodes and checkpoints

    def _node(self, cursor: Cursor | None) -> Node:
        node = self._root if cursor is None else cursor
        assert node.alive, "the place is no longer cached: its pages were given back"
        return node

    def _tail(self, cursor: Cursor | None, num_tokens: int, tail: np.ndarray) -> bytes:
        depth = 0 if cursor is None else cursor.depth
        assert num_tokens == depth * self._page_size + len(tail), "tokens are missing or too many"
        assert len(tail) < self._page_size, "the tail is a full page"
        return _bytes(tail)

    def _cached(self, page: int) -> int:
        """How many references the cache itself has to ``page``."""
        return (self._nodes[page] is not None) + self._tails.get(page, 0)

    def _add_node(self, parent: Node, key: bytes, page: int) -> Node:
        assert self._nodes[page] is None, f"page {page} is cached for other tokens"
        self._pages.fork((page,))
        node = Node(parent, key, page, parent.depth + 1, self._order.pages.clock)
        parent.children[key] = node
        self._nodes[page] = node
        self._num_nodes += 1
        self._watch_if(page)
        return node

    def _evict(self, node: Node) -> None:
        assert node.parent is not None and not node.children
        for checkpoint in list(node.checkpoints.values()):
            self._evict_state(checkpoint)
        self._set_busy(node.page)
        self._watched.discard(node.page)
        node.alive = False
        self._nodes[node.page] = None
        self._num_nodes -= 1
        del node.parent.children[node.key]
        self._pages.free((node.page,))
        self.stats.evicted_pages += 1
        self._rank_leaf(node.parent)

    def _evict_state(self, checkpoint: Checkpoint) -> None:
        self.stats.evicted_states += 1
        self.stats.evicted_pages += checkpoint.tail_page is not None
        self._drop(checkpoint)

    def _drop(self, checkpoint: Checkpoint) -> None:
        del self._checkpoints[checkpoint.slot]
        del checkpoint.node.checkpoints[checkpoint.tail]
        self._order.forget(checkpoint)
        self._slots.free((checkpoint.slot,))
        if checkpoint.tail_page is not None:
            self._free_tail(checkpoint.tail_page)
        self._rank_leaf(checkpoint.node)

    def _free_tail(self, page: int) -> None:
        self._tails[page] -= 1
        if self._tails[page] == 0:
            del self._tails[page]
        self._pages.free((page,))

    # Idle pages

    def _set_busy(self, page: int) -> None:
        node = self._nodes[page]
        if node is not None and self._idle[page]:
            self._idle[page] = 0
            self._num_idle -= 1
            self._order.pages.discard(node)

    def _set_idle_if(self, node: Node) -> None:
        """Note that only the cache refers to the page of ``node``, if that is so."""
        page = node.page
        if self._pages.references(page) == self._cached(page) and not self._idle[page]:
            self._idle[page] = 1
            self._num_idle += 1
        self._rank_leaf(node)

    def _watch_if(self, page: int) -> None:
        """Look after a node whose page is a tail, too: who copies it does not tell."""
        if self._nodes[page] is not None and page in self._tails:
            self._watched.add(page)

    def _settle(self) -> None:
        """Bring up to date what may have changed untold."""
        for page in list(self._watched):
            node = self._nodes[page]
            assert node is not None
            if self._pages.references(page) > self._cached(page):
                self._set_busy(page)
            else:
                self._set_idle_if(node)
                if page not in self._tails:
                    self._watched.discard(page)

    def _rank_leaf(self, node: Node) -> None:
        if self._idle[node.page] and not node.children:
            self._order.put_leaf(node)

    def check(self) -> None:
        """Assert that trie, references, counts and rankings agree (for tests)."""
        self._settle()
        check_cache(self)


def _bytes(tokens: np.ndarray) -> bytes:
    return np.ascontiguousarray(tokens, dtype=np.int64).tobytes()
