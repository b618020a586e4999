"""The engine without a model: the very scheduler and pools, with time told by the cost model.

A step takes the seconds that the cost model predicts; tokens are what the trace says. Where all
running requests decode in every step, decodes are not planned one by one: they advance in bulk
(``engine/decodes.py``), with the same pages taken in the same order, until one ends or memory runs
short. ``bulk=False`` plans every step; both give the same times (tested). No torch.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field, fields
from functools import cache
from typing import cast

from yocolm.engine.cost import CostModel, StepCost, StepLoad
from yocolm.engine.decodes import Decodes, copy_load
from yocolm.engine.histogram import Histogram
from yocolm.engine.plan import Plan, Scheduled, StepResult
from yocolm.engine.policy import Fcfs
from yocolm.engine.request import Request, Sequence
from yocolm.engine.sampling_params import SamplingParams
from yocolm.engine.scheduler import Scheduler
from yocolm.engine.steps import Observer, PoolUsage, StepRecord
from yocolm.engine.swap_space import Move
from yocolm.engine.trace import Arrivals, Served, Tokens, Trace
from yocolm.errors import RequestError, YocolmError

IDLE_STEPS = 10_000  # steps without a token, with nothing to wait for, that are a fault
PHASES = tuple(field.name for field in fields(StepCost))


@dataclass
class Outcome:
    """What became of a trace.

    served: one for each request, in the order of the trace.
    steps: all of them; bulk_steps: those that advanced in bulk.
    busy: seconds in steps by phase; tokens, rows: through the first and the second half.
    gaps: seconds between tokens of a request.
    peak: the most that was taken of each pool, by sequences and by the prefix cache.
    """

    served: list[Served]
    steps: int = 0
    bulk_steps: int = 0
    busy: StepCost = field(default_factory=StepCost)
    tokens: int = 0
    rows: int = 0
    gaps: Histogram = field(default_factory=Histogram)
    peak: PoolUsage | None = None
    preemptions: int = 0
    swaps: int = 0
    recomputed_tokens: int = 0


class Simulation:
    """One trace through one scheduler. Call ``run`` once.

    Args:
        scheduler: idle; it is used up.
        cost: tells the time. Nothing is learned from what it tells itself.
        observer: is told of every step; then none advances in bulk.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        cost: CostModel,
        trace: Trace,
        observer: Observer | None = None,
        bulk: bool = True,
    ) -> None:
        self.scheduler, self.cost, self.trace = scheduler, cost, trace
        self.observer, self.bulk = observer, bulk and observer is None
        self.now = 0.0
        self.outcome = Outcome([Served(request.arrival) for request in trace])
        self._tokens = Tokens(trace)
        self._arrivals = Arrivals(trace)
        self._moves = _Moves(cost, scheduler.page_pool.page_size)
        self._decodes = Decodes(scheduler, cost, self._reply)
        self._last: dict[Sequence, float] = {}  # when each drew its last token
        self._busy = [0.0] * 5
        self._peak = dict.fromkeys((field.name for field in fields(PoolUsage)), 0)

    def run(self) -> Outcome:
        """Until every request has ended."""
        scheduler, idle = self.scheduler, 0
        while True:
            self._arrive()
            for ticket in self._moves.ended(self.now):
                scheduler.moved(ticket)
            if not scheduler.has_unfinished:
                later = self._next_event()
                if later is None:
                    break
                self.now = max(self.now, later)
                continue
            plan = scheduler.schedule(self.now)
            self._moves.start(plan.moves, self.now)
            self._step(plan)
            idle = 0 if plan.scheduled or plan.failed else idle + 1
            if idle:
                self._wait(idle)
            elif self._goes_in_bulk():
                self._run_in_bulk()
        return self._finished()

    def _finished(self) -> Outcome:
        outcome, memory = self.outcome, self.scheduler.memory
        outcome.busy = StepCost(*self._busy)
        outcome.peak = PoolUsage(**self._peak)
        outcome.preemptions = self.scheduler.num_preemptions
        outcome.swaps, outcome.recomputed_tokens = memory.num_swaps, memory.recomputed_tokens
        return outcome

    # Requests

    def _arrive(self) -> None:
        """Queue what has arrived by now."""
        for index, at in self._arrivals.due(self.now):
            entry, served = self.trace[index], self.outcome.served[index]
            served.arrival = at
            tokens = self._tokens.prompt(index)
            request = Request(
                str(index),
                tokens.tolist(),
                _params(entry.output_tokens),
                arrival=at,
                priority=entry.priority,
                ttft_target=entry.ttft_target,
                tpot_target=entry.tpot_target,
            )
            request.prompt_array = tokens
            try:
                self.scheduler.add(request)
            except RequestError as error:
                served.error, served.ended = str(error), at
                self._arrivals.ended(index, at)

    def _end(self, seq: Sequence) -> None:
        request, index = seq.request, int(seq.request.request_id)
        served = self.outcome.served[index]
        served.ended, served.error = self.now, request.error
        served.num_preemptions, served.num_cached = request.num_preemptions, seq.num_cached
        self._last.pop(seq, None)
        request.sequences.clear()  # so that all of it goes at once, without the collector
        self._arrivals.ended(index, self.now)

    def _next_event(self) -> float | None:
        times = [at for at in (self._arrivals.next_at, self._moves.next_at) if at is not None]
        return min(times, default=None)

    # Steps, one by one

    def _step(self, plan: Plan) -> None:
        """Run a plan: let its time pass, and tell the scheduler what was drawn."""
        scheduler, began = self.scheduler, self.now
        load = self.cost.load(plan)
        cost = self._pass(load)
        self._draw([entry.seq for entry in plan.scheduled if entry.samples_n])
        self._note_usage()
        self._update(plan)
        if self.observer is not None:
            running, waiting = len(scheduler.running), len(scheduler.waiting)
            seconds, usage = self.now - began, scheduler.memory.usage()
            self.observer(StepRecord(began, seconds, load, cost, cost, usage, running, waiting))

    def _update(self, plan: Plan) -> None:
        """Tell the scheduler what a plan, or a part of one, has drawn; note who ended."""
        results = [
            StepResult(self._reply(entry.seq, 1), (0.0,)) if entry.samples_n else StepResult()
            for entry in plan.scheduled
        ]
        for seq in self.scheduler.update(plan, results, self.now):
            if seq.num_output == 1:
                served = self.outcome.served[int(seq.request.request_id)]
                if served.first_token is None:
                    served.first_token = self.now
            if seq.finished:
                self._end(seq)

    def _pass(self, load: StepLoad) -> StepCost:
        """Let the time of a step pass."""
        cost, outcome, busy = self.cost.predict(load), self.outcome, self._busy
        self.now += cost.total
        outcome.steps += 1
        outcome.tokens += load.tokens
        outcome.rows += load.rows
        busy[0] += cost.self_prefill
        busy[1] += cost.kv_finalize
        busy[2] += cost.cross_decode
        busy[3] += cost.sample
        busy[4] += cost.overhead
        return cost

    def _reply(self, seq: Sequence, count: int) -> list[int]:
        """Its next tokens."""
        return self._tokens.row(int(seq.request.request_id), seq.num_tokens, count)

    def _draw(self, seqs: list[Sequence]) -> None:
        """Each of ``seqs`` has drawn a token now."""
        now, last = self.now, self._last
        gaps = Counter([now - last[seq] for seq in seqs if seq in last])
        for gap, count in gaps.items():
            self.outcome.gaps.add(gap, count)
        last.update(dict.fromkeys(seqs, now))

    def _note_usage(self) -> None:
        """Keep the highest of every pool, as it is while a step runs."""
        usage, peak = self.scheduler.memory.usage(), self._peak
        for name, highest in peak.items():
            value = getattr(usage, name)
            if value > highest:
                peak[name] = value

    def _may_be_peak(self) -> bool:
        """Whether more may be in use than ever: what sequences hold, shared or not, at least is."""
        running, peak = self.scheduler.running, self._peak
        if len(running) > peak["slots_used"]:
            return True
        return sum([len(seq.pages) for seq in running]) > peak["pages_used"]

    def _wait(self, idle: int) -> None:
        """Nobody could run: time passes until a move ends, or else step by step."""
        later = self._next_event()
        if later is not None and self._moves.next_at is not None:
            self.now = max(self.now, later)
        elif idle > IDLE_STEPS:
            raise YocolmError(
                f"nothing runs though {len(self.scheduler.waiting)} requests wait, at "
                f"{self.now:.3f} s"
            )

    # Steps in bulk

    def _goes_in_bulk(self) -> bool:
        """Whether the next steps have all decode who can, and nothing is under way beside them."""
        scheduler = self.scheduler
        return (
            self.bulk
            and isinstance(scheduler.policy, Fcfs)
            and self._moves.next_at is None
            and len(scheduler.running) <= scheduler.max_num_batched_tokens
        )

    def _run_in_bulk(self) -> None:
        """Steps in which each decode is only counted, while ``_goes_in_bulk``.

        Of a decode, pages are taken and handed on, and its end is told, when it is time; prompts
        go through the scheduler as ever. The same is done in the same order as by ``schedule`` and
        ``update``. Ends before a step in which a decode finds no page, which has to be planned.
        """
        scheduler, members = self.scheduler, self._decodes
        members.join([seq for seq in scheduler.running if seq.decoding])
        first = True
        while members.count and self._goes_in_bulk():
            self._arrive()
            if not members.take_pages():
                break
            chunks = self._chunks(members.count)
            scheduler.memory.copies.issue()
            self._moves.start(scheduler.memory.take_moves(), self.now)
            first = self._bulk_step(members, chunks, first)
        seqs = members.leave_all()
        if not first:  # else it is known of each
            self._last.update(dict.fromkeys(seqs, self.now))

    def _chunks(self, num_decodes: int) -> list[Scheduled]:
        """The prompts of a step, as the scheduler has them."""
        scheduler = self.scheduler
        half = len(scheduler.running) - num_decodes
        full = len(scheduler.running) >= scheduler.max_num_seqs
        if not half and (full or not scheduler.waiting):
            return []
        decodes = cast("list[Scheduled]", range(num_decodes))  # only counted
        return scheduler._schedule_chunks(decodes, self.now)

    def _bulk_step(self, members: Decodes, chunks: list[Scheduled], first: bool) -> bool:
        """One step with prompts, or all until one needs attention or somebody arrives.

        ``first``: not all have drawn their last token in the step before; returns whether that is
        so for the next.
        """
        steps = 1
        if self._may_be_peak() or self.outcome.bulk_steps % 64 == 0:
            self._note_usage()
        if chunks or first:
            load, began = copy_load(members.load), self.now
            for entry in chunks:
                rows, draws = len(entry.rows), entry.samples_n
                self.cost.add(load, entry.start, entry.num_tokens, rows, draws)
            self._pass(load)
            if first:
                self._draw(members.sequences)
            else:
                self.outcome.gaps.add(self.now - began, members.count)
        else:
            steps = self._pass_steps(members)
        members.next_steps(steps - 1)
        for entry in members.ending():
            self._update(Plan((entry,), ()))
        if chunks:
            plan = Plan(tuple(sorted(chunks, key=lambda entry: entry.num_tokens > 1)), ())
            self._draw([entry.seq for entry in chunks if entry.samples_n])
            self._update(plan)
        members.next_steps(1)
        self.scheduler.num_steps += steps
        self.outcome.bulk_steps += steps
        new = [e.seq for e in chunks if e.seq.decoding and not e.seq.finished]
        late = any([self._last[seq] != self.now for seq in new])  # computed anew, but for a token
        if late:
            self._last.update(dict.fromkeys(members.sequences, self.now))
        members.join(new)
        return late

    def _pass_steps(self, members: Decodes) -> int:
        """Let the time of several steps pass; how many. Their seconds grow evenly, so they are
        summed up rather than taken one by one."""
        most, later = members.steps_ahead, self._next_event()
        first = last = self.cost.predict(members.load)
        growth = 0.0
        if most > 1:
            last = self.cost.predict(members.load_in(most - 1))
            growth = max(0.0, (last.total - first.total) / (most - 1))

        def seconds(steps: int) -> float:
            return steps * (first.total + growth * (steps - 1) / 2)

        steps = most
        if later is not None and self.now + seconds(most - 1) >= later:
            steps = bisect_left(range(1, most), later, key=lambda n: self.now + seconds(n)) + 1
        share = (steps - 1) / max(most - 1, 1) / 2
        for phase, name in enumerate(PHASES):
            low, high = getattr(first, name), getattr(last, name)
            self._busy[phase] += steps * (low + (high - low) * share)
        self.outcome.gaps.add_even(first.total, growth, steps, members.count)
        self.outcome.tokens += steps * members.load.tokens
        self.outcome.rows += steps * members.load.rows
        self.outcome.steps += steps
        self.now += seconds(steps)
        return steps


@cache
def _params(output_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=output_tokens, ignore_eos=True)


class _Moves:
    """Moves to and from the swap space, one after another."""

    def __init__(self, cost: CostModel, page_size: int) -> None:
        self._cost = cost
        self._page_bytes = cost.spec.page_bytes(page_size, cost.dtype_bytes)
        self._slot_bytes = cost.spec.slot_bytes(cost.dtype_bytes)
        self._under_way: list[tuple[float, int]] = []
        self._free_at = 0.0

    @property
    def next_at(self) -> float | None:
        """When the next one ends."""
        return self._under_way[0][0] if self._under_way else None

    def start(self, moves: tuple[Move, ...], now: float) -> None:
        for move in moves:
            size = len(move.pages) * self._page_bytes
            size += 0 if move.state is None else self._slot_bytes
            self._free_at = max(self._free_at, now) + self._cost.swap_seconds(size)
            heapq.heappush(self._under_way, (self._free_at, move.ticket))

    def ended(self, now: float) -> list[int]:
        """Tickets of those that have ended by ``now``."""
        tickets = []
        while self._under_way and self._under_way[0][0] <= now:
            tickets.append(heapq.heappop(self._under_way)[1])
        return tickets
