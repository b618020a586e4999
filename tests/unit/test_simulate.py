"""The simulator: steps in bulk are the steps one by one, whatever memory and policy do to them."""

import random
from dataclasses import replace

import pytest

from yocolm.bench.recording import RequestTimes
from yocolm.bench.simulated import Setup, Simulated, simulate, summary, summary_table
from yocolm.config import ModelConfig, YocoConfig
from yocolm.engine.hardware import Hardware
from yocolm.engine.settings import EngineSettings
from yocolm.engine.simulate import Simulation
from yocolm.engine.steps import StepRecord
from yocolm.engine.trace import Trace, TraceRequest
from yocolm.errors import ConfigError
from yocolm.models.presets import preset
from yocolm.models.spec import model_spec

YOCO = preset("160M")
TWIN = preset("llama-160M")
GEMMA = preset("gemma-3n-E2B")
MODELS = {"yoco": YOCO, "transformer": TWIN, "gemma": GEMMA}


def setup(config: ModelConfig, pages: int = 400, seqs: int = 6, **settings: object) -> Setup:
    """On an H100, with so many pages beside the slots of sequences and a few kept states."""
    spec = model_spec(config)
    size = settings.get("page_size", 16)
    assert isinstance(size, int)
    kept = 4
    memory = (pages + 1) * spec.page_bytes(size, 2) + (seqs + kept + 1) * spec.slot_bytes(2)
    values = {
        "page_size": size,
        "max_num_seqs": seqs,
        "num_checkpoints": kept if spec.slot_bytes(2) else None,
        "kv_memory": memory,
        "swap_space": 0,
        "max_num_batched_tokens": 96,
        **settings,
    }
    return Setup(config, Hardware.load("h100"), EngineSettings(**values))


def draw(seed: int, count: int, rate: float, longest: int = 300) -> Trace:
    """Requests of all sizes: sessions of several turns, common prefixes, loners."""
    source, now = random.Random(seed), 0.0
    trace: Trace = []
    lengths: dict[str, int] = {}
    for _ in range(count):
        now += source.expovariate(rate)
        prompt, output = source.randint(1, longest), source.randint(1, 80)
        session = source.choice([None, "a", "b", f"c{source.randint(0, 9)}"])
        shared = None
        if session is None:
            shared = source.choice([None, 40, 100])
        else:
            prompt = lengths.get(session, 0) + source.randint(1, 60)
            if prompt > 2 * longest:
                prompt, shared = source.randint(20, 60), source.choice([None, 20])
            lengths[session] = prompt + output
        trace.append(TraceRequest(now, prompt, output, session, shared))
    return trace


def times(simulated: Simulated) -> list[tuple[object, ...]]:
    return [(r.arrival, r.ttft, r.e2e) for r in simulated.requests]


def counts(simulated: Simulated) -> list[tuple[object, ...]]:
    return [(r.cached_tokens, r.preemptions, r.error) for r in simulated.requests]


def assert_same(setup: Setup, trace: Trace) -> Simulated:
    """In bulk as one by one; returns the former."""
    bulk, single = simulate(setup, trace), simulate(setup, trace, bulk=False)
    assert single.outcome.bulk_steps == 0
    assert bulk.outcome.steps == single.outcome.steps
    assert counts(bulk) == counts(single)
    for ours, theirs in zip(times(bulk), times(single), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-9)
    one, other = bulk.outcome, single.outcome
    assert one.busy.total == pytest.approx(other.busy.total, rel=1e-9)
    assert (one.tokens, one.rows, one.preemptions) == (other.tokens, other.rows, other.preemptions)
    assert (one.swaps, one.recomputed_tokens) == (other.swaps, other.recomputed_tokens)
    assert one.peak is not None and other.peak is not None
    for name in ("pages_used", "slots_used", "blocks_swapped", "states_swapped"):
        assert getattr(one.peak, name) == getattr(other.peak, name), name
    assert one.gaps.count == other.gaps.count
    shares = (1, 50, 99, 100)
    assert one.gaps.percentiles(shares) == pytest.approx(other.gaps.percentiles(shares), rel=2e-3)
    return bulk


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("seed", range(3))
def test_bulk_is_stepping_with_room_enough(model: str, seed: int) -> None:
    found = assert_same(setup(MODELS[model]), draw(seed, 60, rate=100))
    assert found.outcome.bulk_steps > found.outcome.steps / 2
    assert found.outcome.preemptions == 0


@pytest.mark.parametrize("model", ["yoco", "transformer"])
@pytest.mark.parametrize("seed", range(3))
def test_bulk_is_stepping_where_pages_run_out(model: str, seed: int) -> None:
    trace = [replace(r, prompt_tokens=min(r.prompt_tokens, 200)) for r in draw(seed, 60, rate=1e4)]
    found = assert_same(setup(MODELS[model], pages=30, max_model_len=400), trace)
    assert found.outcome.preemptions > 0
    assert found.outcome.bulk_steps > 0


@pytest.mark.parametrize("seed", range(2))
def test_bulk_is_stepping_with_a_swap_space(seed: int) -> None:
    slow = setup(YOCO, pages=30, max_model_len=400, swap_space="1GiB")
    hardware = replace(slow.hardware, swap_bandwidth=1e12, matrix_rates=((1, 1e12),))
    slow = replace(slow, hardware=hardware)
    found = assert_same(slow, draw(seed, 60, rate=1e4, longest=150))
    assert found.outcome.swaps > 0


def test_bulk_is_stepping_with_priorities_and_without_a_cache() -> None:
    source = random.Random(0)
    trace = [replace(r, priority=source.randint(-2, 2)) for r in draw(7, 60, rate=1e3)]
    assert_same(setup(YOCO, prefix_caching=False), trace)


def test_windows_that_fill_up_on_the_way_change_the_pace() -> None:
    short = [TraceRequest(0.0, 20 + i, 1200) for i in range(4)]
    assert_same(setup(GEMMA, pages=800), short)


def test_the_policy_by_traffic_is_simulated_too() -> None:
    found = simulate(setup(YOCO, policy="traffic"), draw(0, 40, rate=50))
    assert all(r.error is None and r.e2e is not None for r in found.requests)


def test_every_request_has_its_tokens_and_rows() -> None:
    trace = draw(3, 50, rate=100)
    found = simulate(setup(YOCO, prefix_caching=False), trace)
    assert [r.output_tokens for r in found.requests] == [r.output_tokens for r in trace]
    total = sum(r.prompt_tokens + r.output_tokens - 1 for r in trace)
    assert found.outcome.tokens == total  # the last token drawn is not computed
    assert found.outcome.rows == sum(r.output_tokens for r in trace)
    assert found.outcome.gaps.count == sum(r.output_tokens - 1 for r in trace)


def test_without_fast_prefill_every_token_passes_both_halves() -> None:
    trace = draw(3, 20, rate=100)
    fast = simulate(setup(YOCO), trace)
    slow = simulate(setup(YOCO, fast_prefill=False), trace)
    assert slow.outcome.rows == slow.outcome.tokens == fast.outcome.tokens > fast.outcome.rows
    assert slow.outcome.busy.cross_decode > fast.outcome.busy.cross_decode


def test_time_is_what_the_cost_model_predicts() -> None:
    one = setup(YOCO, prefix_caching=False, max_num_batched_tokens=64)
    cost = one.cost()
    (request,) = simulate(one, [TraceRequest(2.5, 100, 3)]).requests
    assert request.arrival == 2.5
    assert request.ttft == pytest.approx(cost.solo_ttft(100, budget=64))
    assert request.e2e is not None and request.ttft is not None
    decodes = cost.solo_tpot(101) + cost.solo_tpot(102)
    assert request.e2e - request.ttft == pytest.approx(decodes)
    assert request.ttft_target == pytest.approx(5 * cost.solo_ttft(100))
    assert request.tpot_target == pytest.approx(2 * cost.solo_tpot(101))


def test_a_turn_waits_for_the_one_before_it_and_hits_what_that_left() -> None:
    trace = [
        TraceRequest(0.0, 100, 50, "a"),
        TraceRequest(1e-6, 200, 5, "a"),
        TraceRequest(2e-6, 100, 5, "b"),
    ]
    first, second, other = simulate(setup(YOCO), trace).requests
    assert first.e2e is not None
    assert second.arrival == pytest.approx(first.arrival + first.e2e)
    assert second.cached_tokens == 149
    assert (first.cached_tokens, other.cached_tokens) == (0, 0)


def test_a_request_that_cannot_be_served_fails_alone() -> None:
    trace = [TraceRequest(0.0, 10**5, 1, "a"), TraceRequest(0.1, 8, 2, "a"), TraceRequest(0, 8, 2)]
    found = simulate(setup(YOCO, max_model_len=500), trace)
    assert [r.error is None for r in found.requests] == [False, True, True]
    assert "max_model_len=500" in str(found.requests[0].error)
    told = summary(found)
    assert (told["completed"], told["failed"]) == (2, 1)
    assert "first failure" in summary_table(told)


def test_the_observer_sees_every_step() -> None:
    steps: list[StepRecord] = []
    found = simulate(setup(YOCO), draw(1, 20, rate=100), steps.append)
    assert len(steps) == found.outcome.steps
    assert sum(step.load.tokens for step in steps) == found.outcome.tokens
    ends = [step.at + step.seconds for step in steps]
    assert all(a <= b.at + 1e-12 for a, b in zip(ends, steps[1:], strict=False))
    assert found.outcome.peak is not None
    assert max(step.usage.pages_used for step in steps) <= found.outcome.peak.pages_used


def test_the_summary_counts_what_kept_its_targets() -> None:
    trace = [TraceRequest(0.0, 10, 5), TraceRequest(10.0, 10, 5, ttft_target=1e-9)]
    found = simulate(setup(YOCO), trace)
    told = summary(found)
    assert told["met_targets"] == 0.5
    assert told["seconds"] == pytest.approx(10.0, abs=0.1)
    assert told["goodput"] == pytest.approx(1 / told["seconds"])
    assert [r.meets for r in found.requests] == [True, False]
    assert "50.0% kept both targets" in summary_table(told)


def test_memory_that_cannot_hold_the_weights_is_an_error() -> None:
    big = Setup(YOCO, replace(Hardware.load("h100"), memory_bytes=10**8), EngineSettings())
    with pytest.raises(ConfigError, match="choose a smaller model"):
        simulate(big, [TraceRequest(0.0, 1, 1)])


def test_nothing_at_all() -> None:
    told = summary(simulate(setup(YOCO), []))
    assert (told["requests"], told["seconds"], told["ttft"]) == (0, 0.0, None)
    assert summary_table(told)


def test_simulating_ends_with_empty_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Simulation] = []
    run = Simulation.run
    monkeypatch.setattr(Simulation, "run", lambda self: (kept.append(self), run(self))[1])
    simulate(setup(YOCO, pages=30, max_model_len=400), draw(0, 60, rate=1e4, longest=150))
    (simulation,) = kept
    simulation.scheduler.check()
    assert not simulation.scheduler.requests


def test_request_times_are_complete() -> None:
    (request,) = simulate(setup(YOCO), [TraceRequest(0.0, 10, 2)]).requests
    assert isinstance(request, RequestTimes)
    assert isinstance(YOCO, YocoConfig)
    assert None not in (request.ttft, request.e2e, request.tpot, request.meets)
