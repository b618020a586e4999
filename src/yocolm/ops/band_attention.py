"""Sliding-window attention of a prefill chunk that continues from a ring of earlier tokens.

Blocks of consecutive queries need one stretch of ``window`` keys before them and their own: so much
is collected for each block, from the step's own tokens and from the ring, and the fused kernel does
the rest. Work and memory are O(T * window). Rows that are not consecutive, and decodes, take
``ops/block_attention.py``.

Shapes: T packed tokens, S sequences, H query heads, G key heads, W window; N blocks of B queries.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from yocolm.ops.blocks import Blocks, cut_blocks

BAND_BLOCK = 256  # queries a block: it costs BAND_BLOCK / W more than the band itself


@dataclass(frozen=True)
class Band:
    """The plan of a batch: its query blocks, where their keys lie, and what each query sees."""

    blocks: Blocks
    keys: Tensor  # [N, W + B] below T: own token; from T on: ring place, W for each sequence
    seen: Tensor  # [N, 1, B, W + B] bool


def cut_band(lengths: list[int], starts: Tensor, window: int) -> Band:
    """Plan for sequences of ``lengths`` tokens in this step whose first is at ``starts`` [S]."""
    device = starts.device
    size = min(BAND_BLOCK, max([1, *lengths]))
    blocks = cut_blocks(lengths, size, device)
    counts = torch.tensor(lengths, device=device)
    offset = counts.cumsum(0) - counts
    levels = torch.tensor(blocks.level_sizes, device=device)
    rank = torch.repeat_interleave(levels)
    seq = blocks.order[torch.arange(blocks.count, device=device) - blocks.level_starts[rank]]

    first = starts[seq] + rank * size  # [N] position of each block's first query
    queries = first[:, None] + torch.arange(size, device=device)
    positions = first[:, None] + torch.arange(-window, size, device=device)
    gap = queries[:, :, None] - positions[:, None, :]
    seen = (gap >= 0) & (gap < window) & (positions >= 0)[:, None, :]

    own = positions - starts[seq, None]
    last = counts[seq, None] - 1  # padded queries see themselves somewhere, and are dropped
    places = sum(lengths) + seq[:, None] * window + positions % window
    keys = torch.where(own >= 0, offset[seq, None] + torch.minimum(own, last), places)
    return Band(blocks, keys, seen.unsqueeze(1))


def band_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_rings: Tensor,
    v_rings: Tensor,
    band: Band,
    scale: float | None = None,
) -> Tensor:
    """Attention of all T tokens of a step: q [T, H, K], own k, v [T, G, .], rings [S, G, W, .].

    A ring holds position p at place ``p % W``. Returns [T, H, V].
    """
    kb, vb = (
        torch.cat((x, ring.transpose(1, 2).flatten(0, 1)))[band.keys].transpose(1, 2)
        for x, ring in ((k, k_rings), (v, v_rings))
    )
    qb = band.blocks.spread(q).transpose(1, 2)
    out = F.scaled_dot_product_attention(
        qb, kb, vb, attn_mask=band.seen, scale=scale, enable_gqa=True
    )
    return band.blocks.pack(out.transpose(1, 2))
