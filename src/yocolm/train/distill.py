"""Distillation: a frozen teacher's distribution of the next token as the target of training.

    loss = (1 - w) * cross-entropy + w * t^2 * KL(teacher || student)  at temperature t
         + hidden_weight * mean over the self-decoder's layers of |h - h_teacher|^2 / |h_teacher|^2

summed over rows. Logits of either model exist for a block of rows at a time only. The factor t^2
keeps gradients comparable across temperatures (Hinton et al., arXiv 1503.02531).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from yocolm.config import LlamaConfig, ModelConfig, YocoConfig
from yocolm.errors import ConfigError, YocolmError
from yocolm.models.base import Batch
from yocolm.models.dense import DenseState
from yocolm.models.registry import load_config, load_model, resolve
from yocolm.tokenizer import TOKENIZER_FILE, read_tokenizer
from yocolm.train.objective import Loss, head_weight, next_token_loss
from yocolm.train.settings import DistillSettings, TrainSettings

ROWS = 256  # rows of logits that exist at once, of both models and some temporaries


class Scorer(NamedTuple):
    """What gives logits: final hidden states [N, D], output head [V, D], soft cap (0: none)."""

    hidden: Tensor
    weight: Tensor
    softcap: float

    def logits(self, rows: slice, wide: torch.dtype) -> Tensor:
        hidden = self.hidden[rows]
        scores = torch.matmul(hidden, self.weight.to(hidden.dtype).T).to(wide)
        if self.softcap:
            scores.div_(self.softcap).tanh_().mul_(self.softcap)
        return scores


class _ChunkedDistillation(torch.autograd.Function):
    """Loss and both gradients in one pass over blocks of rows; only the gradients are kept."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        softcap: float,
        teacher: Scorer,
        targets: Tensor,
        share: float,
        temperature: float,
        needs_grad: bool,
    ) -> Tensor:
        student = Scorer(hidden, weight.to(hidden.dtype), softcap)
        grad_hidden = torch.empty_like(hidden) if needs_grad else None
        grad_weight = torch.zeros_like(weight) if needs_grad else None
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        total = torch.zeros((), dtype=wide, device=hidden.device)
        for start in range(0, len(hidden), ROWS):
            rows = slice(start, start + ROWS)
            scores = student.logits(rows, wide)
            value, grad = _block(
                scores, teacher.logits(rows, wide), targets[rows], share, temperature
            )
            total += value
            if grad_hidden is not None and grad_weight is not None:
                if softcap:
                    grad.mul_(scores.div_(softcap).square_().neg_().add_(1))
                grad = grad.to(hidden.dtype)
                grad_hidden[rows] = torch.matmul(grad, student.weight)
                grad_weight += torch.matmul(grad.T, hidden[rows])
        ctx.save_for_backward(grad_hidden, grad_weight)
        return total

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad_output: Tensor
    ) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        # In float32: a factor rounded to bfloat16 would put the same error on every entry.
        scaled = (grad_hidden.to(grad_output.dtype) * grad_output).to(grad_hidden.dtype)
        return scaled, grad_weight * grad_output, *[None] * 6


def _block(
    scores: Tensor, wanted: Tensor, targets: Tensor, share: float, temperature: float
) -> tuple[Tensor, Tensor]:
    """Loss of a block of rows and its gradient by the student's logits ``scores`` [R, V].

    ``wanted`` [R, V] are the teacher's logits; it is overwritten.
    """
    counts = (targets >= 0)[:, None]
    log_student = (scores / temperature).log_softmax(-1)
    log_teacher = wanted.div_(temperature).log_softmax(-1)
    teacher = log_teacher.exp()
    divergence = (log_teacher.sub_(log_student) * teacher).sum(-1, keepdim=True)
    total = (divergence * counts).sum() * (share * temperature**2)
    grad = log_student.exp_().sub_(teacher).mul_(share * temperature)
    if share < 1:
        target = targets.clamp(min=0)[:, None]
        log_probability = scores.log_softmax(-1)
        total -= (log_probability.gather(1, target) * counts).sum() * (1 - share)
        plain = log_probability.exp_()
        plain.scatter_add_(1, target, plain.new_full(target.shape, -1.0))
        grad.add_(plain, alpha=1 - share)
    return total, grad.mul_(counts)


def distillation_sum(
    student: Scorer, teacher: Scorer, targets: Tensor, share: float = 1.0, temperature: float = 1.0
) -> Tensor:
    """Summed loss, in nats, of N rows: ``share`` of it divergence, the rest cross-entropy.

    ``targets`` [N] int64; rows with a negative one do not count. Gradients go to the student's
    hidden states and head. Products run in the dtype of either's hidden states, caps, softmax and
    sums in float32 or wider.
    """
    hidden, weight = student.hidden, student.weight
    needs_grad = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    with torch.autocast(hidden.device.type, enabled=False):
        return _ChunkedDistillation.apply(
            hidden, weight, student.softcap, teacher, targets, share, temperature, needs_grad
        )


def hidden_error_sum(found: list[Tensor], wanted: list[Tensor], targets: Tensor) -> Tensor:
    """Squared distance of hidden states [N, D] over the teacher's squared length.

    Summed over the rows with a target, averaged over the layers that the lists hold.
    """
    counts = targets >= 0
    errors = [
        ((ours.float() - theirs.float()).square().sum(-1) / theirs.float().square().sum(-1))
        for ours, theirs in zip(found, wanted, strict=True)
    ]
    return torch.stack(errors).mean(0)[counts].sum()


class _Outputs:
    """The outputs of some layers of the forward pass that runs while it is open."""

    def __init__(self, layers: list[nn.Module]) -> None:
        self.found: list[Tensor] = []
        self.open = False
        for layer in layers:
            layer.register_forward_hook(self._keep)

    def _keep(self, layer: nn.Module, arguments: Any, output: Tensor) -> None:
        if self.open:  # not when activations are computed again for the backward pass
            self.found.append(output)

    def begin(self, *_: object) -> None:
        """Also a hook before the forward pass of a model in training."""
        self.found, self.open = [], torch.is_grad_enabled()

    def take(self) -> list[Tensor]:
        found, self.found, self.open = self.found, [], False
        return found


class Distillation:
    """The ``Loss`` of a training with a teacher. No module: the teacher is no part of the model.

    Args:
        student: the model in training; with a ``hidden_weight`` its layers get hooks.
        teacher: any model of the same vocabulary; it is frozen here.
        layers: whose outputs are compared, first the student's, then the teacher's.
    """

    def __init__(
        self,
        student: nn.Module,
        teacher: nn.Module,
        s: DistillSettings,
        chunk_size: int,
        layers: tuple[list[nn.Module], list[nn.Module]] = ([], []),
    ) -> None:
        self.teacher, self.s, self.chunk_size = teacher.eval().requires_grad_(False), s, chunk_size
        self.outputs = _Outputs(layers[0])
        self.wanted = _Outputs(layers[1])
        if s.hidden_weight:
            student.register_forward_pre_hook(self.outputs.begin)

    def __call__(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float, batch: Batch
    ) -> Tensor:
        """See ``objective.Loss``; ``batch`` is what the teacher reads as well."""
        found = [batch.select_rows(output)[0] for output in self.outputs.take()]
        with torch.no_grad():
            self.wanted.found, self.wanted.open = [], bool(self.s.hidden_weight)
            teacher = self._teacher(hidden.dtype, batch)
            wanted = [batch.select_rows(output)[0] for output in self.wanted.take()]
        student = Scorer(hidden, weight, softcap)
        loss = distillation_sum(student, teacher, targets, self.s.weight, self.s.temperature)
        if self.s.hidden_weight:
            loss = loss + self.s.hidden_weight * hidden_error_sum(found, wanted, targets)
        return loss

    def _teacher(self, dtype: torch.dtype, batch: Batch) -> Scorer:
        config: Any = self.teacher.config
        mixed = dtype != torch.float32
        with torch.autocast(batch.tokens.device.type, dtype=dtype, enabled=mixed):
            hidden = self.teacher(batch, DenseState(chunk_size=self.chunk_size))
        return Scorer(hidden.to(dtype), head_weight(self.teacher).to(dtype), config.final_softcap)


def training_loss(
    s: TrainSettings,
    student: nn.Module,
    config: ModelConfig,
    tokenizer: Tokenizer,
    device: torch.device,
) -> Loss:
    """The loss that the settings ask for: next-token, or that of a teacher, which is loaded here.

    The teacher keeps the dtype that it was saved in; every rank holds the whole of it. Raises
    ConfigError for a teacher of another vocabulary, of a shorter context, or, with a
    ``hidden_weight``, of other layers.
    """
    if s.distill is None:
        return next_token_loss
    name = s.distill.teacher
    try:
        source = resolve(name)
        theirs = load_config(source)
    except YocolmError as error:
        raise ConfigError(f"distill.teacher is {name!r}: {error}") from error
    own = None if source.folder is None else source.folder / TOKENIZER_FILE
    vocabulary = read_tokenizer(own).get_vocab() if own is not None and own.exists() else None
    if theirs.vocab_size != config.vocab_size or (
        vocabulary is not None and vocabulary != tokenizer.get_vocab()
    ):
        raise ConfigError(
            f"distill.teacher {name} has another vocabulary ({theirs.vocab_size} tokens) than the "
            f"model ({config.vocab_size}); a teacher must share the model's tokenizer"
        )
    if theirs.max_position_embeddings < s.data.sequence_length:
        raise ConfigError(
            f"distill.teacher {name} has a context of {theirs.max_position_embeddings} tokens; "
            f"data.sequence_length {s.data.sequence_length} is longer: shorten the windows, or "
            "train on without a teacher"
        )
    count = _compared_layers(config, theirs, name) if s.distill.hidden_weight else 0
    teacher, _ = load_model(source, "auto", device, per_layer_tables="resident")
    layers = ([], []) if not count else (_layers(student)[:count], _layers(teacher)[:count])
    return Distillation(student, teacher, s.distill, s.train.retention_chunk_size, layers)


def _compared_layers(config: ModelConfig, theirs: ModelConfig, name: str) -> int:
    """The student's self-decoder layers, if the teacher has as many of the same width to compare
    with."""
    if not isinstance(config, YocoConfig):
        raise ConfigError(
            f"distill.hidden_weight compares a YOCO's self-decoder; the model is of type "
            f"{config.model_type}: set it to 0"
        )
    count, most = config.num_self_layers, 0
    if isinstance(theirs, LlamaConfig):
        most = theirs.num_layers - 1  # the last is called in two parts: no hook sees its output
    elif isinstance(theirs, YocoConfig):
        most = theirs.num_self_layers
    if theirs.hidden_size != config.hidden_size or most < count:
        raise ConfigError(
            f"distill.hidden_weight needs a teacher of type llama or yoco with hidden_size "
            f"{config.hidden_size} and at least {count} layers below; {name} is of type "
            f"{theirs.model_type} with hidden_size {theirs.hidden_size}: set it to 0"
        )
    return count


def _layers(model: nn.Module) -> list[nn.Module]:
    found: Any = getattr(model, "self_layers", None) or getattr(model, "layers")  # noqa: B009
    return list(found)
