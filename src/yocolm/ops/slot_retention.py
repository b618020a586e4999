"""Gated retention on states that lie in the slots of a pool; inference only.

Shapes as in ``ops/retention.py``; a pool is [slots, H, K, V], ``slots`` [S] int64 says where each
sequence's state lies. Slots are distinct, but for those of pads, whose states nobody reads.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from yocolm.ops.blocks import Blocks, cut_blocks
from yocolm.ops.native import retention as native
from yocolm.ops.native.library import fits
from yocolm.ops.retention import CHUNK_SIZE, retention_chunkwise, retention_step


def step_slots(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    pool: Tensor,
    slots: Tensor,
    scale: float | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Advance S sequences by a token each, their states in place.

    q, k are [S, H, K], v is [S, H, V], log_decay [S, H]. Returns [S, H, V] in the dtype of ``v``,
    in ``out`` if that is given, which is contiguous.
    """
    if _native(q, k, v, log_decay, pool, slots):
        return native.retention_step(q, k, v, log_decay, pool, slots, scale, out)
    where = _side_by_side(slots)
    state = pool[where]
    result = retention_step(q, k, v, log_decay, state, scale)
    if where is slots:
        pool[slots] = state
    return result if out is None else out.copy_(result)


def prefill_slots(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    pool: Tensor,
    slots: Tensor,
    cu_seqlens: Tensor,
    blocks: Callable[[], Blocks],
    scale: float | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run packed sequences from their states in the pool on, which stays as it is.

    ``cu_seqlens`` [S + 1] int64 says where each sequence's tokens start, ``blocks`` cuts them for
    the form that needs it. Returns output [T, H, V], in ``out`` if that is given, which is
    contiguous, and final states [S, H, K, V].
    """
    if _native(q, k, v, log_decay, pool, slots, cu_seqlens):
        return native.retention_prefill(q, k, v, log_decay, pool, slots, cu_seqlens, scale, out)
    state = pool.index_select(0, slots)
    result, final = retention_chunkwise(q, k, v, log_decay, blocks(), state, scale)
    return result if out is None else out.copy_(result), final


def advance_slots(
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    pool: Tensor,
    slots: Tensor,
    starts: Tensor,
    counts: Tensor,
) -> None:
    """Advance the states in the pool by ``counts`` [S] tokens from ``starts`` [S] on, both int64.

    Other tokens may lie between the sequences.
    """
    if _native(k, k, v, log_decay, pool, slots, starts, counts):
        native.retention_advance(k, v, log_decay, pool, slots, starts, counts)
        return
    within = torch.arange(int(counts.sum()), device=k.device)
    within -= torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    token = torch.repeat_interleave(starts, counts) + within
    blocks = cut_blocks(counts.tolist(), CHUNK_SIZE, k.device)
    k = k[token]
    state = pool.index_select(0, slots)
    _, final = retention_chunkwise(k, k, v[token], log_decay[token], blocks, state)
    pool.index_copy_(0, slots, final)


def _side_by_side(slots: Tensor) -> slice | Tensor:
    """``slots`` as a slice where that is cheap to find out: such states need no copy."""
    if not (slots.is_cpu and len(slots)) or torch.compiler.is_compiling():
        return slots
    first = int(slots[0])
    run = torch.arange(first, first + len(slots))
    return slice(first, first + len(slots)) if torch.equal(slots, run) else slots


def _native(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, pool: Tensor, *indices: Tensor
) -> bool:
    return (
        fits(q)
        and q.dtype == k.dtype == v.dtype
        and log_decay.dtype == pool.dtype == torch.float32
        and pool.is_contiguous()
        and q.stride(2) == k.stride(2) == v.stride(2) == 1
        and all(index.dtype == torch.int64 and index.is_contiguous() for index in indices)
    )
