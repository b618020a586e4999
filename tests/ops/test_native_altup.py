"""AltUp against its formulas: native forms in float32 and bfloat16, PyTorch's in float64.

The references compute in float64, and round to the dtype under test where a form does so: what it
returns is rounded before it is used again, as are the router's outputs.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from elementwise import NATIVE_DTYPES, check_rows, check_threads, needs_native, surrounded
from packed import DTYPES, apart, randn
from tolerances import OPS
from yocolm.ops import altup
from yocolm.ops.altup import Router
from yocolm.ops.native import altup as native

EPS = 1e-6
SHAPES = [(0, 16, 4), (1, 64, 4), (3, 37, 4), (2, 50, 3), (2, 8, 2), (5, 512, 4), (2, 21, 7)]


class Case:
    """Inputs of one shape and dtype, and what the formulas make of them."""

    def __init__(self, shape: tuple[int, int, int], dtype: str) -> None:
        self.shape, self.dtype = shape, dtype
        rows, size, streams = shape
        self.x = self.draw(1, rows, size, streams)
        self.router = Router(self.draw(2, size), 1e-3, self.draw(3, streams, size) * 8)
        self.weight = self.draw(4, size) * 0.5 + 1
        self.rows = [self.draw(seed, rows, size) for seed in range(5, 9)]
        self.active = streams // 2

    def draw(self, seed: int, *shape: int) -> Tensor:
        return randn(*shape, dtype=DTYPES[self.dtype], seed=seed)

    def rounded(self, x: Tensor) -> Tensor:
        return x.to(DTYPES[self.dtype]).double()

    def norm(self, x: Tensor, weight: Tensor, eps: float = EPS) -> Tensor:
        x = x.double()
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()

    def coefficients(self, x: Tensor, weight: Tensor) -> Tensor:
        normed = self.norm(x, self.router.norm, self.router.eps)
        routed = self.rounded(normed @ self.router.weight.double().mT / x.shape[-1])
        return self.rounded(self.rounded(routed.tanh()) @ weight.double().mT)

    def close(self, got: Tensor, exact: Tensor) -> None:
        assert got.dtype == DTYPES[self.dtype]
        assert apart(got, exact) <= OPS[self.dtype]


@pytest.fixture(params=SHAPES, ids=str)
def shape(request: pytest.FixtureRequest) -> tuple[int, int, int]:
    return request.param


@pytest.fixture(
    params=["float64", *(pytest.param(name, marks=needs_native) for name in NATIVE_DTYPES)]
)
def case(request: pytest.FixtureRequest, shape: tuple[int, int, int]) -> Case:
    return Case(shape, request.param)


def test_predictions(case: Case) -> None:
    rows, size, streams = case.shape
    weight = case.draw(10, streams**2, streams) * 0.5
    with torch.no_grad():
        got = altup.predict(case.x, case.router, weight, case.active, case.weight, EPS)
    stream = case.x[..., case.active].double()
    mixing = case.coefficients(stream, weight).unflatten(-1, (streams, streams)).mT
    case.close(got.mixing, mixing)
    moved = (case.x.double() * got.mixing[:, :, case.active].double().unsqueeze(1)).sum(-1)
    case.close(got.active, stream + moved)
    case.close(got.normed, case.norm(got.active, case.weight))


def test_joined_paths(case: Case) -> None:
    active, attended, normed, low = case.rows
    weights = case.weight, case.draw(11, case.shape[1]), case.draw(12, case.shape[1])
    with torch.no_grad():
        h, following = altup.join(
            active, attended, weights[0], normed, low, weights[1], EPS, weights[2]
        )
    exact = active.double() + case.norm(attended, weights[0]) + normed + case.norm(low, weights[1])
    case.close(h, exact / 2**0.5)
    case.close(following, case.norm(h, weights[2]))


@pytest.mark.parametrize("scaled", [False, True])
def test_corrections(case: Case, scaled: bool) -> None:
    streams = case.shape[2]
    h, y, active, scale = *case.rows[:3], case.draw(11, case.shape[1])
    weight = case.draw(10, streams, streams)
    with torch.no_grad():
        got = altup.correction(
            *(h, y, case.weight, EPS, active, case.router, weight, case.active),
            scale if scaled else None,
        )
    made = case.rounded(h.double() + case.norm(y, case.weight))
    case.close(got.error, made - active)
    case.close(got.gains, case.coefficients(made, weight) + 1)
    corrected = active.double() + got.error.double() * got.gains.double()[:, case.active, None]
    case.close(got.corrected, corrected * scale.double() if scaled else corrected)


def test_corrected_streams(case: Case) -> None:
    rows, size, streams = case.shape
    mixing, gains = case.draw(11, rows, streams, streams), case.draw(12, rows, streams)
    error, own = case.rows[:2]
    with torch.no_grad():
        # A transposed view of the mixing, as PyTorch's form of the prediction gives it.
        args = mixing.mT.contiguous().mT, error, gains, own, case.weight, EPS
        got = altup.correct(case.x, *args)
    exact = case.x.double() + torch.einsum("tds,tse->tde", case.x.double(), mixing.double())
    exact += error.double().unsqueeze(-1) * gains.double().unsqueeze(1)
    exact[..., 1:] += case.norm(own, case.weight).unsqueeze(-1)
    case.close(got, exact)


def test_streams_are_made_as_large_as_the_first(case: Case) -> None:
    rows, size, streams = case.shape
    x, others = case.rows[0], case.draw(11, rows, (streams - 1) * size) * 7
    others[:, :size] *= 1e-5  # smaller than what is divided by
    with torch.no_grad():
        spread = altup.spread(x, others)
        merged = altup.merge(case.x, others.view(rows, streams - 1, size).transpose(0, 1))

    def large(part: Tensor, like: Tensor) -> Tensor:
        own, wanted = (t.double().square().mean(-1, keepdim=True).sqrt() for t in (part, like))
        return part.double() * case.rounded(wanted / own.clamp(min=1e-5**0.5))

    parts = others.split(size, dim=1)
    case.close(spread, torch.stack((x.double(), *(large(part, x) for part in parts)), -1))
    first = case.x[..., 0]
    exact = torch.stack((first.double(), *(large(part, first) for part in parts))).mean(0)
    case.close(merged, exact)


@needs_native
def test_more_streams_than_native_forms_take() -> None:
    case = Case((2, 6, native.MAX_STREAMS + 1), "float32")
    test_predictions(case)
    test_corrections(case, True)
    test_corrected_streams(case)


@needs_native
def test_nan_stays_in_its_row() -> None:
    case = Case((4, 40, 4), "bfloat16")
    prediction, weight = case.draw(10, 16, 4), case.draw(11, 4, 4)
    mixing, gains = case.draw(12, 4, 4, 4), case.draw(13, 4, 4)
    a, b, c, d = case.rows
    w, router = case.weight, case.router
    x = case.x.clone()
    check_rows(altup.predict, x, x, router, prediction, 0, w, EPS, row=1)
    check_rows(altup.correct, gains, case.x, mixing, a, gains, b, w, EPS, row=2)
    check_rows(altup.join, d, a, b, w, c, d, w, EPS, w, row=0)
    check_rows(altup.correction, b, a, b, w, EPS, c, router, weight, 1, w, row=3)


@needs_native
def test_threads_share_rows() -> None:
    case = Case((150, 128, 4), "bfloat16")
    prediction, weight = case.draw(10, 16, 4), case.draw(11, 4, 4)
    mixing, gains = case.draw(12, 150, 4, 4), case.draw(13, 150, 4)
    a, b, c, d = case.rows
    w = case.weight
    check_threads(altup.predict, case.x, case.router, prediction, 1, w, EPS)
    check_threads(altup.join, a, b, w, c, d, w, EPS, w)
    check_threads(altup.correction, a, b, w, EPS, c, case.router, weight, 1, None)
    check_threads(altup.correct, case.x, mixing, a, gains, b, w, EPS)
    check_threads(altup.spread, a, case.draw(14, 150, 384))
    check_threads(altup.merge, case.x, case.draw(14, 3, 150, 128))


@needs_native
def test_surroundings_are_not_read() -> None:
    case = Case((3, 36, 4), "float32")
    own, w, router = surrounded(3, 36, dtype="float32"), case.weight, case.router
    with torch.no_grad():
        parts = altup.correction(own, own, w, EPS, own, router, case.draw(11, 4, 4), 1, w)
        parts += altup.join(own, own, w, own, own, w, EPS, w)
    assert all(bool(part.isfinite().all()) for part in parts)


def test_gradients_pass_through_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("predict", "join", "correction", "correct", "spread", "merge"):
        monkeypatch.setattr(native, name, None)  # calling it would fail
    case = Case((2, 12, 4), "float32")
    x, w, router = case.x.requires_grad_(), case.weight, case.router
    expected = altup.predict(x, router, case.draw(10, 16, 4), 0, w, EPS)
    h, normed = altup.join(expected.active, expected.normed, w, x[..., 1], x[..., 2], w, EPS, w)
    got = altup.correction(h, normed, w, EPS, expected.active, router, case.draw(11, 4, 4), 0, w)
    out = altup.correct(x, expected.mixing, got.error, got.gains, got.corrected, w, EPS)
    merged = altup.merge(out, out.permute(2, 0, 1)[1:])
    altup.spread(merged, h.repeat(1, 3))[..., 1].sum().backward()
    assert x.grad is not None and bool(x.grad.isfinite().all())
