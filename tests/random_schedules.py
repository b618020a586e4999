"""Random schedules against a model whose state is the tokens themselves.

The fake model writes token ids into simulated pages and slots and reads its next token back from
them, so a stale copy, a shared tail page or a reused slot shows up as foreign tokens.
"""

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from yocolm.engine.pages import SCRATCH, PagePool, SlotPool
from yocolm.engine.plan import Plan, Scheduled, StepResult
from yocolm.engine.request import Request, Sequence
from yocolm.engine.sampling_params import SamplingParams
from yocolm.engine.scheduler import Scheduler
from yocolm.errors import RequestError

EOS, STOP = 0, 1
MAX_STEPS = 2_000


def draw(seed: int, index: int, context: list[int]) -> int:
    """The next token: a function of the request's seed, the sample's index and all it has read."""
    number = hash((seed, index, tuple(context)))
    return number % 16 if number % 16 in (EOS, STOP) else 1_000 + number % 1_000_000


def solo_output(request: Request, index: int, max_model_len: int) -> list[int]:
    """What sample ``index`` gives when it is computed alone."""
    params, output = request.params, []
    while len(output) != params.max_tokens:
        context = request.prompt_token_ids + output
        if len(context) == max_model_len:
            break
        output.append(draw(params.seed or 0, index, context))
        if len(output) < params.min_tokens:
            continue
        if output[-1] == EOS and not params.ignore_eos:
            break
        if output[-1] in (params.stop_token_ids or ()):
            break
    return output


@dataclass
class FakeRunner:
    """Runs plans on simulated memory and asserts what a plan promises."""

    scheduler: Scheduler
    delivered: Counter[tuple[str, int]] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        pool = self.scheduler.page_pool
        self.pages: list[list[int | None]] = [[None] * pool.page_size for _ in range(pool.size)]
        self.slots: list[list[int]] = [[] for _ in range(self.scheduler.slot_pool.size)]

    def run(self, plan: Plan) -> list[StepResult]:
        self.check_plan(plan)
        for kind, src, dst in plan.copies:
            if kind == "page":
                self.pages[dst] = list(self.pages[src])
            else:
                self.slots[dst] = list(self.slots[src])
        computed = {entry.seq.order: entry.stop for entry in plan.scheduled}
        for seq in self.scheduler.running:
            self.check_state(seq, seq.num_computed)
        results = [self.run_entry(entry) for entry in plan.scheduled]
        for seq in self.scheduler.running:
            self.check_state(seq, computed.get(seq.order, seq.num_computed))
        return results

    def run_entry(self, entry: Scheduled) -> StepResult:
        seq, size = entry.seq, self.scheduler.page_pool.page_size
        assert seq.slot is not None
        self.count_events(entry)
        if entry.start == 0:
            self.slots[seq.slot] = []
        self.slots[seq.slot] += entry.token_ids
        for position, token in enumerate(entry.token_ids, entry.start):
            self.pages[seq.pages[position // size]][position % size] = token
        prompt = seq.request.prompt_token_ids
        scored = [entry.start + row for row in entry.rows[: entry.num_scored]]
        assert entry.targets == [prompt[row + 1] for row in scored]
        self.delivered.update((seq.request.request_id, row) for row in scored)
        indices = range(seq.index, seq.index + entry.samples_n)
        seed = seq.request.params.seed or 0
        tokens = [draw(seed, index, self.slots[seq.slot]) for index in indices]
        return StepResult(tokens, [-1.0] * len(tokens))

    def count_events(self, entry: Scheduled) -> None:
        seq, request = entry.seq, entry.seq.request
        begins = entry.start == 0
        self.events["fork continues"] += seq.index > 0 and seq.num_output == 1 and not begins
        self.events["fork without room"] += seq.index > 0 and seq.num_output == 1 and begins
        self.events["resumed with output"] += begins and seq.num_output > 0
        partly_scored = seq.scored_until in request.scored_rows[1:]
        self.events["resumed half scored"] += begins and partly_scored
        self.events["mixed"] += entry.num_tokens > 1 and bool(self.scheduler.running[0].decoding)

    def check_plan(self, plan: Plan) -> None:
        scheduler = self.scheduler
        assert plan.num_tokens <= scheduler.max_num_batched_tokens
        assert plan.scheduled or plan.failed or not scheduler.has_unfinished, "nobody advances"
        assert [entry.num_tokens == 1 for entry in plan.scheduled] == sorted(
            (entry.num_tokens == 1 for entry in plan.scheduled), reverse=True
        )
        assert len({entry.seq.order for entry in plan.scheduled}) == len(plan.scheduled)
        for kind, src, _ in plan.copies:
            pool = self.scheduler.page_pool if kind == "page" else self.scheduler.slot_pool
            self.events["copy from one that ended"] += pool.references(src) == 0
        written = [(copy.kind, copy.dst) for copy in plan.copies]
        assert len(set(written)) == len(written)
        assert not set(written) & {(copy.kind, copy.src) for copy in plan.copies}
        for entry in plan.scheduled:
            assert entry.num_tokens >= 1
            assert entry.start == entry.seq.num_computed
            assert SCRATCH not in entry.seq.pages and entry.seq.slot != SCRATCH
            assert entry.rows == self.wanted_rows(entry)
            if entry.start == 0 and scheduler.waiting:
                assert entry.seq.order < scheduler.waiting[0].order, "admitted out of turn"

    def wanted_rows(self, entry: Scheduled) -> tuple[int, ...]:
        """The rows that a reader of the specification would ask for."""
        seq, request = entry.seq, entry.seq.request
        scores = request.params.prompt_logprobs is not None and seq.index == 0
        first = max(request.params.prompt_logprobs_start, 1) - 1
        rows = []
        for position in range(entry.start, entry.stop):
            scored = scores and first <= position < request.num_prompt - 1
            if scored and not self.delivered[request.request_id, position]:
                rows.append(position - entry.start)
        if entry.stop == seq.num_tokens and request.params.max_tokens != 0:
            rows.append(entry.num_tokens - 1)
        return tuple(rows)

    def check_state(self, seq: Sequence, num_computed: int) -> None:
        size, expected = self.scheduler.page_pool.page_size, seq.tokens(0, num_computed)
        in_pages = [token for page in seq.pages for token in self.pages[page]][:num_computed]
        assert in_pages == expected, f"pages of {seq} hold foreign tokens (page_size {size})"
        if num_computed:
            assert seq.slot is not None
            assert self.slots[seq.slot] == expected, f"the slot of {seq} holds foreign tokens"


class Scenario:
    """One random schedule: pools, requests, aborts, stops and errors all follow from the seed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        page_size = self.rng.randint(1, 5)
        self.room = self.rng.randint(4, 40)  # tokens that the pages hold, about
        self.scheduler = Scheduler(
            PagePool(2 + self.room // page_size, page_size),
            SlotPool(self.rng.randint(2, 7)),
            max_num_batched_tokens=self.rng.choice([1, 2, 3, 4, 6, 10, 64]),
            max_num_seqs=self.rng.randint(1, 6),
            max_model_len=self.rng.choice([8, 24, 60]),
        )
        self.runner = FakeRunner(self.scheduler)
        self.requests: list[Request] = []
        self.interrupted: set[tuple[float, int, int]] = set()
        self.trouble = self.rng.choice([0.0, 0.05, 0.3])

    def run(self) -> None:
        to_add = self.rng.randint(1, 12)
        for _ in range(MAX_STEPS):
            while to_add and self.rng.random() < 0.4:
                self.add_request()
                to_add -= 1
            self.maybe_abort()
            self.step()
            self.scheduler.check()
            if not to_add and not self.scheduler.has_unfinished:
                return self.check_end()
        pytest.fail(f"not done after {MAX_STEPS} steps")

    def step(self) -> None:
        plan = self.scheduler.schedule(now=0.0)
        lengths = {seq.order: seq.num_output for r in self.requests for seq in r.sequences}
        results = [self.maybe_spoil(entry, result) for entry, result in self.run_plan(plan)]
        self.maybe_abort()
        changed = self.scheduler.update(plan, results)
        self.scheduler.check()
        assert len({seq.order for seq in changed}) == len(changed)
        for seq in changed:
            assert seq.finished or seq.num_output == lengths.get(seq.order, 0) + 1
            if self.rng.random() < self.trouble / 5:
                self.scheduler.finish(seq, "stop", "a stop string")
                self.interrupted.add(seq.order)
        self.scheduler.check()

    def run_plan(self, plan: Plan) -> list[tuple[Scheduled, StepResult]]:
        return list(zip(plan.scheduled, self.runner.run(plan), strict=True))

    def add_request(self) -> None:
        rng, number = self.rng, len(self.requests)
        scoring = rng.random() < 0.5
        prompt_length = rng.randint(1, rng.choice([3, 1 + self.room // 2, 1 + self.room]))
        rest = max(self.room - prompt_length, 1)
        max_tokens = rng.choice([None, 0 if scoring else 1, 1, 2, rest // 2 + 1, rest, rest])
        params = SamplingParams(
            n=1 if max_tokens == 0 else rng.choice([1, 1, 2, 3, 5]),
            seed=rng.randint(0, 99),
            max_tokens=max_tokens,
            min_tokens=rng.randint(0, max_tokens or 0),
            ignore_eos=rng.random() < 0.5,
            stop_token_ids=rng.choice([None, [STOP]]),
            prompt_logprobs=rng.randint(0, 2) if scoring else None,
            prompt_logprobs_start=rng.randint(0, prompt_length) if scoring else 0,
        )
        # Prompts of different requests have no token in common.
        prompt = [10_000_000 * (number + 1) + p for p in range(prompt_length)]
        request = Request(str(number), prompt, params, eos_token_ids=frozenset({EOS}))
        try:
            self.scheduler.add(request)
        except RequestError:
            pool, limit = self.scheduler.page_pool, self.scheduler.max_model_len
            too_long = prompt_length + (max_tokens != 0) > limit
            assert too_long or request.max_computed(limit) > pool.capacity * pool.page_size
        else:
            self.requests.append(request)

    def maybe_abort(self) -> None:
        if self.requests and self.rng.random() < self.trouble:
            request = self.rng.choice(self.requests)
            self.interrupted.update(s.order for s in self.scheduler.abort(request.request_id))
            assert request.finished

    def maybe_spoil(self, entry: Scheduled, result: StepResult) -> StepResult:
        if self.rng.random() >= self.trouble / 20:
            return result
        request = entry.seq.request
        self.interrupted.update(seq.order for seq in request.sequences if not seq.finished)
        return StepResult(error="not finite")

    def check_end(self) -> None:
        for request in self.requests:
            assert request.finished
            orders = {seq.order for seq in request.sequences}
            if not orders & self.interrupted:
                assert len(request.sequences) == request.params.n
            for seq in request.sequences:
                expected = solo_output(request, seq.index, self.scheduler.max_model_len)
                if seq.order in self.interrupted:
                    expected = expected[: seq.num_output]
                assert seq.output_token_ids == expected
                assert seq.cumulative_logprob == -seq.num_output
            delivered = [self.runner.delivered[request.request_id, r] for r in request.scored_rows]
            assert max(delivered, default=0) <= 1, "a prompt row is scored twice"
            if request.sequences[0].order not in self.interrupted:
                assert min(delivered, default=1) == 1, "a prompt row is not scored"
