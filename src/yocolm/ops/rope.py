"""Rotary position embedding (Su et al., arXiv 2104.09864): two pairings, two frequency laws.

* interleaved: dimensions (2i, 2i+1) turn together (the YOCO authors' layout);
* half-split: dimensions (i, i + D/2) turn together (Llama; flash-linear-attention's window layers);
* exclusive frequencies ``theta ** -(2i / D)``; inclusive ones ``theta ** -(i / (D/2 - 1))``, which
  reach both ends of the range, as in the authors' code;
* partial: only the first pairs turn, the others stay as they are (Gemma 4's full layers).

Angles are computed in float64 and only the finished tables are cast, so that position 1,000,000 is
as exact as position 1.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from yocolm.ops.native import heads as native
from yocolm.ops.native.library import fits


class Rotation(NamedTuple):
    """Cosines and sines of one batch's positions, [T, 1, pairs] each, float32 or float64.

    Of a head's D/2 pairs the first turn, as many as the tables have.
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool


def inverse_frequencies(
    dim: int, theta: float, inclusive: bool, device: torch.device, fraction: float = 1.0
) -> Tensor:
    """Angular frequencies, in float64, of the first ``fraction`` of the ``dim // 2`` pairs."""
    half = dim // 2
    if inclusive:
        exponent = torch.linspace(0, 1, half, dtype=torch.float64, device=device)
    else:
        exponent = torch.arange(half, dtype=torch.float64, device=device) / half
    return theta ** -exponent[: int(fraction * dim // 2)]


def rotation(
    positions: Tensor,
    dim: int,
    theta: float,
    *,
    interleaved: bool,
    inclusive: bool,
    fraction: float = 1.0,
    factor: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> Rotation:
    """Build the tables for ``positions`` [T] and heads of ``dim`` dimensions.

    ``fraction`` of the pairs turn, ``factor`` times slower than ``theta`` says.
    """
    laws = _traced_frequencies if torch.compiler.is_compiling() else _cached_frequencies
    frequencies = laws(dim, theta, inclusive, positions.device, fraction, factor)
    if dtype == torch.float32 and native.indices_fit(positions):
        return Rotation(*native.rotation(positions, frequencies), interleaved)
    angles = positions.double()[:, None, None] * frequencies
    return Rotation(angles.cos().to(dtype), angles.sin().to(dtype), interleaved)


def _traced_frequencies(
    dim: int, theta: float, inclusive: bool, device: torch.device, fraction: float, factor: float
) -> Tensor:
    return inverse_frequencies(dim, theta, inclusive, device, fraction) / factor


@lru_cache(maxsize=64)
def _cached_frequencies(
    dim: int, theta: float, inclusive: bool, device: torch.device, fraction: float, factor: float
) -> Tensor:
    with torch.inference_mode(False):  # may be used outside of it later
        return _traced_frequencies(dim, theta, inclusive, device, fraction, factor)


def tables_fit(table: Rotation | None, x: Tensor) -> bool:
    """Whether native forms take these tables, or none at all, for the rows of ``x``."""
    if table is None:
        return True
    cos = table.cos
    return cos.dtype == torch.float32 and cos.shape[0] == x.shape[0] and cos.is_contiguous()


def rotate(x: Tensor, table: Rotation) -> Tensor:
    """Rotate ``x`` [T, H, D] by its rows' angles, in the table's dtype; returns x's dtype."""
    if fits(x) and tables_fit(table, x):
        return native.finish_heads(x, None, None, table)
    turning = table.cos.shape[-1]
    if table.interleaved:
        assert 2 * turning == x.shape[-1], "a partial rotation is half-split"
        pairs = torch.view_as_complex(x.to(table.cos.dtype).reshape(*x.shape[:-1], turning, 2))
        turned = torch.view_as_real(pairs * torch.complex(table.cos, table.sin))
        return turned.flatten(-2).to(x.dtype)
    halves = x.chunk(2, dim=-1)
    first, second = (half[..., :turning].to(table.cos.dtype) for half in halves)
    parts = (
        (first * table.cos - second * table.sin).to(x.dtype),
        halves[0][..., turning:],
        (second * table.cos + first * table.sin).to(x.dtype),
        halves[1][..., turning:],
    )
    return torch.cat(parts, dim=-1)
