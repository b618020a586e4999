"""Root-mean-square normalisation (Zhang & Sennrich, arXiv 1910.07467)."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Normalise the last dimension of ``x`` [..., D] by its root mean square, in float32 or wider.

    ``weight`` is [D] or None. Returns a tensor of the shape and dtype of ``x``.
    """
    wide = x if x.dtype == torch.float64 else x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    normed = wide * scale
    if weight is not None:
        normed = normed * weight.to(wide.dtype)
    return normed.to(x.dtype)
