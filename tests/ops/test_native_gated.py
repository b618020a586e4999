"""Native gated units against their PyTorch forms in float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

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
from packed import DTYPES, randn
from yocolm.ops.gated import gelu_glu, gelu_mul, silu_glu, sparse_gelu_glu
from yocolm.ops.native import gated as native

pytestmark = needs_native
QUANTILE = 1.6448536269514722  # 95 %
SPARSE = partial(sparse_gelu_glu, quantile=QUANTILE)


@pytest.mark.parametrize("dtype", NATIVE_DTYPES)
@pytest.mark.parametrize("size", [1, 3, 16, 31, 100, 256, 1000])
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_gated_units(rows: int, size: int, dtype: str) -> None:
    gate_up = surrounded(rows, 2 * size, dtype=dtype)
    for op in (gelu_glu, silu_glu):
        (out,) = check(op, gate_up, dtype=dtype)
        assert out.shape == (rows, size)
    other = surrounded(rows, 3, size, dtype=dtype, seed=2).unbind(1)[1]
    check(gelu_mul, gate_up[:, :size], other, dtype=dtype)


@pytest.mark.parametrize("dtype", NATIVE_DTYPES)
@pytest.mark.parametrize("size", [2, 33, 512, 1003])
@pytest.mark.parametrize("quantile", [QUANTILE, -0.5])
def test_sparse_units(quantile: float, size: int, dtype: str) -> None:
    gate_up = surrounded(6, 2 * size, dtype=dtype) * 3 + 2.5  # a mean that is not 0
    # The cut's quantile is rounded as the dtype has it: the same one for the reference.
    quantile = float(torch.tensor(quantile, dtype=DTYPES[dtype]))
    (out,) = check(sparse_gelu_glu, gate_up, quantile, dtype=dtype)
    if size > 500:
        share = float((out == 0).float().mean())
        assert abs(share - (0.95 if quantile > 0 else 0.31)) < 0.03


@pytest.mark.parametrize("op", [gelu_glu, silu_glu])
def test_large_gates(op: Callable[[Tensor], Tensor]) -> None:
    gates = [-3e38, -1e30, -200.0, -90.0, -20.0, -1e-30, 0.0, 1e-30, 20.0, 90.0, 1e30, float("inf")]
    gate_up = torch.tensor([gates + [1.0] * len(gates)])
    with torch.no_grad():
        out = op(gate_up)[0]
    assert bool(((out - gate_up[0, : len(gates)].clamp(min=0)).abs() < 1e-6)[:-1].all())
    assert float(out[-1]) == float("inf")


@pytest.mark.parametrize("dtype", NATIVE_DTYPES)
def test_nan_stays_where_it_is(dtype: str) -> None:
    for op in (gelu_glu, silu_glu, SPARSE):
        x = randn(5, 80, dtype=DTYPES[dtype])
        check_rows(op, x, x, row=2)
        x = randn(3, 80, dtype=DTYPES[dtype])
        x[1, 43] = float("nan")  # an `up`: of one output only, whatever its gate is
        with torch.no_grad():
            assert op(x).isnan().nonzero().tolist() == [[1, 3]]


def test_threads_share_rows() -> None:
    x = randn(100, 2048, dtype=torch.bfloat16)
    for op in (gelu_glu, silu_glu, SPARSE):
        check_threads(op, x)
    check_threads(gelu_mul, x, x)


def test_gradients_pass_through_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("glu", "gelu_mul", "sparse_gelu_glu"):
        monkeypatch.setattr(native, name, None)  # calling it would fail
    x = randn(4, 32, dtype=torch.float32).requires_grad_()
    (gelu_mul(gelu_glu(x), silu_glu(x)) + SPARSE(x)).sum().backward()
    assert x.grad is not None and bool(x.grad.isfinite().all())
    with torch.no_grad():
        gelu_glu(x.half())
        with pytest.raises(TypeError, match="NoneType"):
            gelu_glu(x)


@torch.no_grad()
@pytest.mark.parametrize("dtype", NATIVE_DTYPES)
def test_inputs_whose_rows_do_not_lie_together(dtype: str) -> None:
    gate_up = randn(600, 50, dtype=DTYPES[dtype]).mT
    for op in (gelu_glu, silu_glu, SPARSE):
        assert torch.equal(op(gate_up), op(gate_up.contiguous()))
    halves = gate_up[:, :300], gate_up[:, 300:]
    assert torch.equal(gelu_mul(*halves), gelu_mul(*(x.contiguous() for x in halves)))
