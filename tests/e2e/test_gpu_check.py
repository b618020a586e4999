"""The script for machines with a GPU, run on the CPU at a size that takes seconds."""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from yocolm.models.presets import preset

SCRIPT = Path(__file__).parents[2] / "bench" / "gpu_check.py"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_operations_agree(script: ModuleType) -> None:
    rows = script.check_ops(CPU)
    assert len(rows) == 6 and all(row.passed for row in rows)


@pytest.mark.parametrize("name", ["160M", "llama-160M"])
def test_paths_agree_and_speed_is_measured(script: ModuleType, name: str) -> None:
    small = replace(preset(name), vocab_size=512)
    rows = script.check_paths(CPU, small)
    assert len(rows) == 2 and all(row.passed for row in rows)
    rows = script.measure(CPU, name, script.tiny(small), prompt=20, steps=2)
    assert [row.value.split()[1] for row in rows] == ["tok/s", "ms/step"] * 2


def test_a_difference_fails_the_check(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = script.causal_attention
    monkeypatch.setattr(script, "causal_attention", lambda *args: wrong(*args) * 1.5)
    assert [row.name for row in script.check_ops(CPU) if not row.passed] == [
        "causal attention, torch.float32",
        "causal attention, torch.bfloat16",
    ]
