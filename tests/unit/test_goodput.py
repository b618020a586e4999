"""The goodput sweep: what a run counts, which budget and knee it picks, and its one command."""

import json
from concurrent.futures import Future
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from yocolm.bench import goodput
from yocolm.bench.goodput import Point, Run, Sweep, main, measure
from yocolm.bench.goodput_engine import compare, compared_table, figures
from yocolm.bench.recording import RequestTimes
from yocolm.bench.simulated import Setup, simulate
from yocolm.bench.traces import MIXES, uniform
from yocolm.engine.hardware import Hardware
from yocolm.engine.settings import EngineSettings
from yocolm.engine.trace import Trace
from yocolm.models.presets import preset


class Here:
    """A pool of processes that is this one."""

    def submit(self, work: Any, *arguments: Any) -> Future:
        future: Future = Future()
        future.set_result(work(*arguments))
        return future


def setup() -> Setup:
    return Setup(preset("160M"), Hardware.load("epyc-2core"), EngineSettings())


def request(arrival: float, ttft: float | None, tpot: float, **kept: Any) -> RequestTimes:
    times = RequestTimes(arrival, 10, 11, ttft=ttft, ttft_target=1.0, tpot_target=0.1, **kept)
    times.e2e = None if ttft is None else ttft + 10 * tpot
    return times


def test_a_run_counts_what_kept_both_targets() -> None:
    requests = [
        request(0.0, 0.5, 0.05),
        request(1.0, 2.0, 0.05),
        request(2.0, 0.5, 0.2),
        request(3.0, None, 0.0, error="no"),
        request(4.0, 1.0, 0.05),
    ]
    run = measure(setup(), Point("uniform", "fcfs", 512, 1.0, 0), lambda *_: requests)
    assert run == Run(2 / 5, 4 / 5.5, 2 / 5, 3 / 5, 3 / 5)


def test_turns_that_come_later_than_planned_are_fewer_a_second() -> None:
    requests = [request(0.0, 0.5, 0.05), request(1.0, 0.5, 0.05), request(4.0, 0.5, 0.05)]
    run = measure(setup(), Point("agent", "fcfs", 512, 1.0, 0), lambda *_: requests)
    assert (run.met, run.good) == (1.0, 0.5)


def test_a_single_token_is_kept_by_its_first() -> None:
    one = RequestTimes(0.0, 10, 1, ttft=0.5, e2e=0.5, ttft_target=1.0, tpot_target=1e-9)
    run = measure(setup(), Point("uniform", "fcfs", 512, 1.0, 0), lambda *_: [one, one])
    assert run.met == 1.0


class FakeEngine:
    """Takes twice as long as was known before, and says so afterwards."""

    def __init__(self, known: Hardware) -> None:
        self.hardware = known

    def run(self, setup: Setup, trace: Trace) -> list[RequestTimes]:
        slow = {name: getattr(self.hardware, name) / 2 for name in RATES}
        slow["matrix_rates"] = tuple((n, rate / 2) for n, rate in self.hardware.matrix_rates)
        slow |= {name: 2 * getattr(self.hardware, name) for name in SECONDS}
        self.hardware = replace(self.hardware, **slow)
        return simulate(replace(setup, hardware=self.hardware), trace).requests


RATES = "weight_bandwidth kv_bandwidth state_bandwidth attention_rate draw_elements".split()
SECONDS = [f.name for f in fields(Hardware) if f.name.endswith("_seconds")]


def test_the_engine_is_set_beside_what_was_simulated() -> None:
    engine = FakeEngine(setup().hardware)
    trace = uniform(0, count=8)
    said: list[str] = []
    (row,) = compare(engine, setup(), [("fcfs", 512, trace)], said.append)  # pyright: ignore
    assert row["refined"] == row["engine"]
    for name in ("ttft p50", "tpot p50"):  # at least twice as long, and queues beside it
        assert 0.3 < row["before"][name] / row["engine"][name] < 0.52
    text = compared_table([{"mix": "uniform", "load": 80, **row}])
    assert "uniform 80 fcfs 512" in text and "(+0%)" in text and "(-" in text
    assert said == [f"engine: fcfs 512, 8 requests in {trace[-1].arrival:.0f} s"]


def test_figures_of_requests() -> None:
    found = figures([request(0.0, 0.5, 0.05), request(1.0, 1.5, 0.15), request(2.0, None, 0.0)])
    assert found["ttft p50"] == pytest.approx(1.0) and found["tpot p99"] == pytest.approx(0.149)
    assert found["requests/s"] == pytest.approx(2 / 4.0)
    assert found["kept both"] == pytest.approx(1 / 3)


def made_up(sweep: Sweep, curves: dict[tuple[str, int], list[float]]) -> Sweep:
    sweep.capacity = 2.0
    for way, values in curves.items():
        for load, value in zip(sweep.loads, values, strict=True):
            sweep.runs[(*way, load)] = [Run(value * f, 1, 1, 1, 1) for f in (0.5, 1.5)]
    return sweep


def test_budget_knee_and_ratios_are_those_of_the_curves() -> None:
    sweep = Sweep(setup(), "uniform", budgets=(128, 512), loads=(50, 80, 110), seeds=2)
    curves = {
        ("fcfs", 128): [0.9, 0.5, 0.1],
        ("fcfs", 512): [0.8, 1.0, 0.3],
        ("traffic", 2048): [0.9, 1.5, 1.6],
    }
    made_up(sweep, curves)
    assert (sweep.best_budget, sweep.knee) == (512, 80)
    assert sweep.ratio(80) == pytest.approx(1.5)
    assert sweep.ratio(50) == pytest.approx(0.9 / 0.8)
    assert sweep.peak_ratio() == pytest.approx(1.6)
    lines = sweep.text().splitlines()
    assert "0.9 (128)" in next(line for line in lines if line.startswith("50 %"))
    assert "1.50 there, 1.60 peak over peak" in lines[-1]
    told = json.loads(json.dumps(sweep.to_json()))
    assert (told["knee"], len(told["runs"])) == (80, 9)


def test_no_goodput_at_all_divides_nothing() -> None:
    sweep = Sweep(setup(), "uniform", budgets=(128,), loads=(50,), seeds=1)
    made_up(sweep, {("fcfs", 128): [0.0], ("traffic", 2048): [0.0]})
    assert sweep.ratio(50) == 1.0


def test_a_sweep_runs_all_policies_at_shares_of_the_capacity(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(MIXES, "uniform", lambda seed: uniform(seed, count=25))
    sweep = Sweep(setup(), "uniform", budgets=(256, 1024), loads=(50, 110), seeds=2)
    said: list[str] = []
    sweep.run(Here(), said.append)  # pyright: ignore[reportArgumentType]
    assert len(sweep.runs) == 2 * 3 and len(said) == 1 + 2 * 3
    assert all(len(runs) == 2 for runs in sweep.runs.values())
    best = sweep.good("fcfs", sweep.best_budget, 50)
    assert 0 < best <= sweep.rate(50) * 1.0001
    assert 1.0 < sweep.capacity < 10.0  # of this model on that machine
    # What arrives at half the capacity is completed at that rate, whoever schedules.
    for policy, budget in (("fcfs", 1024), ("traffic", 2048)):
        runs = sweep.runs[policy, budget, 50]
        assert all(run.completed == pytest.approx(sweep.rate(50), rel=0.5) for run in runs)


def test_one_command_prints_and_saves_the_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    class Pool(Here):
        def __init__(self, jobs: int, context: object) -> None:
            assert jobs == 2

        def __enter__(self) -> "Pool":
            return self

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(goodput, "ProcessPoolExecutor", Pool)
    monkeypatch.setitem(MIXES, "uniform", lambda seed: uniform(seed, count=10))
    path = tmp_path / "goodput.json"
    options = ["--hardware", "epyc-2core", "--mix", "uniform", "--budgets", "256", "--loads"]
    assert main([*options, "50,100", "--seeds", "1", "--json", str(path)]) == 0
    assert "knee of fcfs (budget 256)" in capsys.readouterr().out
    saved = json.loads(path.read_text())
    assert saved["hardware"]["name"] == "epyc-2core"
    assert [len(sweep["runs"]) for sweep in saved["sweeps"]] == [4]
