"""When will a request that arrives now have its first token? No torch.

The queue is followed from group to group of prompts rather than from step to step: as long as the
same sequences decode, steps are alike, and what they take comes from the cost model.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import TYPE_CHECKING, Protocol

from yocolm.engine.cost import CostModel, StepLoad
from yocolm.engine.pages import PagePool
from yocolm.engine.policy import LEAST_CHUNK, PACE, QUICK, RECENT, Traffic, slack_of
from yocolm.engine.request import Request, Sequence, Status
from yocolm.engine.usual import Outputs

if TYPE_CHECKING:
    from yocolm.engine.scheduler import Scheduler

GROUPS = 32  # of waiting requests that are looked at one by one; more of them in groups
BISECTIONS = 11


class Queue(Protocol):
    """What is asked of a scheduler."""

    running: list[Sequence]
    waiting: list[Sequence]
    page_pool: PagePool
    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int


def ttft(
    queue: Queue,
    cost: CostModel,
    request: Request,
    now: float,
    outputs: Outputs | None = None,
    *,
    num_cached: int = 0,
    num_evictable: int = 0,
    boundary: int = 0,
    pace: Pace | None = None,
    ahead: list[Sequence] | None = None,
) -> float:
    """Predicted seconds from the arrival of ``request`` to its first token.

    To be asked between two steps, at the time ``now``, once the request is in the queue (or before:
    then all who wait are served first).

    Args:
        outputs: what has been seen of requests; None assumes the usual.
        num_cached: tokens of its prompt that the prefix cache has.
        num_evictable: pages that the prefix cache would give up.
        boundary: where its prompt is cut so that a state can be kept there; 0 if it is not.
        pace: how long steps may last, where they are kept short.
        ahead: those with prompts to compute who go first, where that is not by their places.
    """
    outputs = outputs or Outputs()
    line = _Line(queue, cost, outputs, pace)
    line.pages += num_evictable
    mine = request.sequences[0]
    half, waiting, behind = _order(queue, mine, ahead)
    for seq in half:
        if seq is mine:
            num_cached = seq.num_computed
        else:
            output = outputs.expected(seq.request, queue.max_model_len)
            line.prompt(seq.num_computed, seq.num_tokens, 1, output)
    for group in _groups(waiting, outputs, queue.max_model_len):
        line.admit(group)
    if mine not in queue.running:
        line.wait_for_room(1, queue.page_pool.pages_for(mine.num_tokens))
    if num_cached < boundary < mine.num_tokens:
        line.prompt(num_cached, boundary, 0, 0)
        line.close()
        num_cached = boundary
    line.prompt(num_cached, mine.num_tokens, 1, 0)
    # Who comes behind fills the rest of its last step.
    more = sum(seq.num_tokens for seq in islice(behind, GROUPS))
    line.fill(more + outputs.arriving(line.seconds))
    line.close()
    return line.seconds + max(0.0, now - request.arrival)


@dataclass(frozen=True)
class Pace:
    """How long steps may last, in seconds.

    slack: the next one, until a token is due that is not late already; pace: those after it, the
    quickest pace of those who decode; quick: any, while the prompt is not urgent, which it is from
    ``until`` seconds from now on.
    """

    slack: float
    pace: float
    quick: float
    until: float

    def allowed(self, steps: float, seconds: float, decoding: bool) -> float:
        """Of the step behind so many steps and seconds, with or without decodes."""
        most = (self.pace if steps else self.slack) if decoding else float("inf")
        if seconds >= self.until:
            return most
        return min(most, self.quick, self.pace if decoding else self.quick)

    def steps_alike(self, seconds: float, each: float) -> int:
        """How many steps can be taken at once before that changes."""
        if seconds >= self.until:
            return 1 << 31
        return max(1, int(min((self.until - seconds) / each, 1 << 31)))


class Forecaster:
    """Says of each request that comes when its first token will, and learns from those that end."""

    def __init__(self, scheduler: Scheduler, cost: CostModel) -> None:
        self.scheduler, self.cost, self.outputs = scheduler, cost, Outputs()
        self._targets: deque[float] = deque(maxlen=RECENT)  # for a first token

    def arrived(self, request: Request, now: float) -> float:
        """Predicted seconds from the arrival of ``request``, just queued, to its first token.

        To be called once for each request, between two steps, at the time ``now``.
        """
        self.outputs.arrived(request, now)
        cache, pool = self.scheduler.memory.cache, self.scheduler.page_pool
        num_cached = num_evictable = boundary = 0
        if cache is not None:
            last = min(request.num_prompt - 1, request.scored_rows.start)
            num_cached = cache.match(request.prompt_array, last).length
            num_evictable = cache.num_evictable
            if cache.stateful:
                boundary = (request.num_prompt - 1) // pool.page_size * pool.page_size
        pace = ahead = None
        if isinstance(self.scheduler.policy, Traffic):
            pace, ahead = self._pace(request, now), self._due_before(request)
        return ttft(
            self.scheduler,
            self.cost,
            request,
            now,
            self.outputs,
            num_cached=num_cached,
            num_evictable=num_evictable,
            boundary=boundary,
            pace=pace,
            ahead=ahead,
        )

    def ended(self, seq: Sequence) -> None:
        """A sequence has ended, whatever the reason."""
        self.outputs.finished(seq, seq.num_cached)

    def _pace(self, request: Request, now: float) -> Pace:
        decoding = [seq for seq in self.scheduler.running if seq.decoding]
        slacks = [slack for slack in (slack_of(seq, now) for seq in decoding) if slack > 0]
        targets = [seq.request.tpot_target or float("inf") for seq in decoding]
        self._targets.append(request.ttft_target or float("inf"))
        shortest = min(self._targets)
        work = self.cost.prefill_seconds(0, request.num_prompt)
        return Pace(
            slack=min(slacks, default=float("inf")),
            pace=PACE * min(targets, default=float("inf")),
            quick=QUICK * shortest,
            until=_due(request) - now - shortest - 2 * work,
        )

    def _due_before(self, request: Request) -> list[Sequence]:
        due = _due(request)
        half = [seq for seq in self.scheduler.running if not seq.decoding]
        others = [seq for seq in half + self.scheduler.waiting if seq.request is not request]
        return [seq for seq in others if _due(seq.request) <= due]


def _due(request: Request) -> float:
    return request.due + (request.ttft_target or 0.0)


@dataclass(slots=True)
class _Group:
    """Several prompts, as if they were alike."""

    count: int
    tokens: int  # of each, not cached
    length: int  # of each, cached tokens included
    output: float


def _order(
    queue: Queue, mine: Sequence, ahead: list[Sequence] | None
) -> tuple[list[Sequence], list[Sequence], list[Sequence]]:
    """Before a sequence: prompts that are half computed, and prompts that wait; all behind it.

    By the places in the queue, or else with those ``ahead`` before it. The half computed may hold
    the sequence itself.
    """
    half = [seq for seq in queue.running if not seq.decoding]
    if ahead is None:
        return half, *_split(queue.waiting, mine)
    first = {id(seq) for seq in ahead}
    behind = [seq for seq in half + queue.waiting if id(seq) not in first and seq is not mine]
    waiting = [seq for seq in ahead if seq.status is Status.WAITING]
    return [seq for seq in half if id(seq) in first], waiting, behind


def _split(waiting: list[Sequence], mine: Sequence) -> tuple[list[Sequence], list[Sequence]]:
    """Who waits before and behind a sequence."""
    try:
        place = waiting.index(mine)
    except ValueError:
        return waiting, []
    return waiting[:place], waiting[place + 1 :]


def _groups(ahead: list[Sequence], outputs: Outputs, max_model_len: int) -> Iterator[_Group]:
    size = -(-len(ahead) // GROUPS) or 1
    for start in range(0, len(ahead), size):
        group = ahead[start : start + size]
        length = sum([seq.num_tokens for seq in group]) // len(group)
        computed = max(1, round(length * outputs.computed_share))
        output = outputs.expected(group[0].request, max_model_len)
        yield _Group(len(group), computed, length, output)


class _Line:
    """The steps to come: those that are full at once, and one that is still open.

    ``seconds`` and ``steps`` have passed since now; who decodes leaves at a step known in advance.
    """

    def __init__(self, queue: Queue, cost: CostModel, outputs: Outputs, pace: Pace | None) -> None:
        self.cost, self.pool = cost, queue.page_pool
        self.budget, self.pace = queue.max_num_batched_tokens, pace
        decoding = [seq for seq in queue.running if seq.decoding]
        self.seconds, self.steps = 0.0, 0.0
        self.places = queue.max_num_seqs - len(queue.running)
        self.pages = self.pool.num_free
        self.ends = [  # step, pages given back, context
            (outputs.remaining(seq, queue.max_model_len), len(seq.pages), seq.num_tokens)
            for seq in decoding
        ]
        heapify(self.ends)
        self.context = sum(end[2] for end in self.ends)
        self.begun: list[tuple[float, int, int]] = []  # prompts that end with the open step
        self.tokens = self.chunks = 0
        self.flops = 0.0
        self._room = (-1, 0)

    # Prompts

    def admit(self, group: _Group) -> None:
        """Prompts that wait: each begins when there is room for it."""
        pages = self.pool.pages_for(group.length)
        left = group.count
        while left:
            together = min(left, 1 + group.count // 2)  # of a group some begin at once
            self.wait_for_room(together, together * pages)
            count = max(1, min(left, self.places, self.pages // pages if pages else left))
            self.places -= count
            self.pages -= count * pages
            start = group.length - group.tokens
            self.prompt(start, group.length, count, group.output)
            left -= count

    def prompt(self, start: int, stop: int, count: int, output: float) -> None:
        """``count`` prompts (0: a part of one, at whose end nothing is drawn) of the tokens
        ``start .. stop - 1`` each, which then draw ``output`` tokens in all."""
        tokens = (stop - start) * max(count, 1)
        each = self.cost.mixing_flops(start, stop) / (stop - start)
        if self.tokens + tokens > self.room:
            part = self.room - self.tokens
            self._take(part, each)
            self.close()
            tokens -= part
            while tokens > self.room:  # the last step stays open
                full = (tokens - 1) // self.room
                self._take(self.room, each)
                if self.pace is not None:
                    full = min(full, self.pace.steps_alike(self.seconds, self._step_seconds()))
                tokens -= full * self.tokens
                self._pass(full)
        self._take(tokens, each)
        if count:
            end, pages = (max(output, 1.0) - 1, self.pool.pages_for(stop))
            self.begun += [(end, pages, stop)] * count
            self.chunks += count - 1

    def fill(self, tokens: int) -> None:
        """Others, who are not urgent, take what is left of the open step."""
        room = self.room
        if self.pace is not None:
            quick = min(self.pace.quick, self.pace.allowed(self.steps, -1.0, bool(self.ends)))
            room = min(room, self._tokens_within(quick, room))
        tokens = min(tokens, room - self.tokens)
        if tokens > 0:
            self._take(tokens, self.cost.mixing_flops(0, tokens) / tokens)

    def wait_for_room(self, places: int, pages: int) -> None:
        """Go on until there is a place and that many pages, or nobody is left to leave."""
        while self.places < places or self.pages < pages:
            if self.tokens or self.begun:
                self.close()
            elif not self.ends:
                return
            else:
                steps = max(self.ends[0][0] - self.steps, 0.0)
                if steps:
                    self.seconds += steps * self._step_seconds()
                    self.steps += steps
                self._leave()

    # Steps

    @property
    def room(self) -> int:
        """Tokens of prompts that a step has room for."""
        count = len(self.ends)
        if self._room[0] != count:
            self._room = count, self._room_beside(count)
        return self._room[1]

    def _room_beside(self, count: int) -> int:
        most = max(1, self.budget - count)
        if self.pace is None:
            return most
        return self._tokens_within(self.pace.allowed(self.steps, self.seconds, count > 0), most)

    def _tokens_within(self, seconds: float, most: int) -> int:
        if seconds == float("inf"):
            return most
        low, high = 1, most + 1
        for _ in range(BISECTIONS):
            middle = (low + high) // 2
            load = self._load(middle, 1, 0.0)
            low, high = (middle, high) if self.cost.seconds(load) <= seconds else (low, middle)
        assert self.pace is not None
        if low < LEAST_CHUNK and seconds < self.pace.quick:  # who is late already is not waited for
            return self._tokens_within(self.pace.quick, most)
        return max(low, min(LEAST_CHUNK, most))

    def close(self) -> None:
        """End the open step, if anything is in it."""
        if not (self.tokens or self.begun):
            return
        self._pass(1)
        for output, pages, context in self.begun:
            heappush(self.ends, (self.steps + output, pages, context))
            self.context += context
        self.begun.clear()
        self._leave()

    def _pass(self, count: int) -> None:
        """So many steps like the open one, which is empty again."""
        self.seconds += count * self._step_seconds()
        self.steps += count
        self._room = -1, 0
        self.tokens = self.chunks = 0
        self.flops = 0.0
        self._leave()

    def _take(self, tokens: int, flops_each: float) -> None:
        self.tokens += tokens
        self.chunks += tokens > 0
        self.flops += tokens * flops_each

    def _step_seconds(self) -> float:
        return self.cost.seconds(self._load(self.tokens, self.chunks, self.flops))

    def _load(self, tokens: int, chunks: int, flops: float) -> StepLoad:
        load, count = StepLoad(), len(self.ends)
        if count:
            self.cost.add_decodes(load, count, self.context / count)
        if tokens == chunks:  # prompts of a token are like decodes
            self.cost.add_decodes(load, tokens, 1)
        else:
            self.cost.add_chunks(load, chunks, tokens, flops, len(self.begun))
        return load

    def _leave(self) -> None:
        while self.ends and self.ends[0][0] <= self.steps:
            _, pages, context = heappop(self.ends)
            self.context -= context
            self.places += 1
            self.pages += pages
