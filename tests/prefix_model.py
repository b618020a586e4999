"""What the prefix cache and its pools should hold: a simple model, dicts from tokens to pages.

It writes what each page and slot holds, so a stale, foreign or half-written state that is taken
for another's shows up as tokens. It does not know what is to be evicted, only what may be.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from yocolm.engine.pages import PagePool, SlotPool
from yocolm.engine.prefix import PrefixCache
from yocolm.engine.prefix_nodes import Cursor

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
class Memory:
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
