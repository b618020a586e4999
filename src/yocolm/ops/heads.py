"""What is done to projected heads before attention: norms, rotation, writing keys and values.

On the CPU, in float32 and bfloat16, and without gradients, each of these is one native call, which
reads views of a fused projection in place and writes straight to where keys and values are kept.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from yocolm.ops.native import heads as native
from yocolm.ops.native import write as native_write
from yocolm.ops.native.library import fits
from yocolm.ops.norm import rms_norm
from yocolm.ops.rope import Rotation, rotate, tables_fit


class KeyForm(NamedTuple):
    """What is still to be done to projected keys and values; the default is nothing.

    k_norm: weight of a norm of each head of the keys. v_norm: the values are normed, without a
    weight. rope: the keys are turned, behind their norm.
    """

    k_norm: Tensor | None = None
    v_norm: bool = False
    eps: float = 0.0
    rope: Rotation | None = None


def finish_heads(
    x: Tensor, norm_weight: Tensor | None, eps: float | None, rope: Rotation | None
) -> Tensor:
    """Norm each head of ``x`` [T, H, D] (``eps`` None: no norm), then turn it. Contiguous."""
    if fits(x) and _same(norm_weight, x) and tables_fit(rope, x):
        return native.finish_heads(x, norm_weight, eps, rope)
    if eps is not None:
        x = rms_norm(x, norm_weight, eps)
    return (x if rope is None else rotate(x, rope)).contiguous()


def finish_kv(k: Tensor, v: Tensor, form: KeyForm) -> tuple[Tensor, Tensor]:
    """Keys and values [T, G, D] with ``form`` done to them; contiguous."""
    if _fit(k, v, form):
        return native_write.finish_kv(k, v, form)
    k = finish_heads(k, form.k_norm, None if form.k_norm is None else form.eps, form.rope)
    return k, finish_heads(v, None, form.eps if form.v_norm else None, None)


def page_places(
    block_table: Tensor, seq_ids: Tensor, positions: Tensor, page_size: int
) -> tuple[Tensor, Tensor]:
    """Page and offset [T] of tokens, by their sequences' rows of ``block_table``; all int64."""
    tensors = (block_table, seq_ids, positions)
    if native.indices_fit(*tensors):
        return native_write.page_places(*tensors, page_size)
    return block_table[seq_ids, positions // page_size], positions % page_size


def write_heads(
    k: Tensor,
    v: Tensor,
    form: KeyForm,
    k_pool: Tensor,
    v_pool: Tensor,
    page: Tensor,
    offset: Tensor,
) -> None:
    """Do ``form`` to keys and values [T, G, D], and write them to pools [pages, G, size, D].

    Token i goes to ``pool[page[i], :, offset[i]]``, int64; a sequence's tokens are in order.
    A page whose first token is written is cleared first: its last owner may have left infinities,
    which no mask can hide.
    """
    pools_fit = k_pool.dtype == v_pool.dtype == k.dtype
    if pools_fit and _fit(k, v, form) and k_pool.is_contiguous() and v_pool.is_contiguous():
        if native.indices_fit(page, offset):
            return native_write.write_heads(k, v, form, k_pool, v_pool, page, offset)
    fresh = page[offset == 0]
    for pool, x in zip((k_pool, v_pool), finish_kv(k, v, form), strict=True):
        pool[fresh] = 0
        pool[page, :, offset] = x.to(pool.dtype)


def _fit(k: Tensor, v: Tensor, form: KeyForm) -> bool:
    return fits(k) and v.dtype == k.dtype and _same(form.k_norm, k) and tables_fit(form.rope, k)


def _same(weight: Tensor | None, x: Tensor) -> bool:
    return weight is None or (weight.dtype == x.dtype and weight.is_contiguous())
