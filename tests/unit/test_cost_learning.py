"""What the cost model learns, and what its parts are for."""

import math
from dataclasses import replace

import pytest

from yocolm.engine.cost import COLD, SWAP_START, CostModel, StepCost, StepLoad
from yocolm.engine.hardware import Hardware
from yocolm.engine.plan import Plan, next_chunk
from yocolm.engine.request import Request
from yocolm.engine.sampling_params import PoolingParams, SamplingParams, without_draws
from yocolm.models.presets import preset
from yocolm.models.spec import model_spec


def cost_model() -> CostModel:
    return CostModel(model_spec(preset("160M")), 2, Hardware.load("epyc-2core"))


def test_a_swap_takes_a_while_to_begin() -> None:
    cost = cost_model()
    assert cost.swap_seconds(0) == SWAP_START
    more = cost.swap_seconds(1e9) - SWAP_START
    assert more == pytest.approx(1e9 / cost.hardware.swap_bandwidth)


def test_rows_that_are_pooled_need_no_logits() -> None:
    scored = SamplingParams(max_tokens=0, prompt_logprobs=0, prompt_logprobs_start=9)
    for pooling, logits in ((PoolingParams(), 0), (None, 1)):
        request = Request("a", [1] * 10, without_draws() if pooling else scored, pooling=pooling)
        load = cost_model().load(Plan((next_chunk(request.sequences[0], 64),), ()))
        assert (load.rows, load.logits) == (1, logits)


def test_behind_a_chunk_weights_are_cold() -> None:
    cost, load, decode = cost_model(), StepLoad(), StepLoad()
    cost.add(load, 0, 512, 1, 1)
    cost.add(decode, 511, 1, 1, 1)
    before, alone = cost.predict(load), cost.predict(decode)
    cost._slow[COLD] = 2.0
    after = cost.predict(load)
    assert after.cross_decode > 1.5 * before.cross_decode
    assert after.sample == pytest.approx(2 * before.sample)
    assert after.self_prefill == before.self_prefill
    assert cost.predict(decode) == alone


def test_more_work_never_takes_less() -> None:
    """Steps that are read faster than is known make nothing warmer than warm."""
    cost, load = cost_model(), StepLoad()
    cost.add(load, 0, 512, 1, 1)
    for _ in range(200):
        known = cost.predict(load)
        fast = replace(known, cross_decode=known.cross_decode / 2, sample=known.sample / 2)
        cost.observe(load, fast)
        assert cost._slow[COLD] >= 1.0


def test_what_settles_changes_no_prediction() -> None:
    """What has been so for long becomes what is known: memory and arithmetic each its own."""
    cost, loads = cost_model(), []
    for start, tokens in ((0, 512), (4096, 1)):
        loads.append(StepLoad())
        cost.add(loads[-1], start, tokens, 1, 1)
    cost.corrections = [0.2, -0.4, 0.1]
    before = [cost.seconds(load) for load in loads]
    cost._settle()
    assert cost.corrections[1] > -0.4
    for load, seconds in zip(loads, before, strict=True):
        assert cost.seconds(load) == pytest.approx(seconds, rel=1e-3)


def test_cold_is_learned_from_chunks_only() -> None:
    cost, load = cost_model(), StepLoad()
    cost.add(load, 100, 1, 1, 1)
    known = cost.predict(load)
    slow = StepCost(*(2 * value for value in vars_of(known)))
    for _ in range(20):
        cost.observe(load, slow)
    assert cost._slow[COLD] == 1.0 and math.isfinite(cost.seconds(load))


def vars_of(cost: StepCost) -> list[float]:
    return [
        cost.self_prefill,
        cost.kv_finalize,
        cost.cross_decode,
        cost.sample,
        cost.overhead,
    ]
