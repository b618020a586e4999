"""Cross-entropy in blocks of rows against PyTorch's on whole logits."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from yocolm.ops.logits import soft_cap
from yocolm.train import loss as module
from yocolm.train.loss import cross_entropy_sum

N, D, V = 20, 8, 31
RELATIVE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}  # of the norm; bfloat16 has 8 bits
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


@pytest.fixture(autouse=True)
def _several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROWS", 7)  # the last block is shorter


def whole(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The same by PyTorch, in float64 on the values that ``hidden`` and the head really have."""
    head = weight.to(hidden.dtype).double()
    return F.cross_entropy(hidden.double() @ head.T, targets, reduction="sum")


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, D, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(V, D, generator=generator).requires_grad_()
    return hidden, weight, torch.randint(V, (N,), generator=generator)


def close(got: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    difference = (got.double() - expected.double()).norm()
    return bool(difference <= RELATIVE[dtype] * expected.double().norm())


@pytest.mark.parametrize("dtype", RELATIVE)
@pytest.mark.parametrize("scale", [1.0, 1 / 37, 3000.0])
def test_loss_and_gradients(dtype: torch.dtype, scale: float) -> None:
    results = []
    for loss in (cross_entropy_sum, whole):
        hidden, weight, targets = inputs(dtype)
        value = loss(hidden, weight, targets)
        (value * scale).backward()
        assert hidden.grad is not None and weight.grad is not None
        assert hidden.grad.dtype == dtype and weight.grad.dtype == torch.float32
        results.append((value.detach(), hidden.grad, weight.grad))
    for got, expected in zip(*results, strict=True):
        assert close(got, expected, dtype)


@pytest.mark.parametrize("softcap", [0.0, 0.7])
def test_rows_with_a_negative_target_do_not_count(softcap: float) -> None:
    kept = torch.ones(N, dtype=torch.bool)
    kept[[0, 3, 8, N - 1]] = False
    results = []
    for drop in (False, True):
        hidden, weight, targets = inputs(torch.float32)
        if drop:
            loss = cross_entropy_sum(hidden[kept], weight, targets[kept], softcap)
        else:
            loss = cross_entropy_sum(hidden, weight, targets.where(kept, -100), softcap)
        loss.backward()
        assert hidden.grad is not None and weight.grad is not None
        results.append((loss.detach(), hidden.grad, weight.grad))
        assert not hidden.grad[~kept].any()
    for got, expected in zip(*results, strict=True):
        assert close(got, expected, torch.float32)


@pytest.mark.parametrize("softcap", [0.0, 0.7, 30.0])
@pytest.mark.parametrize("dtype", [torch.float64, *RELATIVE])
def test_a_soft_cap(dtype: torch.dtype, softcap: float) -> None:
    """Of the logits, as models apply it: in value and in both gradients."""
    results = []
    for ours in (True, False):
        hidden, weight, targets = inputs(dtype)
        if dtype == torch.float64:
            weight = weight.detach().double().requires_grad_()
        if ours:
            value = cross_entropy_sum(hidden, weight, targets, softcap)
        else:
            scores = soft_cap(hidden.double() @ weight.to(dtype).double().T, softcap)
            value = F.cross_entropy(scores, targets, reduction="sum")
        value.backward()
        results.append((value.detach(), hidden.grad, weight.grad))
    for got, expected in zip(*results, strict=True):
        assert got is not None and expected is not None
        difference = float((got.double() - expected.double()).norm() / expected.double().norm())
        assert difference <= {torch.float64: 1e-12, **RELATIVE}[dtype]
    bound = N * (math.log(V) + 2 * softcap)
    assert not softcap or float(results[0][0]) <= bound


def test_the_scale_of_the_loss_does_not_round_the_gradient() -> None:
    """1/37 has no short binary form: in bfloat16 the product would be off by the same for all."""
    hidden, weight, targets = inputs(torch.bfloat16)
    [plain] = torch.autograd.grad(cross_entropy_sum(hidden, weight, targets), hidden)
    [scaled] = torch.autograd.grad(cross_entropy_sum(hidden, weight, targets) / 37, hidden)
    assert torch.equal(scaled, (plain.float() / 37).bfloat16())


@pytest.mark.parametrize("dtype", RELATIVE)
def test_gradients_accumulate(dtype: torch.dtype) -> None:
    grads = []
    for loss in (cross_entropy_sum, whole):
        hidden, weight, targets = inputs(dtype)
        for start, stop in ((0, 12), (12, N)):
            (loss(hidden[start:stop], weight, targets[start:stop]) / N).backward()
        grads.append((hidden.grad, weight.grad))
    for got, expected in zip(*grads, strict=True):
        assert got is not None and expected is not None and close(got, expected, dtype)


@pytest.mark.parametrize("dtype", RELATIVE)
def test_a_tied_head_collects_both_gradients(dtype: torch.dtype) -> None:
    def grad(loss: Loss) -> Tensor:
        _, weight, targets = inputs(dtype)
        hidden = torch.tanh(F.embedding(targets.flip(0), weight)).to(dtype)
        loss(hidden, weight, targets).backward()
        assert weight.grad is not None
        return weight.grad

    assert close(grad(cross_entropy_sum), grad(whole), dtype)


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_one_side_may_be_frozen(frozen: str) -> None:
    hidden, weight, targets = inputs(torch.float32)
    (hidden if frozen == "hidden" else weight).requires_grad_(False)
    cross_entropy_sum(hidden, weight, targets).backward()
    assert [x.grad is None for x in (hidden, weight)] == [frozen == "hidden", frozen == "weight"]


def test_no_gradient_is_computed_where_none_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, targets = inputs(torch.float32)
    products = []
    product = torch.matmul
    monkeypatch.setattr(torch, "matmul", lambda a, b: products.append(1) or product(a, b))
    with torch.no_grad():
        value = cross_entropy_sum(hidden, weight, targets)
    assert close(value, whole(hidden, weight, targets), torch.float32)
    assert len(products) == 3  # one a block, of the logits alone


def test_extreme_logits_stay_finite() -> None:
    hidden = torch.full((2, D), 300.0, requires_grad=True)
    weight = torch.full((V, D), -30.0, requires_grad=True)
    value = cross_entropy_sum(hidden, weight, torch.tensor([0, 1]))
    value.backward()
    assert value.isfinite() and hidden.grad is not None and hidden.grad.isfinite().all()


def test_products_ignore_autocast() -> None:
    hidden, weight, targets = inputs(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = cross_entropy_sum(hidden, weight, targets)
    assert close(value, whole(hidden, weight, targets), torch.float32)
