"""Gated units of MLPs: an activation of one projection times another.

On the CPU, in float32 and bfloat16, and without gradients, each of these is one native call. GELU
is the one with tanh.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from yocolm.ops.dtypes import rounded
from yocolm.ops.native import gated as native
from yocolm.ops.native.library import fits


def gelu_glu(gate_up: Tensor) -> Tensor:
    """``gelu(gate) * up`` of the halves of [T, 2I]."""
    if fits(gate_up):
        return native.glu(gate_up, False)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def silu_glu(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` of the halves of [T, 2I]."""
    if fits(gate_up):
        return native.glu(gate_up, True)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu_mul(x: Tensor, other: Tensor) -> Tensor:
    """``gelu(x) * other``, [T, P] each."""
    if fits(x) and other.dtype == x.dtype:
        return native.gelu_mul(x, other)
    return F.gelu(x, approximate="tanh") * other


def sparse_gelu_glu(gate_up: Tensor, quantile: float) -> Tensor:
    """``gelu(relu(gate - cut)) * up`` of the halves of [T, 2I] (Gemma 3n).

    The cut of a row is the mean of its gates and ``quantile`` times their standard deviation: of
    normally distributed gates, that quantile of the standard normal distribution's.
    """
    quantile = rounded(quantile, gate_up.dtype)
    if fits(gate_up):
        return native.sparse_gelu_glu(gate_up, quantile)
    gate, up = gate_up.chunk(2, dim=-1)
    std, mean = torch.std_mean(gate, dim=-1, correction=0, keepdim=True)
    return F.gelu(F.relu(gate - (mean + std * quantile)), approximate="tanh") * up
