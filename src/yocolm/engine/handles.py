"""Handles on written keys and values: pages of a global KV, rings and staged tokens of a window."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from yocolm.models.base import Batch
from yocolm.ops.band_attention import band_attention, cut_band
from yocolm.ops.block_attention import (
    KeySource,
    Pairs,
    RowBlocks,
    attend_blocks,
    cut_rows,
    page_pairs,
    ring_pairs,
    token_pairs,
)
from yocolm.ops.blocks import Blocks, cut_blocks
from yocolm.ops.chunk_attention import MANY_ROWS, chunk_attention, gather_pages

TOKEN_BLOCK = 64  # a step's own tokens meet window queries in blocks of so many


def _row_groups(batch: Batch) -> list[RowBlocks]:
    return batch.memo("rows", lambda: cut_rows(batch.cu_seqlens, batch.positions))


@dataclass(frozen=True)
class PagedKV:
    """Handle on one global KV: k, v [pages, kv heads, page size, head size]. Read in place."""

    k: Tensor
    v: Tensor

    def attend(
        self, q: Tensor, batch: Batch, scale: float | None = None, softcap: float = 0.0
    ) -> Tensor:
        size = self.k.shape[2]
        many = [] if softcap else batch.memo("many", lambda: _many_rows(batch, size))
        groups = batch.memo(("few", len(many)), lambda: self._few_rows(batch, bool(many)))
        out = q.new_empty(*q.shape[:2], self.v.shape[3])
        if groups:
            sources = [(rows, [KeySource(self.k, self.v, pairs)]) for rows, pairs in groups]
            out = attend_blocks(q, sources, scale, 0, softcap)
        for rows, table in many:
            k, v = gather_pages(self.k, table), gather_pages(self.v, table)
            out[rows] = chunk_attention(q[rows], batch.positions[rows], k, v, scale)
        return out

    def _few_rows(self, batch: Batch, only: bool) -> list[tuple[RowBlocks, Pairs]]:
        """Row blocks with their pages; ``only`` of sequences with few rows, or of all."""
        groups = cut_rows(batch.cu_seqlens, batch.positions, MANY_ROWS if only else None)
        return [(rows, page_pairs(rows, batch.block_table, self.k.shape[2])) for rows in groups]


def _many_rows(batch: Batch, page_size: int) -> list[tuple[slice, Tensor]]:
    """Where sequences with many rows have them, and their pages: prefill chunks, scored prompts."""
    starts = batch.cu_seqlens.tolist()
    pages = ((batch.kv_lens + page_size - 1) // page_size).tolist()
    return [
        (slice(start, stop), batch.block_table[seq, : pages[seq]])
        for seq, (start, stop) in enumerate(zip(starts, starts[1:], strict=False))
        if stop - start >= MANY_ROWS
    ]


@dataclass(frozen=True)
class WindowKV:
    """Handle on one window: the old ring and this step's keys and values, uncommitted."""

    k_ring: Tensor  # [slots, kv heads, window, head size]
    v_ring: Tensor
    k: Tensor  # [T, kv heads, head size]
    v: Tensor
    written: Batch

    def attend(
        self, q: Tensor, batch: Batch, scale: float | None = None, softcap: float = 0.0
    ) -> Tensor:
        singles = leading_singles(batch)
        if softcap or batch is not self.written or singles == len(batch.lengths):
            return self._attend_rows(q, _row_groups(batch), batch, scale, softcap)
        rest = self._attend_chunks(q[singles:], singles, batch, scale)
        if not singles:
            return rest
        decodes = [rows for rows in _row_groups(batch) if rows.index.shape[1] == 1]
        return torch.cat((self._attend_rows(q, decodes, batch, scale, 0.0)[:singles], rest))

    def _attend_rows(
        self,
        q: Tensor,
        groups: list[RowBlocks],
        batch: Batch,
        scale: float | None,
        softcap: float,
    ) -> Tensor:
        """Rows wherever they are, in the blocks of ``groups``."""
        window = self.k_ring.shape[2]
        blocks = _token_blocks(self.written)
        k, v = (blocks.spread(x).transpose(1, 2) for x in (self.k, self.v))
        starts = _starts(self.written)

        def plan() -> list[tuple[Pairs, Pairs]]:
            return [
                (
                    ring_pairs(rows, batch.slots, starts, window),
                    token_pairs(rows, blocks, starts, window),
                )
                for rows in groups
            ]

        shapes = tuple(rows.index.shape for rows in groups)
        pairs = batch.memo(("window", window, shapes), plan)
        sources = [
            (rows, [KeySource(self.k_ring, self.v_ring, old), KeySource(k, v, new)])
            for rows, (old, new) in zip(groups, pairs, strict=True)
        ]
        return attend_blocks(q, sources, scale, window, softcap)

    def _attend_chunks(self, q: Tensor, singles: int, batch: Batch, scale: float | None) -> Tensor:
        """All tokens of the sequences behind the ``singles`` leading ones."""
        window = self.k_ring.shape[2]
        band = batch.memo(
            ("band", window),
            lambda: cut_band(batch.lengths[singles:], _starts(batch)[singles:], window),
        )
        slots = batch.slots[singles:]
        return band_attention(
            q,
            self.k[singles:],
            self.v[singles:],
            self.k_ring[slots],
            self.v_ring[slots],
            band,
            scale,
        )

    def commit(self) -> None:
        """Move the last tokens of the step into the ring."""
        window = self.k_ring.shape[2]
        batch = self.written
        token, slot, place = batch.memo(("ring", window), lambda: _ring_places(batch, window))
        self.k_ring[slot, :, place] = self.k[token]
        self.v_ring[slot, :, place] = self.v[token]


def _starts(batch: Batch) -> Tensor:
    """Position of each sequence's first token of the step, [S]."""
    return batch.memo("starts", lambda: batch.kv_lens - batch.cu_seqlens.diff())


def _token_blocks(batch: Batch) -> Blocks:
    size = min(TOKEN_BLOCK, max([1, *batch.lengths]))
    return batch.memo("tokens", lambda: cut_blocks(batch.lengths, size, batch.tokens.device))


def _ring_places(batch: Batch, window: int) -> tuple[Tensor, Tensor, Tensor]:
    """The tokens that a ring keeps of a step, with their slots and places."""
    kept = batch.positions >= batch.kv_lens[batch.seq_ids] - window
    token = torch.nonzero(kept).squeeze(1)
    return token, batch.slots[batch.seq_ids[token]], batch.positions[token] % window


def leading_singles(batch: Batch) -> int:
    """How many sequences, from the first on, have one token in this step."""
    for index, length in enumerate(batch.lengths):
        if length != 1:
            return index
    return len(batch.lengths)
