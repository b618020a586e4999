"""Forecasts of the first token against the real scheduler, whose steps take what was predicted."""

from __future__ import annotations

import random

import pytest

from yocolm.engine.cost import CostModel
from yocolm.engine.forecast import Forecaster, Pace, ttft
from yocolm.engine.hardware import Hardware
from yocolm.engine.pages import PagePool, SlotPool
from yocolm.engine.plan import StepResult
from yocolm.engine.request import Request
from yocolm.engine.sampling_params import SamplingParams
from yocolm.engine.scheduler import Scheduler
from yocolm.engine.settings import EngineSettings, PoolSizes
from yocolm.engine.setup import make_scheduler
from yocolm.engine.usual import USUAL_OUTPUT, Outputs
from yocolm.models.presets import preset
from yocolm.models.spec import model_spec

EPYC = Hardware.load("epyc-2core")
LENGTH = 20_000


def cost_model(name: str = "160M") -> CostModel:
    return CostModel(model_spec(preset(name)), 2, EPYC)


class World:
    """A scheduler on a clock of its own: steps take exactly what the cost model says."""

    def __init__(self, cost: CostModel, seqs: int = 16, pages: int = 4000, budget: int = 512):
        self.cost, self.now, self.count = cost, 0.0, 0
        self.queue = Scheduler(PagePool(pages + 1, 64), SlotPool(seqs + 1), budget, seqs, LENGTH)
        self.outputs = Outputs()
        self.first: dict[str, float] = {}
        self.arrivals: list[tuple[float, int, int]] = []

    def request(self, prompt: int, output: int, arrival: float | None = None) -> Request:
        self.count += 1
        params = SamplingParams(max_tokens=output, ignore_eos=True)
        at = self.now if arrival is None else arrival
        ids = [prompt, *range(1, prompt)]
        return Request(str(self.count), ids, params, arrival=at)

    def add(self, prompt: int, output: int, arrival: float | None = None) -> Request:
        request = self.request(prompt, output, arrival)
        self.queue.add(request)
        return request

    def step(self) -> None:
        while self.arrivals and self.arrivals[0][0] <= self.now:
            self.add(*self.arrivals.pop(0)[1:])
        plan = self.queue.schedule(self.now)
        self.now += self.cost.seconds(self.cost.load(plan))
        results = [StepResult([0] * e.samples_n, [0.0] * e.samples_n) for e in plan.scheduled]
        self.queue.update(plan, results)
        for entry in plan.scheduled:
            request = entry.seq.request
            if entry.samples:
                self.first.setdefault(request.request_id, self.now)
            if entry.seq.finished:
                self.outputs.finished(entry.seq)

    def until_first(self, request: Request) -> float:
        while request.request_id not in self.first:
            self.step()
        return self.first[request.request_id] - request.arrival


def same_lengths(world: World, length: int) -> None:
    """Replies have all been of that length."""
    for _ in range(40):
        seq = world.request(10, length).sequences[0]
        seq.output_token_ids = [0] * length
        seq.finish_reason = "length"
        world.outputs.finished(seq)


def check(world: World, request: Request, rel: float) -> None:
    guess = ttft(world.queue, world.cost, request, world.now, world.outputs)
    assert guess == pytest.approx(world.until_first(request), rel=rel)


@pytest.mark.parametrize("name", ["160M", "llama-160M", "gemma-4-E2B"])
@pytest.mark.parametrize("prompt", [1, 100, 511, 512, 513, 1024, 5000])
def test_alone(name: str, prompt: int) -> None:
    world = World(cost_model(name))
    check(world, world.add(prompt, 5), rel=0.02)


@pytest.mark.parametrize("prompt", [20, 300, 3000])
def test_while_others_decode(prompt: int) -> None:
    world = World(cost_model())
    for i in range(8):
        world.add(200 + 300 * i, 400)
    for _ in range(40):
        world.step()
    assert all(seq.decoding for seq in world.queue.running)
    check(world, world.add(prompt, 5), rel=0.03)


@pytest.mark.parametrize("sizes", [(3000,), (100,) * 12, (900, 40, 40, 2000), (512, 512)])
def test_behind_others(sizes: tuple[int, ...]) -> None:
    """Some of which have begun: the first is half computed."""
    world = World(cost_model(), seqs=32)
    for size in sizes:
        world.add(size, 200)
    world.step()
    check(world, world.add(300, 5), rel=0.06)


@pytest.mark.parametrize("prompt", [100, 2000])
def test_waiting_for_a_place(prompt: int) -> None:
    world = World(cost_model(), seqs=4)
    same_lengths(world, 60)
    for i in range(4):
        world.add(100 + 10 * i, 60)
    for _ in range(20):
        world.step()
    for _ in range(3):
        world.add(200, 60)
    check(world, world.add(prompt, 5), rel=0.06)


def test_waiting_for_pages() -> None:
    world = World(cost_model(), pages=40)
    same_lengths(world, 80)
    world.add(1200, 80)
    world.add(600, 80)
    for _ in range(10):
        world.step()
    check(world, world.add(1500, 5), rel=0.06)


def test_many_wait() -> None:
    world, rng = World(cost_model(), seqs=32, budget=2048), random.Random(0)
    same_lengths(world, 50)
    for _ in range(400):
        world.add(rng.randrange(20, 900), 50)
    check(world, world.add(300, 5), rel=0.08)


def test_in_a_stream_of_arrivals() -> None:
    """Poisson arrivals at four fifths of what the machine can do."""
    world, rng = World(cost_model(), seqs=32, budget=2048), random.Random(3)
    at, errors = 0.0, []
    rate = 0.8 / (world.cost.solo_ttft(400) + 40 * world.cost.decode_seconds(400))
    requests: list[tuple[float, int, int]] = []
    for _ in range(250):
        at += rng.expovariate(rate)
        requests.append((at, rng.choice([50, 200, 400, 1000]), rng.randrange(20, 60)))
    guesses: list[tuple[Request, float]] = []
    while requests or world.queue.has_unfinished:
        while requests and requests[0][0] <= world.now:
            arrival, prompt, output = requests.pop(0)
            request = world.add(prompt, output, arrival)
            world.outputs.arrived(request, arrival)
            guess = ttft(world.queue, world.cost, request, world.now, world.outputs)
            guesses.append((request, guess))
        if world.queue.has_unfinished:
            world.step()
        elif requests:
            world.now = requests[0][0]
    for request, guess in guesses[50:]:
        errors.append(abs(guess / (world.first[request.request_id] - request.arrival) - 1))
    assert len(errors) == 200
    assert sum(errors) / len(errors) < 0.08


def cached_world(policy: str, seqs: int = 16) -> World:
    """With a prefix cache that keeps states, and the policy of that name."""
    world = World(cost_model(), seqs=seqs)
    settings = EngineSettings(max_num_batched_tokens=512, policy=policy)  # type: ignore[arg-type]
    sizes = PoolSizes(4001, 2 * seqs + 1, seqs)
    spec = model_spec(preset("160M"))
    world.queue = make_scheduler(settings, spec, 2, sizes, LENGTH, world.cost)
    return world


@pytest.mark.parametrize("policy", ["fcfs", "traffic"])
@pytest.mark.parametrize("prompt", [20, 64, 65, 1000, 4000])
def test_with_a_prefix_cache(policy: str, prompt: int) -> None:
    """A prompt is cut at its last page boundary; sent again, little of it is computed."""
    world = cached_world(policy)
    forecaster = Forecaster(world.queue, world.cost)
    taken = []
    for _ in range(2):
        request = world.add(prompt, 5)
        guess = forecaster.arrived(request, world.now)
        taken.append(world.until_first(request))
        assert guess == pytest.approx(taken[-1], rel=0.06)
        while world.queue.has_unfinished:
            world.step()
        forecaster.ended(request.sequences[0])
    assert prompt < 500 or taken[1] < 0.5 * taken[0]
    assert forecaster.outputs.computed_share < 1 or prompt < 65


def test_pages_that_are_only_kept_are_not_waited_for() -> None:
    world = cached_world("fcfs")
    forecaster = Forecaster(world.queue, world.cost)
    pool = world.queue.page_pool
    for length in range(15_000, 14_980, -1):  # until the cache has filled the pool
        world.until_first(world.add(length, 1))
    assert pool.num_free < 40
    world.add(200, 300)
    for _ in range(5):
        world.step()
    request = world.add(3000, 5)
    guess = forecaster.arrived(request, world.now)
    assert guess == pytest.approx(world.until_first(request), rel=0.05)


def test_who_is_due_first_goes_first() -> None:
    world = cached_world("traffic")
    forecaster = Forecaster(world.queue, world.cost)
    for _ in range(4):
        world.add(100, 300)
    for _ in range(10):
        world.step()
    for _ in range(3):  # long prompts, whose targets are far away
        world.add(5000, 5)
    request = world.add(50, 5)
    guess = forecaster.arrived(request, world.now)
    in_turn = ttft(world.queue, world.cost, request, world.now)
    assert guess < 0.2 * in_turn and world.until_first(request) < 0.2 * in_turn


def test_a_long_prompt_that_has_begun_is_passed() -> None:
    world = cached_world("traffic")
    forecaster = Forecaster(world.queue, world.cost)
    world.add(15_000, 5)
    for _ in range(3):
        world.step()
    assert any(not seq.decoding for seq in world.queue.running)
    request = world.add(50, 5)
    guess = forecaster.arrived(request, world.now)
    in_turn = ttft(world.queue, world.cost, request, world.now)
    assert guess < 0.2 * in_turn and world.until_first(request) < 0.2 * in_turn


def test_what_has_passed_since_the_arrival_counts() -> None:
    world = World(cost_model())
    world.now = 5.0
    early, late = world.add(100, 5, arrival=3.0), world.add(100, 5)
    guesses = [ttft(world.queue, world.cost, r, world.now) for r in (early, late)]
    assert guesses[0] > 2.0 > guesses[1] > 0


def test_a_request_that_is_not_queued_yet_comes_last() -> None:
    world = World(cost_model())
    for _ in range(3):
        world.add(400, 20)
    request = world.request(100, 5)
    guess = ttft(world.queue, world.cost, request, world.now)
    world.queue.add(request)
    assert guess == ttft(world.queue, world.cost, request, world.now)
    assert guess == pytest.approx(world.until_first(request), rel=0.05)


def test_cached_tokens_and_boundaries() -> None:
    world = World(cost_model())
    request = world.add(1000, 5)

    def guess(num_cached: int = 0, boundary: int = 0) -> float:
        queue, cost = world.queue, world.cost
        return ttft(queue, cost, request, world.now, num_cached=num_cached, boundary=boundary)

    assert guess(num_cached=960) < 0.3 * guess()
    assert guess(boundary=960) > guess() > guess(num_cached=500) > guess(num_cached=960)
    assert guess(num_cached=999, boundary=960) == guess(num_cached=999)


def test_steps_kept_short_take_longer() -> None:
    world = World(cost_model())
    world.add(500, 100)
    for _ in range(3):
        world.step()
    request = world.add(2000, 5)
    decode = world.cost.solo_tpot(500)

    def guess(pace: float | None) -> float:
        short = None if pace is None else Pace(pace, pace, 0.1, 0.0)
        return ttft(world.queue, world.cost, request, world.now, pace=short)

    assert guess(None) < guess(10 * decode) < guess(3 * decode)
    assert guess(100.0) == guess(None)
    assert guess(1.05 * decode) < guess(3 * decode)  # who decodes is late anyway


def test_lengths_of_replies() -> None:
    outputs, world = Outputs(), World(cost_model())
    free = Request("a", [0] * 10, SamplingParams(max_tokens=None))
    capped = Request("b", [0] * 10, SamplingParams(max_tokens=30))
    assert outputs.expected(free, LENGTH) == USUAL_OUTPUT
    assert outputs.expected(capped, LENGTH) == 30

    def end(length: int, reason: str, most: int) -> None:
        seq = Request("c", [0] * 100, SamplingParams(max_tokens=most)).sequences[0]
        seq.output_token_ids, seq.finish_reason = [0] * length, reason  # type: ignore[assignment]
        outputs.finished(seq, num_cached=75)

    for _ in range(200):
        end(20, "stop", 1000)
    assert outputs.expected(free, LENGTH) == pytest.approx(20, rel=0.01)
    assert 20 <= outputs.expected(capped, LENGTH) < 21
    assert outputs.computed_share == pytest.approx(0.25)
    for _ in range(200):
        end(30, "length", 30)
    assert outputs.expected(capped, LENGTH) == pytest.approx(30, rel=0.01)
    end(0, "abort", 30)
    seq = capped.sequences[0]
    seq.output_token_ids = [0] * 29
    assert outputs.remaining(seq, LENGTH) == 1
    assert world.outputs.computed_share == 1


def test_arrivals_by_the_second() -> None:
    outputs = Outputs()
    request = Request("a", [0] * 100, SamplingParams())
    for i in range(100):
        outputs.arrived(request, i * 0.5)
        outputs.arrived(request, i * 0.5)
    assert outputs.arriving(100.0) == pytest.approx(40_000, rel=0.1)
    assert outputs.arriving(0.1) == 0 == Outputs().arriving(100.0)


def test_a_thousand_waiting_are_looked_at_in_milliseconds() -> None:
    """Counted rather than timed: the cost model is asked a bounded number of times."""
    calls = 0

    class Counting(CostModel):
        def seconds(self, load):  # type: ignore[no-untyped-def]
            nonlocal calls
            calls += 1
            return super().seconds(load)

    world = World(Counting(model_spec(preset("160M")), 2, EPYC), seqs=64, budget=2048)
    for _ in range(1000):
        world.add(300, 50)
    request = world.add(300, 50)
    ttft(world.queue, world.cost, request, world.now)
    assert 0 < calls < 1500


def test_a_prompt_that_has_begun_is_asked_about_again() -> None:
    """What it has computed already is not to come."""
    world = World(cost_model(), budget=512)
    request = world.add(3000, 1)
    world.step()
    world.step()
    assert request.sequences[0].num_computed == 1024
    guess = ttft(world.queue, world.cost, request, request.arrival)
    rest = world.until_first(request) - 2 * (world.now - request.arrival) / 6
    assert guess == pytest.approx(rest, rel=0.1)


def test_decodes_that_are_late_are_not_waited_for() -> None:
    world = cached_world("traffic")
    seqs = [world.add(64, 400).sequences[0] for _ in range(2)]
    while not all(seq.decoding for seq in seqs):
        world.step()
    seqs[0].first_token_at, seqs[1].first_token_at = world.now - 1e3, world.now + 5.0
    request = world.add(100, 1)
    pace = Forecaster(world.queue, world.cost)._pace(request, world.now)
    assert 5.0 < pace.slack < 10.0
    work = world.cost.prefill_seconds(0, 100)
    due = request.due + (request.ttft_target or 0.0)
    assert pace.until == pytest.approx(due - world.now - (request.ttft_target or 0.0) - 2 * work)
