"""No operation makes a tensor of the size of tokens x tokens, forward or backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from packed import LargestTensor, randn
from yocolm.models.base import Batch
from yocolm.models.dense import DenseState
from yocolm.ops.attention import attention_reference, causal_attention, window_attention
from yocolm.ops.block_attention import TILE_ELEMENTS, KeySource, attend_blocks, cut_rows, page_pairs
from yocolm.ops.retention import CHUNK_SIZE, gated_retention

TOKENS, HEADS, DIM, WINDOW = 4096, 2, 8, 64
INPUT = TOKENS * HEADS * DIM


def largest(form: Callable[[Tensor, Tensor, Tensor], Tensor], tokens: int = TOKENS) -> int:
    """The largest tensor made in one forward and backward pass."""
    q, k, v = (
        randn(tokens, HEADS, DIM, dtype=torch.float32, seed=seed).requires_grad_()
        for seed in range(3)
    )
    with LargestTensor() as record:
        torch.autograd.backward(form(q, k, v).sum())
    return record.numel


def test_the_record_sees_a_quadratic_buffer() -> None:
    where = torch.zeros(300, dtype=torch.int64), torch.arange(300)
    assert largest(lambda q, k, v: attention_reference(q, k, v, where, where), 300) >= 300**2


def test_causal_attention() -> None:
    assert largest(lambda q, k, v: causal_attention(q, k, v, [TOKENS])) <= INPUT


def test_causal_attention_with_grouped_heads() -> None:
    def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return causal_attention(q, k[:, :1], v[:, :1], [TOKENS])

    assert largest(grouped) <= INPUT


def test_window_attention() -> None:
    """Each block's keys beside those of the block before it."""
    assert largest(lambda q, k, v: window_attention(q, k, v, [TOKENS], WINDOW)) <= 2 * INPUT


UNEVEN = [2000, 1, 1000, *[3] * 200, 90, 0, *[17] * 20, 65]
TOTAL = sum(UNEVEN)


def of_uneven(form: Callable[[Tensor, Tensor, Tensor], Tensor]) -> float:
    """The largest tensor beside one of all tokens' vectors, which is 1; padding counts."""
    return largest(form, TOTAL) / (TOTAL * HEADS * DIM)


def test_uneven_sequences_are_padded_by_less_than_their_tokens() -> None:
    assert of_uneven(lambda q, k, v: causal_attention(q, k, v, UNEVEN)) < 2
    windowed = of_uneven(lambda q, k, v: window_attention(q, k, v, UNEVEN, 256))
    assert windowed < 4, "each block's keys beside those of the block before it"


def test_retention_of_uneven_sequences() -> None:
    """Scores within blocks and a state a sequence, each of less than twice as many tokens."""
    size, batch = 128, Batch.packed(torch.zeros(TOTAL), UNEVEN)

    def retain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return DenseState(size).retain(0, q, k, v, -q[..., 0].abs(), batch)

    largest_scores = largest(retain, TOTAL)
    assert largest_scores <= max(2 * TOTAL * HEADS * size, len(UNEVEN) * HEADS * DIM * DIM)
    padded = sum(-(-length // size) for length in UNEVEN) * size  # were all blocks of one size
    assert largest_scores < 0.3 * padded * HEADS * size


def test_gated_retention() -> None:
    def retain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return gated_retention(q, k, v, -q[..., 0].abs(), [TOKENS])[0]

    assert largest(retain) <= TOKENS * HEADS * CHUNK_SIZE


@pytest.mark.parametrize("page_size", [16, 256])
def test_attend_blocks(page_size: int) -> None:
    table = torch.arange(TOKENS // page_size)[None]
    [rows] = cut_rows(torch.tensor([0, TOKENS]), torch.arange(TOKENS))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.unflatten(0, (-1, page_size)).transpose(1, 2) for x in (k, v))
        pairs = page_pairs(rows, table, page_size)
        return attend_blocks(q, [(rows, [KeySource(k, v, pairs)])])

    assert largest(attend) <= max(TILE_ELEMENTS, 2 * INPUT)


@pytest.mark.parametrize("window", [0, WINDOW])
def test_dense_state_with_a_soft_cap(window: int) -> None:
    batch = Batch.packed(torch.zeros(TOKENS), [TOKENS])

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        state = DenseState()
        if window:
            kv = state.append_window(0, k, v, batch, window)
        else:
            kv = state.append_global(0, k, v, batch)
        return kv.attend(q, batch, softcap=10.0)

    assert largest(attend) <= max(TILE_ELEMENTS, 2 * INPUT)
