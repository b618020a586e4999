"""Root-mean-square normalisation (Zhang & Sennrich, arXiv 1910.07467), alone and beside sums.

On the CPU, in float32 and bfloat16, and without gradients, each of these is one native call. Sums
are rounded to their dtype before they are normed.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from yocolm.ops.native import norm as native
from yocolm.ops.native.library import fits


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Normalise the last dimension of ``x`` [..., D] by its root mean square, in float32 or wider.

    ``weight`` is [D] or None. Returns a tensor of the shape and dtype of ``x``.
    """
    if _fit(x, weight):
        return native.rms_norm(x, weight, eps)
    return rms_norm_form(x, weight, eps)


def add_norm(
    residual: Tensor, y: Tensor, weight: Tensor, eps: float, scale: Tensor | None = None
) -> Tensor:
    """``(residual + rms_norm(y, weight)) * scale``; ``scale`` has one element, or is None."""
    if _fit(y, residual, weight, scale):
        return native.add_norm(residual, y, weight, eps, scale, None, 0.0)[0]
    x = residual + rms_norm(y, weight, eps)
    return x if scale is None else x * scale


def add_norm_norm(
    residual: Tensor,
    y: Tensor,
    weight: Tensor,
    eps: float,
    next_weight: Tensor,
    next_eps: float,
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``x = add_norm(residual, y, weight, eps, scale)`` and ``rms_norm(x, next_weight)``."""
    if _fit(y, residual, weight, scale, next_weight):
        x, normed = native.add_norm(residual, y, weight, eps, scale, next_weight, next_eps)
        assert normed is not None
        return x, normed
    x = add_norm(residual, y, weight, eps, scale)
    return x, rms_norm(x, next_weight, next_eps)


def add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``x + y`` and its ``rms_norm``."""
    if _fit(y, x, weight):
        total, normed = native.add_norm(x, y, None, 0.0, None, weight, eps)
        assert normed is not None
        return total, normed
    total = x + y
    return total, rms_norm(total, weight, eps)


def gated_norm(o: Tensor, gate: Tensor, eps: float) -> Tensor:
    """``silu(gate) * rms_norm(o)`` over the last of [T, H, V], without a weight; views are fine."""
    if _fit(o, gate):
        return native.gated_norm(o, gate, eps)
    return F.silu(gate) * rms_norm(o, None, eps)


def mix_inputs(
    projected: Tensor,
    scale: float,
    weight: Tensor,
    eps: float,
    looked_up: Tensor,
    table_scale: float,
) -> Tensor:
    """Gemma's inputs of each layer: the mean, times the root of 2, of two sources of equal size.

    ``projected * scale`` [R, N * P] is normed in parts of P with ``weight`` [P]; ``looked_up`` is
    multiplied by ``table_scale``. Returns [R, N, P].
    """
    if _fit(projected, looked_up, weight):
        return native.mix_inputs(projected, scale, weight, eps, looked_up, table_scale)
    normed = rms_norm((projected * scale).unflatten(-1, (-1, len(weight))), weight, eps)
    return (normed + (looked_up * table_scale).view_as(normed)) * 2**-0.5


def rms_norm_form(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """``rms_norm`` in PyTorch: the reference, and what gradients pass through."""
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


def _fit(x: Tensor, *others: Tensor | None) -> bool:
    """Whether native forms take all of these."""
    if not fits(x):
        return False
    for other in others:
        if other is not None and (other.dtype != x.dtype or other.stride(-1) != 1):
            return False
    return True
