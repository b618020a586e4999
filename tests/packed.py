"""What the tests of `yocolm.ops` share: packed sequences, and how far two tensors lie apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


def places(lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Sequence and position of every token of packed sequences, [T] each."""
    counts = torch.tensor(lengths, dtype=torch.int64)
    seqs = torch.repeat_interleave(torch.arange(len(lengths)), counts)
    positions = [torch.arange(length) for length in lengths]
    return seqs, torch.cat([torch.empty(0, dtype=torch.int64), *positions])


def randn(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    """The same normal numbers for every dtype, but for their rounding."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def apart(actual: Tensor, exact: Tensor) -> float:
    """The largest difference, in units of the largest exact value if that is above 1."""
    assert actual.shape == exact.shape
    if not actual.numel():
        return 0.0
    actual, exact = actual.detach().double(), exact.detach().double()
    if not bool(actual.isfinite().all()):
        return float("inf")
    return float((actual - exact).abs().max() / exact.abs().max().clamp(min=1.0))


class LargestTensor(TorchDispatchMode):
    """Records, in ``numel``, the size of the largest tensor that any operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        outputs = result if isinstance(result, (tuple, list)) else (result,)
        sizes = [output.numel() for output in outputs if isinstance(output, Tensor)]
        self.numel = max([self.numel, *sizes])
        return result
