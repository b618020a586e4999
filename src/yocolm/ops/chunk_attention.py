"""Causal attention of one sequence's many rows over its pages, through PyTorch's fused kernel.

For prefill chunks of layers that own a global KV, and for prompt scoring: compute dominates there,
so a sequence's keys are laid out side by side once and rows meet them in blocks. Few rows, and
decodes, take ``ops/block_attention.py``, which reads pages in place.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

MANY_ROWS = 64  # from here on a sequence's rows are worth a call of their own
ROWS = 64  # rows a call: few, so that little is multiplied that no row may see
MASK_ELEMENTS = 1 << 23  # of one call: fewer rows where the context is long


def gather_pages(pages: Tensor, table: Tensor) -> Tensor:
    """Pages ``table`` [P] of a pool [N, G, L, K] side by side: [G, P * L, K]."""
    return pages[table].transpose(0, 1).flatten(1, 2)


def chunk_attention(
    q: Tensor, positions: Tensor, k: Tensor, v: Tensor, scale: float | None = None
) -> Tensor:
    """Attention of rows q [R, H, K] at ascending ``positions`` [R] over keys 0 to N - 1.

    k is [G, N, K] and v [G, N, V], the key of position p at place p. Returns [R, H, V]. Memory
    beside the keys is bounded, whatever R and N.
    """
    places = torch.arange(k.shape[1], device=q.device)
    folded = fold_heads(q.unsqueeze(0), k.shape[0])
    heads = q.shape[1] // k.shape[0]
    outputs = []
    first = 0
    while first < len(q):
        stop = min(len(q), first + max(1, min(ROWS, MASK_ELEMENTS // (heads * k.shape[1]))))
        where = positions[first:stop]
        seen = int(where[-1]) + 1
        out = F.scaled_dot_product_attention(
            folded[:, :, first * heads : stop * heads],
            k[None, :, :seen],
            v[None, :, :seen],
            attn_mask=(where[:, None] >= places[:seen]).repeat_interleave(heads, 0),
            scale=scale,
        )
        outputs.append(unfold_heads(out, heads).squeeze(0))
        first = stop
    return torch.cat(outputs)


def fold_heads(q: Tensor, groups: int) -> Tensor:
    """[N, R, H, K] to [N, G, R * (H / G), K]: a key head's queries become rows of one matrix."""
    return q.unflatten(2, (groups, -1)).transpose(1, 2).flatten(2, 3)


def unfold_heads(x: Tensor, heads: int) -> Tensor:
    """The inverse, for ``heads`` = H / G query heads a key head."""
    return x.unflatten(2, (-1, heads)).transpose(1, 2).flatten(2, 3)
