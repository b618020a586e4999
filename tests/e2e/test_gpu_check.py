"""The script for machines with a GPU, run on the CPU at a size that takes seconds."""

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from yocolm.models.presets import preset

BENCH = Path(__file__).parents[2] / "bench"
CPU = torch.device("cpu")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCH)
    return importlib.import_module("gpu_check")


def test_operations_agree(script: ModuleType) -> None:
    rows = script.check_ops(CPU) + script.check_kernels(CPU, torch.float32)
    assert len(rows) == 10 and all(row.passed for row in rows)


@pytest.mark.parametrize("name", ["160M", "llama-160M", "gemma-4-E2B", "gemma-3n-E2B"])
def test_paths_agree(script: ModuleType, name: str) -> None:
    rows = script.check_paths(CPU, name, script.tiny(preset(name)))
    assert len(rows) == 6 and all(row.passed for row in rows)
    assert {row.name.split(", ")[1] for row in rows} == {"eager", "replay"}


def test_a_difference_fails_the_check(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = script.causal_attention
    monkeypatch.setattr(script, "causal_attention", lambda *args: wrong(*args) * 1.5)
    assert [row.name for row in script.check_ops(CPU) if not row.passed] == [
        "causal attention, float32",
        "causal attention, bfloat16",
    ]


def test_the_whole_script(
    script: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Speed of the smallest models; what comes after the budget is skipped, and said to be."""
    monkeypatch.setattr(script, "FAMILIES", ("160M",))
    monkeypatch.setattr(importlib.import_module("gpu_speed"), "SPEED", ("gemma-4-E2B",))
    options = ["--device", "cpu", "--small", "--lengths", "24,48", "--json", str(tmp_path / "rows")]
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", *options, "--budget", "300"])
    assert script.main() == 0
    rows = {row["name"]: row for row in json.loads((tmp_path / "rows").read_text())["rows"]}
    for length in (24, 48):
        for what in ("TTFT", "TTFT, fast prefill off", "decode step captured"):
            assert rows[f"gemma-4-E2B, {length} tokens, {what}"]["value"] > 0
    assert rows["gemma-4-E2B, 2048 tokens, TTFT"]["value"] > 0 and "GB/s" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", *options, "--budget", "0"])
    assert script.main() == 0
    out = capsys.readouterr().out
    assert out.count("skipped: no time left") == 4 and "160M, replay, 5 tokens" in out
