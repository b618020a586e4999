"""The engine's state for steps of fixed shapes: what touches it is opaque to compilers.

A compiled or captured half may look at nothing on the host. So the operations on state are custom
operations that take tensors only and declare what they write; on CUDA they are Triton's kernels,
elsewhere those of ``engine/state.py``. A batch has one token for each sequence where it writes, and
any rows where it reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from yocolm.engine.handles import PagedKV, WindowKV
from yocolm.engine.pages import SCRATCH
from yocolm.engine.state import PagedState
from yocolm.models.base import AS_IS, KV, Batch
from yocolm.ops import triton
from yocolm.ops.heads import KeyForm, finish_kv
from yocolm.ops.slot_retention import step_slots


class Staged(NamedTuple):
    """A step's k, v [T, G, .] of one window, not yet in its rings."""

    store: int
    k: Tensor
    v: Tensor


class Written(NamedTuple):
    """Which sequences the tokens of staged keys belong to: ``cu_seqlens`` [S + 1] of a batch."""

    cu_seqlens: Tensor
    kv_lens: Tensor
    slots: Tensor


# Custom operations. ``rows``: positions, seq_ids, cu_seqlens, slots, kv_lens, block_table.


@torch.library.custom_op("yocolm::append_pages", mutates_args=("k_pages", "v_pages"))
def append_pages(
    k_pages: Tensor, v_pages: Tensor, k: Tensor, v: Tensor, page: Tensor, offset: Tensor
) -> None:
    fresh = torch.where(offset == 0, page, SCRATCH)  # a list of those alone has no fixed size
    for pages, x in ((k_pages, k), (v_pages, v)):
        pages[fresh] = 0  # a page's last owner may have left infinities, which no mask can hide
        pages[page, :, offset] = x.to(pages.dtype)


@torch.library.custom_op("yocolm::attend_pages", mutates_args=())
def attend_pages(
    q: Tensor, k: Tensor, v: Tensor, rows: list[Tensor], scale: float, softcap: float
) -> Tensor:
    if triton.fits(q):
        positions, seq_ids, *_, block_table = rows
        return triton.kernels("paged_attention").attend_pages(
            q, k, v, positions, seq_ids, block_table, scale, softcap
        )
    return PagedKV(k, v).attend(q, _batch(rows), scale, softcap)


@attend_pages.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, rows: list[Tensor], scale: float, softcap: float) -> Tensor:
    return q.new_empty(*q.shape[:2], v.shape[3])


@torch.library.custom_op("yocolm::attend_window", mutates_args=())
def attend_window(
    q: Tensor,
    k_ring: Tensor,
    v_ring: Tensor,
    k: Tensor,
    v: Tensor,
    rows: list[Tensor],
    written: list[Tensor],
    scale: float,
    softcap: float,
) -> Tensor:
    cu_seqlens, kv_lens, slots = written
    starts = kv_lens - cu_seqlens.diff()
    if triton.fits(q):
        return triton.kernels("paged_attention").attend_window(
            q, k_ring, v_ring, (k, v), rows[0], rows[1], slots, starts, cu_seqlens, scale, softcap
        )
    total = int(cu_seqlens[-1])
    seq_ids = torch.repeat_interleave(cu_seqlens.diff())
    positions = starts[seq_ids] + torch.arange(total) - cu_seqlens[seq_ids]
    batch = _batch([positions, seq_ids, cu_seqlens, slots, kv_lens, slots[:, None]])
    staged = WindowKV(k_ring, v_ring, k[:total], v[:total], batch)
    return staged.attend(q, _batch(rows), scale, softcap)


@attend_window.register_fake
def _(
    q: Tensor,
    k_ring: Tensor,
    v_ring: Tensor,
    k: Tensor,
    v: Tensor,
    rows: list[Tensor],
    written: list[Tensor],
    scale: float,
    softcap: float,
) -> Tensor:
    return q.new_empty(*q.shape[:2], v_ring.shape[3])


@torch.library.custom_op("yocolm::step_retention", mutates_args=("pool",))
def step_retention(
    pool: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, slots: Tensor
) -> Tensor:
    if triton.fits(q):
        return triton.kernels("retention").retention_step(q, k, v, log_decay, pool, slots)
    return step_slots(q, k, v, log_decay, pool, slots)


@step_retention.register_fake
def _(pool: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, slots: Tensor) -> Tensor:
    return v.new_empty(v.shape)


def _batch(rows: list[Tensor]) -> Batch:
    positions, seq_ids, cu_seqlens, slots, kv_lens, block_table = rows
    return Batch(
        tokens=positions,
        positions=positions,
        seq_ids=seq_ids,
        cu_seqlens=cu_seqlens,
        rows=positions,
        slots=slots,
        kv_lens=kv_lens,
        block_table=block_table,
    )


def _rows(batch: Batch) -> list[Tensor]:
    return [
        batch.positions,
        batch.seq_ids,
        batch.cu_seqlens,
        batch.slots,
        batch.kv_lens,
        batch.block_table,
    ]


@dataclass(frozen=True)
class StaticPages:
    """Handle on one global KV."""

    k: Tensor
    v: Tensor

    def attend(
        self, q: Tensor, batch: Batch, scale: float | None = None, softcap: float = 0.0
    ) -> Tensor:
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        return attend_pages(q, self.k, self.v, _rows(batch), scale, softcap)


@dataclass(frozen=True)
class StaticWindow:
    """Handle on one window: rings, and what a step stages of it."""

    k_ring: Tensor
    v_ring: Tensor
    k: Tensor
    v: Tensor
    written: Written

    def attend(
        self, q: Tensor, batch: Batch, scale: float | None = None, softcap: float = 0.0
    ) -> Tensor:
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        return attend_window(
            q,
            self.k_ring,
            self.v_ring,
            self.k,
            self.v,
            _rows(batch),
            list(self.written),
            scale,
            softcap,
        )


class StaticState:
    """What a model's first half writes to, in a step of one token for each sequence."""

    def __init__(self, state: PagedState) -> None:
        self.state = state
        self.staged: list[Staged] = []

    def append_global(
        self, store: int, k: Tensor, v: Tensor, batch: Batch, form: KeyForm = AS_IS
    ) -> KV:
        k, v = finish_kv(k, v, form)
        k_pages, v_pages = self.state.pages[store]
        size = self.state.page_size
        page = batch.block_table.gather(1, (batch.positions // size)[:, None])[:, 0]
        append_pages(k_pages, v_pages, k, v, page, batch.positions % size)
        return StaticPages(k_pages, v_pages)

    def append_window(
        self, store: int, k: Tensor, v: Tensor, batch: Batch, window: int, form: KeyForm = AS_IS
    ) -> KV:
        k, v = finish_kv(k, v, form)
        self.staged.append(Staged(store, k, v))
        written = Written(batch.cu_seqlens, batch.kv_lens, batch.slots)
        return StaticWindow(*self.state.rings[store], k, v, written)

    def retain(
        self, store: int, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, batch: Batch
    ) -> Tensor:
        return step_retention(self.state.recurrent[store], q, k, v, log_decay, batch.slots)

    def commit(self, accepted: Tensor | None = None) -> None:
        raise AssertionError("what is staged is committed from outside")


def commit_windows(
    state: PagedState, staged: list[Staged], positions: Tensor, slots: Tensor
) -> None:
    """Move each sequence's one token into the rings of its slot."""
    for store, k, v in staged:
        for ring, x in zip(state.rings[store], (k, v), strict=True):
            ring[slots, :, positions % ring.shape[2]] = x.to(ring.dtype)
