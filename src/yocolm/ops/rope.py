"""Rotary position embedding (Su et al., arXiv 2104.09864): two pairings, two frequency laws.

* interleaved: dimensions (2i, 2i+1) turn together (the YOCO authors' layout);
* half-split: dimensions (i, i + D/2) turn together (Llama; flash-linear-attention's window layers);
* exclusive frequencies ``theta ** -(2i / D)``; inclusive ones ``theta ** -(i / (D/2 - 1))``, which
  reach both ends of the range, as in the authors' code.

Angles are computed in float64 and only the finished tables are cast, so that position 1,000,000 is
as exact as position 1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Rotation(NamedTuple):
    """Cosines and sines of one batch's positions, [T, 1, D/2] each, float32 or float64."""

    cos: Tensor
    sin: Tensor
    interleaved: bool


def inverse_frequencies(dim: int, theta: float, inclusive: bool, device: torch.device) -> Tensor:
    """Return the ``dim // 2`` angular frequencies in float64."""
    half = dim // 2
    if inclusive:
        exponent = torch.linspace(0, 1, half, dtype=torch.float64, device=device)
    else:
        exponent = torch.arange(half, dtype=torch.float64, device=device) / half
    return theta**-exponent


def rotation(
    positions: Tensor,
    dim: int,
    theta: float,
    *,
    interleaved: bool,
    inclusive: bool,
    dtype: torch.dtype = torch.float32,
) -> Rotation:
    """Build the tables for ``positions`` [T] and heads of ``dim`` dimensions."""
    frequencies = inverse_frequencies(dim, theta, inclusive, positions.device)
    angles = positions.double()[:, None, None] * frequencies
    return Rotation(angles.cos().to(dtype), angles.sin().to(dtype), interleaved)


def rotate(x: Tensor, table: Rotation) -> Tensor:
    """Rotate ``x`` [T, H, D] by its rows' angles, in the table's dtype; returns x's dtype."""
    wide = x.to(table.cos.dtype)
    if table.interleaved:
        pairs = torch.view_as_complex(wide.reshape(*x.shape[:-1], -1, 2))
        turned = torch.view_as_real(pairs * torch.complex(table.cos, table.sin)).flatten(-2)
    else:
        first, second = wide.chunk(2, dim=-1)
        turned = torch.cat(
            (
                first * table.cos - second * table.sin,
                second * table.cos + first * table.sin,
            ),
            dim=-1,
        )
    return turned.to(x.dtype)
