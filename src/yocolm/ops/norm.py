"""Root-mean-square normalisation (Zhang & Sennrich, arXiv 1910.07467)."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Normalise the last dimension of ``x`` [..., D] by its root mean square, in float32 or wider.

    ``weight`` is [D] or None. Returns a tensor of the shape and dtype of ``x``.
    """
    wide = x if x.dtype == torch.float64 else x.float()
    if torch.is_grad_enabled():
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (normed if weight is None else normed * weight.to(wide.dtype)).to(x.dtype)
    # The same in fewer passes over memory: a copy of x is the only temporary.
    length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scale = length.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    normed = wide * scale if wide is x else wide.mul_(scale)
    if weight is not None:
        normed.mul_(weight.to(wide.dtype))
    return normed.to(x.dtype)
