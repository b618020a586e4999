"""Attention over whole packed sequences: the fused forms equal the reference, which is right."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from packed import DTYPES, apart, places, randn
from tolerances import OPS
from yocolm.ops import attention
from yocolm.ops.attention import (
    attention_reference,
    causal_attention,
    row_attention,
    window_attention,
)

LENGTHS = [(1,), (2,), (7,), (64,), (65,), (6, 6, 6), (0, 5, 1, 0, 17, 1, 9, 0), (40, 3)]
HEADS = [(4, 4), (4, 2), (4, 1)]
KEY = 8


def make_qkv(
    lengths: tuple[int, ...],
    heads: tuple[int, int] = (4, 2),
    dtype: torch.dtype = torch.float64,
    value: int = KEY,
) -> tuple[Tensor, Tensor, Tensor]:
    """The same numbers for every dtype, rounded to it."""
    tokens = sum(lengths)
    return (
        randn(tokens, heads[0], KEY, seed=1, dtype=dtype),
        randn(tokens, heads[1], KEY, seed=2, dtype=dtype),
        randn(tokens, heads[1], value, seed=3, dtype=dtype),
    )


def results(
    form: Callable[[Tensor, Tensor, Tensor], Tensor], qkv: tuple[Tensor, ...]
) -> list[Tensor]:
    """Output and the gradients of q, k and v."""
    q, k, v = (x.clone().requires_grad_() for x in qkv)
    out = form(q, k, v)
    loss = (out * randn(*out.shape, seed=4, dtype=out.dtype)).sum()
    grads = torch.autograd.grad(loss, (q, k, v), allow_unused=True, materialize_grads=True)
    return [out, *grads]


def assert_same(actual: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    errors = [apart(a, e) for a, e in zip(actual, expected, strict=True)]
    assert max(errors) <= tolerance, errors


def reference(
    lengths: tuple[int, ...], scale: float | None = None, window: int = 0, softcap: float = 0.0
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    where = places(lengths)

    def form(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention_reference(q, k, v, where, where, scale, window, softcap)

    return form


def test_the_reference_sees_the_past_of_its_own_sequence() -> None:
    """With equal scores, the weights of one-hot values can be read off the output."""
    lengths, window = (3, 0, 5), 2
    q, k, _ = make_qkv(lengths, (1, 1))
    v = torch.eye(8, dtype=torch.float64)[:, None]
    where = places(lengths)
    for limit in (0, window):
        weights = attention_reference(torch.zeros_like(q), k, v, where, where, window=limit)[:, 0]
        for seq, position, row in zip(*where, weights, strict=True):
            start = 0 if seq == 0 else 3
            seen = range(max(0, position + 1 - limit) if limit else 0, position + 1)
            expected = torch.zeros(8, dtype=torch.float64)
            expected[[start + p for p in seen]] = 1 / len(seen)
            assert apart(row, expected) <= OPS["float64"]


def test_the_reference_groups_heads_caps_and_scales() -> None:
    """Against the formula written out for the last row."""
    q, k, v = make_qkv((5,))
    out = attention_reference(q, k, v, places([5]), places([5]), 0.7, softcap=2.0)
    for head in range(4):
        scores = 2.0 * torch.tanh(0.7 * (k[:, head // 2] @ q[-1, head]) / 2.0)
        assert apart(out[-1, head], scores.softmax(0) @ v[:, head // 2]) <= OPS["float64"]


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_causal(lengths: tuple[int, ...], heads: tuple[int, int], dtype: str) -> None:
    qkv = make_qkv(lengths, heads, torch.float32)
    expected = results(reference(lengths), tuple(x.double() for x in qkv))
    actual = results(
        lambda q, k, v: causal_attention(q, k, v, list(lengths)),
        tuple(x.to(DTYPES[dtype]) for x in qkv),
    )
    assert_same(actual, expected, OPS[dtype])


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("heads", HEADS[1:], ids=str)
@pytest.mark.parametrize("window", [1, 2, 6, 16, 17, 18, 64, 1000])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_window(lengths: tuple[int, ...], window: int, heads: tuple[int, int], dtype: str) -> None:
    qkv = make_qkv(lengths, heads, torch.float32)
    expected = results(reference(lengths, window=window), tuple(x.double() for x in qkv))
    actual = results(
        lambda q, k, v: window_attention(q, k, v, list(lengths), window),
        tuple(x.to(DTYPES[dtype]) for x in qkv),
    )
    assert_same(actual, expected, OPS[dtype])


UNEVEN = (40, 3, 0, 1, 19, 20, 21, 2, 5, 40, 7, 1, 33)


@pytest.mark.parametrize("order", ["given", "ascending", "descending"])
@pytest.mark.parametrize("window", [0, 1, 4, 20, 39, 40])
def test_many_uneven_sequences(window: int, order: str) -> None:
    """Classes of all sizes, in any order; outputs and gradients."""
    lengths = UNEVEN if order == "given" else tuple(sorted(UNEVEN, reverse=order == "descending"))
    qkv = make_qkv(lengths)

    def form(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if window:
            return window_attention(q, k, v, list(lengths), window)
        return causal_attention(q, k, v, list(lengths))

    assert_same(results(form, qkv), results(reference(lengths, window=window), qkv), OPS["float64"])


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("heads", HEADS[1:], ids=str)
@pytest.mark.parametrize("window", [0, 1, 6, 1000])
@pytest.mark.parametrize("share", [0.02, 0.1, 0.6, 1.0])
def test_some_rows(
    monkeypatch: pytest.MonkeyPatch, share: float, window: int, heads: tuple[int, int], dtype: str
) -> None:
    """Whole or in blocks smaller than a sequence, of sequences of which some have no row."""
    monkeypatch.setattr(attention, "ROW_BLOCK", 7)
    monkeypatch.setattr(attention, "MASK", 150)
    monkeypatch.setattr(attention, "WHOLE", 2)
    qkv = make_qkv(UNEVEN, heads, torch.float32)
    seqs, positions = places(UNEVEN)
    chosen = torch.rand(len(seqs), generator=torch.Generator().manual_seed(5)) < share
    by_sequence = [positions[chosen & (seqs == i)].tolist() for i in range(len(UNEVEN))]
    q, k, v = (x.double() for x in qkv)

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = seqs[chosen], positions[chosen]
        return attention_reference(q, k, v, rows, places(UNEVEN), 0.4, window)

    def form(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return row_attention(q, k, v, by_sequence, list(UNEVEN), window, 0.4)

    expected = results(plain, (q[chosen], k, v))
    q, k, v = (x.to(DTYPES[dtype]) for x in qkv)
    assert_same(results(form, (q[chosen], k, v)), expected, OPS[dtype])


@pytest.mark.parametrize("window", [1, 2, 3, 5, 8])
def test_window_at_every_offset(window: int) -> None:
    """Weights read off one-hot values, for all lengths around the window, alone and together."""
    lengths = list(range(3 * window + 2))
    tokens = sum(lengths)
    zeros = torch.zeros(tokens, 1, tokens, dtype=torch.float64)
    one_hot = torch.eye(tokens, dtype=torch.float64)[:, None]
    together = window_attention(zeros, zeros, one_hot, lengths, window)[:, 0]
    seqs, positions = places(lengths)
    gap = positions[:, None] - positions
    seen = (seqs[:, None] == seqs) & (gap >= 0) & (gap < window)
    expected = seen.double() / seen.sum(1, keepdim=True)
    assert apart(together, expected) <= OPS["float64"]
    for length in lengths:
        rows = seqs == length
        alone = window_attention(zeros[rows], zeros[rows], one_hot[rows], [length], window)[:, 0]
        assert apart(alone, expected[rows]) <= OPS["float64"]


@pytest.mark.parametrize("window", [0, 4])
def test_scale_and_values_of_another_size(window: int) -> None:
    lengths = (9, 2)
    q, k, v = make_qkv(lengths, value=5)
    if window:
        out = window_attention(q, k, v, list(lengths), window, 0.3)
    else:
        out = causal_attention(q, k, v, list(lengths), 0.3)
    expected = reference(lengths, 0.3, window)(q, k, v)
    assert apart(out, expected) <= OPS["float64"]


@pytest.mark.parametrize("window", [0, 4])
def test_bfloat16(window: int) -> None:
    lengths = (33, 2)
    q, k, v = make_qkv(lengths, dtype=torch.bfloat16)
    if window:
        out = window_attention(q, k, v, list(lengths), window)
    else:
        out = causal_attention(q, k, v, list(lengths))
    expected = reference(lengths, window=window)(q.double(), k.double(), v.double())
    assert out.dtype == torch.bfloat16
    assert apart(out, expected) <= OPS["bfloat16"]


@pytest.mark.parametrize("lengths", [(), (0,), (0, 0)], ids=str)
def test_no_tokens(lengths: tuple[int, ...]) -> None:
    q, k, v = make_qkv(lengths)
    assert causal_attention(q, k, v, list(lengths)).shape == (0, 4, KEY)
    assert window_attention(q, k, v, list(lengths), 3).shape == (0, 4, KEY)
    assert row_attention(q, k, v, [[] for _ in lengths], list(lengths)).shape == (0, 4, KEY)
