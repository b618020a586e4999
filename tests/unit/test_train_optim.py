"""Learning-rate schedules at their corners, and which optimiser gets which parameter."""

import math
import re
from dataclasses import replace

import pytest
import torch

from training import MODELS
from yocolm.config import parse_config
from yocolm.models.registry import build_model
from yocolm.train.objective import Objective
from yocolm.train.optim import build_optimizers, learning_rate_factor, set_learning_rate
from yocolm.train.settings import OptimSettings

SMALL_OR_STACKED = r"\.altup\.(router|prediction|correction)\.|\.router\.proj\.|\.experts\."
BASE = OptimSettings(steps=110, warmup_steps=10, final_ratio=0.1, decay_fraction=0.2, power=2.5)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "polynomial", "constant", "wsd"])
def test_every_schedule_warms_up_to_its_peak(schedule: str) -> None:
    s = replace(BASE, schedule=schedule)
    assert learning_rate_factor(0, s) == pytest.approx(0.1)  # never a step at 0
    assert learning_rate_factor(4, s) == pytest.approx(0.5)
    assert learning_rate_factor(9, s) == learning_rate_factor(10, s) == 1.0


@pytest.mark.parametrize(
    ("schedule", "step", "expected"),
    [
        ("cosine", 60, 0.55),
        ("cosine", 110, 0.1),
        ("linear", 60, 0.55),
        ("linear", 85, 0.325),
        ("linear", 110, 0.1),
        ("polynomial", 60, 0.1 + 0.9 * 0.5**2.5),
        ("polynomial", 85, 0.1 + 0.9 * 0.25**2.5),
        ("polynomial", 110, 0.1),
        ("constant", 110, 1.0),
        ("wsd", 60, 1.0),
        ("wsd", 90, 1.0),
        ("wsd", 100, 0.55),
        ("wsd", 110, 0.1),
    ],
)
def test_schedules(schedule: str, step: int, expected: float) -> None:
    assert learning_rate_factor(step, replace(BASE, schedule=schedule)) == pytest.approx(expected)


def test_a_polynomial_of_power_1_is_linear() -> None:
    for step in range(0, 130, 7):
        linear = learning_rate_factor(step, replace(BASE, schedule="linear"))
        assert linear == learning_rate_factor(step, replace(BASE, schedule="polynomial", power=1.0))


@pytest.mark.parametrize("schedule", ["cosine", "linear", "polynomial", "wsd"])
def test_no_schedule_leaves_its_bounds(schedule: str) -> None:
    s = replace(BASE, schedule=schedule)
    after = [learning_rate_factor(step, s) for step in range(10, 130)]
    assert after == sorted(after, reverse=True)
    assert after[-1] == pytest.approx(0.1)  # also beyond the last step


def test_warmup_may_be_absent_or_longer_than_the_run() -> None:
    assert learning_rate_factor(0, replace(BASE, warmup_steps=0)) == 1.0
    assert learning_rate_factor(109, replace(BASE, warmup_steps=1000)) == pytest.approx(0.11)
    assert learning_rate_factor(10, replace(BASE, steps=10)) == 1.0


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("family", MODELS)
def test_groups_cover_every_parameter_once(family: str, optimizer: str) -> None:
    model = build_model(parse_config({**MODELS[family], "vocab_size": 40}), "cpu", torch.float32)
    optimizers = build_optimizers(model, replace(BASE, optimizer=optimizer, weight_decay=0.3))
    owners = [(o, g, p) for o in optimizers for g in o.param_groups for p in g["params"]]
    names = {id(p): name for name, p in model.named_parameters()}
    trained = sorted(name for name, p in model.named_parameters() if p.requires_grad)
    assert sorted(names[id(p)] for _, _, p in owners) == trained
    for owner, group, parameter in owners:
        name = names[id(parameter)]
        is_vector = name.endswith((".bias", "norm.weight", "scale"))
        assert group["weight_decay"] == (0.0 if is_vector else 0.3), name
        outside = name.startswith(("embed_tokens.", "lm_head.", "per_layer.table."))
        hidden = not is_vector and not outside and not re.search(SMALL_OR_STACKED, name)
        expected = torch.optim.Muon if optimizer == "muon" and hidden else torch.optim.AdamW
        assert type(owner) is expected, name


def test_norm_weights_do_not_decay() -> None:
    model = build_model(parse_config({**MODELS["yoco"], "vocab_size": 40}), "cpu", torch.float32)
    model.init_weights(0)  # type: ignore[operator]
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for optimizer in build_optimizers(model, replace(BASE, weight_decay=0.5, optimizer="muon")):
        optimizer.step()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) == name.endswith("norm.weight"), name


def test_the_schedule_scales_every_group_from_its_own_peak() -> None:
    model = build_model(parse_config({**MODELS["yoco"], "vocab_size": 40}), "cpu", torch.float32)
    s = replace(BASE, optimizer="muon", learning_rate=1e-3, matrix_learning_rate=2e-2)
    optimizers = build_optimizers(model, s)
    for factor in (0.5, 1.0, 0.1):
        assert set_learning_rate(optimizers, factor) == pytest.approx(1e-3 * factor)
        rates = {g["lr"] for o in optimizers for g in o.param_groups}
        assert sorted(rates) == pytest.approx([1e-3 * factor, 2e-2 * factor])
    [muon] = build_optimizers(model, replace(s, matrix_learning_rate=None))[1:]
    assert muon.param_groups[0]["lr"] == 1e-3


def test_adamw_takes_its_settings() -> None:
    model = build_model(parse_config({**MODELS["llama"], "vocab_size": 40}), "cpu", torch.float32)
    [adamw] = build_optimizers(model, replace(BASE, beta1=0.8, beta2=0.9, eps=1e-6))
    assert all(g["betas"] == (0.8, 0.9) and g["eps"] == 1e-6 for g in adamw.param_groups)
    assert math.isclose(adamw.param_groups[0]["lr"], BASE.learning_rate)


@pytest.mark.parametrize("family", [*MODELS, "gemma3n-unscaled"])
def test_all_that_is_trained_has_a_gradient(family: str) -> None:
    """Ranks would wait for the gradient of a parameter that takes no part."""
    fields = {**MODELS[family.split("-unscaled")[0]], "vocab_size": 40}
    if family.endswith("unscaled"):
        fields["altup_correct_scale"] = False
    model = build_model(parse_config(fields), "cpu", torch.float32).train()
    model.init_weights(0)  # type: ignore[operator]
    tokens = torch.arange(24)
    Objective(model, torch.float32, 16)(tokens, tokens, [24]).backward()
    without = {name for name, p in model.named_parameters() if p.grad is None}
    assert without == {name for name, p in model.named_parameters() if not p.requires_grad}


def test_what_a_checkpoint_fixes_is_not_trained() -> None:
    """Gemma 4's scales of layers are no parameters in transformers."""
    fields = {**MODELS["gemma4"], "vocab_size": 40}
    model = build_model(parse_config(fields), "cpu", torch.float32)
    model.init_weights(0)  # type: ignore[operator]
    fixed = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert fixed == {f"layers.{layer}.scale" for layer in range(4)}
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for optimizer in build_optimizers(model, replace(BASE, weight_decay=0.5, optimizer="muon")):
        optimizer.step()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) == (name in fixed), name
