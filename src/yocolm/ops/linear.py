"""Linear projections: over weights as PyTorch keeps them, and over packed ones.

A packed weight is kept once, in the panels of 32 outputs that the kernels read, and serves one row
as well as thousands. Where no kernel can take the inputs (gradients, another device, float64) it is
unpacked for the call: correct, and slow.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from yocolm.ops.native import linear as native
from yocolm.ops.native.library import fits
from yocolm.ops.native.memory import empty_huge

NATIVE_ROWS = 16  # with more rows PyTorch's product is bound by arithmetic, no longer by memory
PANEL = 32  # outputs side by side, as in gemm.h


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
        return native.linear_rows(x, weight, bias)
    return F.linear(x, weight, bias)


class PackedWeight(NamedTuple):
    """A weight [N, K] as panels [P, ceil(K / 2), 32, 2] of bfloat16, or [P, K, 32] of others.

    Columns beyond N, and an odd K's partner, are zeros. With ``glu`` rows 0 .. N/2 - 1 are gates
    and the others their ups; a panel holds 16 gates, then the 16 ups that belong to them.
    """

    data: Tensor
    n: int
    k: int
    glu: bool
    bias: Tensor | None  # [P, 32] float32, in the order of the panels' columns

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    @property
    def outputs(self) -> int:
        """Columns of the result: N, or N / 2 of a gated pair."""
        return self.n // 2 if self.glu else self.n


def pack(weight: Tensor, bias: Tensor | None = None, glu: bool = False) -> PackedWeight:
    """Pack ``weight`` [N, K] and ``bias`` [N]; ``glu``: N / 2 gates, then the N / 2 ups."""
    n, k = weight.shape
    assert not glu or n % 2 == 0
    panels = -(-n // PANEL)
    weight = weight.detach()
    shape = (panels, -(-k // 2), PANEL, 2) if weight.dtype == torch.bfloat16 else (panels, k, PANEL)
    data = empty_huge(shape, weight.dtype) if weight.is_cpu else weight.new_empty(shape)
    with torch.no_grad():
        if fits(weight) and weight.stride(1) == 1:
            native.pack(weight, glu, data)
        else:
            _pack_torch(weight, glu, data)
        if bias is not None:
            bias = _to_columns(bias.detach().float()[:, None], glu, panels)[..., 0].contiguous()
    return PackedWeight(data, n, k, glu, bias)


def _pack_torch(weight: Tensor, glu: bool, data: Tensor) -> None:
    k = weight.shape[1]
    columns = _to_columns(weight, glu, len(data))
    if data.dim() == 4:
        columns = F.pad(columns, (0, k % 2)).unflatten(2, (-1, 2))
    data.copy_(columns.transpose(1, 2))


def _to_columns(rows: Tensor, glu: bool, panels: int) -> Tensor:
    """Rows [N, ...] in the order of the panels' columns: [P, 32, ...]."""
    if not glu:
        return F.pad(rows, (0, 0, 0, panels * PANEL - len(rows))).unflatten(0, (panels, PANEL))
    halves = F.pad(rows.unflatten(0, (2, -1)), (0, 0, 0, panels * PANEL // 2 - len(rows) // 2))
    return halves.unflatten(1, (panels, PANEL // 2)).transpose(0, 1).flatten(1, 2)


def _from_columns(columns: Tensor, glu: bool, n: int) -> Tensor:
    if not glu:
        return columns.flatten(0, 1)[:n]
    return columns.unflatten(1, (2, -1)).transpose(0, 1).flatten(1, 2)[:, : n // 2].flatten(0, 1)


def unpack(packed: PackedWeight) -> Tensor:
    """The weight [N, K] as it was: a copy."""
    columns = packed.data.transpose(1, 2)
    if columns.dim() == 4:
        columns = columns.flatten(2, 3)[..., : packed.k]
    return _from_columns(columns, packed.glu, packed.n).contiguous()


def unpack_bias(packed: PackedWeight) -> Tensor | None:
    """The bias [N] as it was, or None."""
    if packed.bias is None:
        return None
    return _from_columns(packed.bias, packed.glu, packed.n).to(packed.dtype)


def packed_linear(
    x: Tensor,
    packed: PackedWeight,
    start: int = 0,
    stop: int | None = None,
    activation: str | None = None,
    other: Tensor | None = None,
) -> Tensor:
    """``x`` [..., K] times a packed weight: outputs ``start`` to ``stop`` - 1, rounded once.

    ``activation`` is None, "gelu" (its tanh form) or "silu". Of a gated pair it is applied to the
    gates, and outputs are act(gate) * up. ``other`` [..., stop - start] is added to the result if
    there is no activation (a residual), and multiplied with it if there is one.
    """
    stop = packed.outputs if stop is None else stop
    assert 0 <= start <= stop <= packed.outputs and x.shape[-1] == packed.k
    data = packed.data
    assert x.dtype == data.dtype
    if fits(x) and (other is None or other.dtype == x.dtype):
        return native.packed_linear(
            x, data, packed.bias, packed.glu, start, stop, activation, other
        )
    return _packed_linear_torch(x, packed, start, stop, activation, other)


def _packed_linear_torch(
    x: Tensor,
    packed: PackedWeight,
    start: int,
    stop: int,
    activation: str | None,
    other: Tensor | None,
) -> Tensor:
    wide = torch.float32 if x.dtype == torch.bfloat16 else x.dtype
    bias = packed.bias
    if bias is not None:
        bias = _from_columns(bias, packed.glu, packed.n).to(wide)
    y = F.linear(x.to(wide), unpack(packed).to(wide), bias)
    if packed.glu:
        gates, ups = y.chunk(2, dim=-1)
        y = _activate(gates, activation) * ups
    else:
        y = _activate(y, activation)
    y = y[..., start:stop]
    if other is not None:
        y = y * other if activation else y + other
    return y.to(x.dtype)


def _activate(x: Tensor, activation: str | None) -> Tensor:
    if activation == "gelu":
        return F.gelu(x, approximate="tanh")
    return F.silu(x) if activation == "silu" else x
