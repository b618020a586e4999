"""Machines as files: what comes with the package, what a user writes, what a calibration leaves."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from yocolm.engine.hardware import (
    CALIBRATED,
    PACKAGED,
    Hardware,
    fingerprint,
    names,
    save,
)
from yocolm.errors import ConfigError
from yocolm.models.presets import preset
from yocolm.models.spec import model_spec

EPYC = Hardware.load("epyc-2core")


def test_data_sheets_say_so() -> None:
    assert set(names()) >= {"h100", "h200", "epyc-2core"}
    h100, h200 = Hardware.load("h100"), Hardware.load("H200")
    assert h100.source == h200.source == "data sheet" and "Not measured" in h100.note
    assert (h100.memory_bytes, h200.memory_bytes) == (80 * 10**9, 141 * 10**9)
    assert h200.weight_bandwidth / h100.weight_bandwidth == pytest.approx(4.8 / 3.35)
    assert h100.weight_bandwidth == pytest.approx(0.8 * 3.35e12)
    assert h100.matrix_rate(4096) == pytest.approx(0.6 * 989e12)
    assert EPYC.source == "measured" and EPYC.device == "cpu"


def test_packaged_files_are_installed() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert '"hardware/*"' in text and PACKAGED.name == "hardware"


@pytest.mark.parametrize("name", names())
def test_files_come_back_as_they_were(name: str) -> None:
    hardware = Hardware.load(name)
    assert Hardware.from_json(hardware.to_json()) == hardware
    spec = model_spec(preset("160M"))
    tables: dict[str, Any] = {
        "model": fingerprint(spec, 2),
        "write_table": ((1, 0.001), (64, 0.01)),
        "read_table": ((1, 0.001), (64, 0.01)),
        "logits_table": ((1, 0.001), (64, 0.01)),
    }
    calibrated = replace(hardware, **tables)
    assert Hardware.from_json(calibrated.to_json()) == calibrated
    assert calibrated.holds_for(spec, 2) and not calibrated.holds_for(spec, 4)
    assert not calibrated.holds_for(model_spec(preset("llama-160M")), 2)
    assert not hardware.holds_for(spec, 2)


def test_rates_between_the_points() -> None:
    hardware = replace(EPYC, matrix_rates=((1, 100.0), (11, 200.0)))
    rates = [hardware.matrix_rate(tokens) for tokens in (1, 6, 11, 1000)]
    assert rates == [100.0, 150.0, 200.0, 200.0]
    assert hardware.matrix_rate(6, dtype_bytes=4) == 75.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_bandwidth": 0}, r"kv_bandwidth=0 must be a number above 0"),
        ({"kv_bandwidth": True}, r"kv_bandwidth=True"),
        ({"kv_bandwidth": "fast"}, r"kv_bandwidth='fast'"),
        ({"kv_bandwidth": float("nan")}, r"kv_bandwidth=nan"),
        ({"attention_rate": float("inf")}, r"attention_rate=inf"),
        ({"step_seconds": -1}, r"step_seconds=-1 must be a number at least 0"),
        ({"memory_bytes": 0}, r"memory_bytes=0"),
        ({"matrix_rates": []}, r"matrix_rates is empty"),
        ({"matrix_rates": [[2, 1.0], [1, 1.0]]}, r"tokens ascending"),
        ({"matrix_rates": [[1, 1.0, 3]]}, r"pairs"),
        ({"write_table": [[1, 0]]}, r"write_table=0 must be a number above 0"),
        ({"write_table": 7}, r"write_table=7"),
        ({"source": "guess"}, r"source='guess' must be one of measured, data sheet, generic"),
        ({"device": "tpu"}, r"device='tpu'"),
        ({"name": 3}, r"name=3 must be text"),
        ({"speed": 1}, r"unknown fields \['speed'\]"),
    ],
)
def test_wrong_values_are_named(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(json.loads(EPYC.to_json()) | change))
    with pytest.raises(ConfigError, match=message) as caught:
        Hardware.load(path)
    assert "mine.json" in str(caught.value)


@pytest.mark.parametrize("text", ["", "[1]", "{", "3", "[" * 100_000, '{"name": "x"}'])
def test_files_that_are_no_machine(text: str) -> None:
    with pytest.raises(ConfigError, match="hardware"):
        Hardware.from_json(text)


@pytest.mark.parametrize("name", ["h300", "", "/nowhere/at/all.json", "a\0b", "."])
def test_unknown_names_list_the_known(name: str) -> None:
    with pytest.raises(ConfigError, match=r"cpu, epyc-2core, h100, h200"):
        Hardware.load(name)


def test_cpu_is_as_calibrated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("YOCOLM_CACHE", str(tmp_path))
    spec = model_spec(preset("160M"))
    assert Hardware.load("cpu") == EPYC
    table = ((1, 0.001), (64, 0.01))
    mine = replace(
        EPYC, name="mine", model=fingerprint(spec, 2), write_table=table, read_table=table
    )
    save(mine, tmp_path / f"{CALIBRATED}a.json")
    other = replace(mine, name="other", model="another")
    save(other, tmp_path / f"{CALIBRATED}b.json")
    os.utime(tmp_path / f"{CALIBRATED}a.json", (1, 1))
    (tmp_path / f"{CALIBRATED}c.json").write_text("{")
    save(Hardware.load("h100"), tmp_path / f"{CALIBRATED}d.json")
    assert Hardware.load("cpu").name == "other"  # the newest of this kind of device
    assert Hardware.load("cpu", spec, 2).name == "mine"  # the model's own
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_generic_figures_say_so() -> None:
    cpu, gpu = Hardware.generic(), Hardware.generic("cuda:0")
    assert (cpu.device, gpu.device) == ("cpu", "cuda")
    assert cpu.source == gpu.source == "generic" and "not calibrated" in cpu.note


@pytest.mark.parametrize("name", ["weight_bandwidth", "step_seconds", "memory_bytes"])
def test_integers_beyond_all_floats_are_refused(name: str, tmp_path: Path) -> None:
    data = json.loads(Hardware.load("epyc-2core").to_json())
    data[name] = 10**400
    path = tmp_path / "hardware.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ConfigError):
        Hardware.load(path)
