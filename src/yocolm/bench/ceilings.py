"""What the machine can do at most, as far as PyTorch reaches it: the measure of every operation."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from yocolm.ops.native.memory import empty_huge

READ_BYTES = 1 << 28
MATRIX = 1024


def seconds_of(call: Callable[[], object], least: float = 2e-3) -> float:
    """Seconds of one call, over as many as take ``least`` seconds together."""
    count, spent = 0, 0.0
    begin = time.perf_counter()
    while not count or spent < least:
        call()
        count += 1
        spent = time.perf_counter() - begin
    return spent / count


class Ceilings:
    """Rates of memory reads and matrix products by all threads, in bytes and FLOPs a second."""

    def __init__(self, read_bytes: int = READ_BYTES, matrix: int = MATRIX) -> None:
        # Huge pages and whole numbers: a sum of floats in small pages reads a third less.
        self._memory = empty_huge((read_bytes // 8,), torch.int64).fill_(1)
        self._square = torch.randn(matrix, matrix)
        self._square_bf16 = self._square.bfloat16()

    def measure(self) -> dict[str, float]:
        """``read``, and ``float32`` and ``bfloat16`` products; some tens of milliseconds."""
        flops = 2 * len(self._square) ** 3
        read = seconds_of(self._memory.sum)
        return {
            "read": self._memory.nbytes / read,
            "float32": flops / seconds_of(lambda: self._square @ self._square),
            "bfloat16": flops / seconds_of(lambda: self._square_bf16 @ self._square_bf16),
        }
