"""Lines and curves of a training: MFU, ranks that are silent, Weights & Biases."""

from __future__ import annotations

import io
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from training import MODELS, settings
from yocolm.config import parse_config
from yocolm.errors import ConfigError, MissingDependencyError
from yocolm.models.registry import build_model
from yocolm.models.spec import model_spec
from yocolm.train.progress import PEAK_FLOPS, Progress
from yocolm.train.settings import TrainSettings

CPU = torch.device("cpu")
GPU = torch.device("cuda")


def config(family: str = "yoco") -> Any:
    return parse_config({**MODELS[family], "vocab_size": 300})


def line_of(s: TrainSettings, device: torch.device = CPU, ranks: int = 1) -> str:
    """The line of two steps of a quarter of a second each."""
    out = io.StringIO()
    progress = Progress(s, out)
    progress.measure(config(), device, ranks)
    progress.start(0)
    progress.add(3.0, 0.25)
    progress.add(2.0, 0.25)
    progress.line(2, 1e-3, 1.5)
    return out.getvalue()


def test_mfu_is_of_the_peak_of_all_ranks(tmp_path: Path) -> None:
    s = settings(tmp_path, peak_flops=1e9)
    rate = 2 * 24 / 0.25  # two windows of 24 tokens a step
    share = rate * model_spec(config()).train_flops(24, 16) / 24 / 1e9
    assert f"| loss 2.5000 | lr 1.00e-03 | grad 1.50 | 192 tok/s | MFU {share:.1%} |" in line_of(s)
    assert f"| MFU {share / 4:.1%} |" in line_of(s, ranks=4)
    assert "MFU" not in line_of(settings(tmp_path))  # nobody knows the peak of this CPU


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
    ],
)
def test_gpus_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, peak: float
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    s = settings(tmp_path, dtype="bfloat16")
    progress = Progress(s, io.StringIO())
    progress.measure(config(), GPU, 2)
    assert progress._peak == 2 * peak
    progress.measure(config(), CPU, 2)
    assert progress._peak is None
    progress = Progress(replace(s, train=replace(s.train, peak_flops=5.0)), io.StringIO())
    progress.measure(config(), GPU)
    assert progress._peak == 5.0


def test_the_peak_of_bfloat16_is_not_that_of_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    progress = Progress(settings(tmp_path, dtype="float32"), io.StringIO())
    progress.measure(config(), GPU)
    assert progress._peak is None and PEAK_FLOPS["H200"] == 989e12


@pytest.mark.parametrize("family", ["yoco", "yoco-swa", "llama", "gemma4-experts"])
def test_flops_of_training_are_those_of_the_products(family: str) -> None:
    """A factor 3 of each matrix once a token, of the logits, and of what is mixed."""
    spec, model = model_spec(config(family)), build_model(config(family), "cpu", torch.float32)
    length = 24
    mixing = sum(spec.write_attention_flops(n, length) for n in range(1, length + 1))
    mixing += sum(spec.read_attention_flops(n) for n in range(1, length + 1))
    per_token = spec.write_flops_per_token + spec.read_flops_per_row + spec.logits_flops_per_row
    assert spec.train_flops(length) == 3 * (length * per_token + mixing)
    if family != "gemma4-experts":  # of experts only the chosen ones count
        matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
        head = 0 if not spec.tied else spec.head_params
        assert per_token == 2 * (sum(p.numel() for p in matrices) + head)


@pytest.mark.parametrize(("length", "chunk", "block"), [(24, 16, 16), (24, 128, 24), (8, 16, 8)])
def test_flops_of_retention_by_hand(tmp_path: Path, length: int, chunk: int, block: int) -> None:
    """A token meets the tokens of its block, and a window has no more than its own."""
    size, width, heads, dim, vocabulary = 32, 48, 2, 16, 300
    mlp = 3 * size * width
    retention = 5 * size * size + heads * size + mlp  # q, k, v, gate, out; decays
    kv = size * 2 * dim  # one head of keys and of values
    cross = 2 * size * size + mlp
    products = 2 * (retention + kv + cross + vocabulary * size)
    mixed = heads * (2 * 2 * dim * dim + 2 * 2 * dim * block)  # state in and out; scores and values
    attended = heads * 2 * 2 * dim * sum(range(1, length + 1))
    flops = 3 * (length * (products + mixed) + attended)
    assert model_spec(config()).train_flops(length, chunk) == flops

    s = settings(tmp_path, peak_flops=1e9, retention_chunk_size=chunk)
    s = replace(s, data=replace(s.data, sequence_length=length))
    share = 2 * length / 0.25 * flops / length / 1e9
    assert f"| MFU {share:.1%} |" in line_of(s)


def test_ranks_but_the_first_are_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # not asked for there
    s = settings(tmp_path, wandb="boats", tensorboard=True)
    progress = Progress(s, None)
    progress.measure(config(), CPU)
    progress.start(0)
    progress.add(3.0, 0.25)
    progress.line(1, 1e-3, 1.5)
    progress.validation({"nll_per_token": 1.0, "bits_per_byte": 1.0}, 3, 1)
    progress.say("nothing")
    progress.close()
    assert not (tmp_path / "run").exists()


class FakeWandB(ModuleType):
    """What a training uses of the package."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__("wandb")
        error = type("Error", (Exception,), {})
        self.errors = SimpleNamespace(Error=error)
        self.given: dict[str, Any] = {}
        self.rows: list[dict[str, float]] = []
        self.axes: list[tuple[str, str]] = []
        self.finished = 0

        def init(**given: Any) -> Any:
            if fails:
                raise error("api_key not configured (no-tty)")
            self.given = given
            return self

        self.init = init

    def define_metric(self, name: str, step_metric: str) -> None:
        self.axes.append((name, step_metric))

    def log(self, row: dict[str, float]) -> None:
        self.rows.append(row)

    def finish(self) -> None:
        self.finished += 1


def test_weights_and_biases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandB()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    s = settings(tmp_path, wandb="boats")
    ids = []
    for begin in (0, 1):  # the second goes on
        progress = Progress(s, io.StringIO())
        assert fake.finished == begin
        progress.start(begin)
        ids.append(fake.given["id"])
        progress.add(3.0, 0.25)
        progress.line(begin + 1, 1e-3, 1.5)
        progress.scalars("validation", {"nll_per_token": 2.0}, begin + 1)
        progress.close()
    assert ids[0] == ids[1] and fake.given["resume"] == "allow" and fake.finished == 2
    assert fake.given["project"] == "boats" and fake.given["name"] == "run"
    assert fake.given["dir"] == str(tmp_path / "run")
    assert fake.given["config"]["train"]["steps"] == 6
    assert fake.axes == [("*", "step")] * 2
    row = {"train/loss": 3.0, "train/lr": 1e-3, "train/grad_norm": 1.5, "train/tokens_per_s": 192.0}
    other = {"validation/nll_per_token": 2.0}
    assert fake.rows == [{**each, "step": step} for step in (1, 2) for each in (row, other)]


def test_weights_and_biases_without_an_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", FakeWandB(fails=True))
    progress = Progress(settings(tmp_path, wandb="boats"), io.StringIO())
    with pytest.raises(ConfigError, match=r"train\.wandb is 'boats', .*no-tty.*WANDB_MODE=offline"):
        progress.start(0)


def test_weights_and_biases_that_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingDependencyError, match="pip install wandb"):
        Progress(settings(tmp_path, wandb="boats"), io.StringIO())
