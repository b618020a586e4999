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
ROWS = 256  # rows a call
MASK_ELEMENTS = 1 << 23  # rows x keys of one call's mask: fewer rows where the context is long


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
    outputs = []
    first = 0
    while first < len(q):
        rows = slice(first, first + max(1, min(ROWS, MASK_ELEMENTS // k.shape[1])))
        where = positions[rows]
        stop = int(where[-1]) + 1
        out = F.scaled_dot_product_attention(
            q[rows].transpose(0, 1).unsqueeze(0),
            k[None, :, :stop],
            v[None, :, :stop],
            attn_mask=where[:, None] >= places[:stop],
            scale=scale,
            enable_gqa=True,
        )
        outputs.append(out.squeeze(0).transpose(0, 1))
        first = rows.stop
    return torch.cat(outputs)
