"""Attention over pages and windows, and the writes of both, natively.

The native functions take descriptions: short arrays of addresses and sizes. Those of pools and
batches are made once and used by all calls; nothing in them depends on what the tensors hold.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from yocolm.ops.native.library import function

_P, _I, _L, _F = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float
_POOL, _SEQUENCES, _OWN = _L * 13, _L * 8, _L * 7


class Description(NamedTuple):
    """Numbers for a native function, and the tensors that they point into."""

    numbers: Any
    tensors: tuple[Tensor, ...]


@lru_cache(maxsize=1)
def _attend() -> Any:
    return function("yo_attend", _P, _P, _P, _P, _L, _L, _P, _L, _L, _F, _F, _I)


@lru_cache(maxsize=1)
def _commit_window() -> Any:
    return function("yo_commit_window", _P, _P, _P, _P, _I)


def describe_pool(k: Tensor, v: Tensor) -> Description:
    """Pages or rings k [N, G, L, K], v [N, G, L, V], alike in dtype, each row contiguous."""
    assert k.dtype == v.dtype and k.stride(3) == v.stride(3) == 1
    size = k.element_size()
    numbers = _POOL(
        k.data_ptr(),
        v.data_ptr(),
        *(size * step for step in (*k.stride()[:3], *v.stride()[:3])),
        k.shape[2],
        k.shape[1],
        k.shape[3],
        v.shape[3],
        k.dtype == torch.bfloat16,
    )
    return Description(numbers, (k, v))


def describe_sequences(
    cu_seqlens: Tensor, positions: Tensor, kv_lens: Tensor, block_table: Tensor, slots: Tensor
) -> Description:
    """A batch's int64 tensors, see ``models.base.Batch``; rows lie between ``cu_seqlens``."""
    tensors = [x.contiguous() for x in (cu_seqlens, positions, kv_lens, block_table, slots)]
    cu_seqlens, positions, kv_lens, block_table, slots = tensors
    numbers = _SEQUENCES(
        len(kv_lens),
        cu_seqlens.data_ptr(),
        positions.data_ptr(),
        kv_lens.data_ptr(),
        block_table.data_ptr(),
        block_table.shape[1],
        block_table.shape[1],
        slots.data_ptr(),
    )
    return Description(numbers, tuple(tensors))


def describe_own(k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Description:
    """A step's own k [T, G, K], v [T, G, V], the tokens of its sequences between ``cu_seqlens``."""
    k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (k, v))
    cu_seqlens = cu_seqlens.contiguous()
    size = k.element_size()
    numbers = _OWN(
        k.data_ptr(),
        v.data_ptr(),
        k.stride(0) * size,
        k.stride(1) * size,
        v.stride(0) * size,
        v.stride(1) * size,
        cu_seqlens.data_ptr(),
    )
    return Description(numbers, (k, v, cu_seqlens))


def attend(
    pool: Description,
    sequences: Description,
    own: Description | None,
    q: Tensor,
    scale: float | None = None,
    softcap: float = 0.0,
) -> Tensor:
    """Attention of rows q [R, H, K] over pages, or over rings and a step's ``own`` tokens.

    A row at position p sees the keys 0 to p of its sequence, of a window the last of them. Rows
    that belong to no sequence become zero. Returns [R, H, V].
    """
    rows, heads, size = q.shape
    row, head, last = q.stride()
    if last != 1:
        q = q.contiguous()
        row, head, last = q.stride()
    out = torch.empty(rows, heads, pool.tensors[1].shape[3], dtype=q.dtype)
    width = q.element_size()
    _attend()(
        pool.numbers,
        sequences.numbers,
        None if own is None else own.numbers,
        q.data_ptr(),
        row * width,
        head * width,
        out.data_ptr(),
        rows,
        heads,
        size**-0.5 if scale is None else scale,
        softcap,
        torch.get_num_threads(),
    )
    return out


def commit_window(
    pool: Description, sequences: Description, own: Description, accepted: Tensor | None = None
) -> None:
    """Move a step's own tokens into the rings: of each sequence ``accepted`` [S] int64, or all."""
    accepted = None if accepted is None else accepted.contiguous()
    _commit_window()(
        pool.numbers,
        sequences.numbers,
        own.numbers,
        None if accepted is None else accepted.data_ptr(),
        torch.get_num_threads(),
    )
