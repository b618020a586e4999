"""Memory that is read again and again lies in huge pages, where Linux has them.

Every 4 KB page that a kernel streams through costs a look-up in the page tables, on a virtual
machine in two of them at once: weights and caches were read twice as fast from pages of 2 MB.
"""

from __future__ import annotations

import math
import mmap
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

HUGE_PAGE = 2 << 20
SLAB = 16 * HUGE_PAGE  # what small tensors are cut from; freed with the last of them
_ALIGNMENT = 64


class Slabs:
    """Slabs that tensors are cut from one after the other: they share memory, never elements.

    What is given back long before the rest, such as weights that are packed, wants slabs of its
    own: a single tensor keeps the whole slab.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._slab: Tensor | None = None
        self._used = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """As ``torch.empty`` on the CPU, in huge pages where the system lends them."""
        size = math.prod(shape) * dtype.itemsize
        with torch.inference_mode(False):  # such memory serves inside of it and out of it
            flat = self._cut(size) if size <= SLAB // 4 else _pages(size)[:size]
            return flat.view(dtype).view(*shape)

    def _cut(self, size: int) -> Tensor:
        with self._lock:
            if self._slab is None or self._used + size > SLAB:
                self._slab, self._used = _pages(SLAB), 0
            piece = self._slab[self._used : self._used + size]
            self._used += -(-size // _ALIGNMENT) * _ALIGNMENT
            return piece


_slabs = Slabs()


def empty_huge(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor of the slabs for all that stays; see ``Slabs.empty``."""
    return _slabs.empty(shape, dtype)


def _pages(size: int) -> Tensor:
    """At least ``size`` bytes from the start of a huge page on, not touched yet."""
    size = -(-size // HUGE_PAGE) * HUGE_PAGE
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(size, dtype=torch.uint8)
    # Not from malloc, which gives memory again that has been touched before.
    memory = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # a kernel without them
        pass
    flat = torch.frombuffer(memory, dtype=torch.uint8)
    start = -flat.data_ptr() % HUGE_PAGE
    return flat[start : start + size]
