"""Schedulers, requests and steps without a model, for the tests of the scheduler's rules."""

import pytest

from yocolm.engine.pages import PagePool, SlotPool
from yocolm.engine.plan import Plan, StepResult
from yocolm.engine.request import Request
from yocolm.engine.sampling_params import SamplingParams
from yocolm.engine.scheduler import Scheduler

EOS = 0
TOKEN = 7


def make_scheduler(
    pages: int = 100, page_size: int = 4, slots: int = 10, budget: int = 100, length: int = 200
) -> Scheduler:
    """A scheduler with so many pages and slots to hand out (scratch not counted)."""
    return Scheduler(
        PagePool(pages + 1, page_size),
        SlotPool(slots + 1),
        max_num_batched_tokens=budget,
        max_num_seqs=slots,
        max_model_len=length,
    )


def make_request(name: str, num_prompt: int, **params: object) -> Request:
    return Request(
        name,
        list(range(100, 100 + num_prompt)),
        SamplingParams(**params),  # pyright: ignore[reportArgumentType]
        eos_token_ids=frozenset({EOS}),
    )


def results_for(plan: Plan, token: int = TOKEN) -> list[StepResult]:
    return [StepResult([token] * e.samples_n, [-0.5] * e.samples_n) for e in plan.scheduled]


def step(scheduler: Scheduler, token: int = TOKEN) -> Plan:
    """Run one step in which every row draws ``token``."""
    plan = scheduler.schedule(now=0.0)
    scheduler.update(plan, results_for(plan, token))
    scheduler.check()
    return plan


def summary(plan: Plan) -> list[tuple[str, int, int, tuple[int, ...]]]:
    """Request, start, number of tokens and rows of each entry."""
    return [(e.seq.request.request_id, e.start, e.num_tokens, e.rows) for e in plan.scheduled]


def finish_all(scheduler: Scheduler, max_steps: int = 1000) -> None:
    for _ in range(max_steps):
        if not scheduler.has_unfinished:
            scheduler.check()
            return
        step(scheduler)
    pytest.fail("not done")
