"""Keys and values finished natively, and written where they are kept."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from yocolm.ops.native.heads import tables
from yocolm.ops.native.packed import packed

if TYPE_CHECKING:
    from yocolm.ops.heads import KeyForm


@lru_cache(maxsize=1)
def _write_heads() -> Callable[..., None]:
    return packed("yo_write_heads", "PqqqPqqqPqdPPqqPPPPqqqqq")


@lru_cache(maxsize=1)
def _page_places() -> Callable[..., None]:
    return packed("yo_page_places", "PqPPqPPq")


def finish_kv(k: Tensor, v: Tensor, form: KeyForm) -> tuple[Tensor, Tensor]:
    """As ``ops.heads.finish_kv``."""
    k_out, v_out = k.new_empty(*k.shape), v.new_empty(*v.shape)
    _write(k, v, form, k_out, v_out, (0, 0, k.shape[0], 0))
    return k_out, v_out


def write_heads(
    k: Tensor,
    v: Tensor,
    form: KeyForm,
    k_pool: Tensor,
    v_pool: Tensor,
    page: Tensor,
    offset: Tensor,
) -> None:
    """As ``ops.heads.write_heads``; pools are contiguous, indices int64."""
    page, offset = page.contiguous(), offset.contiguous()
    places = page.data_ptr(), offset.data_ptr(), page.shape[0], k_pool.shape[2]
    _write(k, v, form, k_pool, v_pool, places)


def _write(
    k: Tensor,
    v: Tensor,
    form: KeyForm,
    k_out: Tensor,
    v_out: Tensor,
    places: tuple[int, int, int, int],
) -> None:
    k_row, k_head, last = k.stride()
    if last != 1:
        k = k.contiguous()
        k_row, k_head, _ = k.stride()
    v_row, v_head, last = v.stride()
    if last != 1:
        v = v.contiguous()
        v_row, v_head, _ = v.stride()
    _, heads, k_size = k.shape
    k_norm, v_norm, eps, rope = form
    page, offset, count, page_size = places
    _write_heads()(
        k.data_ptr(),
        k_row,
        k_head,
        k_size,
        v.data_ptr(),
        v_row,
        v_head,
        v.shape[2],
        0 if k_norm is None else k_norm.data_ptr(),
        v_norm,
        eps,
        *tables(rope),
        k_out.data_ptr(),
        v_out.data_ptr(),
        page,
        offset,
        count,
        heads,
        page_size,
        k.dtype == torch.bfloat16,
        torch.get_num_threads(),
    )


def page_places(
    block_table: Tensor, seq_ids: Tensor, positions: Tensor, page_size: int
) -> tuple[Tensor, Tensor]:
    """As ``ops.heads.page_places``; everything is int64."""
    seq_ids, positions = seq_ids.contiguous(), positions.contiguous()
    if block_table.stride(1) != 1:
        block_table = block_table.contiguous()
    page, offset = torch.empty_like(positions), torch.empty_like(positions)
    _page_places()(
        block_table.data_ptr(),
        block_table.stride(0),
        seq_ids.data_ptr(),
        positions.data_ptr(),
        page_size,
        page.data_ptr(),
        offset.data_ptr(),
        positions.shape[0],
    )
    return page, offset
