"""Heads of queries, keys and values finished natively, and the tables that turn them."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from yocolm.ops.native.library import native
from yocolm.ops.native.packed import packed

if TYPE_CHECKING:
    from yocolm.ops.rope import Rotation


@lru_cache(maxsize=1)
def _finish_heads() -> Callable[..., None]:
    return packed("yo_finish_heads", "PqqPqdPPqqPqqqqq")


@lru_cache(maxsize=1)
def _rotation() -> Callable[..., None]:
    return packed("yo_rotation", "PPPPqqq")


def indices_fit(*indices: Tensor) -> bool:
    """Whether native forms take these: int64 on the CPU, and nothing to trace."""
    if torch.compiler.is_compiling() or native().handle is None:
        return False
    for index in indices:
        if not (index.is_cpu and index.dtype == torch.int64):
            return False
    return True


def finish_heads(
    x: Tensor, weight: Tensor | None, eps: float | None, rope: Rotation | None
) -> Tensor:
    """As ``ops.heads.finish_heads``; tables are float32 and contiguous."""
    row, head, last = x.stride()
    if last != 1:
        x = x.contiguous()
        row, head, _ = x.stride()
    rows, heads, size = x.shape
    out = x.new_empty(rows, heads, size)
    cos, sin, pairs, interleaved = tables(rope)
    _finish_heads()(
        x.data_ptr(),
        row,
        head,
        0 if weight is None else weight.data_ptr(),
        eps is not None,
        eps or 0.0,
        cos,
        sin,
        pairs,
        interleaved,
        out.data_ptr(),
        rows,
        heads,
        size,
        x.dtype == torch.bfloat16,
        torch.get_num_threads(),
    )
    return out


def tables(rope: Rotation | None) -> tuple[int, int, int, bool]:
    """Addresses of cosines and sines, pairs that turn, and whether these are neighbours."""
    if rope is None:
        return 0, 0, 0, False
    cos, sin, interleaved = rope
    return cos.data_ptr(), sin.data_ptr(), cos.shape[-1], interleaved


def rotation(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines [T, 1, pairs], float32, of positions [T] int64 and float64 frequencies."""
    positions = positions.contiguous()
    rows, pairs = positions.shape[0], frequencies.shape[0]
    cos = frequencies.new_empty(rows, 1, pairs, dtype=torch.float32)
    sin = torch.empty_like(cos)
    _rotation()(
        positions.data_ptr(),
        frequencies.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        rows,
        pairs,
        torch.get_num_threads(),
    )
    return cos, sin
