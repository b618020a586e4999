"""Attention of any rows over keys that lie in blocks: pages, window rings, or a step's own tokens.

Rows are grouped into row blocks and keys into key blocks; a list of (row block, key block) pairs
says what meets what. Pairs are multiplied in tiles of bounded size and merged with the running
softmax of flash-decoding, so that nothing of the size rows x keys exists and ragged batches need no
loop over sequences. Where a tile's key blocks lie one after another, as pages mostly do, they are
used in place; otherwise one tile at a time is collected, never a whole KV.

Shapes: R rows, H query heads, G key heads, NB row blocks of B rows, P pairs, L keys a key block.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from yocolm.ops.blocks import Blocks

ROW_BLOCK = 64  # rows a block when a sequence has several
SHORT_RUN = 4  # fewer consecutive key blocks are not worth a tile of their own
TILE_ELEMENTS = 1 << 20  # keys, or scores, that a tile may hold: stays in the cache
_LOWEST = -1e30  # finite, so that fully masked rows merge without NaN


@dataclass(frozen=True)
class RowBlocks:
    """Rows in blocks of one sequence each. Padded places hold row R (none) and position -1."""

    index: Tensor  # [NB, B] int64
    positions: Tensor  # [NB, B] int64
    seq: Tensor  # [NB] int64
    num_rows: int

    @property
    def first(self) -> Tensor:
        """Lowest position of each block; rows ascend, so the first place holds it."""
        return self.positions[:, 0]

    @property
    def last(self) -> Tensor:
        """Highest position of each block."""
        return self.positions.amax(1)


class Tile(NamedTuple):
    """Some pairs, and the first of their key blocks where these are consecutive."""

    pairs: slice
    first: int | None


@dataclass(frozen=True)
class Pairs:
    """What meets what: ``row_block``, ``key_block`` [P]; keys' positions [P, L], -1 for none."""

    row_block: Tensor
    key_block: Tensor
    key_positions: Tensor
    _tiles: dict[int, list[Tile]] = field(init=False, repr=False, default_factory=dict)

    def tiles(self, most: int) -> list[Tile]:
        """Cut into tiles of at most ``most`` pairs; worked out once for all layers of a batch."""
        if most not in self._tiles:
            self._tiles[most] = _cut_tiles(self.key_block, most)
        return self._tiles[most]


def _cut_tiles(key_block: Tensor, most: int) -> list[Tile]:
    """Long runs of consecutive key blocks become views; short ones are collected together."""
    if not len(key_block):
        return []
    breaks = torch.nonzero(key_block.diff() != 1).squeeze(1) + 1
    edges = [0, *breaks.tolist(), len(key_block)]
    spans: list[tuple[int, int, bool]] = []
    for start, stop in zip(edges, edges[1:], strict=False):
        run = stop - start >= SHORT_RUN
        if spans and not run and not spans[-1][2]:
            start = spans.pop()[0]
        spans.append((start, stop, run))
    firsts = key_block[[start for start, _, _ in spans]].tolist()
    return [
        Tile(slice(i, min(i + most, stop)), first + i - start if run else None)
        for (start, stop, run), first in zip(spans, firsts, strict=True)
        for i in range(start, stop, most)
    ]


@dataclass(frozen=True)
class KeySource:
    """Key blocks k [N, G, L, K], v [N, G, L, V] and the pairs that use them."""

    k: Tensor
    v: Tensor
    pairs: Pairs


def cut_rows(
    cu_seqlens: Tensor, positions: Tensor, fewer_than: int | None = None
) -> list[RowBlocks]:
    """Group rows by sequence: ``cu_seqlens`` [S + 1] are row offsets into ``positions`` [R].

    Positions ascend within a sequence. Sequences with a single row (decodes) come in blocks of one,
    the others in blocks of up to ``ROW_BLOCK``: one group for each of the two kinds that occurs.
    Sequences of ``fewer_than`` rows or more are left out.
    """
    counts = cu_seqlens.diff()
    if fewer_than is not None:
        counts = torch.where(counts < fewer_than, counts, 0)
    longest = int(counts.max()) if len(counts) else 0
    singles, several = torch.where(counts == 1, 1, 0), torch.where(counts > 1, counts, 0)
    groups = []
    if int(singles.sum()):
        groups.append(_cut_group(cu_seqlens, positions, singles, 1))
    if longest > 1:
        groups.append(_cut_group(cu_seqlens, positions, several, min(ROW_BLOCK, longest)))
    return groups


def _cut_group(cu_seqlens: Tensor, positions: Tensor, counts: Tensor, size: int) -> RowBlocks:
    blocks = (counts + size - 1) // size
    device = positions.device
    seq = torch.repeat_interleave(torch.arange(len(counts), device=device), blocks)
    within = torch.arange(len(seq), device=device) - (blocks.cumsum(0) - blocks)[seq]
    offset = within[:, None] * size + torch.arange(size, device=device)
    real = offset < counts[seq, None]
    index = torch.where(real, cu_seqlens[:-1][seq, None] + offset, len(positions))
    padded = torch.cat((positions, positions.new_full((1,), -1)))
    return RowBlocks(index, padded[index], seq, len(positions))


def expand_pairs(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """All (i, n) with ``low[i] <= n < high[i]``, as two vectors ordered by i, then n."""
    counts = (high - low).clamp(min=0)
    which = torch.repeat_interleave(torch.arange(len(low), device=low.device), counts)
    rank = torch.arange(len(which), device=low.device) - (counts.cumsum(0) - counts)[which]
    return which, low[which] + rank


def page_pairs(rows: RowBlocks, block_table: Tensor, page_size: int) -> Pairs:
    """Every row block with the pages of its sequence up to its last position.

    In page order, so that neighbours in memory become neighbours in tiles. Of pages that forked
    samples share, first come all first uses, then all second ones: each a run of its own.
    """
    row_block, page = expand_pairs(torch.zeros_like(rows.seq), rows.last // page_size + 1)
    key_block = block_table[rows.seq[row_block], page]
    order = torch.argsort(key_block, stable=True)
    ordered = key_block[order]
    use = torch.arange(len(ordered), device=page.device) - torch.searchsorted(ordered, ordered)
    order = order[torch.argsort(use, stable=True)]
    row_block, page, key_block = row_block[order], page[order], key_block[order]
    offsets = torch.arange(page_size, device=page.device)
    return Pairs(row_block, key_block, page[:, None] * page_size + offsets)


def token_pairs(rows: RowBlocks, blocks: Blocks, starts: Tensor, window: int) -> Pairs:
    """Every row block with the blocks of its sequence's own tokens of this step that it may see.

    ``starts`` [S] is the position of each sequence's first token of the step.
    """
    start = starts[rows.seq]
    low = (rows.first - window + 1 - start).clamp(min=0) if window else torch.zeros_like(start)
    row_block, rank = expand_pairs(
        low // blocks.size, (rows.last - start).clamp(min=-1) // blocks.size + 1
    )
    key_block = blocks.number(rows.seq[row_block], rank)
    first = start[row_block] + rank * blocks.size
    offsets = torch.arange(blocks.size, device=first.device)
    return Pairs(row_block, key_block, first[:, None] + offsets)


def ring_pairs(rows: RowBlocks, slots: Tensor, starts: Tensor, window: int) -> Pairs:
    """Every row block that sees tokens from before the step with its sequence's ring.

    A ring of ``window`` places holds position p at place ``p % window``; ``starts`` [S] tokens have
    gone into it, of which it keeps the last ``window``.
    """
    start = starts[rows.seq]
    looks_back = (start > 0) & (rows.first - window + 1 < start)
    row_block = torch.nonzero(looks_back).squeeze(1)
    newest = start[row_block, None] - 1
    place = torch.arange(window, device=start.device)
    held = newest - (newest - place) % window
    return Pairs(row_block, slots[rows.seq[row_block]], held.clamp(min=-1))


def attend_blocks(
    q: Tensor,
    groups: list[tuple[RowBlocks, list[KeySource]]],
    scale: float | None = None,
    window: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    """Attention of q [R, H, K], each group of row blocks over its sources together; differentiable.

    A row sees the keys of its pairs at positions 0 up to its own and, with a window, at most
    ``window`` of them, itself included. Every row belongs to one group. Softmax is float32 (float64
    for float64). Returns [R, H, V] in q's dtype.
    """
    scale = float(q.shape[-1] ** -0.5) if scale is None else scale
    value_dim = groups[0][1][0].v.shape[-1]
    out = q.new_empty(q.shape[0], q.shape[1], value_dim)
    for rows, sources in groups:
        blocks = _attend_group(q, rows, sources, scale, window, softcap)
        real = rows.index.flatten() < rows.num_rows
        out = out.index_copy(0, rows.index.flatten()[real], blocks[real].to(q.dtype))
    return out


def _attend_group(
    q: Tensor,
    rows: RowBlocks,
    sources: list[KeySource],
    scale: float,
    window: int,
    softcap: float,
) -> Tensor:
    """One group's rows, padding included: [NB * B, H, V]."""
    size = rows.index.shape[1]
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    folded = _fold_rows(q, rows, sources[0].k.shape[1]).to(wide) * scale  # [NB, G, (H/G) * B, K]
    merged = _Merge(folded, sources[0].v.shape[-1])
    for source in sources:
        for tile, first_block in _tiles(source, folded.shape[2]):
            row_block = source.pairs.row_block[tile]
            k = _key_tile(source.k, source.pairs.key_block[tile], first_block)
            v = _key_tile(source.v, source.pairs.key_block[tile], first_block)
            # A bfloat16 product would round the scores, and the softmax with them, to 8 bits.
            scores = torch.matmul(folded[row_block], k.to(wide).transpose(-1, -2))
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            unseen = _unseen(rows.positions[row_block], source.pairs.key_positions[tile], window)
            scores.unflatten(2, (-1, size)).masked_fill_(unseen, float("-inf"))
            merged.add(row_block, scores, v)
    blocks = merged.result().unflatten(2, (-1, size))  # [NB, G, H / G, B, V]
    return blocks.permute(0, 3, 1, 2, 4).flatten(2, 3).flatten(0, 1)


def _unseen(row_positions: Tensor, key_positions: Tensor, window: int) -> Tensor:
    """True where a row must not look: [n, 1, 1, B, L] from [n, B] and [n, L]."""
    gap = row_positions[:, :, None] - key_positions[:, None, :]
    unseen = (gap < 0) | (key_positions < 0)[:, None, :]
    if window:
        unseen |= gap >= window
    return unseen[:, None, None]


def _tiles(source: KeySource, folded_rows: int) -> list[Tile]:
    """Tiles of the pairs, each of a bounded number of keys and scores."""
    _, groups, length, dim = source.k.shape
    per_pair = groups * length * max(dim, folded_rows)
    return source.pairs.tiles(max(1, TILE_ELEMENTS // per_pair))


def _key_tile(blocks: Tensor, key_block: Tensor, first: int | None) -> Tensor:
    """Key blocks ``key_block``: a view where they are consecutive, else collected."""
    if first is None:
        return blocks.index_select(0, key_block)
    return blocks[first : first + len(key_block)]


def _fold_rows(q: Tensor, rows: RowBlocks, groups: int) -> Tensor:
    """[R, H, K] to [NB, G, (H / G) * B, K]: a key head's queries become rows of one matrix."""
    padded = torch.cat((q, q.new_zeros(1, *q.shape[1:])))
    blocks = padded[rows.index].unflatten(2, (groups, -1))  # [NB, B, G, H / G, K]
    return blocks.permute(0, 2, 3, 1, 4).flatten(2, 3)


class _Merge:
    """Running softmax over key blocks: a row's highest score, sum of weights, weighted values."""

    def __init__(self, folded: Tensor, value_dim: int) -> None:
        shape = folded.shape[:3]
        self.peak = folded.new_full(shape, _LOWEST)
        self.total = folded.new_zeros(shape)
        self.values = folded.new_zeros(*shape, value_dim)

    def add(self, row_block: Tensor, scores: Tensor, v: Tensor) -> None:
        """Merge a tile: ``scores`` [n, G, rows, L], -inf where unseen, and values [n, G, L, V]."""
        peak = scores.detach().amax(-1).clamp_(min=_LOWEST)
        weights = scores.sub_(peak.unsqueeze(-1)).exp_()
        values = torch.matmul(weights.to(v.dtype), v).to(self.values.dtype)
        where = row_block[:, None, None].expand_as(peak)
        highest = self.peak.scatter_reduce(0, where, peak, "amax")
        keep = (self.peak - highest).exp()
        share = (peak - highest[row_block]).exp()
        self.total = (self.total * keep).index_add(0, row_block, weights.sum(-1) * share)
        self.values = (self.values * keep.unsqueeze(-1)).index_add(
            0, row_block, values * share.unsqueeze(-1)
        )
        self.peak = highest

    def result(self) -> Tensor:
        """Weighted means; rows that saw nothing (padding) are zero."""
        return self.values / self.total.clamp(min=torch.finfo(self.total.dtype).tiny).unsqueeze(-1)
