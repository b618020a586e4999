"""Recurrent state in slots of a pool: advanced by every step, in place where it can be."""

from __future__ import annotations

import torch
from torch import Tensor

from yocolm.engine.handles import leading_singles
from yocolm.models.base import Batch
from yocolm.models.spec import RETENTION_CHUNK
from yocolm.ops.blocks import Blocks, cut_blocks
from yocolm.ops.retention import retention_chunkwise, retention_step


def retain(
    pool: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, batch: Batch
) -> Tensor:
    """Gated retention of a batch from the states in ``pool`` [slots, H, K, V] on, which it updates.

    q, k are [T, H, K], v is [T, H, V], log_decay [T, H]. Returns [T, H, V].
    """
    singles = leading_singles(batch)
    outputs = []
    if singles:
        one = slice(0, singles)
        where = batch.memo("singles", lambda: _slot_run(batch.slots[one]))
        state = pool[where]  # a view of slots side by side, else a copy
        outputs.append(retention_step(q[one], k[one], v[one], log_decay[one], state))
        if not isinstance(where, slice):
            pool[where] = state
    if singles < len(batch.lengths):
        blocks = batch.memo("chunks", lambda: _chunks(batch, singles))
        slots = batch.slots[singles:]
        rest = slice(singles, None)
        out, final = retention_chunkwise(
            q[rest], k[rest], v[rest], log_decay[rest], blocks, pool.index_select(0, slots)
        )
        pool.index_copy_(0, slots, final)
        outputs.append(out)
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _chunks(batch: Batch, singles: int) -> Blocks:
    lengths = batch.lengths[singles:]
    size = min(RETENTION_CHUNK, max([1, *lengths]))
    return cut_blocks(lengths, size, batch.tokens.device)


def _slot_run(slots: Tensor) -> slice | Tensor:
    """``slots`` as a slice where they lie side by side."""
    first = int(slots[0])
    run = torch.arange(first, first + len(slots), device=slots.device)
    return slice(first, first + len(slots)) if torch.equal(slots, run) else slots
