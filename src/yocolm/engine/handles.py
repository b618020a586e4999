"""Handles on written keys and values: pages of a global KV, rings and staged tokens of a window."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

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
from yocolm.ops.native import attention as native
from yocolm.ops.native.library import fits

TOKEN_BLOCK = 64  # a step's own tokens meet window queries in blocks of so many


def _described(batch: Batch) -> native.Description:
    """The batch's tensors as native attention takes them: made once, whatever they hold later."""
    return batch.memo(
        "native",
        lambda: native.describe_sequences(
            batch.cu_seqlens, batch.positions, batch.kv_lens, batch.block_table, batch.slots
        ),
    )


def _row_groups(batch: Batch) -> list[RowBlocks]:
    return batch.memo("rows", lambda: cut_rows(batch.cu_seqlens, batch.positions))


@dataclass(frozen=True)
class PagedKV:
    """Handle on one global KV: k, v [pages, kv heads, page size, head size]. Read in place."""

    k: Tensor
    v: Tensor

    @cached_property
    def _pool(self) -> native.Description:
        return native.describe_pool(self.k, self.v)

    def attend(
        self, q: Tensor, batch: Batch, scale: float | None = None, softcap: float = 0.0
    ) -> Tensor:
        if fits(q) and q.dtype == self.k.dtype:
            return native.attend(self._pool, _described(batch), None, q, scale, softcap)
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

    @cached_property
    def _rings(self) -> native.Description:
        return native.describe_pool(self.k_ring, self.v_ring)

    @cached_property
    def _own(self) -> native.Description:
        return native.describe_own(self.k, self.v, self.written.cu_seqlens)

    def _fits(self, x: Tensor) -> bool:
        """Whether native forms take ``x`` and all that lies here."""
        return fits(x) and x.dtype == self.k.dtype == self.v.dtype == self.k_ring.dtype

    def attend(
        self, q: Tensor, batch: Batch, scale: float | None = None, softcap: float = 0.0
    ) -> Tensor:
        if self._fits(q):
            return native.attend(self._rings, _described(batch), self._own, q, scale, softcap)
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

    def commit(self, accepted: Tensor | None = None) -> None:
        """Move the step's last tokens into the ring.

        Of each sequence the first ``accepted`` [S] int64 count, without it all.
        """
        batch, window = self.written, self.k_ring.shape[2]
        if self._fits(self.k):
            native.commit_window(self._rings, _described(batch), self._own, accepted)
            return
        if accepted is None:
            places = batch.memo(("ring", window), lambda: _ring_places(batch, window, None))
        else:
            places = _ring_places(batch, window, accepted)
        token, slot, place = places
        self.k_ring[slot, :, place] = self.k[token].to(self.k_ring.dtype)
        self.v_ring[slot, :, place] = self.v[token].to(self.v_ring.dtype)


def _starts(batch: Batch) -> Tensor:
    """Position of each sequence's first token of the step, [S]."""
    return batch.memo("starts", lambda: batch.kv_lens - batch.cu_seqlens.diff())


def _token_blocks(batch: Batch) -> Blocks:
    size = min(TOKEN_BLOCK, max([1, *batch.lengths]))
    return batch.memo("tokens", lambda: cut_blocks(batch.lengths, size, batch.tokens.device))


def _ring_places(
    batch: Batch, window: int, accepted: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The tokens that a ring keeps of a step, with their slots and places."""
    ends = batch.kv_lens if accepted is None else _starts(batch) + accepted
    gap = ends[batch.seq_ids] - batch.positions
    token = torch.nonzero((gap > 0) & (gap <= window)).squeeze(1)
    return token, batch.slots[batch.seq_ids[token]], batch.positions[token] % window


def leading_singles(batch: Batch) -> int:
    """How many sequences, from the first on, have one token in this step."""
    for index, length in enumerate(batch.lengths):
        if length != 1:
            return index
    return len(batch.lengths)
