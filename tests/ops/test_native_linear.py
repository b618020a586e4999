"""Linears against float64: few rows over row-major weights, any rows over packed ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tolerances import OPS
from yocolm.ops import linear as ops
from yocolm.ops.linear import linear, pack, packed_linear, unpack
from yocolm.ops.native.library import native
from yocolm.ops.native.linear import linear_rows

needs_kernels = pytest.mark.skipif(native().handle is None, reason=f"none: {native().reason}")
DTYPES = [torch.float32, torch.bfloat16]
ROWS = (1, 2, 3, 5, 8, 12, 13, 16, 29)


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


def _random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _amid_nan(x: Tensor) -> Tensor:
    """``x`` [rows, columns] as a part of a larger tensor that is NaN elsewhere."""
    around = torch.full((x.shape[0] + 2, x.shape[1] + 5), torch.nan, dtype=x.dtype)
    inside = around[1:-1, 3:-2]
    inside.copy_(x)
    return inside


def _close(got: Tensor, wanted: Tensor) -> None:
    assert got.shape == wanted.shape
    if wanted.numel():
        error = (got.double() - wanted).abs().max() / wanted.abs().max()
        assert error <= OPS[str(got.dtype).removeprefix("torch.")]


def _activate(x: Tensor, activation: str | None) -> Tensor:
    if activation is None:
        return x
    return F.gelu(x, approximate="tanh") if activation == "gelu" else F.silu(x)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n,k", [(1, 1), (3, 31), (5, 64), (130, 100), (64, 257), (1000, 768)])
def test_rows_over_a_slice_of_weights(dtype: torch.dtype, n: int, k: int):
    """Any number of rows, odd sizes, weights and inputs that lie in larger tensors full of NaN."""
    around = torch.full((n + 2, k), torch.nan, dtype=dtype)
    weight = around[1:-1]
    weight.copy_(_random(n, k, dtype=dtype))
    bias = _random(n, dtype=dtype, seed=1)
    for rows in ROWS:
        x = _amid_nan(_random(rows, k, dtype=dtype, seed=rows))
        wanted = x.double() @ weight.double().T
        _close(linear_rows(x, weight, None), wanted)
        _close(linear_rows(x, weight, bias), wanted + bias.double())


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_nan_stays_in_its_row(packed: bool, dtype: torch.dtype):
    x, weight = _random(15, 41, dtype=dtype), _random(9, 41, dtype=dtype)
    x[2, 3] = torch.nan
    y = packed_linear(x, pack(weight)) if packed else linear(x, weight)
    assert y[2].isnan().all() and not torch.cat([y[:2], y[3:]]).isnan().any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_empty_inputs_give_empty_outputs_and_leading_dimensions_stay(dtype: torch.dtype):
    x, weight = _random(6, 40, dtype=dtype), _random(9, 40, dtype=dtype)
    packed = pack(weight)
    assert linear(x[:0], weight).shape == packed_linear(x[:0], packed).shape == (0, 9)
    assert packed_linear(x, packed, 4, 4).shape == (6, 0)
    wanted = (x.double() @ weight.double().T).view(2, 3, 9)
    _close(linear(x.view(2, 3, 40), weight), wanted)
    _close(packed_linear(x.view(2, 3, 40), packed), wanted)


@pytest.mark.parametrize("rows", [1, 16, 17])
def test_linear_takes_what_no_kernel_takes(rows: int):
    """Gradients, float64, other layouts: PyTorch's own product, and the same numbers."""
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


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("glu", [False, True])
@pytest.mark.parametrize("n,k", [(2, 1), (32, 32), (34, 33), (130, 100), (96, 65)])
def test_packing_keeps_every_weight(
    dtype: torch.dtype, glu: bool, n: int, k: int, monkeypatch: pytest.MonkeyPatch
):
    weight = _amid_nan(_random(n, k, dtype=dtype))
    packed = pack(weight, glu=glu)
    assert torch.equal(unpack(packed), weight)
    assert packed.outputs == (n // 2 if glu else n)
    monkeypatch.setattr(ops, "fits", lambda x: False)
    assert torch.equal(pack(weight, glu=glu).data, packed.data)  # padding included


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n,k", [(1, 1), (31, 2), (32, 64), (70, 101), (200, 257)])
def test_packed_product_of_any_size_and_range(dtype: torch.dtype, n: int, k: int):
    weight, bias = _random(n, k, dtype=dtype), _random(n, dtype=dtype, seed=1)
    packed, biased = pack(weight), pack(weight, bias)
    for rows in ROWS:
        x = _amid_nan(_random(rows, k, dtype=dtype, seed=rows))
        wanted = x.double() @ weight.double().T
        _close(packed_linear(x, packed), wanted)
        for start, stop in ((0, n), (n // 3, n), (n // 2, n // 2 + 1), (n // 4, 3 * n // 4)):
            got = packed_linear(x, biased, start, stop)
            _close(got, (wanted + bias.double())[:, start:stop])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", [None, "gelu", "silu"])
@pytest.mark.parametrize("n,k", [(32, 16), (70, 33)])
def test_packed_product_with_what_follows_it(
    dtype: torch.dtype, activation: str | None, n: int, k: int
):
    weight, bias = _random(n, k, dtype=dtype) / k**0.5, _random(n, dtype=dtype, seed=1)
    packed, gated = pack(weight, bias), pack(weight, bias, glu=True)
    for rows in (1, 5, 30):
        x = _random(rows, k, dtype=dtype, seed=rows)
        other = _amid_nan(_random(rows, n, dtype=dtype, seed=rows + 1))
        y = x.double() @ weight.double().T + bias.double()
        gates, ups = y.chunk(2, dim=-1)
        product = _activate(gates, activation) * ups
        _close(packed_linear(x, gated, activation=activation), product)
        _close(packed_linear(x, gated, 5, 9, activation), product[:, 5:9])
        y = _activate(y, activation)
        _close(packed_linear(x, packed, activation=activation), y)
        wanted = y * other.double() if activation else y + other.double()
        _close(packed_linear(x, packed, activation=activation, other=other), wanted)
        part = packed_linear(x, packed, 3, n - 2, activation, other[:, 3:-2])
        _close(part, wanted[:, 3:-2])
        _close(
            packed_linear(x, gated, 5, 9, activation), (_activate(gates, activation) * ups)[:, 5:9]
        )


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [1, 2])
def test_large_products_do_not_depend_on_their_batch(dtype: torch.dtype, threads: int):
    """Beyond every block size: several blocks of rows, chunks of panels, more threads than one."""
    weight = _random(1500, 1030, dtype=dtype)
    packed = pack(weight)
    x = _random(700, 1030, dtype=dtype, seed=1)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        y = packed_linear(x, packed)
        _close(y, x.double() @ weight.double().T)
        for start, stop in ((0, 1), (3, 20), (100, 612), (699, 700)):
            assert torch.equal(packed_linear(x[start:stop], packed), y[start:stop])
    finally:
        torch.set_num_threads(before)


def test_packed_weights_where_no_kernel_fits():
    x, weight = _random(5, 24, dtype=torch.float32), _random(14, 24, dtype=torch.float32)
    packed = pack(weight, glu=True)
    gates, ups = (x.double() @ weight.double().T).chunk(2, dim=-1)
    with torch.enable_grad():
        leaf = x.clone().requires_grad_()
        y = packed_linear(leaf, packed, activation="silu")
        _close(y.detach(), F.silu(gates) * ups)
        y.sum().backward()
    assert leaf.grad is not None and leaf.grad.abs().sum() > 0
    double = packed_linear(x.double(), pack(weight.double(), glu=True), activation="silu")
    _close(double, F.silu(gates) * ups)
