"""Native draws against those of PyTorch's operations."""

from __future__ import annotations

import math
import random

import pytest
import torch

from elementwise import needs_native
from yocolm.ops.sampling import SamplingBatch, SamplingRow, sample

pytestmark = needs_native


def some_row(rng: random.Random, vocab_size: int) -> SamplingRow:
    return SamplingRow(
        temperature=rng.choice([0, 1e-3, 0.3, 1.0, 2.5]),
        top_k=rng.choice([0, 0, 1, 3, 40, vocab_size, vocab_size + 9]),
        top_p=rng.choice([1.0, 1.0, 0.999, 0.9, 0.3, 1e-6, 1e-50]),
        min_p=rng.choice([0.0, 0.0, 1e-3, 0.2, 1.0]),
        seed=rng.getrandbits(64),
        index=rng.randrange(1000),
        banned=[rng.randrange(vocab_size)] * rng.randrange(2),
    )


def both(logits: torch.Tensor, batch: SamplingBatch) -> tuple[list[int], list[int]]:
    """The tokens of the native form and of the other."""
    with torch.inference_mode():
        native = sample(logits, batch).tolist()
    with torch.enable_grad():
        return native, sample(logits, batch).tolist()


@pytest.mark.parametrize("vocab_size", [1, 5, 16, 301, 3000])
@pytest.mark.parametrize("spread", [0.1, 3.0])
def test_both_forms_draw_the_same(vocab_size: int, spread: float) -> None:
    rng = random.Random(vocab_size)
    rows = [some_row(rng, vocab_size) for _ in range(60)]
    rows += [SamplingRow(seed=i, top_p=0.99) for i in range(9)]  # more than are looked at first
    rows += [SamplingRow(seed=i, top_p=0.5, min_p=1e-3) for i in range(9)]
    logits = torch.randn(len(rows), vocab_size, generator=torch.Generator().manual_seed(7)) * spread
    logits[::3] = logits[::3].round()  # ties
    native, other = both(logits, SamplingBatch.build(rows))
    assert native == other
    native, other = both(logits.bfloat16(), SamplingBatch.build(rows))
    assert native == other


def test_threads_change_nothing() -> None:
    rows = [SamplingRow(seed=i, top_k=9 * (i % 2)) for i in range(13)]
    logits = torch.randn(13, 3000, generator=torch.Generator().manual_seed(7))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        native, other = both(logits, SamplingBatch.build(rows))
    finally:
        torch.set_num_threads(before)
    assert native == other


def test_rows_that_are_not_finite_get_no_token() -> None:
    logits = torch.zeros(7, 40)
    logits[1, 35] = math.nan
    logits[2, 3] = math.inf
    logits[3] = -math.inf
    logits[4, :39] = -math.inf
    logits[5, 39] = math.nan
    logits[6, 2] = -math.inf
    for asked in (SamplingRow(top_k=3, top_p=0.9), SamplingRow(), SamplingRow(temperature=0)):
        native, other = both(logits, SamplingBatch.build([asked] * 7))
        assert native == other
        assert [token < 0 for token in native] == [False, True, True, True, False, True, False]
        assert native[4] == 39


def test_a_row_with_everything_masked_is_no_failure() -> None:
    nothing = SamplingRow(allowed=torch.zeros(2, dtype=torch.int32).numpy())
    native, _ = both(torch.zeros(2, 40), SamplingBatch.build([nothing, SamplingRow()]))
    assert native[0] == 0 and 0 <= native[1] < 40
