"""Native linears against float64: few rows over row-major weights, any rows over packed ones."""

from __future__ import annotations

import pytest
import torch
from tolerances import OPS
from torch import Tensor

from yocolm.ops.linear import linear
from yocolm.ops.native.library import native
from yocolm.ops.native.linear import linear_rows

pytestmark = pytest.mark.skipif(native().handle is None, reason=f"no kernels: {native().reason}")
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


def _random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _close(got: Tensor, wanted: Tensor) -> None:
    assert got.shape == wanted.shape
    error = (got.double() - wanted).abs().max() / wanted.abs().max()
    assert error <= OPS[str(got.dtype).removeprefix("torch.")]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n,k", [(1, 1), (3, 31), (5, 64), (130, 100), (64, 257), (1000, 768)])
def test_rows_over_a_slice_of_weights(dtype: torch.dtype, n: int, k: int):
    """Any number of rows, odd sizes, weights and inputs that lie in larger tensors full of NaN."""
    around = torch.full((n + 2, k), torch.nan, dtype=dtype)
    weight = around[1:-1]
    weight.copy_(_random(n, k, dtype=dtype))
    bias = _random(n, dtype=dtype, seed=1)
    for rows in (1, 2, 3, 4, 5, 8, 16):
        inputs = torch.full((rows + 2, k + 5), torch.nan, dtype=dtype)
        x = inputs[1:-1, 3:-2]
        x.copy_(_random(rows, k, dtype=dtype, seed=rows))
        wanted = x.double() @ weight.double().T
        _close(linear_rows(x, weight, None), wanted)
        _close(linear_rows(x, weight, bias), wanted + bias.double())


def test_a_nan_stays_in_its_row_and_empty_inputs_give_empty_outputs():
    x, weight = _random(6, 40, dtype=torch.float32), _random(9, 40, dtype=torch.float32)
    x[2, 3] = torch.nan
    y = linear_rows(x, weight, None)
    assert y[2].isnan().all() and not torch.cat([y[:2], y[3:]]).isnan().any()
    assert linear_rows(x[:0], weight, None).shape == (0, 9)
    assert linear_rows(x[None], weight, None).shape == (1, 6, 9)


@pytest.mark.parametrize("rows", [1, 16, 17])
def test_linear_takes_what_no_kernel_takes(rows: int):
    """Gradients, float64, mixed layouts: PyTorch's own product; and the same numbers either way."""
    x, weight = _random(rows, 24, dtype=torch.float32), _random(7, 24, dtype=torch.float32)
    wanted = x.double() @ weight.double().T
    _close(linear(x, weight), wanted)
    _close(linear(x, weight.T.contiguous().T), wanted)
    _close(linear(x.double(), weight.double()), wanted)
    with torch.enable_grad():
        leaf = weight.clone().requires_grad_()
        linear(x, leaf).sum().backward()
    assert leaf.grad is not None
    _close(leaf.grad, x.double().sum(0).expand(7, -1))
