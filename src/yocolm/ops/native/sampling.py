"""Draws from logits, natively: a form of ``ops.sampling.sample``."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from yocolm.ops.native.library import function

_P, _I, _L = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64


@lru_cache(maxsize=1)
def _sample() -> Any:
    return function("yo_sample", *[_P] * 2, *[_L] * 2, *[_P] * 7, _I)


def sample(
    logits: Tensor,
    raw: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    indices: Tensor,
) -> Tensor:
    """Tokens [R] int64 of logits [R, V] float32; -1 where ``raw``, the same or what they were made
    of, is not finite. Per row [R]: float32, and int64 top_k, seeds and indices."""
    same = logits is raw
    logits = logits.contiguous()
    raw = logits if same else raw.contiguous()
    out = torch.empty(len(logits), dtype=torch.int64)
    _sample()(
        logits.data_ptr(),
        raw.data_ptr(),
        len(logits),
        logits.shape[1],
        temperature.data_ptr(),
        top_k.data_ptr(),
        top_p.data_ptr(),
        min_p.data_ptr(),
        seeds.data_ptr(),
        indices.data_ptr(),
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out
