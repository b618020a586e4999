"""Logits, natively: forms of ``ops.logits`` for float32 and bfloat16."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from yocolm.ops.native.packed import packed


@lru_cache(maxsize=1)
def _soft_cap() -> Callable[..., None]:
    return packed("yo_soft_cap", "PdPqqq")


@lru_cache(maxsize=1)
def _finite_argmax() -> Callable[..., None]:
    return packed("yo_finite_argmax", "PqPPqqqq")


def soft_cap(x: Tensor, cap: float) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x, dtype=torch.float32)
    is_bf16 = x.dtype == torch.bfloat16
    _soft_cap()(x.data_ptr(), cap, out.data_ptr(), x.numel(), is_bf16, torch.get_num_threads())
    return out


def finite_argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    stride, last = logits.stride()
    if last != 1:
        logits = logits.contiguous()
        stride, _ = logits.stride()
    rows, size = logits.shape
    tokens = logits.new_empty(rows, dtype=torch.int64)
    finite = logits.new_empty(rows, dtype=torch.bool)
    _finite_argmax()(
        logits.data_ptr(),
        stride,
        tokens.data_ptr(),
        finite.data_ptr(),
        rows,
        size,
        logits.dtype == torch.bfloat16,
        torch.get_num_threads(),
    )
    return tokens, finite
