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
        """Of ``hidden`` [R, D] of the rows of ``batch``, under the output head ``weight`` [V, D].

        ``targets`` [R] int64 of the batch's rows; those whose target is negative do not count.
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

        ``targets`` [T] int64, negative where nothing is to be predicted: the second half of the
        model runs on the other rows alone.
        """
        rows = _rows(targets)
        if rows is not None:
            targets = targets[rows]
        batch, state = Batch.packed(tokens, lengths, rows), DenseState(chunk_size=self.chunk_size)
        mixed = self.dtype != torch.float32
        # A cache would keep every weight in this dtype, sharded and recomputed blocks' too.
        with torch.autocast(tokens.device.type, self.dtype, enabled=mixed, cache_enabled=False):
            hidden = self.model(batch, state)
        loss = next_token_loss if validating else self.loss
        config: Any = self.model.config
        return loss(
            hidden.to(self.dtype), head_weight(self.model), targets, config.final_softcap, batch
        )


def _rows(targets: Tensor) -> Tensor | None:
    """Where there is something to predict; None for everywhere.

    One row at least, so that every parameter takes part on every rank.
    """
    rows = torch.nonzero(targets >= 0).squeeze(1)
    if len(rows) == len(targets):
        return None
    return rows if len(rows) else rows.new_zeros(1)


def head_weight(model: nn.Module) -> Tensor:
    """The output head [V, D], which may be the table of embeddings."""
    head = getattr(model, "lm_head", None) or getattr(model, "embed_tokens")  # noqa: B009
    return head.weight
