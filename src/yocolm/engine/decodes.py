"""Decodes of many steps at once, for the simulator: what each step does to them is known before.

A decode needs attention only when it takes a page, has filled one, or ends. In between it is a
count: its tokens are added when they are wanted. What all decodes together put on a step grows by
the same amount every step.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import NamedTuple

from yocolm.engine.cost import CostModel, StepLoad
from yocolm.engine.plan import Scheduled, next_chunk
from yocolm.engine.request import Sequence
from yocolm.engine.scheduler import Scheduler

TAKE, FILL, END, WIDEN = "take", "fill", "end", "widen"
SUMMED = tuple(field.name for field in fields(StepLoad))
GROWING = ("kv_bytes_write", "kv_bytes_read", "window_bytes")


_values = attrgetter(*SUMMED)


def copy_load(load: StepLoad) -> StepLoad:
    """Another with the same values, quickly."""
    return StepLoad(*_values(load))


@dataclass(slots=True)
class _Member:
    """``base`` and the number of the step: its tokens. It ends with the step ``last``; ``kind``:
    how many windows it fills."""

    base: int
    last: int
    kind: int


class _Event(NamedTuple):
    """What comes before (``after == 0``) or after the tokens of a step, in the order of the
    running sequences."""

    step: int
    after: int
    order: tuple[float, int, int]
    kind: str
    seq: Sequence


class Decodes:
    """The sequences that decode one token in every step.

    Args:
        scheduler: theirs; of it pages are taken, and it is told of pages that are full.
        reply: the next tokens of a sequence, so many.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        cost: CostModel,
        reply: Callable[[Sequence, int], list[int]],
    ) -> None:
        self._memory, self._limit = scheduler.memory, scheduler.max_model_len
        self._size = scheduler.page_pool.page_size
        self._cost, self._reply = cost, reply
        self._windows = sorted({store.window for store in cost.spec.window_stores})
        self._growths = [self._growth_at(context) for context in (1, *self._windows)]
        self._growth = StepLoad()
        self._members: dict[Sequence, _Member] = {}
        self._events: list[_Event] = []
        self._step = 0
        self.load = StepLoad()  # what they put on the next step

    @property
    def count(self) -> int:
        return len(self._members)

    @property
    def sequences(self) -> list[Sequence]:
        return list(self._members)

    def join(self, seqs: list[Sequence]) -> None:
        """They decode from the next step on."""
        for seq in seqs:
            length, size, step = seq.num_tokens, self._size, self._step
            last = step + seq.request.max_length(self._limit) - length - 1
            kind = bisect_right(self._windows, length)
            self._members[seq] = _Member(length - step, last, kind)
            self._cost.add(self.load, length - 1, 1, 1, 1)
            self._grow_by(kind, 1)
            self._push(END, seq, last, last)
            self._push(TAKE, seq, step + (1 - length) % size, last)
            self._push(FILL, seq, step + -length % size, last - 1)
            for window in self._windows[kind:]:
                self._push(WIDEN, seq, step + window - length, last - 1)

    def take_pages(self) -> bool:
        """Before a step: pages for those that need one. False if one of them finds none."""
        while self._is_due(0):
            _, _, _, _, seq = self._events[0]
            self._catch_up(seq)
            if not self._memory.grow(seq):
                return False
            heapq.heappop(self._events)
            self._push(TAKE, seq, self._step + self._size, self._members[seq].last)
        return True

    def ending(self) -> Iterator[Scheduled]:
        """After the tokens of a step: hand on pages that are full; yields what ends with this
        step, to be told to the scheduler before the next is asked for."""
        while self._is_due(1):
            _, _, _, kind, seq = heapq.heappop(self._events)
            member = self._members[seq]
            if kind == WIDEN:
                self._grow_by(member.kind, -1)
                member.kind += 1
                self._grow_by(member.kind, 1)
                continue
            self._catch_up(seq)
            if kind == END:
                self._leave(seq)
                yield next_chunk(seq, 1)
            else:
                seq.num_computed += 1
                self._memory.advanced(seq)
                self._push(FILL, seq, self._step + self._size, member.last - 1)

    @property
    def steps_ahead(self) -> int:
        """How many steps there are, the next among them, until one of them needs attention: the
        last of them included if that is after its tokens."""
        event = self._events[0]
        return event.step - self._step + event.after

    def next_steps(self, count: int) -> None:
        """Everybody is so many tokens further."""
        if not count:
            return
        self._step += count
        self._add_growth(self.load, count)

    def load_in(self, steps: int) -> StepLoad:
        """What they will put on the step that is so many behind the next, all being quiet."""
        load = copy_load(self.load)
        self._add_growth(load, steps)
        return load

    def _add_growth(self, load: StepLoad, steps: int) -> None:
        growth = self._growth
        load.kv_bytes_write += steps * growth.kv_bytes_write
        load.kv_bytes_read += steps * growth.kv_bytes_read
        load.window_bytes += steps * growth.window_bytes

    def leave_all(self) -> list[Sequence]:
        """Bring all up to date, to be scheduled one by one from now on; returns them."""
        seqs = self.sequences
        for seq in seqs:
            self._catch_up(seq)
        self._members.clear()
        self._events.clear()
        self.load, self._growth = StepLoad(), StepLoad()
        return seqs

    def _leave(self, seq: Sequence) -> None:
        member, gone = self._members.pop(seq), StepLoad()
        self._cost.add(gone, seq.num_tokens - 1, 1, 1, 1)
        for name in SUMMED:
            setattr(self.load, name, getattr(self.load, name) - getattr(gone, name))
        self._grow_by(member.kind, -1)

    def _is_due(self, after: int) -> bool:
        return bool(self._events) and self._events[0][:2] == (self._step, after)

    def _push(self, kind: str, seq: Sequence, step: int, last: int) -> None:
        if step <= last:
            after = 0 if kind == TAKE else 1
            heapq.heappush(self._events, _Event(step, after, seq.order, kind, seq))

    def _catch_up(self, seq: Sequence) -> None:
        """Give ``seq`` the tokens it has drawn before this step; all but the last are computed."""
        num_tokens = self._members[seq].base + self._step
        missing = num_tokens - seq.num_tokens
        if missing > 0:
            seq.output_token_ids += self._reply(seq, missing)
        seq.num_computed = num_tokens - 1

    def _growth_at(self, context: int) -> StepLoad:
        """What one token more of context adds."""
        now, later, grown = StepLoad(), StepLoad(), StepLoad()
        self._cost.add(now, context - 1, 1, 1, 1)
        self._cost.add(later, context, 1, 1, 1)
        for name in GROWING:
            setattr(grown, name, getattr(later, name) - getattr(now, name))
        return grown

    def _grow_by(self, kind: int, times: int) -> None:
        growth, each = self._growth, self._growths[kind]
        growth.kv_bytes_write += times * each.kv_bytes_write
        growth.kv_bytes_read += times * each.kv_bytes_read
        growth.window_bytes += times * each.window_bytes
