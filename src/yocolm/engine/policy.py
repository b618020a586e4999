"""Who goes next: in the order of arrival with a budget of tokens, or by what a step will cost.

A policy is asked twice a step: which of the running sequences decode, and which prompts advance by
how many tokens. What it leaves out waits for the next step, a bounded number of times.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from copy import copy
from heapq import heappop, heappush
from itertools import islice
from typing import TYPE_CHECKING, Protocol

from yocolm.engine.cost import CostModel, StepLoad
from yocolm.engine.plan import Scheduled
from yocolm.engine.request import Request, Sequence, Status

if TYPE_CHECKING:
    from yocolm.engine.scheduler import Scheduler

TTFT_FACTOR = 5.0  # targets that nobody has given, in times of what the request takes alone
TPOT_FACTOR = 2.0
MAX_SKIP = 16  # steps in a row that a decode, or all prompts, may be left out
LEAST_CHUNK = 32  # tokens; fewer are not worth a place in a step, unless they end the prompt
DEAR = 0.25  # a decode is dear if it alone lengthens a step by more than this share
LATE_TURN = 8  # after so many chunks of others the first of those that are late goes first
PACE = 0.93  # of the target for the time between tokens is aimed at: predictions are not exact
QUICK = 0.25  # of the shortest recent target for a first token, a chunk that has time may take
RECENT = 32  # requests
RESERVE = 0.4  # of the shortest recent target stays unspent by those that are late
CREDIT = 0.5  # of the time that a decode can still save, urgent prompts may spend in advance
USUAL_OUTPUT = 128  # tokens of an answer, before any has been seen
LOOKED_AT = 256  # waiting sequences, in their order
CROWDED = 1.25  # seconds that are asked of one, at most, if who asks cannot wait


_NEVER = float("inf")


class Policy(Protocol):
    """``keeps_turns``: who finds no room lets nobody pass."""

    keeps_turns: bool

    def added(self, request: Request) -> None:
        """A request has been queued."""
        ...

    def ended(self, seq: Sequence) -> None:
        """A sequence has ended."""
        ...

    def decodes(self, scheduler: Scheduler, now: float) -> list[Sequence]:
        """Of the running sequences those that draw a token in this step, in their order."""
        ...

    def prompts(
        self, scheduler: Scheduler, decodes: list[Scheduled], budget: int, now: float
    ) -> Iterator[Sequence]:
        """Running and waiting sequences whose prompts may advance, beside ``decodes`` and within
        ``budget`` tokens; each is asked for only after the last one was scheduled, or refused."""
        ...

    def tokens(self, seq: Sequence) -> int:
        """How many tokens the next of ``prompts`` may advance by."""
        ...

    def took(self, entry: Scheduled) -> None:
        """A chunk was scheduled."""
        ...


class Fcfs:
    """First come, first served: all decodes, then prompts until the budget of tokens is spent."""

    keeps_turns = True

    def __init__(self) -> None:
        self._left = 0

    def added(self, request: Request) -> None:
        pass

    def ended(self, seq: Sequence) -> None:
        pass

    def decodes(self, scheduler: Scheduler, now: float) -> list[Sequence]:
        return [seq for seq in scheduler.running if seq.decoding]

    def prompts(
        self, scheduler: Scheduler, decodes: list[Scheduled], budget: int, now: float
    ) -> Iterator[Sequence]:
        self._left = budget
        yield from [seq for seq in scheduler.running if not seq.decoding]
        while self._left > 0:
            seq = next((seq for seq in scheduler.waiting if not scheduler.arrives(seq)), None)
            if seq is None or seq.ticket is not None:  # on its way out: it comes back first
                return
            yield seq

    def tokens(self, seq: Sequence) -> int:
        return self._left

    def took(self, entry: Scheduled) -> None:
        self._left -= entry.num_tokens


class Traffic:
    """By the cost that is predicted: steps are as long as the pace of those who decode permits.

    Each request has a target for its first token and for the time between tokens. Tokens are due
    at (most of) that pace from the first one on, so time that a fast step saves can be spent later.

    - Decodes that lengthen a step by much (a long context among short ones) are left out while
      others would be late by it, or prompts wait and their next token is not due.
    - Prompts advance by as many tokens as fit before the next token of a decode is due. What time
      decodes have saved, and some of what they are expected to save, is for prompts that are
      urgent; the others keep to their pace, and to chunks so short that whoever comes meanwhile is
      not late by one.
    - Their order is by the time at which they are due. Those that would make others late (the
      longest first: Moore and Hodgson's rule, which has the fewest late) go behind, if there is
      no time to spare for them, but have a turn now and then: nobody starves.
    - A prompt begins only if those who run and it can keep their pace together: the sum of what
      each asks of a second must not exceed it.
    """

    keeps_turns = False

    def __init__(
        self, cost: CostModel, ttft_target: float | None = None, tpot_target: float | None = None
    ) -> None:
        self.cost = cost
        self.ttft_target, self.tpot_target = ttft_target, tpot_target
        self._load, self._left = StepLoad(), 0
        self._slack, self._pace, self._now = _NEVER, _NEVER, 0.0
        self._recent: deque[float] = deque(maxlen=RECENT)  # targets for a first token
        self._steps_without = 0  # a chunk, though somebody waits for one
        self._late: set[Sequence] = set()
        self._since_late = 0  # chunks since the last one of somebody who is late
        self._asked = (0.0, _NEVER, 0.0)  # by those who decode, see _keeps_pace
        self._guest: Sequence | None = None  # runs though there is no pace for it
        self._output = float(USUAL_OUTPUT)  # mean tokens of the last answers
        self._hope = _NEVER  # seconds that urgent prompts may take
        self._decode_seconds = self._spent = 0.0  # of the step's decodes; of all in it so far

    def added(self, request: Request) -> None:
        if request.ttft_target is None:
            request.ttft_target = self.ttft_target
        if request.ttft_target is None:
            request.ttft_target = TTFT_FACTOR * self.cost.solo_ttft(request.num_prompt)
        if request.tpot_target is None:
            request.tpot_target = self.tpot_target
        if request.tpot_target is None:
            request.tpot_target = TPOT_FACTOR * self.cost.solo_tpot(request.num_prompt)
        # Whoever asks for what cannot be must not have everybody's chunks cut to pieces.
        least = self.cost.solo_ttft(request.num_prompt)
        self._recent.append(max(request.ttft_target, least))

    def ended(self, seq: Sequence) -> None:
        if seq.finish_reason in ("stop", "length") and seq.num_output:
            self._output += (seq.num_output - self._output) / RECENT

    # Decodes

    def decodes(self, scheduler: Scheduler, now: float) -> list[Sequence]:
        decoding = [seq for seq in scheduler.running if seq.decoding]
        if len(decoding) < 2:
            return decoding
        extra = [self.cost.decode_seconds(seq.num_tokens) for seq in decoding]
        base = self._base(len(decoding))
        dear = [c > DEAR * base for c in extra]
        if not any(dear) or all(dear):
            return self._without(decoding, set())
        left_out = self._left_out(decoding, extra, dear, base, scheduler, now)
        return self._without(decoding, left_out)

    def _left_out(
        self,
        decoding: list[Sequence],
        extra: list[float],
        dear: list[bool],
        base: float,
        scheduler: Scheduler,
        now: float,
    ) -> set[Sequence]:
        """The dear ones that need not, or should not, be in this step."""
        seconds, room = base, _NEVER
        for seq, c, is_dear in zip(decoding, extra, dear, strict=True):
            if not is_dear:
                seconds += c
                slack = slack_of(seq, now)
                saved = self._left_to_draw(seq, scheduler) * max(0.0, _pace(seq) - base)
                if slack + saved > 0:  # or it is late whatever is done
                    room = min(room, max(0.0, slack))
        prompts = len(decoding) < len(scheduler.running) or bool(scheduler.waiting)
        left_out: set[Sequence] = set()
        order = sorted((slack_of(seq, now), i) for i, seq in enumerate(decoding) if dear[i])
        for slack, i in order:
            seq, c = decoding[i], extra[i]
            fits = seconds + c <= room
            due = slack < 2 * (seconds + c)
            if seq.skipped >= MAX_SKIP or (fits and (due or not prompts)):
                seconds += c
            else:
                left_out.add(seq)
        return left_out

    def _without(self, decoding: list[Sequence], left_out: set[Sequence]) -> list[Sequence]:
        for seq in decoding:
            seq.skipped = seq.skipped + 1 if seq in left_out else 0
        return [seq for seq in decoding if seq not in left_out]

    def _base(self, count: int) -> float:
        """Seconds of a step of ``count`` decodes without their contexts."""
        load = StepLoad()
        for _ in range(count):
            self.cost.add(load, 0, 1, 1, 1)
        return self.cost.seconds(load)

    # Prompts

    def prompts(
        self, scheduler: Scheduler, decodes: list[Scheduled], budget: int, now: float
    ) -> Iterator[Sequence]:
        half = [seq for seq in scheduler.running if not seq.decoding]
        waiting = (seq for seq in scheduler.waiting if seq.ticket is None)
        seqs = half + list(islice(waiting, LOOKED_AT))
        self._left, self._load, self._now = budget, StepLoad(), now
        for entry in decodes:
            self.cost.add(self._load, entry.start, 1, 1, 1)
        if not seqs:
            self._steps_without = 0
            return
        self._find_time(scheduler, {entry.seq for entry in decodes}, now)
        self._steps_without += 1
        for seq in self._in_order(seqs, scheduler):
            if self._spent >= self._hope and not self._is_forced() and not seq.is_swapped:
                continue  # there is no time for anybody, but for who is only read back
            if seq.status is not Status.WAITING:
                yield seq
            elif self._keeps_pace(seq):
                yield seq
                if seq.status is Status.RUNNING:
                    self._count_in(seq)
            elif seq in self._late and self._may_be_guest(scheduler):
                yield seq
                if seq.status is Status.RUNNING or seq.ticket is not None:
                    self._guest = seq

    def _find_time(self, scheduler: Scheduler, picked: set[Sequence], now: float) -> None:
        """Seconds until the next token of somebody who decodes is due, those that they can do
        without as faster steps will follow, and the quickest pace of them; of those who can still
        be in time."""
        self._slack = self._hope = self._pace = _NEVER
        seconds, asked, count = self.cost.seconds(self._load), 0.0, 0
        self._spent = seconds
        self._decode_seconds = seconds if self._load.tokens else 0.0
        for seq in scheduler.running:
            if not seq.decoding:
                continue
            slack, pace = slack_of(seq, now), _pace(seq)
            own = self.cost.decode_seconds(seq.num_tokens)
            if seq not in picked:
                slack -= seconds + own
            credit = self._left_to_draw(seq, scheduler) * max(0.0, pace - seconds)
            if slack + credit <= 0:
                continue
            self._slack = min(self._slack, max(slack, 0.0))
            self._hope = min(self._hope, max(slack + CREDIT * credit, 0.0))
            self._pace = min(self._pace, pace)
            asked += own / pace
            count += 1
        self._asked = asked, self._pace, self._base(count + 1)
        for seq in scheduler.running:
            if not seq.decoding and self._decodes_soon(seq):
                self._count_in(seq)

    def _decodes_soon(self, seq: Sequence) -> bool:
        return self.cost.prefill_seconds(seq.num_computed, seq.num_tokens) < min(self._recent)

    def _count_in(self, seq: Sequence) -> None:
        """Count ``seq`` among those who ask for time, see ``_keeps_pace``."""
        asked, pace, base = self._asked
        asked += self.cost.decode_seconds(seq.num_tokens) / _pace(seq)
        self._asked = asked, min(pace, _pace(seq)), base

    def _left_to_draw(self, seq: Sequence, scheduler: Scheduler) -> float:
        """Tokens that a decode is expected to draw yet."""
        most = seq.request.max_length(scheduler.max_model_len) - seq.num_tokens
        return min(most, max(self._output - seq.num_output, self._output / 4))

    def _in_order(self, seqs: list[Sequence], scheduler: Scheduler) -> list[Sequence]:
        """Those that can be in time by when they are due, and the others where there is time."""
        now = self._now
        share = 1.0  # of the time is left by decodes
        if self._pace < _NEVER:
            share = max(0.1, 1 - self.cost.seconds(self._load) / self._pace)
        by_due = sorted(seqs, key=_due)
        work: list[float] = []
        for seq in by_due:
            alone = self.cost.prefill_seconds(seq.num_computed, seq.num_tokens)
            at_once = min(alone, self._hope)
            work.append(at_once + (alone - at_once) / share)
        late = _latest(by_due, work, now)
        self._late = {by_due[i] for i in late}
        in_time = [i for i in range(len(by_due)) if i not in late]
        end, spare = now, _NEVER
        reserve = RESERVE * min(self._recent)
        for i in in_time:
            end += work[i]
            spare = min(spare, _due(by_due[i]) - end - reserve)

        def urgency(i: int) -> float:  # the response ratio: who waits long for little goes first
            return (now - by_due[i].request.due) / max(work[i], 1e-9)

        behind = sorted(late, key=urgency, reverse=True)
        behind = [i for i in behind if self._may_go(by_due[i], scheduler)]
        before: list[int] = []
        if behind and self._since_late >= LATE_TURN:
            before.append(behind.pop(0))
        while behind and work[behind[0]] < spare:
            spare -= work[behind[0]]
            before.append(behind.pop(0))
        return [by_due[i] for i in (*before, *in_time, *behind)]

    def _keeps_pace(self, seq: Sequence) -> bool:
        """Whether ``seq`` can decode beside those who do, all at their pace; nearly, if it cannot
        wait for a better time.

        Of each second, everybody asks for the time of his own scan over his pace, and all together
        for that of the weights over the quickest pace.
        """
        asked, pace, base = self._asked
        if pace == _NEVER:
            return True
        asked += self.cost.decode_seconds(seq.num_tokens) / _pace(seq)
        asked += base / min(pace, _pace(seq))
        return asked <= (CROWDED if self._is_urgent(seq) else 1.0)

    def _may_be_guest(self, scheduler: Scheduler) -> bool:
        """Nobody waits for ever: one at a time runs whatever that does to others."""
        guest = self._guest
        return guest is None or (guest.ticket is None and guest not in scheduler.running)

    def _may_go(self, seq: Sequence, scheduler: Scheduler) -> bool:
        """Whether one that is late can use its turn."""
        waits = seq.status is Status.WAITING
        return not waits or self._keeps_pace(seq) or self._may_be_guest(scheduler)

    def tokens(self, seq: Sequence) -> int:
        most = min(self._left, seq.num_tokens - seq.num_computed)
        if most <= 0 or seq.is_swapped:  # that is only read back
            return min(most, 1)
        allowed, least = self._allowed(seq), min(LEAST_CHUNK, most)
        if self._spent >= allowed and not self._is_forced():
            return 0
        if self._seconds_with(seq, most) <= allowed:
            return most
        if self._seconds_with(seq, least) > allowed:
            return least if self._is_forced() else 0
        low, high = 0, most
        while high - low > max(8, low // 8):
            middle = (low + high) // 2
            if self._seconds_with(seq, middle) <= allowed:
                low = middle
            else:
                high = middle
        return max(low, least)

    def _is_forced(self) -> bool:
        """Whether some prompt goes on now, whatever time there is."""
        alone = self._slack == _NEVER and not self._load.tokens
        return self._steps_without > MAX_SKIP or alone

    def _allowed(self, seq: Sequence) -> float:
        """Seconds that a step with a chunk of ``seq`` may take."""
        if self._is_urgent(seq):
            return self._hope
        quick = max(QUICK * min(self._recent), 2 * self._decode_seconds)
        return min(self._slack, self._pace, quick)

    def _is_urgent(self, seq: Sequence) -> bool:
        """Whether its time has come, and is not over."""
        if seq in self._late:
            return False
        work = self.cost.prefill_seconds(seq.num_computed, seq.num_tokens)
        return _due(seq) - self._now < min(self._recent) + 2 * work

    def _seconds_with(self, seq: Sequence, tokens: int) -> float:
        load = copy(self._load)
        last = seq.num_computed + tokens == seq.num_tokens
        self.cost.add(load, seq.num_computed, tokens, int(last), int(last))
        return self.cost.seconds(load)

    def took(self, entry: Scheduled) -> None:
        self._left -= entry.num_tokens
        self._steps_without = 0
        self._since_late = 0 if entry.seq in self._late else self._since_late + 1
        self.cost.add(self._load, entry.start, entry.num_tokens, len(entry.rows), entry.samples_n)
        self._spent = self.cost.seconds(self._load)


def _latest(by_due: list[Sequence], work: list[float], now: float) -> set[int]:
    """Those that will be late if as few as possible are to be, of ``work`` seconds each."""
    chosen: list[tuple[float, int]] = []
    late: set[int] = set()
    end = now
    for i, seq in enumerate(by_due):
        end += work[i]
        heappush(chosen, (-work[i], i))
        if end > _due(seq):
            longest, index = heappop(chosen)
            end += longest
            late.add(index)
    return late


def slack_of(seq: Sequence, now: float) -> float:
    """Seconds until its next token is due, at its pace from the first token on."""
    assert seq.first_token_at is not None
    return seq.first_token_at + seq.num_output * _pace(seq) - now


def _pace(seq: Sequence) -> float:
    """Seconds a token that are aimed at."""
    target = seq.request.tpot_target
    assert target is not None
    return PACE * target


def _due(seq: Sequence) -> float:
    """When it has to draw its next token: the first, or the one after a preemption."""
    request = seq.request
    if seq.first_token_at is not None:
        return seq.first_token_at + seq.num_output * _pace(seq)
    assert request.ttft_target is not None
    return request.due + request.ttft_target
