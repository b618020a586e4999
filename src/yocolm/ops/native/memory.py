"""Memory that is read again and again lies in huge pages, where Linux has them.

Every 4 KB page that a kernel streams through costs a look-up in the page tables, on a virtual
machine in two of them at once: weights and caches were read twice as fast from pages of 2 MB.
"""

from __future__ import annotations

import ctypes
import math
import sys
import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

HUGE_PAGE = 2 << 20
SLAB = 16 * HUGE_PAGE  # what small tensors are cut from; freed with the last of them
_ALIGNMENT = 64
_MADV_HUGEPAGE = 14


class _Slabs:
    """The slab that tensors are being cut from. Its tensors share memory, never elements."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.slab: Tensor | None = None
        self.used = 0

    def cut(self, size: int) -> Tensor:
        with self.lock:
            if self.slab is None or self.used + size > SLAB:
                self.slab, self.used = _pages(SLAB), 0
            piece = self.slab[self.used : self.used + size]
            self.used += -(-size // _ALIGNMENT) * _ALIGNMENT
            return piece


_slabs = _Slabs()


def empty_huge(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """As ``torch.empty`` on the CPU, in huge pages where the system lends them."""
    size = math.prod(shape) * dtype.itemsize
    with torch.inference_mode(False):  # such memory serves inside of it and out of it
        flat = _slabs.cut(size) if size <= SLAB // 4 else _pages(size)[:size]
        return flat.view(dtype).view(*shape)


def _pages(size: int) -> Tensor:
    """At least ``size`` bytes from the start of a huge page on, not touched yet."""
    size = -(-size // HUGE_PAGE) * HUGE_PAGE
    memory = torch.empty(size + HUGE_PAGE, dtype=torch.uint8)
    start = -memory.data_ptr() % HUGE_PAGE
    advise = _madvise()
    if advise is not None:
        advise(memory.data_ptr() + start, size, _MADV_HUGEPAGE)  # advice: failing changes nothing
    return memory[start : start + size]


@lru_cache(maxsize=1)
def _madvise() -> Any:
    if not sys.platform.startswith("linux"):
        return None
    found = ctypes.CDLL(None).madvise
    found.argtypes, found.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int), ctypes.c_int
    return found
