"""What the tests of native element-wise operations share.

An operation's native form is compared with its PyTorch form on the same values in float64, which
native forms do not take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from packed import DTYPES, apart, randn
from tolerances import OPS
from yocolm.ops.native.library import native

needs_native = pytest.mark.skipif(
    native().handle is None, reason=f"native kernels: {native().reason}"
)
NATIVE_DTYPES = ("float32", "bfloat16")


def surrounded(*shape: int, dtype: str, seed: int = 0, lead: int = 3) -> Tensor:
    """Normal numbers as a view: everything around it in memory, between rows too, is NaN."""
    last = shape[-1]
    room = torch.full((*shape[:-1], last + 2 * lead), float("nan"), dtype=DTYPES[dtype])
    view = room[..., lead : lead + last]
    view.copy_(randn(*shape, seed=seed))
    return view


def wide(value: Any) -> Any:
    """Floating-point tensors in float64, in tuples too."""
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, tuple):
        items = [wide(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value


def tensors(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else [t for item in value for t in tensors(item)]


def check(op: Callable[..., Any], *args: Any, dtype: str, **named: Any) -> list[Tensor]:
    """Compare what ``op`` returns with its float64 form; returns the tensors it returned."""
    with torch.no_grad():
        got = tensors(op(*args, **named))
        expected = tensors(op(*wide(args), **{key: wide(value) for key, value in named.items()}))
    assert len(got) == len(expected)
    for actual, exact in zip(got, expected, strict=True):
        assert exact.dtype in (torch.float64, torch.int64, torch.bool)
        assert actual.is_contiguous()
        assert apart(actual, exact) <= OPS[dtype]
    return got


def check_rows(op: Callable[..., Any], rows: Tensor, *args: Any, row: int) -> None:
    """NaN in one row of ``rows``, an argument of ``op``, reaches that row of the results only."""
    with torch.no_grad():
        clean = tensors(op(*args))
        rows[row] = float("nan")
        got = tensors(op(*args))
    for before, after in zip(clean, got, strict=True):
        assert bool(after[row].isnan().any())
        others = torch.arange(len(after)) != row
        assert torch.equal(before[others], after[others])


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def check_threads(op: Callable[..., Any], *args: Any) -> None:
    """Two threads give exactly what one gives."""
    with torch.no_grad():
        with threads(1):
            one = tensors(op(*args))
        with threads(2):
            two = tensors(op(*args))
    for first, second in zip(one, two, strict=True):
        assert torch.equal(first, second)
