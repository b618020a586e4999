"""Linears over weights as PyTorch keeps them, for few rows, and over packed weights, natively."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from yocolm.ops.native.library import function
from yocolm.ops.native.packed import packed

_P, _I, _L = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
ACTIVATIONS = {None: 0, "gelu": 1, "silu": 2}


@lru_cache(maxsize=1)
def _linear_rows() -> Any:
    return function("yo_linear_rows", _P, _L, _P, _L, _P, _P, _L, _L, _L, _I, _I)


@lru_cache(maxsize=1)
def _pack() -> Any:
    return function("yo_pack", _P, _L, _L, _L, _I, _P, _I, _I)


@lru_cache(maxsize=1)
def _packed_linear() -> Callable[..., None]:
    return packed("yo_packed_linear", "PqPPPqPqqqqqqqqq")


def _rows(x: Tensor) -> Tensor:
    """``x`` as a matrix whose rows are contiguous: a view where it can be one."""
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _empty(x: Tensor, rows: int, n: int) -> Tensor:
    return x.new_empty(rows, n) if x.dim() == 2 else x.new_empty(*x.shape[:-1], n)


def linear_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x`` [..., K] times ``weight`` [N, K] transposed; both float32 or both bfloat16."""
    rows = _rows(x)
    count = rows.shape[0]
    n, k = weight.shape
    out = _empty(x, count, n)
    _linear_rows()(
        rows.data_ptr(),
        rows.stride(0),
        weight.data_ptr(),
        weight.stride(0),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        count,
        n,
        k,
        x.dtype == torch.bfloat16,
        torch.get_num_threads(),
    )
    return out


def pack(weight: Tensor, glu: bool, out: Tensor) -> None:
    """Write ``weight`` [N, K], rows contiguous, into ``out`` as panels."""
    n, k = weight.shape
    _pack()(
        weight.data_ptr(),
        weight.stride(0),
        n,
        k,
        glu,
        out.data_ptr(),
        weight.dtype == torch.bfloat16,
        torch.get_num_threads(),
    )


def packed_linear(
    x: Tensor,
    panels: Tensor,
    bias: Tensor | None,
    glu: bool,
    start: int,
    stop: int,
    activation: str | None,
    other: Tensor | None,
) -> Tensor:
    """Outputs ``start`` to ``stop`` - 1; see ``ops.linear.packed_linear``."""
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    stride, last = rows.stride()
    if last != 1:
        rows = rows.contiguous()
        stride = rows.shape[1]
    count, k = rows.shape
    n = stop - start
    out = x.new_empty(count, n) if rows is x or x.dim() == 2 else x.new_empty(*x.shape[:-1], n)
    if other is None:
        beside, beside_stride = 0, 0
    else:
        other = _rows(other)
        beside, beside_stride = other.data_ptr(), other.stride(0)
    _packed_linear()(
        rows.data_ptr(),
        stride,
        panels.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        beside,
        beside_stride,
        out.data_ptr(),
        n,
        count,
        k,
        start,
        stop,
        ACTIVATIONS[activation],
        glu,
        x.dtype is torch.bfloat16,
        torch.get_num_threads(),
    )
    return out
