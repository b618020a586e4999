"""Recurrent state in slots of a pool.

A sequence with one token in a step is advanced in place, at once. One with several leaves its slot
as it is until the step is committed, which may cut it back to its first tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from yocolm.engine.handles import leading_singles
from yocolm.models.base import Batch
from yocolm.models.spec import RETENTION_CHUNK
from yocolm.ops.blocks import Blocks, cut_blocks
from yocolm.ops.slot_retention import advance_slots, prefill_slots, step_slots

CUT_TOKENS = 64  # a sequence with more tokens in a step is a prompt's chunk: never cut back


@dataclass(frozen=True)
class _Kept:
    """What a cut needs of the tokens of sequences that may be cut back."""

    k: Tensor  # [tokens, H, K]
    v: Tensor
    log_decay: Tensor
    starts: Tensor  # [sequences] first token of each sequence with several; of no meaning for those
    # that cannot be cut back


@dataclass(frozen=True)
class StagedRetention:
    """What a step of one layer has still to store in ``pool``."""

    pool: Tensor  # [slots, H, K, V]
    batch: Batch
    singles: int  # so many sequences come first, and are stored already
    final: Tensor | None  # [sequences behind them, H, K, V]
    kept: _Kept | None

    def commit(self, accepted: Tensor | None = None) -> None:
        """Store the states after all tokens, or after ``accepted`` [S] int64 of each sequence.

        Raises:
            ValueError: more accepted than there are; not the one token of a sequence, whose state
                has it already; not all of more than ``CUT_TOKENS``.
        """
        if accepted is not None:
            self._check(accepted)
        if self.final is None:
            return
        slots = self.batch.slots[self.singles :]
        if accepted is None:
            self.pool.index_copy_(0, slots, self.final)
            return
        accepted = accepted[self.singles :]
        cut = accepted < self.batch.cu_seqlens.diff()[self.singles :]
        self.pool.index_copy_(0, slots[~cut], self.final[~cut])
        if self.kept is not None and bool(cut.any()):
            kept = self.kept
            advance_slots(
                kept.k,
                kept.v,
                kept.log_decay,
                self.pool,
                slots[cut],
                kept.starts[cut],
                accepted[cut],
            )

    def _check(self, accepted: Tensor) -> None:
        lengths = self.batch.cu_seqlens.diff()
        least = torch.where((lengths == 1) | (lengths > CUT_TOKENS), lengths, 0)
        wrong = torch.nonzero((accepted < least) | (accepted > lengths))
        if len(wrong):
            seq = int(wrong[0])
            raise ValueError(
                f"accepted {int(accepted[seq])} of {int(lengths[seq])} tokens; a step's sequence "
                f"of 2 to {CUT_TOKENS} tokens can be cut back, any other has to be accepted whole"
            )


def retain(
    pool: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, batch: Batch
) -> tuple[Tensor, StagedRetention]:
    """Gated retention of a batch from the states in ``pool`` [slots, H, K, V] on.

    q, k are [T, H, K], v is [T, H, V], log_decay [T, H]. No sequence is empty. Returns [T, H, V],
    and what is to be committed.
    """
    if len(q) == len(batch.slots):  # a token each; nothing is read on the host
        out = step_slots(q, k, v, log_decay, pool, batch.slots)
        return out, StagedRetention(pool, batch, len(q), None, None)
    singles = leading_singles(batch)
    one, rest = slice(0, singles), slice(singles, None)
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if singles:
        step_slots(q[one], k[one], v[one], log_decay[one], pool, batch.slots[one], out=out[one])
    cu_seqlens = batch.memo("behind singles", lambda: batch.cu_seqlens[singles:] - singles)
    _, final = prefill_slots(
        q[rest],
        k[rest],
        v[rest],
        log_decay[rest],
        pool,
        batch.slots[rest],
        cu_seqlens,
        lambda: batch.memo("chunks", lambda: _chunks(batch, singles)),
        out=out[rest],
    )
    kept = _keep(k, v, log_decay, batch, singles)
    return out, StagedRetention(pool, batch, singles, final, kept)


def _chunks(batch: Batch, singles: int) -> Blocks:
    lengths = batch.lengths[singles:]
    size = min(RETENTION_CHUNK, max([1, *lengths]))
    return cut_blocks(lengths, size, batch.tokens.device)


def _keep(k: Tensor, v: Tensor, log_decay: Tensor, batch: Batch, singles: int) -> _Kept | None:
    """The tokens of sequences that may be cut back; views where that is all of them."""

    def plan() -> tuple[Tensor | None, Tensor] | None:
        lengths = batch.cu_seqlens.diff()
        short = (lengths > 1) & (lengths <= CUT_TOKENS)
        behind = short[singles:]
        if bool(behind.all()):
            return None, batch.cu_seqlens[singles:-1]
        if not bool(behind.any()):
            return None
        ends = torch.where(short, lengths, 0).cumsum(0)
        return torch.nonzero(short[batch.seq_ids]).squeeze(1), (ends - lengths)[singles:]

    planned = batch.memo("kept", plan)
    if planned is None:
        return None
    token, starts = planned
    if token is None:
        return _Kept(k, v, log_decay, starts)
    return _Kept(k[token], v[token], log_decay[token], starts)
