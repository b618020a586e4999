"""Goodput of scheduling by traffic beside first come, first served: the whole table in one command.

    python -m yocolm.bench.goodput                      # simulated, on this machine as calibrated
    python -m yocolm.bench.goodput --hardware h100 --model 3B --json goodput.json
    python -m yocolm.bench.goodput --mix splitwise_conv.csv --length-scale 0.25
    python -m yocolm.bench.goodput --mix uniform --loads 80 --num-prompts 60 --engine 1

Goodput is requests a second that kept both targets: the first token within 5 times, the time a
token within 2 times what the request takes alone on the machine, with nothing cached. For every
mix, ``fcfs`` runs with every token budget; its capacity is the most requests a second that it
completes, with any of them, when all are there at once. Loads are shares of that; arrivals are
drawn by seed. What is compared is ``fcfs`` with the budget whose curve has the highest point.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from yocolm.bench.recording import RequestTimes
from yocolm.bench.report import table
from yocolm.bench.simulated import Setup, set_up, simulate
from yocolm.bench.traces import MIXES, at_rate, mix
from yocolm.engine.hardware import Hardware
from yocolm.engine.settings import EngineSettings, PolicyName
from yocolm.engine.trace import Trace
from yocolm.errors import ConfigError
from yocolm.models.presets import PRESETS, preset
from yocolm.models.spec import model_spec

BUDGETS = (128, 256, 512, 1024, 2048, 4096)
LOADS = (50, 60, 70, 80, 90, 100, 110)
SEEDS = 5
AT_ONCE = 1e6  # requests a second


@dataclass(frozen=True)
class Point:
    """One run: ``rate`` requests a second of a mix (or a trace's file), as ``seed`` draws them; the
    first ``count``, or all."""

    mix: str
    policy: PolicyName
    budget: int
    rate: float
    seed: int
    count: int | None = None
    length_scale: float = 1.0


@dataclass(frozen=True)
class Run:
    """What came of it. ``good``, ``completed``: requests a second that kept both targets, and that
    were completed; ``ttft_met``, ``tpot_met``, ``met``: shares of all requests."""

    good: float
    completed: float
    met: float
    ttft_met: float
    tpot_met: float


Runner = Callable[[Setup, Point], list[RequestTimes]]


def simulated_run(setup: Setup, point: Point) -> list[RequestTimes]:
    """The requests of one run, simulated."""
    return simulate(set_up(setup, point.policy, point.budget), trace_of(point)).requests


def trace_of(point: Point) -> Trace:
    """What arrives in one run."""
    return at_rate(mix(point.mix, point.seed, point.count, point.length_scale), point.rate)


def measure(setup: Setup, point: Point, runner: Runner = simulated_run) -> Run:
    """Run one point."""
    requests = runner(setup, point)
    arrivals = [request.arrival for request in requests]
    ends = [r.arrival + r.e2e for r in requests if r.e2e is not None]
    # A session's turns arrive later where its earlier ones are late: then there was less to do.
    count, planned = len(requests), (len(requests) - 1) / point.rate
    rate = point.rate * min(1.0, planned / max(max(arrivals) - min(arrivals), 1e-9))
    ttft = [r.ttft is not None and r.ttft <= (r.ttft_target or 0) for r in requests]
    tpot = [r.e2e is not None and (r.tpot or 0) <= (r.tpot_target or 0) for r in requests]
    good = sum(a and b for a, b in zip(ttft, tpot, strict=True))
    whole = max(ends, default=0.0) - min(arrivals)
    return Run(
        rate * good / count,
        len(ends) / whole if whole else 0.0,
        good / count,
        sum(ttft) / count,
        sum(tpot) / count,
    )


class Sweep:
    """All runs of one mix, and what they say."""

    def __init__(
        self,
        setup: Setup,
        mix: str,
        budgets: Sequence[int] = BUDGETS,
        loads: Sequence[int] = LOADS,
        seeds: int = SEEDS,
        traffic_budget: int = 2048,
        count: int | None = None,
        length_scale: float = 1.0,
    ) -> None:
        self.setup, self.mix = setup, mix
        self.budgets, self.loads, self.seeds = tuple(budgets), tuple(loads), range(seeds)
        self.traffic_budget, self.count = traffic_budget, count
        self.length_scale = length_scale
        self.capacity, self.capacity_budget = 0.0, 0
        self.runs: dict[tuple[str, int, int], list[Run]] = {}  # by policy, budget, load

    def run(self, pool: ProcessPoolExecutor, say: Callable[[str], None]) -> None:
        """Find the capacity, then run every policy at every load."""
        at_once = {b: self._run(pool, "fcfs", b, AT_ONCE) for b in self.budgets}
        rates = {b: statistics.mean(r.completed for r in runs()) for b, runs in at_once.items()}
        self.capacity_budget = max(rates, key=rates.__getitem__)
        self.capacity = rates[self.capacity_budget]
        say(f"{self.mix}: capacity {self.capacity:.4g} requests/s")
        ways: list[tuple[PolicyName, int]] = [("fcfs", budget) for budget in self.budgets]
        ways.append(("traffic", self.traffic_budget))
        started = {
            (*way, load): self._run(pool, *way, self.rate(load))
            for load in self.loads
            for way in ways
        }
        for key, runs in started.items():
            self.runs[key] = runs()
            say(f"{self.mix}: {key[0]} {key[1]} at {key[2]} %")

    def _run(
        self, pool: ProcessPoolExecutor, policy: PolicyName, budget: int, rate: float
    ) -> Callable[[], list[Run]]:
        points = [Point(self.mix, policy, budget, rate, seed, self.count) for seed in self.seeds]
        futures = [pool.submit(measure, self.setup, point) for point in points]
        return lambda: [future.result() for future in futures]

    def point(self, policy: PolicyName, budget: int, rate: float, seed: int) -> Point:
        return Point(self.mix, policy, budget, rate, seed, self.count, self.length_scale)

    def rate(self, load: int) -> float:
        return self.capacity * load / 100

    def good(self, policy: str, budget: int, load: int) -> float:
        """Mean goodput of the seeds."""
        return statistics.mean(run.good for run in self.runs[policy, budget, load])

    @property
    def best_budget(self) -> int:
        """Of fcfs: whose goodput is highest somewhere."""
        return max(
            self.budgets,
            key=lambda budget: max(self.good("fcfs", budget, load) for load in self.loads),
        )

    @property
    def knee(self) -> int:
        """The load at which fcfs with its best budget has its highest goodput."""
        return max(self.loads, key=lambda load: self.good("fcfs", self.best_budget, load))

    def ratio(self, load: int) -> float:
        """Goodput of traffic over that of fcfs with its best budget."""
        return _over(
            self.good("traffic", self.traffic_budget, load),
            self.good("fcfs", self.best_budget, load),
        )

    def peak_ratio(self) -> float:
        """Highest goodput over highest goodput, wherever they are."""
        highest = max(self.good("traffic", self.traffic_budget, load) for load in self.loads)
        return _over(highest, self.good("fcfs", self.best_budget, self.knee))

    def to_json(self) -> dict[str, Any]:
        return {
            "mix": self.mix,
            "capacity": self.capacity,
            "capacity_budget": self.capacity_budget,
            "best_budget": self.best_budget,
            "knee": self.knee,
            "ratio_at_knee": self.ratio(self.knee),
            "ratio_of_peaks": self.peak_ratio(),
            "runs": [
                {"policy": policy, "budget": budget, "load": load, "seeds": list(map(asdict, runs))}
                for (policy, budget, load), runs in self.runs.items()
            ],
        }

    def text(self) -> str:
        """The curves beside each other."""
        best = self.best_budget
        head = ["load", "requests/s", f"fcfs {best}", "(range)", "first/token kept", "best fcfs"]
        head += ["traffic", "(range)", "first/token kept", "ratio"]
        rows = []
        for load in self.loads:
            highest = max(self.budgets, key=lambda budget: self.good("fcfs", budget, load))
            rows.append(
                [
                    f"{load} %",
                    f"{self.rate(load):.4g}",
                    *_cells(self.runs["fcfs", best, load]),
                    f"{self.good('fcfs', highest, load):.4g} ({highest})",
                    *_cells(self.runs["traffic", self.traffic_budget, load]),
                    f"{self.ratio(load):.2f}",
                ]
            )
        return "\n".join(
            [
                f"{self.mix}: capacity {self.capacity:.4g} requests/s (fcfs, all at once, budget "
                f"{self.capacity_budget}); goodput in requests/s, mean of {len(self.seeds)} seeds",
                "",
                table(head, rows),
                "",
                f"knee of fcfs (budget {best}) at {self.knee} %: traffic over fcfs "
                f"{self.ratio(self.knee):.2f} there, {self.peak_ratio():.2f} peak over peak",
            ]
        )


def _cells(runs: Iterable[Run]) -> list[str]:
    runs = list(runs)
    good = [run.good for run in runs]
    kept = [statistics.mean(run.ttft_met for run in runs)]
    kept.append(statistics.mean(run.tpot_met for run in runs))
    return [
        f"{statistics.mean(good):.4g}",
        f"({min(good):.4g}-{max(good):.4g})",
        "/".join(f"{share:.0%}" for share in kept),
    ]


def _over(ours: float, theirs: float) -> float:
    return ours / theirs if theirs else float("inf") if ours else 1.0


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    setup = Setup(
        preset(options.model.removeprefix("random:")),
        Hardware.load(options.hardware, model_spec(preset(options.model))),
        EngineSettings(max_num_seqs=options.max_num_seqs, kv_memory=options.kv_memory),
    )
    engine = None
    if options.engine:
        engine = importlib.import_module("yocolm.bench.goodput_engine").OnEngine(
            f"random:{options.model}", "bfloat16", options.threads
        )
        setup = replace(setup, hardware=engine.calibrate(setup))
    sweeps, compared = [], []
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        for name in options.mix or MIXES:
            sweep = Sweep(
                *(setup, name, options.budgets, options.loads, options.seeds),
                *(options.traffic_budget, options.num_prompts, options.length_scale),
            )
            sweep.run(pool, _say)
            sweeps.append(sweep)
            print(sweep.text(), end="\n\n", flush=True)
    for sweep in sweeps if engine is not None else ():
        compared += on_engine(engine, sweep, options.engine)
    if options.json is not None:
        result = {"model": options.model, "hardware": asdict(setup.hardware)}
        result["sweeps"] = [sweep.to_json() for sweep in sweeps]
        result["engine"] = compared
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


def on_engine(engine: Any, sweep: Sweep, seeds: int) -> list[dict[str, Any]]:
    """Both policies at every load, with so many of the seeds, in real time; prints as it goes."""
    module = importlib.import_module("yocolm.bench.goodput_engine")
    rows: list[dict[str, Any]] = []
    for load in sweep.loads:
        for seed in range(seeds):
            points = [
                sweep.point("fcfs", sweep.best_budget, sweep.rate(load), seed),
                sweep.point("traffic", sweep.traffic_budget, sweep.rate(load), seed),
            ]
            runs = [(point.policy, point.budget, trace_of(point)) for point in points]
            for row in module.compare(engine, sweep.setup, runs, _say):
                rows.append({"mix": sweep.mix, "load": load, "seed": seed, **row})
    print(module.compared_table(rows), end="\n\n", flush=True)
    return rows


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m yocolm.bench.goodput", description=(__doc__ or "").splitlines()[0]
    )
    add = parser.add_argument
    add("--model", default="160M", choices=PRESETS, help="a preset", metavar="PRESET")
    add("--hardware", default="cpu", help="cpu, h100, h200, or a JSON file")
    names = ", ".join(MIXES)
    add("--mix", action="append", help=f"{names}, or a trace's file; repeatable; default all three")
    add("--length-scale", type=float, default=1.0, help="multiplies all token counts")
    add("--budgets", type=_numbers, default=BUDGETS, help="of fcfs, such as 128,512")
    add("--loads", type=_numbers, default=LOADS, help="in per cent of capacity")
    add("--seeds", type=_number, default=SEEDS, help="so many draws of arrivals")
    add("--num-prompts", type=_number, help="the first requests of each mix only")
    add("--traffic-budget", type=_number, default=2048, help="tokens of a step at most")
    add("--max-num-seqs", type=_number, help="sequences at once")
    add("--kv-memory", help="memory for state, such as 2GiB")
    add("--jobs", type=_number, default=2, help="processes")
    add(
        "--engine",
        type=_number,
        metavar="N",
        help="then run N of the seeds on the real engine as well, in real time, beside the "
        "simulator on this machine as measured at the start",
    )
    add("--threads", type=_number, default=os.cpu_count() or 1, help="of the engine")
    add("--json", type=Path, help="save every run")
    return parser


def _number(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return number


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(_number(part) for part in text.split(","))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ConfigError, OSError) as error:
        sys.exit(f"error: {error}")
