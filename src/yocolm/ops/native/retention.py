"""Gated retention on the slots of a pool, natively; see ``ops/slot_retention.py``.

q, k, v are float32 or bfloat16, all the same, their last dimension contiguous; log-decays and pools
are float32, pools contiguous.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from yocolm.ops.native.library import function

CHUNK = 48  # tokens; more of them multiply more scores, fewer pass over the state more often

_P, _I, _L, _F = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float
_INPUTS = (_P, _L, _L) * 4  # q, k, v, log-decay
_SIZES = (_L, _L, _L, _L)  # sequences, heads, K, V


@lru_cache(maxsize=1)
def _step() -> Any:
    return function("yo_retention_step", *_INPUTS, _P, _P, _P, *_SIZES, _F, _I, _I)


@lru_cache(maxsize=1)
def _chunks() -> Any:
    places = (_P, _P, _P, _P, _P, _P, _P)  # initial and final states, output, starts and stops
    return function("yo_retention_chunks", *_INPUTS, *places, *_SIZES, _F, _L, _I, _I)


def retention_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    pool: Tensor,
    slots: Tensor,
    scale: float | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """As ``step_slots``; into ``out`` [S, H, V], contiguous, if it is given."""
    sequences, heads, size = q.shape
    if out is None:
        out = torch.empty(v.shape, dtype=v.dtype)
    _step()(
        q.data_ptr(),
        *q.stride()[:2],
        k.data_ptr(),
        *k.stride()[:2],
        v.data_ptr(),
        *v.stride()[:2],
        log_decay.data_ptr(),
        *log_decay.stride(),
        pool.data_ptr(),
        slots.data_ptr(),
        out.data_ptr(),
        sequences,
        heads,
        size,
        v.shape[2],
        size**-0.5 if scale is None else scale,
        q.dtype == torch.bfloat16,
        torch.get_num_threads(),
    )
    return out


def retention_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    pool: Tensor,
    slots: Tensor,
    cu_seqlens: Tensor,
    scale: float | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As ``prefill_slots``; into ``out`` [T, H, V], contiguous, if it is given."""
    if out is None:
        out = torch.empty(v.shape, dtype=v.dtype)
    final = torch.empty(len(slots), *pool.shape[1:])
    scale = float(q.shape[2] ** -0.5) if scale is None else scale
    starts, stops = cu_seqlens[:-1], cu_seqlens[1:]
    _run(q, k, v, log_decay, (pool, slots), (final, None), out, starts, stops, scale)
    return out, final


def retention_advance(
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    pool: Tensor,
    slots: Tensor,
    starts: Tensor,
    counts: Tensor,
) -> None:
    """As ``advance_slots``."""
    stops = starts + counts
    _run(None, k, v, log_decay, (pool, slots), (pool, slots), None, starts, stops, 1.0)


def _run(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    initial: tuple[Tensor, Tensor],
    final: tuple[Tensor, Tensor | None],
    out: Tensor | None,
    starts: Tensor,
    stops: Tensor,
    scale: float,
) -> None:
    _chunks()(
        None if q is None else q.data_ptr(),
        *((0, 0) if q is None else q.stride()[:2]),
        k.data_ptr(),
        *k.stride()[:2],
        v.data_ptr(),
        *v.stride()[:2],
        log_decay.data_ptr(),
        *log_decay.stride(),
        initial[0].data_ptr(),
        initial[1].data_ptr(),
        final[0].data_ptr(),
        None if final[1] is None else final[1].data_ptr(),
        None if out is None else out.data_ptr(),
        starts.data_ptr(),
        stops.data_ptr(),
        len(starts),
        *k.shape[1:],
        v.shape[2],
        scale,
        CHUNK,
        k.dtype == torch.bfloat16,
        torch.get_num_threads(),
    )
