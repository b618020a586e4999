"""Gated units, natively: forms of ``ops.gated`` for float32 and bfloat16."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from yocolm.ops.native.packed import packed


@lru_cache(maxsize=1)
def _gated() -> Callable[..., None]:
    return packed("yo_gated", "PqPqPqqqqq")


@lru_cache(maxsize=1)
def _sparse_gelu() -> Callable[..., None]:
    return packed("yo_sparse_gelu", "PqPqdPqqqq")


def glu(gate_up: Tensor, silu: bool) -> Tensor:
    """GELU, or SiLU, of the first half of each row of [T, 2I] times the other."""
    gate_up = gate_up if gate_up.stride(1) == 1 else gate_up.contiguous()
    gate, up, row, out, is_bf16 = _halves(gate_up)
    rows, size = out.shape
    threads = torch.get_num_threads()
    _gated()(gate, row, up, row, out.data_ptr(), rows, size, silu, is_bf16, threads)
    return out


def sparse_gelu_glu(gate_up: Tensor, quantile: float) -> Tensor:
    gate_up = gate_up if gate_up.stride(1) == 1 else gate_up.contiguous()
    gate, up, row, out, is_bf16 = _halves(gate_up)
    rows, size = out.shape
    threads = torch.get_num_threads()
    _sparse_gelu()(gate, row, up, row, quantile, out.data_ptr(), rows, size, is_bf16, threads)
    return out


def gelu_mul(x: Tensor, other: Tensor) -> Tensor:
    x_row, last = x.stride()
    if last != 1:
        x = x.contiguous()
        x_row, _ = x.stride()
    other_row, last = other.stride()
    if last != 1:
        other = other.contiguous()
        other_row, _ = other.stride()
    rows, size = x.shape
    out = x.new_empty(rows, size)
    _gated()(
        x.data_ptr(),
        x_row,
        other.data_ptr(),
        other_row,
        out.data_ptr(),
        rows,
        size,
        False,
        x.dtype == torch.bfloat16,
        torch.get_num_threads(),
    )
    return out


def _halves(gate_up: Tensor) -> tuple[int, int, int, Tensor, bool]:
    """Addresses of both halves, how far rows lie apart, the output, and whether it is bfloat16."""
    row, last = gate_up.stride()
    assert last == 1, "the caller keeps a contiguous copy alive"
    rows, width = gate_up.shape
    size = width // 2
    is_bf16 = gate_up.dtype == torch.bfloat16
    start = gate_up.data_ptr()
    return start, start + size * (2 if is_bf16 else 4), row, gate_up.new_empty(rows, size), is_bf16
