"""Native forms of what is done to logits, against their PyTorch forms."""

from __future__ import annotations

import pytest
import torch

from elementwise import NATIVE_DTYPES, check, check_threads, needs_native, surrounded
from packed import DTYPES, randn
from yocolm.ops.logits import finite_argmax, soft_cap
from yocolm.ops.native import logits as native

pytestmark = needs_native
INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("dtype", NATIVE_DTYPES)
@pytest.mark.parametrize("shape", [(0, 5), (1, 1), (3, 100), (2, 40_001)])
def test_soft_cap(shape: tuple[int, int], dtype: str) -> None:
    x = surrounded(*shape, dtype=dtype) * 40
    (out,) = check(soft_cap, x, 30.0, dtype="float32")
    assert out.dtype == torch.float32
    assert soft_cap(x, 0.0) is x


def test_soft_cap_of_all_sizes() -> None:
    x = torch.tensor([-INF, -1e30, -5.0, -1e-20, 0.0, 1e-20, 1e-3, 4.4, 4.6, 1e30, INF, NAN])
    with torch.no_grad():
        out = soft_cap(x, 30.0)
    exact = torch.tanh(x.double() / 30.0) * 30.0
    assert torch.equal(out.isnan(), exact.isnan())
    assert bool(((out - exact).abs() <= exact.abs() * 1e-6)[:-1].all())


@pytest.mark.parametrize("dtype", NATIVE_DTYPES)
@pytest.mark.parametrize("size", [1, 15, 16, 512, 513, 16_384, 16_385, 50_003])
def test_the_greatest(size: int, dtype: str) -> None:
    logits = surrounded(7, size, dtype=dtype)
    places = torch.randint(size, (7,))
    logits[torch.arange(6), places[:6]] = 9.0
    logits[1, places[1] :] = 9.0  # the first of equals
    logits[2] = -INF
    logits[2, places[2]] = -3.0
    with torch.no_grad():
        tokens, finite = finite_argmax(logits)
        assert torch.equal(tokens, logits.double().argmax(-1)) and bool(finite.all())
        assert torch.equal(tokens, torch.cat((places[:6], tokens[6:])))
        # What spoils a row, wherever it is
        logits[0, places[1]] = NAN
        logits[2] = -INF
        logits[4, places[4]] = INF
        logits[5] = NAN
        tokens, finite = finite_argmax(logits)
    assert finite.tolist() == [False, True, False, True, False, False, True]
    assert bool(((tokens >= 0) & (tokens < size)).all())


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_other_dtypes_pass_through_pytorch(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "finite_argmax", None)
    logits = randn(2, 9).to(getattr(torch, dtype))
    logits[1, 3] = NAN
    tokens, finite = finite_argmax(logits)
    assert int(tokens[0]) == int(logits[0].argmax()) and finite.tolist() == [True, False]


def test_threads_share_rows_and_vocabulary() -> None:
    for shape in ((1, 200_000), (5, 30_000)):
        logits = randn(*shape, dtype=DTYPES["bfloat16"])
        check_threads(finite_argmax, logits)
        check_threads(soft_cap, logits, 30.0)
