"""Root-mean-square norms, natively: forms of ``ops.norm`` for float32 and bfloat16."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from yocolm.ops.native.packed import packed


@lru_cache(maxsize=1)
def _rms_norm() -> Callable[..., None]:
    return packed("yo_rms_norm", "PqPdPqqqq")


@lru_cache(maxsize=1)
def _add_norm() -> Callable[..., None]:
    return packed("yo_add_norm", "PPqPdPPdPPqqqq")


@lru_cache(maxsize=1)
def _gated_norm() -> Callable[..., None]:
    return packed("yo_gated_norm", "PqqPqqdPqqqqq")


@lru_cache(maxsize=1)
def _mix_inputs() -> Callable[..., None]:
    return packed("yo_mix_inputs", "PqdPdPqdPqqqqq")


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    *_, size = shape = x.shape
    rows = x.reshape(-1, size) if len(shape) != 2 else x
    stride, last = rows.stride()
    if last != 1:
        rows = rows.contiguous()
        stride = size
    out = x.new_empty(*shape)
    _rms_norm()(
        rows.data_ptr(),
        stride,
        0 if weight is None else weight.data_ptr(),
        eps,
        out.data_ptr(),
        rows.shape[0],
        size,
        x.dtype == torch.bfloat16,
        torch.get_num_threads(),
    )
    return out


def add_norm(
    residual: Tensor,
    y: Tensor,
    weight: Tensor | None,
    eps: float,
    scale: Tensor | None,
    next_weight: Tensor | None,
    next_eps: float,
) -> tuple[Tensor, Tensor | None]:
    """The sum, and its norm if there is a ``next_weight``; without ``weight``, y is not normed."""
    residual, y = residual.contiguous(), y.contiguous()
    size = y.shape[-1]
    x = torch.empty_like(y)  # contiguous, as y is
    normed = None if next_weight is None else torch.empty_like(y)
    _add_norm()(
        residual.data_ptr(),
        y.data_ptr(),
        weight is not None,
        0 if weight is None else weight.data_ptr(),
        eps,
        0 if scale is None else scale.data_ptr(),
        0 if next_weight is None else next_weight.data_ptr(),
        next_eps,
        x.data_ptr(),
        0 if normed is None else normed.data_ptr(),
        y.numel() // size,
        size,
        y.dtype == torch.bfloat16,
        torch.get_num_threads(),
    )
    return x, normed


def gated_norm(o: Tensor, gate: Tensor, eps: float) -> Tensor:
    if o.stride(2) != 1:
        o = o.contiguous()
    if gate.stride(2) != 1:
        gate = gate.contiguous()
    rows, heads, size = o.shape
    out = o.new_empty(rows, heads, size)
    _gated_norm()(
        o.data_ptr(),
        o.stride(0),
        o.stride(1),
        gate.data_ptr(),
        gate.stride(0),
        gate.stride(1),
        eps,
        out.data_ptr(),
        rows,
        heads,
        size,
        o.dtype == torch.bfloat16,
        torch.get_num_threads(),
    )
    return out


def mix_inputs(
    projected: Tensor,
    scale: float,
    weight: Tensor,
    eps: float,
    looked_up: Tensor,
    table_scale: float,
) -> Tensor:
    if projected.stride(1) != 1:
        projected = projected.contiguous()
    if looked_up.stride(1) != 1:
        looked_up = looked_up.contiguous()
    rows, width = projected.shape
    size = weight.shape[0]
    parts = width // size
    out = projected.new_empty(rows, parts, size)
    _mix_inputs()(
        projected.data_ptr(),
        projected.stride(0),
        scale,
        weight.data_ptr(),
        eps,
        looked_up.data_ptr(),
        looked_up.stride(0),
        table_scale,
        out.data_ptr(),
        rows,
        parts,
        size,
        projected.dtype == torch.bfloat16,
        torch.get_num_threads(),
    )
    return out
