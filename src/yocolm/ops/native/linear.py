"""Linears over weights as PyTorch keeps them, for few rows, and over packed weights, natively."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from yocolm.ops.native.library import function

_P, _I, _L = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64


@lru_cache(maxsize=1)
def _linear_rows() -> Any:
    return function("yo_linear_rows", _P, _L, _P, _L, _P, _P, _L, _L, _L, _I, _I)


def linear_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x`` [..., K] times ``weight`` [N, K] transposed; both float32 or both bfloat16."""
    k = x.shape[-1]
    rows = x if x.dim() == 2 else x.reshape(-1, k)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    n = weight.shape[0]
    count = rows.shape[0]
    out = torch.empty((*x.shape[:-1], n), dtype=x.dtype)
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
