"""Attention over packed whole sequences, and the reference that every form is compared with.

All functions take grouped-query heads: q has H heads, k and v have G of them, H a multiple of G;
query head ``h`` reads key head ``h // (H / G)``. Softmax is in float32 or wider. No form
builds a T x T mask or score matrix, except the reference.
"""

from __future__ import annotations

from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from yocolm.ops.blocks import by_length, cut_blocks

ROW_BLOCK = 512  # rows of a long sequence at once; one no longer than this is computed whole
MASK = 1 << 24  # elements of the mask of such a block
WHOLE = 4  # a sequence is computed whole if one of so many of its rows is wanted


def attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_where: tuple[Tensor, Tensor],
    kv_where: tuple[Tensor, Tensor],
    scale: float | None = None,
    window: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    """Plain attention in float64 for any rows and keys.

    q is [R, H, K], k [N, G, K], v [N, G, V]. ``q_where`` and ``kv_where`` are (sequence, position)
    pairs of int64 vectors. A row sees the keys of its sequence at positions up to its own and, with
    a window, at most ``window`` of them, itself included. Returns [R, H, V] in q's dtype.
    """
    scale = float(q.shape[-1] ** -0.5) if scale is None else scale
    repeat = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(repeat, dim=1) for x in (k, v))
    scores = torch.einsum("rhk,nhk->hrn", q.double(), k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    gap = q_where[1][:, None] - kv_where[1][None, :]
    seen = (q_where[0][:, None] == kv_where[0][None, :]) & (gap >= 0)
    if window:
        seen &= gap < window
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("hrn,nhv->rhv", weights, v).to(q.dtype)


def _fused(q: Tensor, k: Tensor, v: Tensor, scale: float | None, mask: Tensor | None) -> Tensor:
    """PyTorch's fused kernel on [B, H, L, K] and grouped [B, G, N, K]; causal without a mask."""
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
    )


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: list[int], scale: float | None = None
) -> Tensor:
    """Causal attention of whole packed sequences; differentiable, linear memory if K = V.

    q is [T, H, K], k [T, G, K], v [T, G, V], sequences of ``lengths`` tokens one after another.
    """
    longest = max(lengths, default=0)
    if longest == 0:
        return v.new_zeros(0, q.shape[1], v.shape[2])
    classes = by_length(lengths, longest, q.device)
    return classes.apply(lambda some, q, k, v: _padded(q, k, v, some, scale), q, k, v)


def _padded(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], scale: float | None) -> Tensor:
    """Sequences are padded to the longest, behind their end, where causality hides the padding."""
    longest = max(lengths)
    even = all(length == longest for length in lengths)
    if even:
        q, k, v = (x.unflatten(0, (-1, longest)) for x in (q, k, v))
        blocks = None
    else:
        blocks = cut_blocks(lengths, longest, q.device)
        q, k, v = (blocks.spread(x) for x in (q, k, v))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = _fused(q, k, v, scale, None).transpose(1, 2)
    return out.flatten(0, 1) if blocks is None else blocks.pack(out)


def window_attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: list[int], window: int, scale: float | None = None
) -> Tensor:
    """Sliding-window attention of whole packed sequences; differentiable, linear memory.

    Arguments as in ``causal_attention``. Work and memory are O(T * window).
    """
    if max(lengths, default=0) <= window:
        return causal_attention(q, k, v, lengths, scale)
    classes = by_length(lengths, window, q.device)

    def form(some: list[int], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if max(some) > window:
            return _band(q, k, v, some, window, scale)
        return _padded(q, k, v, some, scale)

    return classes.apply(form, q, k, v)


def row_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: list[list[int]],
    lengths: list[int],
    window: int = 0,
    scale: float | None = None,
) -> Tensor:
    """Attention of some rows of packed whole sequences; differentiable, linear memory.

    q is [R, H, K], k [T, G, K], v [T, G, V]. ``positions`` are those of q's rows, in ascending
    lists, one for each sequence of ``lengths`` tokens. Sequences of which a good part is wanted,
    and short ones, are computed whole; of the others, the rows in blocks, whose masks are made
    again for the backward pass.
    """
    counts = [len(rows) for rows in positions]
    several = [n for n, count in enumerate(counts) if count]
    few = [n for n in several if max(ROW_BLOCK, WHOLE * counts[n]) < lengths[n]]
    whole = [n for n in several if max(ROW_BLOCK, WHOLE * counts[n]) >= lengths[n]]
    queries, keys, values = q.split(counts), k.split(lengths), v.split(lengths)
    found = [_rows(queries[n], keys[n], values[n], positions[n], window, scale) for n in few]
    if whole:
        q, k, v = (torch.cat([part[n] for n in whole]) for part in (queries, keys, values))
        some = [positions[n] for n in whole], [lengths[n] for n in whole]
        found.append(_whole(q, k, v, *some, window, scale))
    if not found:
        return v.new_zeros(0, q.shape[1], v.shape[2])
    starts = list(accumulate(counts, initial=0))
    rows = [torch.arange(starts[n], starts[n + 1]) for n in (*few, *whole)]
    return torch.cat(found).index_select(0, torch.cat(rows).argsort().to(q.device))


def _whole(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: list[list[int]],
    lengths: list[int],
    window: int,
    scale: float | None,
) -> Tensor:
    """As ``row_attention``, by all rows of the sequences: nothing is asked at those not wanted."""
    starts = accumulate(lengths, initial=0)
    places = [start + p for start, rows in zip(starts, positions, strict=False) for p in rows]
    where = torch.tensor(places, device=q.device)
    queries = q.new_zeros(len(k), *q.shape[1:]).index_copy(0, where, q)
    if window:
        out = window_attention(queries, k, v, lengths, window, scale)
    else:
        out = causal_attention(queries, k, v, lengths, scale)
    return out.index_select(0, where)


def _rows(
    q: Tensor, k: Tensor, v: Tensor, positions: list[int], window: int, scale: float | None
) -> Tensor:
    """Attention of the rows [R, H, K] at ``positions`` of one sequence."""

    def block(q: Tensor, k: Tensor, v: Tensor, part: list[int], low: int) -> Tensor:
        where = torch.tensor(part, device=q.device)
        gap = where[:, None] - torch.arange(low, low + len(k), device=q.device)
        seen = (gap >= 0) & (gap < window) if window else gap >= 0
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        return _fused(q, k, v, scale, seen)[0].transpose(0, 1)

    size = max(1, min(ROW_BLOCK, MASK // len(k)))
    found = []
    for i, rows in zip(range(0, len(q), size), q.split(size), strict=True):
        part = positions[i : i + size]
        low = max(0, part[0] - window + 1) if window else 0
        keys = slice(low, part[-1] + 1)
        inputs = rows, k[keys], v[keys], part, low
        if torch.is_grad_enabled():
            kept = checkpoint(block, *inputs, use_reentrant=False, preserve_rng_state=False)
            assert isinstance(kept, Tensor)
            found.append(kept)
        else:
            found.append(block(*inputs))
    return torch.cat(found)


def _band(
    q: Tensor, k: Tensor, v: Tensor, lengths: list[int], window: int, scale: float | None
) -> Tensor:
    """Sequences are cut into blocks of ``window`` tokens.

    The queries of a block need its own keys and those of the block before.
    """
    blocks = cut_blocks(lengths, window, q.device)
    qb, kb, vb = (blocks.spread(x).transpose(1, 2) for x in (q, k, v))
    first = blocks.level_sizes[0]
    out_first = _fused(qb[:first], kb[:first], vb[:first], scale, None)
    previous = torch.cat(
        [
            torch.arange(start, start + size, device=q.device)
            for start, size in _previous_levels(blocks.level_sizes)
        ]
    )
    gap = torch.arange(window, 2 * window)[:, None] - torch.arange(2 * window)[None, :]
    band = ((gap >= 0) & (gap < window)).to(q.device)
    out_rest = _fused(
        qb[first:],
        torch.cat((kb.index_select(0, previous), kb[first:]), dim=2),
        torch.cat((vb.index_select(0, previous), vb[first:]), dim=2),
        scale,
        band,
    )
    return blocks.pack(torch.cat((out_first, out_rest)).transpose(1, 2))


def _previous_levels(level_sizes: tuple[int, ...]) -> list[tuple[int, int]]:
    """For each level but the first: where the level before starts, and how many of it go on."""
    starts = [sum(level_sizes[:level]) for level in range(len(level_sizes))]
    return list(zip(starts[:-1], level_sizes[1:], strict=True))
