"""Root-mean-square norms, natively."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from yocolm.ops.native.library import function

_P, _I, _L, _F = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float


@lru_cache(maxsize=1)
def _rms_norm() -> Any:
    return function("yo_rms_norm", _P, _L, _P, _F, _P, _L, _L, _I, _I)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """As ``ops.norm.rms_norm``; x [..., D] is float32 or bfloat16, as is the weight."""
    size = x.shape[-1]
    rows = x.reshape(-1, size) if x.dim() != 2 else x
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype)
    _rms_norm()(
        rows.data_ptr(),
        rows.stride(0),
        None if weight is None else weight.data_ptr(),
        eps,
        out.data_ptr(),
        len(rows),
        size,
        x.dtype == torch.bfloat16,
        torch.get_num_threads(),
    )
    return out
