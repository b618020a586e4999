"""The engine's state: pages of global KV, window rings, recurrent slots, behind models' handles."""

from __future__ import annotations

import torch
from torch import Tensor

from yocolm.engine.handles import PagedKV, WindowKV
from yocolm.engine.recurrent import StagedRetention, retain
from yocolm.models.base import AS_IS, KV, Batch
from yocolm.models.spec import ModelSpec, Store
from yocolm.ops.heads import KeyForm, finish_kv, page_places, write_heads
from yocolm.ops.native.memory import empty_huge


class PagedState:
    """Pools for many sequences at once. Number 0 of pages and slots is scratch.

    Pools are not filled in advance: a page is cleared when its first token is written, a slot when
    a sequence starts in it, so memory that is never used is never touched.

    Args:
        spec: what the model stores.
        num_pages, page_size: pages of global KV, shared by all its stores.
        num_slots: places for constant-size state.
        dtype: of keys and values; recurrent state is float32 (float64 beside float64).
    """

    def __init__(
        self,
        spec: ModelSpec,
        num_pages: int,
        page_size: int,
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self.page_size, self.device = page_size, device
        wide = torch.float64 if dtype == torch.float64 else torch.float32

        def pool(store: Store, count: int, length: int) -> tuple[Tensor, Tensor]:
            shape = (count, store.num_heads, length)
            return (
                _empty((*shape, store.k_dim), dtype, device),
                _empty((*shape, store.v_dim), dtype, device),
            )

        self.pages = [pool(store, num_pages, page_size) for store in spec.global_stores]
        self._globals = [PagedKV(k, v) for k, v in self.pages]
        self.rings = [pool(store, num_slots, store.window) for store in spec.window_stores]
        self.recurrent = [
            _empty((num_slots, store.num_heads, store.k_dim, store.v_dim), wide, device)
            for store in spec.recurrent_stores
        ]
        self._staged: list[WindowKV | StagedRetention] = []

    # What the models call

    def append_global(
        self, store: int, k: Tensor, v: Tensor, batch: Batch, form: KeyForm = AS_IS
    ) -> KV:
        k_pages, v_pages = self.pages[store]
        page, offset = batch.memo("places", lambda: self._places(batch))
        write_heads(k, v, form, k_pages, v_pages, page, offset)
        return self._globals[store]

    def append_window(
        self, store: int, k: Tensor, v: Tensor, batch: Batch, window: int, form: KeyForm = AS_IS
    ) -> KV:
        staged = WindowKV(*self.rings[store], *finish_kv(k, v, form), batch)
        self._staged.append(staged)
        return staged

    def retain(
        self, store: int, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, batch: Batch
    ) -> Tensor:
        out, staged = retain(self.recurrent[store], q, k, v, log_decay, batch)
        self._staged.append(staged)
        return out

    def commit(self, accepted: Tensor | None = None) -> None:
        """Make current what the step has staged, or its ``accepted`` first tokens.

        The last reader has run. Pages need nothing: what lies behind a sequence's last token is
        not read, and is written again.
        """
        for staged in self._staged:
            staged.commit(accepted)
        self._staged.clear()

    # What the runner calls

    def discard(self) -> None:
        """Forget what is staged but not committed."""
        self._staged.clear()

    def clear_slots(self, slots: list[int]) -> None:
        """Forget all constant-size state of ``slots``: new sequences start from nothing."""
        for pool in self._slot_pools():
            pool[slots] = 0

    def copy(self, kind: str, sources: list[int], targets: list[int]) -> None:
        """Copy pages, or slots with all their state, of a forked sequence."""
        pools = [t for pair in self.pages for t in pair] if kind == "page" else self._slot_pools()
        for pool in pools:
            pool[targets] = pool[sources]

    def _slot_pools(self) -> list[Tensor]:
        return [*(t for pair in self.rings for t in pair), *self.recurrent]

    def _places(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Page and offset of every token."""
        return page_places(batch.block_table, batch.seq_ids, batch.positions, self.page_size)


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    if torch.device(device).type == "cpu":
        return empty_huge(shape, dtype)
    return torch.empty(shape, dtype=dtype, device=device)
