"""Random operations on the prefix cache against a simple model.

YOCOLM_TEST_OPERATIONS and YOCOLM_TEST_SEED set the number of operations and another seed.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import pytest

from prefix_model import Copy, Memory, Seq, Tokens, array
from yocolm.engine.prefix_nodes import Match

OPERATIONS = int(os.environ.get("YOCOLM_TEST_OPERATIONS", "8000"))
SEED = int(os.environ.get("YOCOLM_TEST_SEED", "0"))
MAX_TOKENS = 24


@dataclass
class Machine(Memory):
    """Sequences that begin, go on, end and are given up, at random."""

    texts: list[Tokens] = field(default_factory=lambda: [()])

    def start(self) -> None:
        tokens = self.text()
        limit = self.random.choice([len(tokens) - 1, self.random.randint(-1, len(tokens) + 2)])
        match = self.cache.match(array(tokens), limit)
        assert match.length == self.best(tokens, limit) <= max(limit, 0)
        assert match.shared == self.shared(tokens)
        assert len(match.pages) == self.full(match.length)
        self.check()
        held = self.cache.take(match)
        if self.adopt(tokens, held, match):
            return
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
        assert not self.stateful or (match.slot is None) == (match.length == 0)

    def adopt(self, tokens: Tokens, held: list[int], match: Match) -> bool:
        """Sometimes take the kept state itself; see that this is refused where it has to be."""
        if match.slot is None or self.random.random() < 0.7:
            return False
        own = [self.slots.references(match.slot)]
        own += [] if match.tail_page is None else [self.pages.references(match.tail_page)]
        assert self.cache.adopt(match) == (own in ([1], [1, 1]))
        if max(own) > 1:
            return False
        del self.states[tokens[: match.length]]
        pages = held if match.tail_page is None else [*held, match.tail_page]
        self.seqs.append(Seq(tokens, pages, match.slot, match.length, match.cursor))
        self.events["adopted"] += 1
        return True

    def text(self) -> Tokens:
        start = self.random.choice(self.random.choice([self.texts, [*self.states] or [()]]))
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

    def run(self, operations: int) -> None:
        chances = {
            self.start: 7,
            self.advance: 12,
            self.fork: 1,
            self.keep_copy: 2,
            self.end: 5,
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
    if OPERATIONS >= 8000:  # it did what it is to test
        wanted = {"hits": 5, "pages evicted": 5, "exchanged": 5}
        if stateful:
            wanted |= {"kept": 5, "states evicted": 5, "adopted": 1}
            wanted |= {"tails": 5} if page_size > 1 else {}
        assert {name: events[name] for name in wanted if events[name] < wanted[name]} == {}
