"""Linear projections: over weights as PyTorch keeps them, row by row."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from yocolm.ops.native.library import fits
from yocolm.ops.native.linear import linear_rows

NATIVE_ROWS = 16  # with more rows PyTorch's product is bound by arithmetic, no longer by memory


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x`` [..., K] times ``weight`` [N, K] transposed, plus ``bias`` [N]: [..., N].

    ``weight`` may be a slice of rows of a larger one; no copy is made of it.
    """
    if (
        fits(x)
        and x.dtype == weight.dtype
        and x.numel() <= NATIVE_ROWS * x.shape[-1]
        and weight.is_cpu
        and weight.stride(-1) == 1
        and (bias is None or (bias.dtype == x.dtype and bias.is_contiguous()))
    ):
        return linear_rows(x, weight, bias)
    return F.linear(x, weight, bias)
