"""What is done to logits [R, V] before a draw, or instead of it: soft cap, greatest of a row."""

from __future__ import annotations

import torch
from torch import Tensor

from yocolm.ops.native import logits as native
from yocolm.ops.native.library import fits


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """``cap * tanh(x / cap)`` in float32 or wider; a ``cap`` of 0 changes nothing."""
    if not cap:
        return x
    if fits(x):
        return native.soft_cap(x, cap)
    wide = x if x.dtype == torch.float64 else x.float()
    return torch.tanh(wide / cap) * cap


def finite_argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The lowest index [R] among each row's greatest logits, and whether one may use it, bool [R].

    One may not where the row [V], V at least 1, has NaN or infinity, or minus infinity alone; the
    index is some id within the vocabulary then. A soft cap changes neither, unless it rounds.
    """
    if fits(logits):
        return native.finite_argmax(logits)
    values, tokens = logits.max(dim=-1)
    return tokens, values.isfinite()
