# Triton is not installed where types are checked, and kernels have none.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportMissingParameterType=false
"""One step of gated retention on states in the slots of a pool."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

STATE_ELEMENTS = 1 << 13  # of a program's part of a state


@triton.jit
def _step(
    q, k, v, log_decay, pool, slots, out, scale, q_row, q_head, k_row, k_head, v_row, v_head,
    decay_row, heads, K: tl.constexpr, K_PAD: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    seq, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i, j = tl.arange(0, K_PAD), tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    real = (i < K)[:, None] & (j < V)[None, :]
    at = (tl.load(slots + seq) * heads + head) * K * V + i[:, None] * V + j[None, :]
    decay = tl.exp(tl.load(log_decay + seq * decay_row + head).to(tl.float32))
    key = tl.load(k + seq * k_row + head * k_head + i, i < K, 0.0).to(tl.float32)
    value = tl.load(v + seq * v_row + head * v_head + j, j < V, 0.0).to(tl.float32)
    query = tl.load(q + seq * q_row + head * q_head + i, i < K, 0.0).to(tl.float32) * scale
    state = tl.load(pool + at, real, 0.0) * decay + key[:, None] * value[None, :]
    tl.store(pool + at, state, real)
    result = tl.sum(query[:, None] * state, 0)
    tl.store(out + (seq * heads + head) * V + j, result.to(out.dtype.element_ty), j < V)


def retention_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    pool: Tensor,
    slots: Tensor,
    scale: float | None = None,
) -> Tensor:
    """Advance S sequences by a token each, their states in place in ``pool`` [slots, H, K, V].

    q, k are [S, H, K], v is [S, H, V], log_decay [S, H], slots [S] int64; the pool is contiguous
    float32. Returns [S, H, V] in the dtype of ``v``.
    """
    seqs, heads, size = q.shape
    width = v.shape[2]
    q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
    log_decay = log_decay if log_decay.stride(1) == 1 else log_decay.contiguous()
    out = torch.empty(seqs, heads, width, dtype=v.dtype, device=v.device)
    pad = triton.next_power_of_2(size)
    block = max(1, min(triton.next_power_of_2(width), STATE_ELEMENTS // pad))
    if seqs:
        _step[(seqs, heads, triton.cdiv(width, block))](
            q, k, v, log_decay, pool, slots, out, size**-0.5 if scale is None else scale,
            *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], log_decay.stride(0), heads,
            K=size, K_PAD=pad, V=width, BLOCK=block,
        )  # fmt: skip
    return out
