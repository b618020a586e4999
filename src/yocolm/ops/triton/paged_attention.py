# Triton is not installed where types are checked, and kernels have none.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportMissingParameterType=false
"""Attention of single rows over pages, or over rings and a step's own tokens, split over the keys.

Each program takes one row, the query heads of one key head, and a share of the keys; a second one
merges the shares (flash-decoding). Nothing but tensors and fixed sizes decides what is launched:
rows whose keys are few leave programs idle. Keys that a row may not see are never loaded, so what
lies there, NaN too, does not matter.

Shapes: R rows, H query heads, G key heads, S sequences; pools [N, G, L, K] and [N, G, L, V].
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE_BYTES = 1 << 15  # of keys in a tile: two of them, and of values, fit into shared memory
MOST_SPLITS = 64


@triton.jit
def _keys(base, own, pool_at, own_at, old, live, d, SIZE: tl.constexpr, WINDOW: tl.constexpr):
    """A tile of keys or values [BLOCK, SIZE padded]; of a window from either of two places."""
    wide = d[None, :] < SIZE
    if WINDOW:
        of_ring = tl.load(base + pool_at[:, None] + d[None, :], (live & old)[:, None] & wide, 0.0)
        of_step = tl.load(own + own_at[:, None] + d[None, :], (live & ~old)[:, None] & wide, 0.0)
        return of_ring + of_step.to(of_ring.dtype)
    return tl.load(base + pool_at[:, None] + d[None, :], live[:, None] & wide, 0.0)


@triton.jit
def _attend_share(
    q, k, v, own_k, own_v, positions, seq_ids, table, starts, firsts, out, peaks, sums,
    scale, softcap, q_row, q_head, k_block, k_head, k_slot, v_block, v_head, v_slot,
    own_k_row, own_k_head, own_v_row, own_v_head, table_row, length, heads, splits,
    GROUP: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr, V: tl.constexpr,
    V_PAD: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    row, group, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    last, seq = tl.load(positions + row), tl.load(seq_ids + row)
    low = last * 0
    start, first, ring = low, low, low
    if WINDOW:  # ``table`` has slots, and ``length`` is the window
        low = tl.maximum(last + 1 - length, 0)
        start, first = tl.load(starts + seq), tl.load(firsts + seq)
        ring = tl.load(table + seq)
    share = tl.cdiv(tl.cdiv(last + 1 - low, splits), BLOCK) * BLOCK
    begin = low + split * share
    end = tl.minimum(begin + share, last + 1)

    head, kd, vd = tl.arange(0, GROUP), tl.arange(0, K_PAD), tl.arange(0, V_PAD)
    real = head < heads
    at = row.to(tl.int64) * q_row + (group * heads + head) * q_head
    queries = tl.load(q + at[:, None] + kd[None, :], real[:, None] & (kd < K)[None, :], 0.0)
    peak = tl.full([GROUP], float("-inf"), tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    acc = tl.zeros([GROUP, V_PAD], tl.float32)
    precision: tl.constexpr = "ieee" if EXACT else "tf32"
    for tile in range(begin, end, BLOCK):
        position = tile + tl.arange(0, BLOCK)
        live = position < end
        if WINDOW:
            block, place, old = ring + position * 0, position % length, position < start
        else:
            block = tl.load(table + seq * table_row + position // length, live, 0)
            place, old = position % length, live
        token = first + position - start
        k_at = block * k_block + group * k_head + place * k_slot
        v_at = block * v_block + group * v_head + place * v_slot
        own_k_at = token * own_k_row + group * own_k_head
        own_v_at = token * own_v_row + group * own_v_head
        keys = _keys(k, own_k, k_at, own_k_at, old, live, kd, K, WINDOW)
        values = _keys(v, own_v, v_at, own_v_at, old, live, vd, V, WINDOW)
        same = queries.to(keys.dtype)
        scores = tl.dot(same, tl.trans(keys), input_precision=precision) * scale
        if SOFTCAP:
            bent = 1.0 - 2.0 / (tl.exp(2.0 * scores / softcap) + 1.0)  # tanh
            scores = softcap * bent
        scores = tl.where(live[None, :], scores, float("-inf"))
        highest = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp(scores - highest[:, None])
        keep = tl.exp(peak - highest)
        total = total * keep + tl.sum(weights, 1)
        seen = tl.dot(weights.to(values.dtype), values, input_precision=precision)
        acc = acc * keep[:, None] + seen
        peak = highest
    share_at = (row.to(tl.int64) * tl.num_programs(1) + group) * heads * splits
    share_at += head * splits + split
    tl.store(peaks + share_at, peak, real)
    tl.store(sums + share_at, total, real)
    tl.store(out + share_at[:, None] * V + vd[None, :], acc, real[:, None] & (vd < V)[None, :])


@triton.jit
def _merge_shares(
    shares, peaks, sums, out, splits, V: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)  # of [R * H]
    split, d = tl.arange(0, SPLITS), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = split < splits
    peak = tl.load(peaks + row * splits + split, real, float("-inf"))
    factor = tl.exp(peak - tl.max(peak, 0))
    total = tl.sum(tl.load(sums + row * splits + split, real, 0.0) * factor, 0)
    at = (row * splits + split)[:, None] * V + d[None, :]
    parts = tl.load(shares + at, real[:, None] & (d < V)[None, :], 0.0)
    merged = tl.sum(parts * factor[:, None], 0) / total
    tl.store(out + row * V + d, merged.to(out.dtype.element_ty), d < V)


def _launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    own: tuple[Tensor, Tensor],
    positions: Tensor,
    seq_ids: Tensor,
    table: Tensor,
    starts: Tensor,
    firsts: Tensor,
    scale: float | None,
    softcap: float,
    window: int,
) -> Tensor:
    rows, num_heads, size = q.shape
    groups, length, value_size = k.shape[1], k.shape[2], v.shape[3]
    heads = num_heads // groups
    q = q if q.stride(2) == 1 else q.contiguous()
    own_k, own_v = (x if x.stride(2) == 1 else x.contiguous() for x in own)
    k_pad, v_pad = (max(16, triton.next_power_of_2(n)) for n in (size, value_size))
    block = max(16, min(128, TILE_BYTES // (max(k_pad, v_pad) * k.element_size())))
    splits = _splits(rows * groups, q.device, window, block)
    out = torch.empty(rows, num_heads, value_size, dtype=q.dtype, device=q.device)
    shares = torch.empty(rows, num_heads, splits, value_size, dtype=torch.float32, device=q.device)
    peaks, sums = (torch.empty_like(shares[..., 0]) for _ in range(2))
    if not rows:
        return out
    _attend_share[(rows, groups, splits)](
        q, k, v, own_k, own_v, positions, seq_ids, table, starts, firsts, shares, peaks, sums,
        size**-0.5 if scale is None else scale, softcap or 1.0, q.stride(0), q.stride(1),
        *k.stride()[:3], *v.stride()[:3], *own_k.stride()[:2], *own_v.stride()[:2],
        table.stride(0), length, heads, splits,
        GROUP=max(16, triton.next_power_of_2(heads)), K=size, K_PAD=k_pad, V=value_size,
        V_PAD=v_pad, BLOCK=block, WINDOW=window > 0, SOFTCAP=softcap > 0,
        EXACT=k.dtype == torch.float32, num_warps=4, num_stages=2,
    )  # fmt: skip
    part = min(v_pad, 128)
    _merge_shares[(rows * num_heads, triton.cdiv(value_size, part))](
        shares, peaks, sums, out, splits,
        V=value_size, BLOCK=part, SPLITS=triton.next_power_of_2(splits),
    )  # fmt: skip
    return out


def _splits(programs: int, device: torch.device, window: int, block: int) -> int:
    """Shares of the keys, so that a few rows keep the whole device busy."""
    most = min(MOST_SPLITS, triton.cdiv(window, block)) if window else MOST_SPLITS
    if device.type != "cuda":
        return min(most, 3)  # the interpreter's
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, min(most, 4 * processors // programs))


def attend_pages(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    seq_ids: Tensor,
    block_table: Tensor,
    scale: float | None = None,
    softcap: float = 0.0,
) -> Tensor:
    """Attention of q [R, H, K] over pages k [N, G, L, K], v [N, G, L, V]; returns [R, H, V].

    A row sees the keys at positions 0 to its own in ``positions`` [R], whose pages are in row
    ``seq_ids`` [R] of ``block_table`` [S, pages]; all int64. Softmax is float32.
    """
    none = positions
    return _launch(
        q, k, v, (q, q), positions, seq_ids, block_table, none, none, scale, softcap, 0
    )  # fmt: skip


def attend_window(
    q: Tensor,
    k_ring: Tensor,
    v_ring: Tensor,
    own: tuple[Tensor, Tensor],
    positions: Tensor,
    seq_ids: Tensor,
    slots: Tensor,
    starts: Tensor,
    firsts: Tensor,
    scale: float | None = None,
    softcap: float = 0.0,
) -> Tensor:
    """Attention of q [R, H, K] over the window of each row; returns [R, H, V].

    Keys before position ``starts`` [S] lie in rings [slots, G, W, .], position p at place p % W;
    those from there on are the step's ``own`` [T, G, .], a sequence's from token ``firsts`` [S] on.
    """
    window = k_ring.shape[2]
    return _launch(
        q, k_ring, v_ring, own, positions, seq_ids, slots, starts, firsts, scale, softcap, window
    )  # fmt: skip
