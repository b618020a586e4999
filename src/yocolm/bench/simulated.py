"""`yocolm simulate`: what a machine would make of a trace, told in a second. No torch."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

from yocolm.bench.recording import RequestTimes, latency
from yocolm.bench.report import table
from yocolm.config import ModelConfig
from yocolm.engine.cost import BUDGET, CostModel
from yocolm.engine.hardware import Hardware
from yocolm.engine.settings import (
    SWAP_SPACE,
    EngineSettings,
    PolicyName,
    parse_bytes,
    size_pools,
)
from yocolm.engine.setup import make_scheduler
from yocolm.engine.simulate import Outcome, Simulation
from yocolm.engine.steps import Observer
from yocolm.engine.swap_space import SwapSpace
from yocolm.engine.trace import Trace
from yocolm.errors import ConfigError
from yocolm.models.spec import ModelSpec, model_spec

TTFT_FACTOR, TPOT_FACTOR = 5.0, 2.0  # targets that nobody has given, in times of the solo values
GPU_SHARE = 0.9  # of a GPU's memory, for weights and state together


@dataclass(frozen=True)
class Setup:
    """A model on a machine with an engine's settings."""

    config: ModelConfig
    hardware: Hardware
    settings: EngineSettings
    dtype_bytes: int = 2

    @property
    def spec(self) -> ModelSpec:
        return model_spec(self.config)

    @property
    def max_model_len(self) -> int:
        return self.settings.max_model_len or self.config.max_position_embeddings

    def cost(self) -> CostModel:
        settings = self.settings
        return CostModel(self.spec, self.dtype_bytes, self.hardware, settings.fast_prefill)

    def kv_memory(self) -> int:
        """Bytes for all state: as set, else what a GPU has beside the weights and a tenth, or a
        quarter of what a CPU has. Raises ConfigError if the weights do not fit."""
        asked = parse_bytes(self.settings.kv_memory)
        weights = self.spec.weight_bytes(self.dtype_bytes)
        memory = self.hardware.memory_bytes
        on_gpu = self.hardware.device == "cuda"
        left = int(GPU_SHARE * memory) - weights if on_gpu else (memory - weights) // 4
        if left <= 0:
            raise ConfigError(
                f"weights of {weights} bytes leave nothing of the {memory} bytes of "
                f"{self.hardware.name}: choose a smaller model or larger hardware"
            )
        return left if asked is None else asked


def set_up(setup: Setup, policy: PolicyName, budget: int) -> Setup:
    """``setup`` with another policy and budget of tokens a step."""
    settings = replace(setup.settings, policy=policy, max_num_batched_tokens=budget)
    return replace(setup, settings=settings)


@dataclass
class Simulated:
    """A trace that has been simulated. ``seconds``: of the machine that was simulated, from the
    first arrival to the last end; ``took``: to simulate them."""

    setup: Setup
    requests: list[RequestTimes]
    outcome: Outcome
    seconds: float
    took: float


def simulate(
    setup: Setup,
    trace: Trace,
    observer: Observer | None = None,
    bulk: bool = True,
    cost: CostModel | None = None,
) -> Simulated:
    """Run ``trace`` through a new scheduler. Raises ConfigError if the settings cannot be.

    ``cost``: tells the time; else that of ``setup``.
    """
    began = time.perf_counter()
    cost = cost or setup.cost()
    spec, settings, size = setup.spec, setup.settings, setup.dtype_bytes
    settings = replace(settings, kv_memory=setup.kv_memory())
    sizes = size_pools(settings, spec, size, setup.max_model_len, 0)
    page_bytes, slot_bytes = spec.page_bytes(settings.page_size, size), spec.slot_bytes(size)
    asked = parse_bytes(settings.swap_space, "swap_space", zero=True)
    room = SWAP_SPACE if asked is None else asked
    room = room if room >= page_bytes + slot_bytes else 0
    space = SwapSpace.sized(room, page_bytes, slot_bytes, sizes.num_seqs)
    scheduler = make_scheduler(settings, spec, size, sizes, setup.max_model_len, cost, space)
    simulation = Simulation(scheduler, cost, trace, observer, bulk)
    with _without_collector():
        outcome = simulation.run()
    seconds = simulation.now - (trace[0].arrival if trace else 0.0)
    took = time.perf_counter() - began
    return Simulated(setup, request_times(trace, outcome, setup), outcome, seconds, took)


@contextmanager
def _without_collector() -> Iterator[None]:
    """Nothing circular is left behind, and looking for it takes a quarter of the time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def request_times(trace: Trace, outcome: Outcome, setup: Setup) -> list[RequestTimes]:
    """Times and targets of every request."""
    solo = Solo(setup)
    times = []
    for request, served in zip(trace, outcome.served, strict=True):
        one = RequestTimes(
            served.arrival,
            request.prompt_tokens,
            cached_tokens=served.num_cached,
            preemptions=served.num_preemptions,
            error=served.error,
        )
        one.ttft_target, one.tpot_target = solo.targets(
            request.prompt_tokens, request.output_tokens
        )
        one.ttft_target = request.ttft_target or setup.settings.ttft_target or one.ttft_target
        one.tpot_target = request.tpot_target or setup.settings.tpot_target or one.tpot_target
        if served.error is None and served.first_token is not None and served.ended is not None:
            one.output_tokens = request.output_tokens
            one.ttft, one.e2e = served.first_token - served.arrival, served.ended - served.arrival
        times.append(one)
    return times


class Solo:
    """What requests take that are alone on the machine, with nothing cached; remembered."""

    def __init__(self, setup: Setup) -> None:
        self._cost = setup.cost()
        self._ttft: dict[int, float] = {}

    def targets(self, prompt_tokens: int, output_tokens: int) -> tuple[float, float]:
        """Seconds to the first token and between tokens that are good enough."""
        ttft = self._ttft.get(prompt_tokens)
        if ttft is None:
            ttft = self._ttft[prompt_tokens] = self._cost.solo_ttft(prompt_tokens, BUDGET)
        tpot = self._cost.solo_tpot(prompt_tokens + output_tokens // 2)
        return TTFT_FACTOR * ttft, TPOT_FACTOR * tpot


def summary(simulated: Simulated) -> dict[str, Any]:
    """Latencies (seconds), rates (a second, from the first arrival to the last end), pools."""
    requests, outcome = simulated.requests, simulated.outcome
    done = [r for r in requests if r.ttft is not None and r.e2e is not None]
    rate = 1 / simulated.seconds if simulated.seconds else 0.0
    prompt, output = (sum(getattr(r, n + "_tokens") for r in done) for n in ("prompt", "output"))
    met = sum(bool(r.meets) for r in requests)
    gaps = outcome.gaps
    itl = dict(zip(("p50", "p90", "p99", "max"), gaps.percentiles((50, 90, 99, 100)), strict=True))
    hardware, busy = simulated.setup.hardware, asdict(outcome.busy)
    return {
        "hardware": hardware.name,
        "hardware_source": hardware.source,
        "policy": simulated.setup.settings.policy,
        "seconds": simulated.seconds,
        "took": simulated.took,
        "requests": len(requests),
        "completed": len(done),
        "failed": sum(r.error is not None for r in requests),
        "first_error": next((r.error for r in requests if r.error is not None), None),
        "request_throughput": len(done) * rate,
        "output_throughput": output * rate,
        "total_throughput": (prompt + output) * rate,
        "met_targets": met / len(requests) if requests else 0.0,
        "goodput": met * rate,
        "ttft": latency([r.ttft for r in done if r.ttft is not None]),
        "tpot": latency([r.tpot for r in done if r.tpot is not None]),
        "itl": {"count": gaps.count, "mean": gaps.mean, **itl} if gaps.count else None,
        "e2e": latency([r.e2e for r in done if r.e2e is not None]),
        "steps": outcome.steps,
        "bulk_steps": outcome.bulk_steps,
        "busy": busy,
        "busy_share": sum(busy.values()) * rate,
        "skipped_share": 1 - outcome.rows / outcome.tokens if outcome.tokens else 0.0,
        "cached_share": sum(r.cached_tokens for r in done) / prompt if prompt else 0.0,
        "preemptions": outcome.preemptions,
        "swaps": outcome.swaps,
        "recomputed_tokens": outcome.recomputed_tokens,
        "peak": asdict(outcome.peak) if outcome.peak else None,
    }


def summary_table(found: dict[str, Any]) -> str:
    """For people."""
    head = ["seconds", "mean", "p50", "p90", "p99", "max"]
    rows = [
        [label, *(f"{found[key][name]:.4g}" for name in head[1:])]
        for key, label in (
            ("ttft", "to the first token"),
            ("tpot", "a token after it"),
            ("itl", "between tokens"),
            ("e2e", "to the end"),
        )
        if found[key]
    ]
    peak = found["peak"]
    lines = [
        f"{found['requests']} requests in {found['seconds']:.1f} s on {found['hardware']} "
        f"({found['hardware_source']}), policy {found['policy']}: {found['completed']} completed, "
        f"{found['failed']} failed; simulated in {found['took']:.1f} s",
        "",
        table(head, rows),
        "",
        f"throughput       {found['request_throughput']:.4g} requests/s, "
        f"{found['output_throughput']:.4g} tokens/s out, {found['total_throughput']:.4g} in all",
        f"goodput          {found['goodput']:.4g} requests/s: {found['met_targets']:.1%} kept both "
        "targets",
        f"busy             {found['busy_share']:.1%} of the time, {found['steps']} steps; the "
        f"second half skipped {found['skipped_share']:.1%} of the tokens",
        f"prefix cache     {found['cached_share']:.1%} of the prompt tokens",
        f"pages, at most   {peak['pages_used']} used and {peak['pages_kept']} kept of "
        f"{peak['num_pages']}",
        f"slots, at most   {peak['slots_used']} used and {peak['slots_kept']} kept of "
        f"{peak['num_slots']}",
        f"preemptions      {found['preemptions']}: {found['swaps']} swapped, "
        f"{found['recomputed_tokens']} tokens computed anew",
    ]
    if found["first_error"]:
        lines.append(f"first failure    {found['first_error']}")
    return "\n".join(lines)
