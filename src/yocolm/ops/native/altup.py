"""AltUp's streams, natively: forms of ``ops.altup`` for float32 and bfloat16."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from yocolm.ops.native.packed import packed

if TYPE_CHECKING:
    from yocolm.ops.altup import Router

MAX_STREAMS = 16  # as in altup.cpp


@lru_cache(maxsize=1)
def _predict() -> Callable[..., None]:
    return packed("yo_altup_predict", "PPdPPqPdPPPqqqqq")


@lru_cache(maxsize=1)
def _join() -> Callable[..., None]:
    return packed("yo_altup_join", "PPPPPPdPPPqqqq")


@lru_cache(maxsize=1)
def _correction() -> Callable[..., None]:
    return packed("yo_altup_correction", "PPPdPPdPPqPPPPqqqqq")


@lru_cache(maxsize=1)
def _correct() -> Callable[..., None]:
    return packed("yo_altup_correct", "PPPPPPdPqqqqq")


@lru_cache(maxsize=2)
def _scaled(name: str) -> Callable[..., None]:
    return packed(name, "PPPqqqqq")


def predict(
    x: Tensor, router: Router, prediction: Tensor, active: int, next_weight: Tensor, next_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    x = x.contiguous()
    rows, size, streams = x.shape
    expected, normed = x.new_empty(rows, size), x.new_empty(rows, size)
    mixing = x.new_empty(rows, streams, streams)
    norm, eps, weight = router
    _predict()(
        x.data_ptr(),
        norm.data_ptr(),
        eps,
        weight.data_ptr(),
        prediction.data_ptr(),
        active,
        next_weight.data_ptr(),
        next_eps,
        expected.data_ptr(),
        mixing.data_ptr(),
        normed.data_ptr(),
        rows,
        size,
        streams,
        x.dtype == torch.bfloat16,
        torch.get_num_threads(),
    )
    return expected, mixing, normed


def join(
    active: Tensor,
    attended: Tensor,
    attended_weight: Tensor,
    normed: Tensor,
    low: Tensor,
    low_weight: Tensor,
    eps: float,
    next_weight: Tensor,
) -> tuple[Tensor, Tensor]:
    active, attended = active.contiguous(), attended.contiguous()
    normed, low = normed.contiguous(), low.contiguous()
    rows, size = active.shape
    joined, following = torch.empty_like(active), torch.empty_like(active)
    _join()(
        active.data_ptr(),
        attended.data_ptr(),
        attended_weight.data_ptr(),
        normed.data_ptr(),
        low.data_ptr(),
        low_weight.data_ptr(),
        eps,
        next_weight.data_ptr(),
        joined.data_ptr(),
        following.data_ptr(),
        rows,
        size,
        active.dtype == torch.bfloat16,
        torch.get_num_threads(),
    )
    return joined, following


def correction(
    h: Tensor,
    y: Tensor,
    y_weight: Tensor,
    y_eps: float,
    active: Tensor,
    router: Router,
    weight: Tensor,
    index: int,
    scale: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    h, y, active = h.contiguous(), y.contiguous(), active.contiguous()
    rows, size = h.shape
    streams = weight.shape[0]
    error, corrected = torch.empty_like(h), torch.empty_like(h)
    gains = h.new_empty(rows, streams)
    norm, eps, router_weight = router
    _correction()(
        h.data_ptr(),
        y.data_ptr(),
        y_weight.data_ptr(),
        y_eps,
        active.data_ptr(),
        norm.data_ptr(),
        eps,
        router_weight.data_ptr(),
        weight.data_ptr(),
        index,
        0 if scale is None else scale.data_ptr(),
        error.data_ptr(),
        gains.data_ptr(),
        corrected.data_ptr(),
        rows,
        size,
        streams,
        h.dtype == torch.bfloat16,
        torch.get_num_threads(),
    )
    return error, gains, corrected


def correct(
    x: Tensor,
    mixing: Tensor,
    error: Tensor,
    gains: Tensor,
    own: Tensor,
    own_weight: Tensor,
    eps: float,
) -> Tensor:
    x, mixing, own = x.contiguous(), mixing.contiguous(), own.contiguous()
    error, gains = error.contiguous(), gains.contiguous()
    rows, size, streams = x.shape
    out = torch.empty_like(x)
    _correct()(
        x.data_ptr(),
        mixing.data_ptr(),
        error.data_ptr(),
        gains.data_ptr(),
        own.data_ptr(),
        own_weight.data_ptr(),
        eps,
        out.data_ptr(),
        rows,
        size,
        streams,
        x.dtype == torch.bfloat16,
        torch.get_num_threads(),
    )
    return out


def spread(x: Tensor, others: Tensor) -> Tensor:
    x, others = x.contiguous(), others.contiguous()
    rows, size = x.shape
    streams = 1 + others.shape[1] // size
    out = x.new_empty(rows, size, streams)
    _scale("yo_altup_spread", x, others, out, (rows, size, streams))
    return out


def merge(x: Tensor, others: Tensor) -> Tensor:
    x, others = x.contiguous(), others.contiguous()
    rows, size, _ = x.shape
    out = x.new_empty(rows, size)
    _scale("yo_altup_merge", x, others, out, x.shape)
    return out


def _scale(name: str, x: Tensor, others: Tensor, out: Tensor, shape: tuple[int, ...]) -> None:
    _scaled(name)(
        x.data_ptr(),
        others.data_ptr(),
        out.data_ptr(),
        *shape,
        x.dtype == torch.bfloat16,
        torch.get_num_threads(),
    )
