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
from yocolm.ops.chunk_attention import fold_heads, unfold_heads

BAND_BLOCK = 64  # queries a block: it costs BAND_BLOCK / W more than the band itself
REACH_STEP = 128  # blocks near a sequence's start see few earlier keys: so many, rounded up


@dataclass(frozen=True)
class Span:
    """Query blocks that are given equally many keys."""

    blocks: Tensor  # [n] their numbers
    keys: Tensor  # [n, L] below T: own token; from T on: ring place, W for each sequence
    seen: Tensor  # [n, 1, B, L] bool: what each query sees


@dataclass(frozen=True)
class Band:
    """The plan of a batch: its query blocks, in spans by the number of keys that they need."""

    blocks: Blocks
    spans: list[Span]
    order: Tensor  # [N] where each block lies among those of all spans


def cut_band(lengths: list[int], starts: Tensor, window: int) -> Band:
    """Plan for sequences of ``lengths`` tokens in this step whose first is at ``starts`` [S]."""
    device = starts.device
    size = min(BAND_BLOCK, max([1, *lengths]))
    blocks = cut_blocks(lengths, size, device)
    levels = torch.tensor(blocks.level_sizes, device=device)
    rank = torch.repeat_interleave(levels)
    seq = blocks.order[torch.arange(blocks.count, device=device) - blocks.level_starts[rank]]
    first = starts[seq] + rank * size  # [N] position of each block's first query
    steps = (first.clamp(max=window) + REACH_STEP - 1) // REACH_STEP
    spans = []
    for step in steps.unique().tolist():
        chosen = torch.nonzero(steps == step).squeeze(1)
        reach = min(step * REACH_STEP, window)
        keys, seen = _span(lengths, starts, window, size, (seq[chosen], first[chosen], reach))
        spans.append(Span(chosen, keys, seen))
    return Band(blocks, spans, torch.cat([span.blocks for span in spans]).argsort())


def _span(
    lengths: list[int],
    starts: Tensor,
    window: int,
    size: int,
    blocks: tuple[Tensor, Tensor, int],
) -> tuple[Tensor, Tensor]:
    """Keys, and what is seen, of blocks (sequence [n], first position [n], how far they reach)."""
    seq, first, reach = blocks
    counts = torch.tensor(lengths, device=starts.device)
    offset = counts.cumsum(0) - counts
    queries = first[:, None] + torch.arange(size, device=starts.device)
    positions = first[:, None] + torch.arange(-reach, size, device=starts.device)
    gap = queries[:, :, None] - positions[:, None, :]
    seen = (gap >= 0) & (gap < window) & (positions >= 0)[:, None, :]

    own = positions - starts[seq, None]
    last = counts[seq, None] - 1  # padded queries see themselves somewhere, and are dropped
    places = sum(lengths) + seq[:, None] * window + positions % window
    keys = torch.where(own >= 0, offset[seq, None] + torch.minimum(own, last), places)
    return keys, seen.unsqueeze(1)


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
    heads = q.shape[1] // k.shape[1]
    q = fold_heads(band.blocks.spread(q), k.shape[1])
    k, v = (
        torch.cat((x, ring.transpose(1, 2).flatten(0, 1)))
        for x, ring in ((k, k_rings), (v, v_rings))
    )
    outputs = [
        F.scaled_dot_product_attention(
            q[span.blocks],
            k[span.keys].transpose(1, 2),
            v[span.keys].transpose(1, 2),
            attn_mask=span.seen.repeat_interleave(heads, 2),
            scale=scale,
        )
        for span in band.spans
    ]
    out = torch.cat(outputs)[band.order]
    return band.blocks.pack(unfold_heads(out, heads))
