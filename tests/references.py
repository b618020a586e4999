"""The reference checkpoints and the outputs that other implementations gave for them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from yocolm.models.base import Batch
from yocolm.models.dense import DenseState

DATA = Path(__file__).parent / "golden" / "data"
AUTHORS = ("yoco-gret-tiny", "yoco-swa-tiny")
NATIVE = ("yoco-fla-gret-tiny", "yoco-fla-swa-tiny", "llama-tiny", "llama-bias-tiny")
ALL = (*AUTHORS, *NATIVE)


@dataclass(frozen=True)
class Expected:
    """token_ids [T], logits [T, V] behind each; generated [G], generated_logits [G, V]."""

    token_ids: Tensor
    logits: Tensor
    prompt_len: int
    generated: list[int]
    generated_logits: Tensor

    @property
    def prompt(self) -> list[int]:
        return self.token_ids[: self.prompt_len].tolist()


def expected(name: str) -> Expected:
    tensors = load_file(DATA / name / "expected.safetensors")
    return Expected(
        token_ids=tensors["token_ids"].long(),
        logits=tensors["logits"],
        prompt_len=int(tensors["prompt_len"]),
        generated=tensors["generated_ids"].tolist(),
        generated_logits=tensors["generated_logits"],
    )


@torch.no_grad()
def logits_of(model: nn.Module, token_ids: Tensor) -> Tensor:
    """Logits [T, V] of one whole sequence."""
    batch = Batch.packed(token_ids, [len(token_ids)])
    logits = model.logits
    assert callable(logits)
    return logits(model(batch, DenseState()))


def worst(a: Tensor, b: Tensor) -> float:
    """The largest absolute difference."""
    assert a.shape == b.shape
    return float((a - b).abs().max())
