"""State for whole packed sequences: differentiable, nothing kept. For training and evaluation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from yocolm.models.base import AS_IS, KV, Batch
from yocolm.models.spec import RETENTION_CHUNK
from yocolm.ops.attention import causal_attention, row_attention, window_attention
from yocolm.ops.block_attention import (
    KeySource,
    attend_blocks,
    cut_rows,
    token_pairs,
)
from yocolm.ops.blocks import Blocks, Classes, by_length, cut_blocks
from yocolm.ops.heads import KeyForm, finish_kv
from yocolm.ops.retention import retention_chunkwise

KEY_BLOCK = 64  # tokens a key block where scores are capped


@dataclass(frozen=True)
class DenseKV:
    """Keys and values [T, kv heads, head size] of a whole batch; ``window`` 0 sees everything."""

    k: Tensor
    v: Tensor
    written: Batch
    window: int = 0

    def attend(
        self, q: Tensor, batch: Batch, scale: float | None = None, softcap: float = 0.0
    ) -> Tensor:
        lengths = self.written.lengths
        if softcap:
            return self._attend_capped(q, batch, scale, softcap)
        if len(q) < len(self.k):
            positions = batch.memo("positions by sequence", lambda: _by_sequence(batch))
            return row_attention(q, self.k, self.v, positions, lengths, self.window, scale)
        if self.window:
            return window_attention(q, self.k, self.v, lengths, self.window, scale)
        return causal_attention(q, self.k, self.v, lengths, scale)

    def _attend_capped(
        self, q: Tensor, batch: Batch, scale: float | None, softcap: float
    ) -> Tensor:
        """Any rows: the fused kernel has no soft cap."""
        blocks = cut_chunks(self.written, KEY_BLOCK)
        k, v = (blocks.spread(x).transpose(1, 2) for x in (self.k, self.v))
        starts = torch.zeros_like(self.written.kv_lens)
        groups = [
            (rows, [KeySource(k, v, token_pairs(rows, blocks, starts, self.window))])
            for rows in cut_rows(batch.cu_seqlens, batch.positions)
        ]
        return attend_blocks(q, groups, scale, self.window, softcap)


class DenseState:
    """Whole sequences from their first token on; every forward pass starts from nothing.

    Args:
        chunk_size: retention's own, see ``ops/retention.py``.
    """

    def __init__(self, chunk_size: int = RETENTION_CHUNK) -> None:
        self.chunk_size = chunk_size

    def append_global(
        self, store: int, k: Tensor, v: Tensor, batch: Batch, form: KeyForm = AS_IS
    ) -> KV:
        return DenseKV(*finish_kv(k, v, form), batch)

    def append_window(
        self, store: int, k: Tensor, v: Tensor, batch: Batch, window: int, form: KeyForm = AS_IS
    ) -> KV:
        return DenseKV(*finish_kv(k, v, form), batch, window)

    def retain(
        self, store: int, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, batch: Batch
    ) -> Tensor:
        size, device = self.chunk_size, q.device

        def plan() -> Classes[Blocks]:
            classes = by_length(batch.lengths, size, device)
            return classes.map(lambda some: cut_blocks(some, min(size, max(some)), device))

        def form(blocks: Blocks, *tensors: Tensor) -> Tensor:
            q, k, v, log_decay = tensors
            return retention_chunkwise(q, k, v, log_decay, blocks)[0]

        return batch.memo(("retention", size), plan).apply(form, q, k, v, log_decay)

    def commit(self, accepted: Tensor | None = None) -> None:
        pass


def _by_sequence(batch: Batch) -> list[list[int]]:
    return [part.tolist() for part in batch.positions.cpu().split(batch.lengths)]


def cut_chunks(batch: Batch, size: int) -> Blocks:
    """Cut a batch's sequences into blocks of ``size`` tokens, fewer if all of them are shorter."""
    size = min(size, max([1, *batch.lengths]))
    device = batch.tokens.device
    return batch.memo(("chunks", size), lambda: cut_blocks(batch.lengths, size, device))
