"""Many rows of one sequence over its pages, against plain attention."""

from __future__ import annotations

import pytest
import torch

from packed import DTYPES, LargestTensor, apart, randn
from tolerances import OPS
from yocolm.ops import chunk_attention as chunk_module
from yocolm.ops.attention import attention_reference
from yocolm.ops.chunk_attention import chunk_attention, gather_pages

HEADS, GROUPS, DIM, PAGE = 6, 2, 8, 4


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask_elements", [1, 100, 1 << 23])
@pytest.mark.parametrize("positions", [range(90), range(40, 97), [0, 1, 5, 6, 50, 98], [98]])
def test_rows_anywhere(
    positions: range | list[int],
    mask_elements: int,
    dtype: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chunk_module, "MASK_ELEMENTS", mask_elements)
    monkeypatch.setattr(chunk_module, "ROWS", 16)
    where = torch.tensor(list(positions))
    pages = [randn(30, GROUPS, PAGE, DIM, dtype=DTYPES[dtype], seed=seed) for seed in (1, 2)]
    table = torch.randperm(30, generator=torch.Generator().manual_seed(0))[:25]
    k, v = (gather_pages(pool, table) for pool in pages)
    q = randn(len(where), HEADS, DIM, dtype=DTYPES[dtype], seed=3)
    found = chunk_attention(q, where, k, v)
    keys = torch.arange(k.shape[1])
    expected = attention_reference(
        q.double(),
        k.transpose(0, 1).double(),
        v.transpose(0, 1).double(),
        (torch.zeros_like(where), where),
        (torch.zeros_like(keys), keys),
    )
    assert apart(found, expected) <= OPS[dtype]
    for place in (0, 1, 7, 99):  # the key of position p lies in page p // PAGE of the table
        expected_key = pages[0][table[place // PAGE], :, place % PAGE]
        torch.testing.assert_close(k[:, place], expected_key, rtol=0, atol=0)


def test_memory_is_bounded() -> None:
    tokens = 4096
    q = randn(tokens, 2, DIM, dtype=torch.float32)
    k = randn(1, tokens, DIM, dtype=torch.float32)
    with LargestTensor() as largest:
        chunk_attention(q, torch.arange(tokens), k, k)
    assert largest.numel <= 2 * chunk_module.ROWS * tokens < tokens * tokens
