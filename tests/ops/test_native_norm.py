"""Native norms and what stands beside them, against their PyTorch forms in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from elementwise import (
    NATIVE_DTYPES,
    check,
    check_rows,
    check_threads,
    needs_native,
    surrounded,
)
from packed import DTYPES, apart, randn
from tolerances import OPS
from yocolm.ops import norm
from yocolm.ops.native import norm as native

pytestmark = needs_native
SIZES = (1, 5, 16, 31, 64, 100, 257, 768)
EPS = 1e-6


@pytest.mark.parametrize("dtype", NATIVE_DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rows", [0, 1, 7])
def test_norms_and_sums(rows: int, size: int, dtype: str) -> None:
    x, y = (surrounded(rows, size, dtype=dtype, seed=seed) for seed in (1, 2))
    weight, other = (randn(size, dtype=DTYPES[dtype], seed=seed) for seed in (3, 4))
    scale = torch.tensor([0.37], dtype=DTYPES[dtype])
    check(norm.rms_norm, x, weight, EPS, dtype=dtype)
    check(norm.rms_norm, x, None, 0.1, dtype=dtype)
    check(norm.add_norm, x, y, weight, EPS, dtype=dtype)
    check(norm.add_norm, x, y, weight, EPS, scale, dtype=dtype)
    check_sum_and_norm(norm.add_norm_norm, x, y, weight, EPS, other, 0.1, dtype=dtype)
    check_sum_and_norm(norm.add_norm_norm, x, y, weight, EPS, other, 0.1, scale, dtype=dtype)
    check_sum_and_norm(norm.add_rms_norm, x, y, other, 0.1, dtype=dtype)


def check_sum_and_norm(op: Callable[..., Any], x: Tensor, *args: Any, dtype: str) -> None:
    """A sum, and the norm of that very sum as it was rounded."""
    weight, eps = args[3:5] if op is norm.add_norm_norm else args[1:3]
    (total,) = check(lambda *given: op(*given)[0], x, *args, dtype=dtype)
    with torch.no_grad():
        both = op(x, *args)
    assert torch.equal(both[0], total)
    assert apart(both[1], norm.rms_norm(total.double(), weight.double(), eps)) <= OPS[dtype]


@pytest.mark.parametrize("dtype", NATIVE_DTYPES)
@pytest.mark.parametrize("shape", [(0, 2, 8), (1, 1, 16), (3, 5, 37), (2, 4, 256)])
def test_gated_norm_of_strided_views(shape: tuple[int, int, int], dtype: str) -> None:
    rows, heads, size = shape
    o = surrounded(*shape, dtype=dtype, seed=1)
    fused = surrounded(rows, 4, heads, size, dtype=dtype, seed=2)
    check(norm.gated_norm, o, fused[:, 3], EPS, dtype=dtype)


@pytest.mark.parametrize("dtype", NATIVE_DTYPES)
@pytest.mark.parametrize(("rows", "parts", "size"), [(0, 2, 8), (1, 3, 16), (5, 7, 33), (2, 1, 1)])
def test_mixed_inputs(rows: int, parts: int, size: int, dtype: str) -> None:
    projected, looked_up = (
        surrounded(rows, parts * size, dtype=dtype, seed=seed) for seed in (1, 2)
    )
    weight = randn(size, dtype=DTYPES[dtype], seed=3)
    (out,) = check(norm.mix_inputs, projected, 0.03, weight, 1e-5, looked_up, 5.6, dtype=dtype)
    assert out.shape == (rows, parts, size)


@pytest.mark.parametrize("dtype", NATIVE_DTYPES)
def test_nan_stays_in_its_row(dtype: str) -> None:
    weight = randn(40, dtype=DTYPES[dtype], seed=3)
    for row, op in enumerate((norm.add_norm, norm.add_rms_norm)):
        for argument in (0, 1):
            pair = [randn(5, 40, dtype=DTYPES[dtype], seed=seed) for seed in (1, 2)]
            check_rows(op, pair[argument], *pair, weight, EPS, row=row)
    x = randn(5, 40, dtype=DTYPES[dtype], seed=1)
    check_rows(norm.rms_norm, x, x, weight, EPS, row=4)


def test_threads_share_rows() -> None:
    x, y = (randn(301, 512, dtype=torch.bfloat16, seed=seed) for seed in (1, 2))
    weight = randn(512, dtype=torch.bfloat16, seed=3)
    check_threads(norm.rms_norm, x, weight, EPS)
    check_threads(norm.add_norm_norm, x, y, weight, EPS, weight, EPS)
    heads = x.unflatten(-1, (4, 128))
    check_threads(norm.gated_norm, heads, y.unflatten(-1, (4, 128)), EPS)
    check_threads(norm.mix_inputs, x, 0.5, weight[:128], EPS, y, 2.0)


def test_gradients_and_other_dtypes_pass_through_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("rms_norm", "add_norm", "gated_norm", "mix_inputs"):
        monkeypatch.setattr(native, name, None)  # calling it would fail
    x = randn(2, 3, 8, dtype=torch.float32).requires_grad_()
    weight = randn(8, dtype=torch.float32)
    y = norm.gated_norm(norm.add_norm(x, norm.rms_norm(x, weight, EPS), weight, EPS), x, EPS)
    y.sum().backward()
    assert x.grad is not None and bool(x.grad.isfinite().all())
    with torch.no_grad():
        norm.rms_norm(x.half(), weight.half(), EPS)
        norm.rms_norm(x, weight.double(), EPS)
        norm.add_norm_norm(x, x.double(), weight, EPS, weight, EPS)
        with pytest.raises(TypeError, match="NoneType"):
            norm.rms_norm(x, weight, EPS)


@torch.no_grad()
def test_a_weight_that_is_a_view() -> None:
    x, weight = randn(3, 40, dtype=torch.float32), randn(80, dtype=torch.float32, seed=1)[::2]
    assert torch.equal(norm.rms_norm(x, weight, 1e-6), norm.rms_norm_form(x, weight, 1e-6))
    total, normed = norm.add_rms_norm(x, x, weight, 1e-6)
    torch.testing.assert_close(normed, norm.rms_norm_form(total, weight, 1e-6))
