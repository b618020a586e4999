"""A prefix cache to play with: prompts are strings, a letter is a token."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from yocolm.engine.pages import PagePool, SlotPool
from yocolm.engine.prefix import PrefixCache
from yocolm.engine.prefix_nodes import Cursor, Match

SIZE = 4  # tokens a page


def tokens_of(text: str) -> np.ndarray:
    return np.array([ord(letter) for letter in text], dtype=np.int64)


@dataclass
class Seq:
    """What a sequence holds."""

    pages: list[int]
    cursor: Cursor | None = None
    cached: int = 0  # of its pages, from the first on


@dataclass
class World:
    """A cache and its pools. A token takes a second to compute."""

    num_pages: int = 33
    num_slots: int = 9
    stateful: bool = True
    pages: PagePool = field(init=False)
    slots: SlotPool = field(init=False)
    cache: PrefixCache = field(init=False)

    def __post_init__(self) -> None:
        self.pages, self.slots = PagePool(self.num_pages, SIZE), SlotPool(self.num_slots)
        self.cache = PrefixCache(
            self.pages,
            self.slots,
            stateful=self.stateful,
            page_bytes=10,
            slot_bytes=10,
            seconds=lambda start, stop: float(stop - start),
        )

    def match(self, text: str, limit: int | None = None) -> Match:
        return self.cache.match(tokens_of(text), len(text) if limit is None else limit)

    def start(self, text: str, limit: int | None = None) -> Seq:
        """A sequence that has computed ``text``, its full pages in the cache."""
        match = self.match(text, len(text) - 1 if limit is None else limit)
        held = self.cache.take(match)
        full = len(text) // SIZE
        new = self.pages.alloc(self.pages.pages_for(len(text)) - len(held))
        assert new is not None, "the test needs more pages"
        seq = Seq(held + new, match.cursor, len(held))
        added = tokens_of(text)[seq.cached * SIZE : full * SIZE]
        seq.cursor, kept = self.cache.extend(seq.cursor, added, seq.pages[seq.cached : full])
        seq.pages[seq.cached : full] = kept
        seq.cached = full
        self.cache.check()
        return seq

    def keep(self, seq: Seq, text: str) -> int | None:
        """Keep the state after ``text``, all that ``seq`` computed; its slot if it is kept."""
        slot = self.slots.alloc(1)
        assert slot is not None, "the test needs more slots"
        tail = tokens_of(text)[len(text) // SIZE * SIZE :]
        tail_page = seq.pages[len(text) // SIZE] if len(tail) else None
        wanted = self.cache.wants_state(seq.cursor, len(text), tail)
        kept = self.cache.keep_state(seq.cursor, len(text), tail, slot[0], tail_page)
        assert kept == wanted
        self.cache.check()
        return slot[0] if kept else None

    def end(self, seq: Seq) -> None:
        self.cache.release(seq.pages)
        self.cache.check()

    def put(self, text: str) -> int | None:
        """Compute ``text``, keep the state at its end, and end."""
        seq = self.start(text)
        slot = self.keep(seq, text)
        self.end(seq)
        return slot
