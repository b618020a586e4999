"""Distillation: its loss against PyTorch's on whole logits, the teacher's place in a training."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import training
from tiny import fresh_model
from yocolm.errors import ConfigError
from yocolm.models.base import Batch
from yocolm.models.dense import DenseState
from yocolm.models.registry import load_model
from yocolm.ops.logits import soft_cap
from yocolm.train import distill as module
from yocolm.train.distill import Distillation, Scorer, distillation_sum, hidden_error_sum
from yocolm.train.objective import Objective
from yocolm.train.settings import DistillSettings

N, D, WIDE, V = 20, 8, 12, 31
RELATIVE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}  # of the norm
Loss = Callable[..., Tensor]


@pytest.fixture(autouse=True)
def _several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROWS", 7)  # the last block is shorter


def whole(
    student: Scorer, teacher: Scorer, targets: Tensor, share: float, temperature: float
) -> Tensor:
    """The same by PyTorch, in float64 on the values that hidden states and heads really have."""

    def scores(s: Scorer) -> Tensor:
        return soft_cap(s.hidden.double() @ s.weight.to(s.hidden.dtype).double().T, s.softcap)

    ours, theirs, counts = scores(student), scores(teacher), targets >= 0
    divergence = F.kl_div(
        (ours / temperature).log_softmax(-1)[counts],
        (theirs / temperature).log_softmax(-1)[counts],
        reduction="sum",
        log_target=True,
    )
    text = F.cross_entropy(ours[counts], targets[counts], reduction="sum")
    return share * temperature**2 * divergence + (1 - share) * text


def inputs(dtype: torch.dtype, softcap: float = 0.0) -> tuple[Scorer, Scorer, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def scorer(width: int) -> Scorer:
        hidden = torch.randn(N, width, generator=generator).to(dtype)
        weight = torch.randn(V, width, generator=generator)
        return Scorer(hidden, weight.double() if dtype == torch.float64 else weight, softcap)

    student, teacher = scorer(D), scorer(WIDE)
    student.hidden.requires_grad_()
    student.weight.requires_grad_()
    targets = torch.randint(V, (N,), generator=generator)
    targets[[0, 7, 11]] = -1
    return student, teacher, targets


def difference(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize(("share", "temperature"), [(1.0, 1.0), (0.7, 2.5), (0.0, 1.0)])
@pytest.mark.parametrize("dtype", RELATIVE)
def test_loss_and_gradients(
    dtype: torch.dtype, share: float, temperature: float, softcap: float
) -> None:
    results = []
    for loss in (distillation_sum, whole):
        student, teacher, targets = inputs(dtype, softcap)
        value = loss(student, teacher, targets, share, temperature)
        (value / 37).backward()
        results.append((value.detach(), student.hidden.grad, student.weight.grad))
    for got, expected in zip(*results, strict=True):
        assert got is not None and expected is not None
        assert difference(got, expected) <= RELATIVE[dtype]


def test_a_student_like_its_teacher_has_nothing_to_learn() -> None:
    student, _, targets = inputs(torch.float64)
    same = Scorer(student.hidden.detach(), student.weight.detach(), 0.0)
    value = distillation_sum(student, same, targets)
    value.backward()
    assert student.hidden.grad is not None and student.weight.grad is not None
    assert abs(float(value.detach())) < 1e-12
    assert student.hidden.grad.abs().max() < 1e-12 and student.weight.grad.abs().max() < 1e-12


def test_rows_that_do_not_count_get_no_gradient() -> None:
    student, teacher, targets = inputs(torch.float32)
    distillation_sum(student, teacher, targets, 0.5).backward()
    assert student.hidden.grad is not None
    silent = student.hidden.grad.abs().sum(-1) == 0
    assert torch.equal(silent, targets < 0)


def test_extreme_logits_stay_finite() -> None:
    hidden = torch.full((2, D), 300.0, requires_grad=True)
    weight = torch.linspace(-30, 30, V)[:, None].expand(V, D).clone().requires_grad_()
    teacher = Scorer(torch.full((2, D), -300.0), weight.detach(), 0.0)
    value = distillation_sum(Scorer(hidden, weight, 0.0), teacher, torch.tensor([0, 1]), 0.5)
    value.backward()
    assert value.isfinite() and hidden.grad is not None and hidden.grad.isfinite().all()


def test_logits_of_few_rows_exist_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of either model: never [N, V] of all rows."""
    student, teacher, targets = inputs(torch.float32)
    rows: list[int] = []
    product = torch.matmul

    def watched(a: Tensor, b: Tensor) -> Tensor:
        out = product(a, b)
        rows.extend([len(out)] if out.shape[1] == V else [])
        return out

    monkeypatch.setattr(torch, "matmul", watched)
    distillation_sum(student, teacher, targets, 0.5)
    assert sorted(rows) == [6, 6, 7, 7, 7, 7]  # both models', in blocks of ROWS


def test_distance_of_hidden_states() -> None:
    wanted = [torch.randn(4, D), torch.randn(4, D)]
    found = [wanted[0] * 1.5, wanted[1].clone()]
    targets = torch.tensor([3, -1, 0, 2])
    value = hidden_error_sum(found, wanted, targets)
    assert value == pytest.approx(3 * (0.25 + 0) / 2, rel=1e-5)


def objective(name: str, s: DistillSettings, checkpointing: bool = False) -> Objective:
    """A tiny YOCO with a tiny Transformer as its teacher."""
    student, teacher = fresh_model(name), fresh_model("llama")
    student.gradient_checkpointing = checkpointing  # type: ignore[assignment]
    layers: Any = (list(student.self_layers)[:2], list(teacher.layers)[:2])  # type: ignore[arg-type]
    return Objective(student, torch.float32, 16, Distillation(student, teacher, s, 16, layers))


@pytest.mark.parametrize("name", ["retention", "window-grouped"])
def test_the_loss_of_a_model_and_its_teacher(name: str) -> None:
    s = DistillSettings("teacher", weight=0.6, temperature=2.0, hidden_weight=0.3)
    both = objective(name, s)
    lengths, tokens = [9, 5], torch.arange(14) % 11
    targets = (tokens * 3) % 11
    targets[8] = -1
    value = both(tokens, targets, lengths)

    def forward(model: nn.Module, layers: Any) -> tuple[Tensor, list[Tensor]]:
        seen: list[Tensor] = []
        handles = [
            layer.register_forward_hook(lambda module, inputs, output: seen.append(output))
            for layer in layers[:2]
        ]
        hidden = model(Batch.packed(tokens, lengths), DenseState(16))
        for handle in handles:
            handle.remove()
        return model.logits(hidden), seen  # type: ignore[operator]

    teacher = fresh_model("llama")
    with torch.no_grad():
        ours, found = forward(both.model, both.model.self_layers)
        theirs, wanted = forward(teacher, teacher.layers)
    eye = torch.eye(ours.shape[1])
    expected = whole(Scorer(ours, eye, 0.0), Scorer(theirs, eye, 0.0), targets, 0.6, 2.0)
    expected += 0.3 * hidden_error_sum(found, wanted, targets)
    assert float(value.detach()) == pytest.approx(float(expected.detach()), rel=1e-4)


def test_the_teacher_stays_as_it_is() -> None:
    both = objective("retention", DistillSettings("teacher", hidden_weight=1.0))
    loss: Any = both.loss
    tokens = torch.arange(12) % 11
    both(tokens, tokens, [12]).backward()
    assert all(p.grad is None and not p.requires_grad for p in loss.teacher.parameters())
    assert all(p.grad is not None for p in both.model.parameters())
    names = {name for name, _ in both.named_parameters()}  # what is trained, shared out and saved
    assert names == {f"model.{name}" for name, _ in both.model.named_parameters()}


def test_validation_is_of_the_text_alone() -> None:
    tokens, targets = torch.arange(12) % 11, (torch.arange(12) * 5) % 11
    both = objective("retention", DistillSettings("teacher", hidden_weight=1.0))
    plain = Objective(both.model, torch.float32, 16)
    with torch.no_grad():
        assert torch.equal(both(tokens, targets, [12], True), plain(tokens, targets, [12], True))


def test_recomputed_activations_give_the_same_gradients() -> None:
    grads = []
    for checkpointing in (False, True):
        both = objective("retention", DistillSettings("t", 0.5, 1.5, 1.0), checkpointing)
        tokens = torch.arange(12) % 11
        for _ in range(2):  # what the first left behind must not enter the second
            both(tokens, tokens, [12]).backward()
        grads.append([p.grad for p in both.model.parameters()])
        loss: Any = both.loss
        assert not loss.outputs.found and not loss.wanted.found
    for a, b in zip(*grads, strict=True):
        assert a is not None and b is not None and torch.allclose(a, b, rtol=1e-5, atol=1e-7)


def run(folder: Path, teacher: str, output: str, model: str = "yoco", **more: Any) -> Any:
    values = training.values(folder, model, **more.pop("train", {}))
    values["output_dir"] = str(folder / output)
    if teacher:
        values["distill"] = {"teacher": teacher, **more}
    return training.Trainer(training.parse_settings(values), training.io.StringIO())


def test_training_with_a_teacher(tmp_path: Path) -> None:
    """The student comes closer to a teacher that was trained, and a resumed run goes on alike."""
    training.write_texts(tmp_path)
    run(tmp_path, "", "teacher", "llama").run()
    teacher = str(tmp_path / "teacher" / "final")
    whole_run = run(tmp_path, teacher, "whole", temperature=2.0)
    losses = [whole_run.train_step().loss for _ in range(4)]
    assert 0 < losses[-1] < losses[0]
    # interrupted after two steps
    part = run(tmp_path, teacher, "part", temperature=2.0)
    for _ in range(2):
        part.train_step()
    part.save()
    resumed = run(tmp_path, teacher, "part", temperature=2.0)
    assert resumed.step == 2
    for _ in range(2):
        resumed.train_step()
    for a, b in zip(whole_run.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(ConfigError, match="distill.temperature was 2.0, is 1.0"):
        run(tmp_path, teacher, "part")


def test_teachers_that_do_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training.write_texts(tmp_path)
    run(tmp_path, "", "teacher", "llama", train={"steps": 1}).run()
    teacher = str(tmp_path / "teacher" / "final")
    with pytest.raises(ConfigError, match="another vocabulary"):
        run(tmp_path, "bundled", "a")
    with pytest.raises(ConfigError, match="distill.teacher is 'nope': model 'nope' is neither"):
        run(tmp_path, "nope", "a")
    with pytest.raises(ConfigError, match="set it to 0"):
        run(tmp_path, teacher, "b", "llama", hidden_weight=1.0)
    with pytest.raises(ConfigError, match="with hidden_size 64 and at least 1 layers"):
        values_of_wider = {**training.MODELS["yoco"], "hidden_size": 64}
        monkeypatch.setitem(training.MODELS, "wider", values_of_wider)
        run(tmp_path, teacher, "c", "wider", hidden_weight=1.0)
    deeper = {"num_hidden_layers": 3, "num_self_decoder_layers": 2}  # the teacher has two in all
    monkeypatch.setitem(training.MODELS, "deeper", {**training.MODELS["yoco"], **deeper})
    with pytest.raises(ConfigError, match="at least 2 layers"):
        run(tmp_path, teacher, "c", "deeper", hidden_weight=1.0)
    config = Path(teacher) / "config.json"
    fields = config.read_text()
    config.write_text(fields.replace('position_embeddings": 24', 'position_embeddings": 8'))
    assert load_model(teacher)[1].max_position_embeddings == 8
    with pytest.raises(ConfigError, match="context of 8 tokens"):
        run(tmp_path, teacher, "d")
