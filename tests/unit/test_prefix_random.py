"""Random operations on the prefix cache against a simple model: dicts from tokens to pages.

The model writes what each page and slot holds, so a stale, foreign or half-written state that is
taken for another's shows up as tokens. It does not know what is to be evicted, only what may be.

YOCOLM_TEST_OPERATIONS and YOCOLM_TEST_SEED set the number of operations and another seed.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest

from yocolm.engine.pages import PagePool, SlotPool
from yocolm.engine.prefix import PrefixCache
from yocolm.engine.prefix_nodes import Cursor

OPERATIONS = int(os.environ.get("YOCOLM_TEST_OPERATIONS", "6000"))
SEED = int(os.environ.get("YOCOLM_TEST_SEED", "0"))
MAX_TOKENS = 24
Tokens = tuple[int, ...]


def array(tokens: Tokens) -> np.ndarray:
    return np.array(tokens, dtype=np.int64)


@dataclass(eq=False)
class Seq:
    """``written`` of its ``tokens`` are in its pages, and in its slot."""

    tokens: Tokens
    pages: list[int]
    slot: int
    written: int
    cursor: Cursor | None


@dataclass
class Copy:
    kind: str
    src: int
    dst: int
    owner: Seq | None  # None: the cache


@dataclass
class Machine:
    """The pools, the cache and the sequences, and beside them what they should hold."""

    seed: str
    stateful: bool
    page_size: int
    num_pages: int
    num_slots: int
    seqs: list[Seq] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)  # to be made, in this order
    nodes: dict[Tokens, int] = field(default_factory=dict)  # all tokens to its end -> page
    states: dict[Tokens, tuple[int, int | None]] = field(default_factory=dict)  # slot, tail page
    events: Counter[str] = field(default_factory=Counter)
    texts: list[Tokens] = field(default_factory=lambda: [()])

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.pages, self.slots = PagePool(self.num_pages, self.page_size), SlotPool(self.num_slots)
        self.in_page: list[Tokens] = [()] * self.num_pages  # all tokens from the first on
        self.in_slot: list[Tokens] = [()] * self.num_slots
        self.cache = PrefixCache(
            self.pages,
            self.slots,
            stateful=self.stateful,
            page_bytes=self.random.choice([0, 7]),
            slot_bytes=self.random.choice([0, 9]),
            seconds=lambda start, stop: (stop - start) * (1 + stop / 50),
        )

    # The model

    def full(self, num_tokens: int) -> int:
        return num_tokens // self.page_size

    def prefixes(self, tokens: Tokens) -> list[Tokens]:
        """``tokens`` up to the end of each full page."""
        ends = range(self.page_size, len(tokens) + 1, self.page_size)
        return [tokens[:end] for end in ends]

    def held(self) -> tuple[Counter[int], Counter[int]]:
        """References to pages and slots by sequences and copies."""
        pages = Counter(page for seq in self.seqs for page in seq.pages)
        slots = Counter(seq.slot for seq in self.seqs)
        for copy in self.copies:
            (pages if copy.kind == "page" else slots)[copy.src] += 1
            if copy.owner is None:
                slots[copy.dst] += 1
        return pages, slots

    def kept(self) -> Counter[int]:
        """References of the cache to pages."""
        tails = (page for _, page in self.states.values() if page is not None)
        return Counter([*self.nodes.values(), *tails])

    def best(self, tokens: Tokens, limit: int) -> int:
        shared = self.shared(tokens)
        if not self.stateful:
            return min(self.full(shared), self.full(max(limit, 0))) * self.page_size
        lengths = [
            len(state)
            for state in self.states
            if len(state) <= limit and tokens[: len(state)] == state
        ]
        return max(lengths, default=0)

    def shared(self, tokens: Tokens) -> int:
        return max((len(p) for p in self.prefixes(tokens) if p in self.nodes), default=0)

    def check(self) -> None:
        self.cache.check()
        self.pages.check()
        self.slots.check()
        held_pages, held_slots = self.held()
        kept_pages, kept_slots = self.kept(), Counter(slot for slot, _ in self.states.values())
        for page in range(self.num_pages):
            assert self.pages.references(page) == held_pages[page] + kept_pages[page]
        for slot in range(self.num_slots):
            assert self.slots.references(slot) == held_slots[slot] + kept_slots[slot]
        assert self.cache.num_pages == len(kept_pages)
        assert self.cache.num_states == len(self.states)
        assert self.cache.num_evictable == len([p for p in kept_pages if not held_pages[p]])
        for tokens, page in self.nodes.items():
            assert self.in_page[page][: len(tokens)] == tokens
            assert len(tokens) == self.page_size or tokens[: -self.page_size] in self.nodes

    def observe(self) -> tuple[set[Tokens], set[Tokens]]:
        """Take note of what was evicted: whose page or slot has lost a reference."""
        held_pages, held_slots = self.held()
        states = {
            tokens
            for tokens, (slot, _) in self.states.items()
            if self.slots.references(slot) == held_slots[slot]
        }
        for tokens in states:
            del self.states[tokens]
        kept = self.kept()
        nodes = {
            tokens
            for tokens, page in self.nodes.items()
            if self.pages.references(page) < held_pages[page] + kept[page]
        }
        for tokens in nodes:
            del self.nodes[tokens]
        for tokens in nodes:
            assert not any(state[: len(tokens)] == tokens for state in self.states)
        return nodes, states

    def useless(self) -> int:
        """How many idle pages lead to no checkpoint, and are the tail of none."""
        (held, _), kept = self.held(), self.kept()
        return sum(
            not held[page]
            and kept[page] == 1
            and not any(state[: len(tokens)] == tokens for state in self.states)
            for tokens, page in self.nodes.items()
        )

    # Room

    def reclaim_pages(self, count: int) -> bool:
        held, _ = self.held()
        free, kept = self.pages.num_free, self.kept()
        possible = free + len([page for page in kept if not held[page]]) >= count
        useless = self.useless()
        before = self.cache.stats.evicted_pages
        assert self.cache.can_reclaim(count) == possible
        assert self.cache.reclaim_pages(count) == possible
        nodes, states = self.observe()
        if not possible or free >= count:
            assert not nodes and not states
            assert self.cache.stats.evicted_pages == before
        else:
            self.events["pages evicted"] += 1
            assert self.pages.num_free >= count
        if self.stateful and useless >= count - free:
            assert not states, "a checkpoint went before pages that lead to none"
        return possible

    def reclaim_slot(self) -> bool:
        _, held = self.held()
        free = self.slots.num_free > 0
        possible = free or any(not held[slot] for slot, _ in self.states.values())
        assert self.cache.reclaim_slot() == possible
        nodes, states = self.observe()
        assert not nodes and len(states) == (possible and not free)
        assert (self.slots.num_free > 0) == possible
        self.events["states evicted"] += len(states)
        return possible

    # Operations

    def start(self) -> None:
        tokens = self.text()
        limit = self.random.choice([len(tokens) - 1, self.random.randint(-1, len(tokens) + 2)])
        match = self.cache.match(array(tokens), limit)
        assert match.length == self.best(tokens, limit) <= max(limit, 0)
        assert match.shared == self.shared(tokens)
        assert len(match.pages) == self.full(match.length)
        self.check()
        held = self.cache.take(match)
        seq = Seq(tokens, held, 0, match.length, match.cursor)
        sources = [("page", match.tail_page), ("slot", match.slot)]
        pinned = [Copy(kind, src, 0, seq) for kind, src in sources if src is not None]
        for copy in pinned:
            (self.pages if copy.kind == "page" else self.slots).fork([copy.src])
        self.copies += pinned
        self.seqs.append(seq)
        missing = self.pages.pages_for(match.length) - len(held)
        if not (self.reclaim_pages(missing) and self.reclaim_slot()):
            self.events["no room"] += 1
            self.seqs.remove(seq)
            self.cache.release(held)
            self.drop(seq)
            return
        seq.pages += self.pages.alloc(missing) or []
        (seq.slot,) = self.slots.alloc(1) or [0]
        for copy in pinned:
            copy.dst = seq.slot if copy.kind == "slot" else seq.pages[-1]
        self.in_slot[seq.slot] = () if self.stateful else tokens[: match.length]
        self.events["hits"] += match.length > 0
        self.events["tails"] += match.tail_page is not None
        if self.stateful and match.slot is None:
            assert match.length == 0

    def text(self) -> Tokens:
        start = self.random.choice(self.texts)
        start = start[: self.random.choice([len(start), self.random.randint(0, len(start))])]
        more = self.random.randint(0, 8)
        text = (*start, *(self.random.randint(0, 2) for _ in range(more)))[:MAX_TOKENS]
        self.texts = [*self.texts[-20:], text]
        return text

    def advance(self) -> None:
        """Compute some tokens of a sequence, its own ones or new ones."""
        seq = self.pick()
        if seq is None:
            return
        self.issue()
        count = self.random.randint(1, 6)
        if seq.written == len(seq.tokens):
            seq.tokens += tuple(self.random.randint(0, 2) for _ in range(count))
        stop = min(seq.written + count, len(seq.tokens))
        missing = max(self.pages.pages_for(stop) - len(seq.pages), 0)
        if not self.reclaim_pages(missing):
            self.preempt(seq)
            return
        seq.pages += self.pages.alloc(missing) or []
        assert self.in_slot[seq.slot] == seq.tokens[: seq.written], "the state is another's"
        self.in_slot[seq.slot] = seq.tokens[:stop]
        for index, page in enumerate(seq.pages):
            first, end = index * self.page_size, (index + 1) * self.page_size
            if first < seq.written:
                old = min(end, seq.written)
                assert self.in_page[page][:old] == seq.tokens[:old], "the page is another's"
            if end > seq.written:
                self.in_page[page] = seq.tokens[: min(end, stop)]
        seq.written = stop
        self.extend(seq)

    def extend(self, seq: Seq) -> None:
        first = 0 if seq.cursor is None else seq.cursor.depth
        last = self.full(seq.written)
        tokens = array(seq.tokens[first * self.page_size : last * self.page_size])
        seq.cursor, kept = self.cache.extend(seq.cursor, tokens, seq.pages[first:last])
        for index, page in enumerate(kept, first):
            prefix = seq.tokens[: (index + 1) * self.page_size]
            self.events["exchanged"] += page != seq.pages[index]
            assert self.nodes.setdefault(prefix, page) == page
        seq.pages[first:last] = kept

    def fork(self) -> None:
        parent = self.pick()
        self.issue()
        if parent is None or parent.written == 0 or not self.reclaim_slot():
            return
        full = self.full(parent.written)
        tail = parent.pages[full : self.pages.pages_for(parent.written)]
        if not self.reclaim_pages(len(tail)):
            return
        pages = [*parent.pages[:full], *(self.pages.alloc(len(tail)) or [])]
        self.cache.hold(pages[:full])
        (slot,) = self.slots.alloc(1) or [0]
        sibling = Seq(parent.tokens, pages, slot, parent.written, parent.cursor)
        self.seqs.append(sibling)
        self.add_copy("slot", parent.slot, slot, sibling)
        for src, dst in zip(tail, pages[full:], strict=True):
            self.add_copy("page", src, dst, sibling)

    def keep_copy(self) -> None:
        """Keep the state of a sequence that goes on."""
        seq = self.pick()
        if seq is None or not self.reclaim_slot():
            return
        if any(copy.dst == seq.slot for copy in self.copies if copy.kind == "slot"):
            return
        (row,) = self.slots.alloc(1) or [0]
        if self.keep(seq, row):
            self.slots.fork([row])
            self.add_copy("slot", seq.slot, row, None)

    def keep(self, seq: Seq, row: int) -> bool:
        tokens = seq.tokens[: seq.written]
        full = self.full(len(tokens))
        tail = array(tokens[full * self.page_size :])
        page = seq.pages[full] if len(tail) else None
        wanted = self.cache.wants_state(seq.cursor, len(tokens), tail)
        assert wanted == (self.stateful and len(tokens) > 0 and tokens not in self.states)
        parent = self.random.choice([None, self.best(tokens, len(tokens) - 1)])
        assert self.cache.keep_state(seq.cursor, len(tokens), tail, row, page, parent) == wanted
        if wanted:
            self.states[tokens] = row, page
            self.events["kept"] += 1
        return wanted

    def end(self) -> None:
        """End a sequence: its slot becomes a checkpoint, or is free."""
        seq = self.pick()
        if seq is None:
            return
        self.issue()
        self.seqs.remove(seq)
        if self.random.random() < 0.8:
            self.keep(seq, seq.slot)
        else:
            self.slots.free([seq.slot])
        self.cache.release(seq.pages)

    def abort(self) -> None:
        seq = self.pick()
        if seq is not None:
            self.preempt(seq)

    def preempt(self, seq: Seq) -> None:
        self.seqs.remove(seq)
        self.drop(seq)
        self.cache.release(self.random.sample(seq.pages, len(seq.pages)))
        self.slots.free([seq.slot])

    def drop_state(self) -> None:
        """A copy into a kept row is given up, unless another copy is to be made from there."""
        for copy in self.copies:
            if copy.owner is None and not any(copy.dst == other.src for other in self.copies):
                self.cache.drop_state(copy.dst)
                self.states = {t: kept for t, kept in self.states.items() if kept[0] != copy.dst}
                self.copies.remove(copy)
                self.free(copy)
                self.events["dropped"] += 1
                return

    def clear(self) -> None:
        if self.random.random() < 0.05:
            for seq in list(self.seqs):
                self.preempt(seq)
            self.cache.clear()
            self.nodes.clear()
            self.states.clear()

    def squeeze(self) -> None:
        self.reclaim_pages(self.random.randint(0, self.num_pages))

    def pick(self) -> Seq | None:
        return self.random.choice(self.seqs) if self.seqs else None

    # Copies

    def add_copy(self, kind: str, src: int, dst: int, owner: Seq | None) -> None:
        (self.pages if kind == "page" else self.slots).fork([src])
        self.copies.append(Copy(kind, src, dst, owner))

    def drop(self, owner: Seq) -> None:
        for copy in [copy for copy in self.copies if copy.owner is owner]:
            self.copies.remove(copy)
            self.free(copy)

    def issue(self) -> None:
        for copy in self.copies:
            content = self.in_page if copy.kind == "page" else self.in_slot
            content[copy.dst] = content[copy.src]
        issued, self.copies = self.copies, []
        for copy in issued:
            self.free(copy)

    def free(self, copy: Copy) -> None:
        (self.pages if copy.kind == "page" else self.slots).free([copy.src])
        if copy.owner is None:
            self.slots.free([copy.dst])

    def run(self, operations: int) -> None:
        chances = {
            self.start: 6,
            self.advance: 12,
            self.fork: 1,
            self.keep_copy: 2,
            self.end: 3,
            self.abort: 1,
            self.drop_state: 1,
            self.clear: 1,
            self.squeeze: 1,
            self.reclaim_slot: 1,
            self.issue: 1,
        }
        names, weights = list(chances), list(chances.values())
        for operation in self.random.choices(names, weights, k=operations):
            operation()
            self.check()
        for seq in list(self.seqs):
            self.preempt(seq)
        self.issue()
        self.cache.clear()
        self.cache.check()
        assert self.pages.num_free == self.pages.capacity
        assert self.slots.num_free == self.slots.capacity


@pytest.mark.parametrize(
    "stateful, page_size, num_pages, num_slots, share",
    [
        (True, 4, 25, 9, 0.4),  # pages are short
        (True, 3, 61, 6, 0.2),  # slots are short
        (True, 1, 61, 9, 0.2),
        (False, 4, 19, 9, 0.2),
    ],
)
def test_random_operations(
    stateful: bool, page_size: int, num_pages: int, num_slots: int, share: float
) -> None:
    seed = f"{SEED} {stateful} {page_size} {num_pages}"
    machine = Machine(seed, stateful, page_size, num_pages, num_slots)
    machine.run(max(int(OPERATIONS * share), 1))
    events = machine.events
    if OPERATIONS >= 5000:
        assert events["hits"] > 20 and events["pages evicted"] > 20 and events["exchanged"] > 20
        assert not stateful or min(events["kept"], events["states evicted"]) > 20
        assert page_size == 1 or not stateful or events["tails"] > 20
