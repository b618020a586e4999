"""What a step of training computes of packed windows: their summed loss, as one module.

Everything that touches a parameter happens inside its ``forward``: ranks that share a model gather
parameters, and average gradients, around that call (see ``train/distributed.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from yocolm.models.base import Batch
from yocolm.models.dense import DenseState
from yocolm.train.loss import cross_entropy_sum


class Loss(Protocol):
    """A summed loss of final hidden states, in nats."""

    def __call__(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float, batch: Batch
    ) -> Tensor:
        """Of ``hidden`` [T, D] of ``batch``, under the output head ``weight`` [V, D].

        ``targets`` [T] int64; rows whose target is negative do not count.
        """
        ...


def next_token_loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float, batch: Batch
) -> Tensor:
    """Cross-entropy; the ``Loss`` of training on text, and of every validation."""
    return cross_entropy_sum(hidden, weight, targets, softcap)


class Objective(nn.Module):
    """The model, and the loss that its training lowers.

    Args:
        dtype: of the products; parameters keep their own.
        chunk_size: gated retention's.
        loss: of training; ``forward`` with ``validating`` takes plain cross-entropy.
    """

    def __init__(
        self,
        model: nn.Module,
        dtype: torch.dtype,
        chunk_size: int,
        loss: Loss = next_token_loss,
    ) -> None:
        super().__init__()
        self.model = model
        self.dtype, self.chunk_size, self.loss = dtype, chunk_size, loss

    def forward(
        self, tokens: Tensor, targets: Tensor, lengths: Sequence[int], validating: bool = False
    ) -> Tensor:
        """Summed loss of sequences of ``lengths``, back to back in ``tokens`` [T] int64.

        ``targets`` [T] int64, negative where nothing is to be predicted.
        """
        batch, state = Batch.packed(tokens, lengths), DenseState(chunk_size=self.chunk_size)
        mixed = self.dtype != torch.float32
        # A cache would keep every weight in this dtype, sharded and recomputed blocks' too.
        with torch.autocast(tokens.device.type, self.dtype, enabled=mixed, cache_enabled=False):
            hidden = self.model(batch, state)
        loss = next_token_loss if validating else self.loss
        config: Any = self.model.config
        return loss(
            hidden.to(self.dtype), head_weight(self.model), targets, config.final_softcap, batch
        )


def head_weight(model: nn.Module) -> Tensor:
    """The output head [V, D], which may be the table of embeddings."""
    head = getattr(model, "lm_head", None) or getattr(model, "embed_tokens")  # noqa: B009
    return head.weight
