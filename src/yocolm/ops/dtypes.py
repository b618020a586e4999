"""Helpers for dtypes: autocast off, and numbers as a dtype has them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache

import torch
from torch import Tensor


def own_dtype(x: Tensor) -> AbstractContextManager[object]:
    """A context in which products keep the dtypes of their operands, whatever autocast says."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


@lru_cache(maxsize=256)
def rounded(value: float, dtype: torch.dtype) -> float:
    """A number as ``dtype`` has it."""
    return float(torch.tensor(value, dtype=dtype))
