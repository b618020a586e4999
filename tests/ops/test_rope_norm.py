"""Rotary embedding and root-mean-square norm against their formulas."""

from __future__ import annotations

import math
from decimal import Decimal, localcontext

import numpy as np
import pytest
import torch
from torch import Tensor

from packed import apart, randn
from tolerances import OPS
from yocolm.ops.norm import rms_norm
from yocolm.ops.rope import inverse_frequencies, rotate, rotation

PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494459230781640628620899")
CPU = torch.device("cpu")
POSITIONS = torch.tensor([0, 1, 2, 77, 4095])
DIM = 16


def angles(theta: float, inclusive: bool) -> Tensor:
    """[T, 1, D/2], written out from the papers' formulas."""
    half = DIM // 2
    exponents = [i / (half - 1) if inclusive else 2 * i / DIM for i in range(half)]
    frequencies = torch.tensor([theta**-e for e in exponents], dtype=torch.float64)
    return POSITIONS.double()[:, None, None] * frequencies


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("inclusive", [False, True])
@pytest.mark.parametrize("theta", [10_000.0, 500.0, 640_000.0])
def test_interleaved_is_a_complex_product(theta: float, inclusive: bool, dtype: str) -> None:
    x = randn(len(POSITIONS), 3, DIM, dtype=getattr(torch, dtype))
    table = rotation(
        POSITIONS, DIM, theta, interleaved=True, inclusive=inclusive, dtype=getattr(torch, dtype)
    )
    pairs = torch.complex(x[..., ::2].double(), x[..., 1::2].double())
    turned = pairs * torch.polar(torch.ones(1, dtype=torch.float64), angles(theta, inclusive))
    expected = torch.stack((turned.real, turned.imag), -1).flatten(-2)
    out = rotate(x, table)
    assert out.dtype == x.dtype and apart(out, expected) <= OPS[dtype]


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("inclusive", [False, True])
def test_half_split_is_llamas_formula(inclusive: bool, dtype: str) -> None:
    x = randn(len(POSITIONS), 3, DIM, dtype=getattr(torch, dtype))
    table = rotation(
        POSITIONS, DIM, 500.0, interleaved=False, inclusive=inclusive, dtype=getattr(torch, dtype)
    )
    both = torch.cat((angles(500.0, inclusive),) * 2, -1)
    wide = x.double()
    turned_half = torch.cat((-wide[..., DIM // 2 :], wide[..., : DIM // 2]), -1)
    expected = wide * both.cos() + turned_half * both.sin()
    out = rotate(x, table)
    assert out.dtype == x.dtype and apart(out, expected) <= OPS[dtype]


def test_frequencies_reach_their_ends() -> None:
    inclusive = inverse_frequencies(64, 10_000.0, True, CPU)
    assert inclusive.dtype == torch.float64 and inclusive.shape == (32,)
    assert float(inclusive[0]) == 1.0
    assert math.isclose(float(inclusive[-1]), 1e-4, rel_tol=1e-14)
    exclusive = inverse_frequencies(64, 10_000.0, False, CPU)
    assert float(exclusive[0]) == 1.0
    assert math.isclose(float(exclusive[-1]), 10_000 ** (-62 / 64), rel_tol=1e-14)
    assert inverse_frequencies(2, 10_000.0, True, CPU).tolist() == [1.0]


@pytest.mark.parametrize("inclusive", [False, True])
def test_position_one_million_is_exact(inclusive: bool) -> None:
    """Float32 tables are the rounded exact values: angles of a million radians lose nothing."""
    position, half = 1_000_000, 32
    table = rotation(
        torch.tensor([position]), 2 * half, 640_000.0, interleaved=True, inclusive=inclusive
    )
    assert table.cos.dtype == torch.float32
    exact = []
    with localcontext() as context:
        context.prec = 60
        for i in range(half):
            exponent = Decimal(i) / (half - 1 if inclusive else half)
            angle = position * Decimal(640_000) ** -exponent
            exact.append(float(angle % (2 * PI)))
    half_step = torch.finfo(torch.float32).eps / 4  # of values up to 1
    for got, function in ((table.cos, math.cos), (table.sin, math.sin)):
        expected = torch.tensor([function(angle) for angle in exact], dtype=torch.float64)
        assert float((got.flatten().double() - expected).abs().max()) <= half_step + 1e-9


@pytest.mark.parametrize("interleaved", [False, True])
def test_scores_depend_on_the_distance_only(interleaved: bool) -> None:
    q, k = randn(1, 1, DIM, seed=1), randn(1, 1, DIM, seed=2)

    def score(q_position: int, k_position: int) -> Tensor:
        tables = [
            rotation(
                torch.tensor([position]),
                DIM,
                10_000.0,
                interleaved=interleaved,
                inclusive=True,
                dtype=torch.float64,
            )
            for position in (q_position, k_position)
        ]
        return (rotate(q, tables[0]) * rotate(k, tables[1])).sum()

    assert apart(score(1000, 990), score(10, 0)) <= OPS["float64"]


@pytest.mark.parametrize("interleaved", [False, True])
def test_bfloat16_is_rotated_in_float32_and_slices_may_be_strided(interleaved: bool) -> None:
    stacked = randn(len(POSITIONS), 2, 3, DIM, dtype=torch.bfloat16)
    table = rotation(POSITIONS, DIM, 500.0, interleaved=interleaved, inclusive=False)
    for x in stacked.unbind(1):
        assert torch.equal(rotate(x, table), rotate(x.float().contiguous(), table).bfloat16())
    wide = stacked.float()
    for x in wide.unbind(1):
        assert torch.equal(rotate(x, table), rotate(x.contiguous(), table))


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("size", [1e-4, 1.0, 1e4])
def test_rms_norm(size: float, weighted: bool, dtype: str) -> None:
    x = randn(7, 3, 32, dtype=getattr(torch, dtype), seed=1) * size
    weight = randn(32, dtype=getattr(torch, dtype), seed=2) if weighted else None
    wide = x.double().numpy()
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5)
    if weight is not None:
        expected = expected * weight.double().numpy()
    out = rms_norm(x, weight, 1e-5)
    assert out.dtype == x.dtype
    assert apart(out, torch.from_numpy(expected)) <= OPS[dtype]


def test_rms_norm_of_zeros_and_of_values_whose_squares_overflow_half_types() -> None:
    zeros = torch.zeros(2, 8, dtype=torch.bfloat16)
    assert torch.equal(rms_norm(zeros, None, 1e-5), zeros)
    large = torch.full((2, 8), 60_000.0, dtype=torch.float16)
    assert apart(rms_norm(large, None, 1e-5), torch.ones(2, 8)) <= OPS["bfloat16"]
