"""Calibration: times the real halves, leaves no trace in the engine, and is remembered."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from tiny import ONE_OF_EACH, finish, make_engine
from yocolm import SamplingParams
from yocolm.engine import calibrate, cost
from yocolm.engine.calibrate import calibrated, calibration_path, remember
from yocolm.engine.cost import CostModel, StepLoad
from yocolm.engine.engine import Engine
from yocolm.engine.hardware import Hardware
from yocolm.engine.meter import Job, Meter, Pools, Timing, usual


def pools_of(engine: Engine) -> Pools:
    scheduler = engine.scheduler
    pages, slots = scheduler.page_pool, scheduler.slot_pool
    return Pools(
        pages.size,
        slots.size,
        pages.page_size,
        scheduler.max_num_batched_tokens,
        scheduler.max_model_len,
    )


def engine_of(name: str = "retention", **settings: Any) -> Engine:
    return make_engine(name, **{"seqs": 4, "page_size": 8, **settings})


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "LIMIT", 0.4)


def answers(engine: Engine) -> list[list[int]]:
    for i in range(3):
        prompt = [(7 * i + j) % 20 for j in range(30 + i)]
        engine.add_request(str(i), prompt, SamplingParams(max_tokens=8, seed=i))
    done = finish(engine)
    return [done[str(i)].outputs[0].token_ids for i in range(3)]


@pytest.mark.parametrize("name", [*ONE_OF_EACH, "gemma3n-windows", "gemma4-experts"])
def test_an_engine_answers_as_before(name: str, tmp_path: Path) -> None:
    engine, other = engine_of(name), engine_of(name)
    hardware = calibrated(engine.runner, engine.spec, pools_of(engine), folder=tmp_path)
    assert hardware.source == "measured" and hardware.holds_for(engine.spec, 4)
    engine.check()
    assert engine.scheduler.page_pool.num_free == engine.scheduler.page_pool.capacity
    assert answers(engine) == answers(other)
    assert [n for n, _ in hardware.logits_table][:3] == [1, 2, 4]
    assert hardware.write_table[-1][0] >= 64 and hardware.read_table[0][0] == 1
    cost = CostModel(engine.spec, 4, hardware)
    load = StepLoad()
    cost.add(load, 10, 1, 1, 1)
    assert 0 < cost.seconds(load) < 1


def test_what_was_measured_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of()
    first = calibrated(engine.runner, engine.spec, pools_of(engine), folder=tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Meter, "measure", lambda *_: pytest.fail("measured again"))
        again = calibrated(engine.runner, engine.spec, pools_of(engine), folder=tmp_path)
    assert again == first
    path = calibration_path(engine.runner, engine.spec, tmp_path)
    assert path is not None and Hardware.load(path) == first
    fresh = calibrated(engine.runner, engine.spec, pools_of(engine), folder=tmp_path, refresh=True)
    assert fresh != first and Hardware.load(path) == fresh


@pytest.mark.parametrize("damage", ["", "{", "[]", "foreign", "other"])
def test_files_that_do_not_fit_are_measured_anew(damage: str, tmp_path: Path) -> None:
    engine = engine_of()
    path = calibration_path(engine.runner, engine.spec, tmp_path)
    assert path is not None
    if damage == "foreign":  # of another version: a field that nobody knows
        fields = json.loads(Hardware.generic().to_json())
        damage = json.dumps({**fields, "temperature": 300})
    elif damage == "other":  # of another model
        damage = Hardware.generic().to_json()
    path.write_text(damage)
    hardware = calibrated(engine.runner, engine.spec, pools_of(engine), folder=tmp_path)
    assert hardware.holds_for(engine.spec, 4) and Hardware.load(path) == hardware


def test_models_and_threads_have_files_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, other = engine_of(), engine_of("llama")
    path = calibration_path(engine.runner, engine.spec, tmp_path)
    assert path != calibration_path(other.runner, other.spec, tmp_path)
    monkeypatch.setattr(calibrate.torch, "get_num_threads", lambda: 77)
    assert path != calibration_path(engine.runner, engine.spec, tmp_path)


def test_a_folder_that_cannot_be_written_only_costs_the_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING, "yocolm.engine"):
        remember(Hardware.generic(), tmp_path / "file" / "below" / "x.json")
        remember(Hardware.generic(), None)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "not kept" in caplog.text and "YOCOLM_CACHE" in caplog.text


def test_pools_too_small_to_measure_in(tmp_path: Path) -> None:
    engine = engine_of(length=40)
    hardware = calibrated(engine.runner, engine.spec, pools_of(engine), folder=tmp_path)
    assert hardware.source == "generic" and not list(tmp_path.iterdir())
    small = engine_of(seqs=1, budget=8, length=80)
    hardware = calibrated(small.runner, small.spec, pools_of(small), folder=tmp_path)
    cost, loads = CostModel(small.spec, 4, hardware), [StepLoad(), StepLoad()]
    cost.add(loads[0], 0, 2, 0)
    cost.add(loads[1], 0, 2048, 0)
    assert 0 < cost.seconds(loads[0]) < cost.seconds(loads[1])  # by more on a quiet machine
    cost.observe(loads[1], cost.predict(loads[1]))
    cost.refined()


def test_nothing_is_begun_that_does_not_fit_the_time() -> None:
    meter = Meter(engine_of().runner, Pools(10, 3, 8, 64, 64))
    calls: list[str] = []

    def job(name: str, expected: float) -> Job:
        def once() -> Timing:
            calls.append(name)
            return Timing(float(len(calls)))

        return Job(once, expected)

    timings = meter.measure({"a": job("a", 1e-9), "b": job("b", 1e9)}, limit=1.0)
    assert set(timings) == {"a"} and set(calls) == {"a"}
    assert meter.measure({"c": job("c", 1e9)}, limit=0.0).keys() == {"c"}  # the first is needed


def test_what_disturbed_a_measurement_does_not_count() -> None:
    timings = [Timing(write=1.0 + 0.01 * i, sample=2.0) for i in range(4)] + [Timing(50.0, 50.0)]
    assert usual(timings) == Timing(write=1.01, sample=2.0)


def test_all_families_are_measured_without_state_of_their_own() -> None:
    """The scan and the states are read off the specification, whatever stores it has."""
    for name in ONE_OF_EACH:
        engine = engine_of(name)
        one = calibrate._Calibration(
            engine.runner, engine.spec, pools_of(engine), Hardware.generic()
        )
        recurrent = sum(store.bytes_per_slot(4) for store in engine.spec.recurrent_stores)
        assert one.state == 2 * recurrent
        assert one.near_read + one.near_write > 0 and one._jobs()


def test_what_was_learned_is_remembered_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("YOCOLM_CACHE", str(tmp_path))
    monkeypatch.setattr(cost, "MANY_STEPS", 3)
    engine = engine_of()
    engine.calibrate()
    measured = engine.cost.hardware
    engine.close()
    path = calibration_path(engine.runner, engine.spec)
    assert path is not None and calibrate.read_calibration(path) == measured, "nothing learned"
    engine.watch.learns = True
    answers(engine)
    engine.close()
    kept = calibrate.read_calibration(path)
    assert kept is not None and kept != measured
    assert kept == engine.cost.refined() and kept.holds_for(engine.spec, 4)
    again = engine_of()
    again.calibrate()
    assert again.cost.hardware == kept
