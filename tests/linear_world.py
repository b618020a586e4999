"""A scheduler by traffic in predicted time, with a cost model whose sums are easy to follow.

A step takes 10 ms, 0.1 ms a token, and 1 us for every token of context that a decode scans.
"""

from __future__ import annotations

from yocolm.engine.cost import CostModel, StepLoad
from yocolm.engine.pages import PagePool, SlotPool
from yocolm.engine.plan import Plan, StepResult
from yocolm.engine.policy import PACE, Fcfs, Traffic
from yocolm.engine.request import Request, Sequence
from yocolm.engine.sampling_params import SamplingParams
from yocolm.engine.scheduler import Scheduler

BASE, TOKEN, SCAN = 0.010, 1e-4, 1e-6


class Linear(CostModel):
    def __init__(self) -> None:
        pass

    def add(
        self, load: StepLoad, start: int, num_tokens: int, num_rows: int, draws: int = 0
    ) -> None:
        load.tokens += num_tokens
        load.kv_bytes_read += start + 1 if num_tokens == 1 else 0

    def seconds(self, load: StepLoad) -> float:
        return BASE + TOKEN * load.tokens + SCAN * load.kv_bytes_read

    def decode_seconds(self, context: int) -> float:
        return TOKEN + SCAN * context

    def prefill_seconds(self, start: int, stop: int) -> float:
        return TOKEN * (stop - start)

    def solo_ttft(self, num_prompt: int, budget: int = 0) -> float:
        return BASE + TOKEN * num_prompt

    def solo_tpot(self, context: int) -> float:
        return BASE + TOKEN + SCAN * context


class World:
    """A scheduler in predicted time. ``ttft`` is the target where a request has none."""

    def __init__(self, budget: int = 4096, ttft: float | None = 30.0) -> None:
        self.cost = Linear()
        self.policy = Traffic(self.cost, ttft)
        self.scheduler = Scheduler(
            PagePool(20_000, 64), SlotPool(65), budget, 64, 1 << 20, policy=self.policy
        )
        self.now, self.count = 100.0, 0

    def add(
        self,
        prompt: int,
        output: int = 1000,
        ttft: float | None = None,
        tpot: float | None = None,
    ) -> Sequence:
        params = SamplingParams(
            max_tokens=output, ignore_eos=True, prompt_logprobs=None if output else 0
        )
        request = Request(str(self.count), [1] * prompt, params, self.now)
        request.ttft_target, request.tpot_target = ttft, tpot
        self.count += 1
        self.scheduler.add(request)
        return request.sequences[0]

    def decoding(self, prompt: int, tpot: float, output: int = 1000) -> Sequence:
        """A request that has drawn its first token just now, whatever its prompt took."""
        seq = self.add(prompt, output, tpot=tpot)
        self.scheduler.policy = Fcfs()
        while not seq.decoding:
            self.step()
        self.scheduler.policy = self.policy
        self.on_time([seq], PACE * tpot)
        return seq

    def on_time(self, seqs: list[Sequence], ahead: float) -> None:
        """Their next tokens are due in so many seconds."""
        for seq in seqs:
            assert seq.request.tpot_target is not None
            seq.first_token_at = self.now + ahead - seq.num_output * PACE * seq.request.tpot_target

    def step(self) -> Plan:
        plan = self.scheduler.schedule(self.now)
        self.now += self.seconds(plan)
        results = [
            StepResult((7,), (0.0,)) if entry.samples_n else StepResult()
            for entry in plan.scheduled
        ]
        self.scheduler.update(plan, results, self.now)
        return plan

    def seconds(self, plan: Plan) -> float:
        return self.cost.seconds(self.cost.load(plan))


def tokens_of(plan: Plan, seq: Sequence) -> int:
    return sum(entry.num_tokens for entry in plan.scheduled if entry.seq is seq)
