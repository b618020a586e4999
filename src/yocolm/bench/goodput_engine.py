"""Points of the goodput sweep on the real engine, in real time, beside the simulator's answer."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch

from yocolm.bench.recording import RequestTimes, quantile
from yocolm.bench.report import table
from yocolm.bench.serving import Replay
from yocolm.bench.simulated import Setup, Solo, set_up, simulate
from yocolm.engine.engine import Engine
from yocolm.engine.hardware import Hardware
from yocolm.engine.settings import PolicyName
from yocolm.engine.trace import Trace, TraceRequest
from yocolm.models.base import CausalLM
from yocolm.models.registry import load_model

WARM_UP = [TraceRequest(0.1 * i, 64 * 2 ** (i % 5), 24) for i in range(15)]
FIGURES = ("ttft p50", "ttft p99", "tpot p50", "tpot p99", "requests/s", "kept both")


class OnEngine:
    """Engines of one model on the CPU, for setups that differ in their settings.

    ``hardware``: this machine, as measured with this model at the start and refined by every run.
    """

    def __init__(self, model: str, dtype: str, threads: int) -> None:
        torch.set_num_threads(threads)
        module, self._config = load_model(model, dtype, "cpu", packed=True)
        self._module = cast(CausalLM, module)
        self.hardware: Hardware | None = None

    def calibrate(self, setup: Setup) -> Hardware:
        """Measure the machine, and refine that by a short run."""
        engine = self._engine(setup)
        engine.calibrate(refresh=True)
        Replay(engine, WARM_UP).run()
        self.hardware = engine.cost.refined()
        engine.close()
        return self.hardware

    def run(self, setup: Setup, trace: Trace) -> list[RequestTimes]:
        """Replay ``trace``."""
        engine = self._engine(setup)
        recording = Replay(engine, trace).run()
        self.hardware = engine.cost.refined()
        engine.close()
        return recording.requests

    def _engine(self, setup: Setup) -> Engine:
        cost = None if self.hardware is None else replace(setup, hardware=self.hardware).cost()
        settings = replace(setup.settings, kv_memory=setup.kv_memory())
        return Engine(self._module, self._config, settings=settings, cost=cost)


def compare(
    engine: OnEngine,
    setup: Setup,
    points: Sequence[tuple[PolicyName, int, Trace]],
    say: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Run every (policy, budget, trace) on the engine, and simulate it: on the machine as it was
    known before, and as the run itself has made it known. Figures of all three. Targets are those
    of the machine as it was known at first, for all runs."""
    rows = []
    solo = Solo(replace(setup, hardware=engine.hardware or setup.hardware))
    for policy, budget, trace in points:
        one = replace(set_up(setup, policy, budget), hardware=engine.hardware or setup.hardware)
        say(f"engine: {policy} {budget}, {len(trace)} requests in {trace[-1].arrival:.0f} s")
        trace = with_targets(trace, solo)
        real = engine.run(one, trace)
        refined = replace(one, hardware=engine.hardware or setup.hardware)
        rows.append(
            {
                "policy": policy,
                "budget": budget,
                "engine": figures(real),
                "before": figures(simulate(one, trace).requests),
                "refined": figures(simulate(refined, trace).requests),
            }
        )
    return rows


def with_targets(trace: Trace, solo: Solo) -> Trace:
    """The same requests, each with the targets that follow from what it takes alone."""
    targets = [solo.targets(request.prompt_tokens, request.output_tokens) for request in trace]
    return [
        replace(request, ttft_target=ttft, tpot_target=tpot)
        for request, (ttft, tpot) in zip(trace, targets, strict=True)
    ]


def figures(requests: Sequence[RequestTimes]) -> dict[str, float]:
    """By FIGURES; seconds."""
    ttft = sorted(r.ttft for r in requests if r.ttft is not None)
    tpot = sorted(r.tpot for r in requests if r.tpot is not None)
    ends = [r.arrival + r.e2e for r in requests if r.e2e is not None]
    seconds = max(ends, default=0.0) - min(r.arrival for r in requests)
    values = [quantile(of, share) if of else 0.0 for of in (ttft, tpot) for share in (0.5, 0.99)]
    values.append(len(ends) / seconds if seconds > 0 else 0.0)
    values.append(statistics.mean(bool(r.meets) for r in requests))
    return dict(zip(FIGURES, values, strict=True))


def compared_table(rows: Sequence[dict[str, Any]]) -> str:
    """Three lines for each run: the engine, and how far the simulator was off."""
    lines = []
    for row in rows:
        where = [str(row[name]) for name in ("mix", "load", "policy", "budget") if name in row]
        lines.append([" ".join(where), *(f"{row['engine'][name]:.3g}" for name in FIGURES)])
        for name in ("before", "refined"):
            lines.append([f"  simulated, {name}", *_cells(row["engine"], row[name])])
    return table(["engine", *FIGURES], lines)


def _cells(real: dict[str, float], simulated: dict[str, float]) -> list[str]:
    return [
        f"{simulated[name]:.3g}"
        + (f" ({simulated[name] / real[name] - 1:+.0%})" if real[name] else "")
        for name in FIGURES
    ]
