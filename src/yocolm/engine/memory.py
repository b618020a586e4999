"""What sequences hold: pages of the global KV, a slot of constant-size state, and what is kept.

Pages grow with a sequence, are immutable once full, and are shared by all that begin with the same
tokens. A slot is written in every step, so it is copied, never shared: from a kept state when a
sequence begins with known tokens, and to one at boundaries that will be met again. What is taken
from a preempted sequence may go to the swap space (``engine/transfers.py``).

Only numbers are moved here; ``Plan.copies`` and ``Plan.moves`` say what is to be done with content.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from yocolm.engine.cost import CostModel
from yocolm.engine.pages import Copy, PagePool, PendingCopies, SlotPool
from yocolm.engine.prefix import Match, PrefixCache
from yocolm.engine.request import Sequence
from yocolm.engine.steps import PoolUsage
from yocolm.engine.swap_space import Move
from yocolm.engine.transfers import Transfers

SPACING = 8192  # tokens between the states that are kept within a long prompt
MISS = Match(0, (), None, None, 0, None, 0)


@dataclass
class Memory:
    """The pools, and who holds what of them.

    Args:
        cache: kept prefixes; None keeps none.
        transfers: takes preempted sequences to a swap space; None has them all recompute.
        cost: weighs the two.
        spacing: tokens between states kept within a long prompt, rounded down to pages.
    """

    page_pool: PagePool
    slot_pool: SlotPool
    cache: PrefixCache | None = None
    transfers: Transfers | None = None
    cost: CostModel | None = None
    spacing: int = SPACING
    copies: PendingCopies = field(init=False)
    num_swaps: int = field(init=False, default=0)
    recomputed_tokens: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.copies = PendingCopies(self.page_pool, self.slot_pool)
        size = self.page_pool.page_size
        self.spacing = max(1, self.spacing // size) * size
        self._refused: tuple[object, ...] = ()

    @property
    def tickets(self) -> tuple[int, ...]:
        """Of the moves that have not ended."""
        return () if self.transfers is None else tuple(self.transfers.running)

    @property
    def num_arriving(self) -> int:
        """Sequences that are being read back: they hold a slot but do not run yet."""
        return 0 if self.transfers is None else self.transfers.num_arriving

    @property
    def pages_leaving(self) -> int:
        """Pages that will be free when they are written out."""
        return 0 if self.transfers is None else self.transfers.pages_leaving

    def take_moves(self) -> tuple[Move, ...]:
        """The moves decided since it was last asked."""
        return () if self.transfers is None else self.transfers.take_moves()

    # A sequence begins

    def start(self, seq: Sequence) -> bool:
        """Give ``seq`` a slot and pages for all its tokens; False, and nothing, without room.

        What was computed before comes from the prefix cache, and ``seq.num_computed`` tells how
        much; or from the swap space, and arrives later: until then ``seq.ticket`` is set.
        """
        attempt = (seq, seq.num_tokens, self.page_pool.num_free, self.slot_pool.num_free)
        if self.cache is not None:
            attempt += (self.cache.num_evictable, self.cache.num_states, self.copies.pending)
        if attempt == self._refused:
            return False
        started = self._bring_in(seq) if seq.is_swapped else self._begin(seq, self._match(seq))
        self._refused = () if started else attempt
        return started

    def _match(self, seq: Sequence) -> Match:
        if self.cache is None:
            return MISS
        limit = seq.num_tokens - 1
        if seq.scored_until < seq.request.scored_rows.stop:
            limit = min(limit, seq.scored_until)  # rows to be scored have to be computed
        return self.cache.match(seq.array(0, seq.num_tokens), limit)

    def _begin(self, seq: Sequence, match: Match) -> bool:
        """Start ``seq`` behind what ``match`` found."""
        shared = [] if self.cache is None else self.cache.take(match)
        missing = self.page_pool.pages_for(seq.num_tokens) - len(shared)
        taken = self._copied(seq, match, missing) or self._adopted(match, missing)
        if taken is None:
            if self.cache is not None:
                self.cache.put_back(match)
            return False
        fresh, slot = taken
        seq.pages, seq.slot, seq.num_computed = shared + fresh, slot, match.length
        seq.cursor, seq.num_shared = match.cursor, len(shared)
        seq.caching = self.cache is not None
        if seq.request.first_scheduled is None:  # later it may be its own that it finds
            seq.num_cached = match.length
        seq.stops = self._stops(seq, match)
        return True

    def _copied(self, seq: Sequence, match: Match, num_pages: int) -> tuple[list[int], int] | None:
        """Pages and a slot, into which what ``match`` found is to be copied."""
        sources = [number for number in (match.tail_page,) if number is not None]
        states = [number for number in (match.slot,) if number is not None]
        self.page_pool.fork(sources)  # what is to be copied must not be evicted for those who
        self.slot_pool.fork(states)  # are to copy it
        taken = self._alloc(num_pages)
        if taken is not None:
            fresh, slot = taken
            for src in states:
                self.copies.add(seq, Copy("slot", src, slot))
            for src in sources:
                self.copies.add(seq, Copy("page", src, fresh[0]))
        self.page_pool.free(sources)
        self.slot_pool.free(states)
        return taken

    def _adopted(self, match: Match, num_pages: int) -> tuple[list[int], int] | None:
        """What ``match`` found itself, where there is no room for a copy beside it."""
        if self.cache is None or match.slot is None:
            return None
        if self.page_pool.num_free + self.cache.num_evictable < num_pages:
            return None
        if not self.cache.adopt(match):
            return None
        tail = [] if match.tail_page is None else [match.tail_page]
        fresh = self._alloc_pages(num_pages - len(tail))
        assert fresh is not None, "what is evictable is not"
        return tail + fresh, match.slot

    def _bring_in(self, seq: Sequence) -> bool:
        taken = self._alloc(self.page_pool.pages_for(seq.num_tokens))
        if taken is None:
            return False
        assert self.transfers is not None
        self.transfers.bring_in(seq, *taken)
        return True

    def _stops(self, seq: Sequence, match: Match) -> list[int]:
        """Where chunks have to end, last one first, since a state is kept there.

        That is where the prompt parts from one seen before, at intervals, and at the last page
        boundary before what the same prompt would have to compute again: its last token, or the
        first row that is scored.
        """
        if self.cache is None or not self.cache.stateful:
            return []
        size, request = self.page_pool.page_size, seq.request
        last, scored = (
            place // size * size for place in (request.num_prompt - 1, request.scored_rows.start)
        )
        stops = {last, scored, match.shared, *range(self.spacing, last, self.spacing)}
        return sorted((s for s in stops if match.length < s < seq.num_tokens), reverse=True)

    def start_from(self, parent: Sequence, sibling: Sequence) -> bool:
        """Start ``sibling`` on its parent's state; False if there is no room for it.

        Full pages are shared; what either of them will write to, the tail page and the slot, is
        copied before the next step.
        """
        num_full = parent.num_computed // self.page_pool.page_size
        full, tail = parent.pages[:num_full], parent.pages[num_full:]
        taken = self._alloc(len(tail))
        if taken is None:
            return False
        copied, slot = taken
        self._hold_pages(full)
        sibling.pages, sibling.slot = full + copied, slot
        sibling.num_computed = parent.num_computed
        sibling.cursor, sibling.num_shared = parent.cursor, parent.num_shared
        sibling.caching = parent.caching
        assert parent.slot is not None
        self.copies.add(sibling, Copy("slot", parent.slot, slot))
        for src, dst in zip(tail, copied, strict=True):
            self.copies.add(sibling, Copy("page", src, dst))
        return True

    # A sequence goes on

    def grow(self, seq: Sequence) -> bool:
        """Make room for all tokens of ``seq``; False if it needs a page and none is to be had."""
        missing = self.page_pool.pages_for(seq.num_tokens) - len(seq.pages)
        if missing <= 0:
            return True
        pages = self._alloc_pages(missing)
        if pages is None:
            return False
        seq.pages += pages
        return True

    def advanced(self, seq: Sequence) -> None:
        """``seq`` has computed more: share pages that are full, keep its state if it is time."""
        if not seq.caching:
            return
        self._share_full_pages(seq)
        if seq.stops and seq.stops[-1] <= seq.num_computed:
            self._keep_state(seq)

    def _share_full_pages(self, seq: Sequence) -> None:
        size, known = self.page_pool.page_size, seq.num_shared
        full = seq.num_computed // size
        if full <= known:
            return
        assert self.cache is not None
        tokens, pages = seq.array(known * size, full * size), seq.pages[known:full]
        seq.cursor, shared = self.cache.extend(seq.cursor, tokens, pages)
        if shared != pages:  # somebody else's, of the same tokens: what was written to ours is not
            seq.pages[known:full] = shared  # needed twice
            seq.page_version += 1
        seq.num_shared = full

    def _keep_state(self, seq: Sequence) -> None:
        """Copy the state of ``seq`` at the boundary that it has reached, where it is wanted."""
        assert self.cache is not None and seq.slot is not None
        while seq.stops and seq.stops[-1] < seq.num_computed:
            seq.stops.pop()  # passed over in a step that was scheduled before it was known
        if not seq.stops or seq.stops.pop() != seq.num_computed:
            return
        tail = seq.array(0, 0)
        if not self.cache.wants_state(seq.cursor, seq.num_computed, tail):
            return
        slot = self._alloc_slot()
        if slot is not None:
            self.copies.add(self.cache, Copy("slot", seq.slot, slot), hold=True)
            self.cache.keep_state(seq.cursor, seq.num_computed, tail, slot, None)

    # A sequence ends, or has to go

    def finish(self, seq: Sequence, keep: bool) -> None:
        """Take all that ``seq`` holds. ``keep``: its state stays for the next turn, in its slot and
        the page that is not full."""
        if keep and self.cache is not None and not self.copies.waits_for(seq):
            self._keep_end(seq)
        self.release(seq)

    def _keep_end(self, seq: Sequence) -> None:
        assert self.cache is not None and seq.slot is not None
        if not seq.caching:  # back from the swap space: its own pages until here, shared from now
            if any(self.page_pool.references(page) > 1 for page in seq.pages):
                return  # they are its siblings' as well, who would not have those that it is given
            seq.cursor, seq.num_shared, seq.caching = None, 0, True
        self._share_full_pages(seq)
        full, num_tokens = seq.num_shared, seq.num_computed
        tail = seq.array(full * self.page_pool.page_size, num_tokens)
        if not self.cache.stateful or not self.cache.wants_state(seq.cursor, num_tokens, tail):
            return
        page = seq.pages[full] if len(tail) else None
        self.cache.keep_state(seq.cursor, num_tokens, tail, seq.slot, page)
        seq.slot = None

    def preempt(self, seq: Sequence) -> bool:
        """Take what ``seq`` holds, by the cheaper of two ways.

        True: it is being written to the swap space, and its memory is free when that is done.
        False: it will be computed anew, and its memory is free now.
        """
        if self._swap_is_cheaper(seq):
            assert self.transfers is not None
            if self.transfers.take_out(seq):
                self.num_swaps += 1
                return True
        self.recomputed_tokens += seq.num_computed
        self.release(seq)
        return False

    def _swap_is_cheaper(self, seq: Sequence) -> bool:
        if self.transfers is None or self.cost is None or not seq.num_computed:
            return False
        if self.copies.waits_for(seq):
            return False  # what it begins with is not there yet
        again = self.cost.prefill_seconds(self._match(seq).length, seq.num_computed)
        return self.cost.swap_seconds(self.transfers.bytes_moved(seq)) < again

    def release(self, seq: Sequence) -> None:
        """Take all that ``seq`` holds, and forget the copies meant for it."""
        self.copies.drop(seq)
        self.free_pages(seq.pages)
        if seq.slot is not None:
            self.slot_pool.free([seq.slot])
        seq.forget_memory()
        if self.transfers is not None:
            self.transfers.forget(seq)

    def moved(self, ticket: int, error: str | None) -> Sequence | None:
        """A move has ended; returns the sequence that is back by it, ready to go on."""
        assert self.transfers is not None
        seq, pages, slot = self.transfers.ended(ticket, error)
        self.free_pages(pages)
        self.slot_pool.free(slot)
        return seq

    def distrust(self) -> None:
        """Forget all that is kept: the step that was to copy it may have failed before."""
        if self.cache is not None:
            self.copies.drop(self.cache)
            self.cache.clear()

    # Pages and slots; what is only kept makes room

    def free_pages(self, pages: list[int]) -> None:
        if self.cache is None:
            self.page_pool.free(pages)
        else:
            self.cache.release(pages)

    def _hold_pages(self, pages: list[int]) -> None:
        if self.cache is None:
            self.page_pool.fork(pages)
        else:
            self.cache.hold(pages)

    def _alloc(self, num_pages: int) -> tuple[list[int], int] | None:
        """Pages and a slot, or nothing."""
        pages = self._alloc_pages(num_pages)
        if pages is None:
            return None
        slot = self._alloc_slot()
        if slot is None:
            self.page_pool.free(pages)
            return None
        return pages, slot

    def _alloc_pages(self, count: int) -> list[int] | None:
        pages = self.page_pool.alloc(count)
        if pages is None and self.cache is not None and self.cache.reclaim_pages(count):
            pages = self.page_pool.alloc(count)
        return pages

    def _alloc_slot(self) -> int | None:
        slot = self.slot_pool.alloc(1)
        if slot is None and self.cache is not None and self.cache.reclaim_slot():
            slot = self.slot_pool.alloc(1)
        return None if slot is None else slot[0]

    def usage(self) -> PoolUsage:
        """What is taken of each pool now, by sequences and by the cache."""
        pages, slots = self.page_pool, self.slot_pool
        kept = 0 if self.cache is None else self.cache.num_evictable
        states = 0 if self.cache is None else self.cache.num_states
        blocks, places = (0, 0) if self.transfers is None else self.transfers.space_used
        return PoolUsage(
            num_pages=pages.capacity,
            num_slots=slots.capacity,
            pages_used=pages.capacity - pages.num_free - kept,
            pages_kept=kept,
            slots_used=slots.capacity - slots.num_free - states,
            slots_kept=states,
            blocks_swapped=blocks,
            states_swapped=places,
        )
