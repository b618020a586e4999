"""Cutting packed sequences into blocks, and back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from packed import places
from yocolm.ops.blocks import cut_blocks

PACKS = st.lists(st.integers(0, 30), max_size=6)
SIZES = st.integers(1, 12)


@settings(deadline=None, max_examples=100)
@given(PACKS, SIZES)
def test_spread_and_pack_are_inverse(lengths: list[int], size: int) -> None:
    blocks = cut_blocks(lengths, size)
    x = torch.randn(sum(lengths), 3, 2)
    spread = blocks.spread(x)
    assert spread.shape == (blocks.count, size, 3, 2)
    assert torch.equal(blocks.pack(spread), x)
    padding = torch.ones(blocks.count * size, dtype=torch.bool)
    padding[blocks.slot] = False
    assert not spread.flatten(0, 1)[padding].any()


@settings(deadline=None, max_examples=100)
@given(PACKS, SIZES)
def test_blocks_are_numbered_by_level(lengths: list[int], size: int) -> None:
    """Every token lies in block ``number(its sequence, its position // size)``, in order."""
    blocks = cut_blocks(lengths, size)
    seqs, positions = places(lengths)
    number = blocks.number(seqs, positions // size)
    assert torch.equal(blocks.slot, number * size + positions % size)
    ranks = torch.empty(blocks.count, dtype=torch.int64)
    ranks[number] = positions // size
    levels = [rank for rank, count in enumerate(blocks.level_sizes) for _ in range(count)]
    assert ranks.tolist() == levels
    assert blocks.count == sum(-(-length // size) for length in lengths)


@settings(deadline=None, max_examples=100)
@given(PACKS, SIZES)
def test_levels_hold_the_longest_sequences_in_order(lengths: list[int], size: int) -> None:
    blocks = cut_blocks(lengths, size)
    counts = [-(-lengths[seq] // size) for seq in blocks.order.tolist()]
    assert counts == sorted(counts, reverse=True)
    assert torch.equal(blocks.order[blocks.inverse], torch.arange(len(lengths)))
    for rank, level in enumerate(blocks.level_sizes):
        assert all(count > rank for count in counts[:level])
        assert all(count <= rank for count in counts[level:])


@pytest.mark.parametrize("lengths", [[12], [0, 12, 0]])
def test_one_sequence_of_whole_blocks_is_not_copied(lengths: list[int]) -> None:
    x = torch.randn(12, 2)
    blocks = cut_blocks(lengths, 4)
    assert blocks.spread(x).data_ptr() == x.data_ptr()
    assert blocks.pack(blocks.spread(x)).data_ptr() == x.data_ptr()
