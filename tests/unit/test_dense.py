"""The state of whole packed sequences: any rows, caps and windows give what all rows give."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from packed import apart, places, randn
from tolerances import OPS
from yocolm.models.base import KV, Batch
from yocolm.models.dense import DenseState
from yocolm.ops.attention import attention_reference
from yocolm.ops.retention import retention_recurrent

LENGTHS = [3, 0, 130, 1, 70]
TOKENS = sum(LENGTHS)
ROWS = {
    "last": [2, 132, 133, 203],
    "first": [0],
    "of one sequence": list(range(10, 100)),
    "every third": list(range(0, TOKENS, 3)),
    "all but one": list(range(TOKENS - 1)),
}


def make_qkv() -> tuple[Tensor, Tensor, Tensor]:
    return randn(TOKENS, 4, 8, seed=1), randn(TOKENS, 2, 8, seed=2), randn(TOKENS, 2, 8, seed=3)


def append(batch: Batch, window: int) -> KV:
    _, k, v = make_qkv()
    state = DenseState()
    if window:
        return state.append_window(0, k, v, batch, window)
    return state.append_global(0, k, v, batch)


@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize("window", [0, 1, 20, 500])
@pytest.mark.parametrize("rows", ROWS)
def test_rows_equal_those_of_the_full_result(rows: str, window: int, softcap: float) -> None:
    q, k, v = make_qkv()
    where = places(LENGTHS)
    full = attention_reference(q, k, v, where, where, 0.4, window, softcap)
    needed = torch.tensor(ROWS[rows])
    batch = Batch.packed(torch.zeros(TOKENS), LENGTHS, needed)
    kv = append(batch, window)
    assert apart(kv.attend(q, batch, 0.4, softcap), full) <= OPS["float64"]
    selected, fewer = batch.select_rows(q)
    assert apart(kv.attend(selected, fewer, 0.4, softcap), full[needed]) <= OPS["float64"]


@pytest.mark.parametrize("chunk_size", [16, 128])
def test_retention_starts_every_sequence_from_nothing(chunk_size: int) -> None:
    q, k, v = (randn(TOKENS, 2, 4, seed=seed) for seed in range(3))
    log_decay = -randn(TOKENS, 2, seed=3).abs()
    batch = Batch.packed(torch.zeros(TOKENS), LENGTHS)
    out = DenseState(chunk_size).retain(0, q, k, v, log_decay, batch)
    expected, _ = retention_recurrent(q, k, v, log_decay, LENGTHS)
    assert apart(out, expected) <= OPS["float64"]
