"""Cutting packed sequences into blocks, and back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from packed import places
from yocolm.ops.blocks import by_length, cut_blocks

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


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(0, 200), max_size=12), st.integers(1, 300))
def test_classes_of_about_one_length_pad_little(lengths: list[int], size: int) -> None:
    classes = by_length(lengths, size, "cpu")
    total = sum(lengths)
    padded = 0
    for some in classes.plans:
        assert all(some)
        block = min(size, max(some))
        padded += sum(-(-length // block) * block for length in some)
    assert padded < 2 * total or padded == total == 0
    assert sorted(torch.cat([torch.zeros(0), *classes.rows]).tolist()) == list(range(total))
    seqs, positions = places(lengths)
    for some, rows in zip(classes.plans, classes.rows, strict=True):
        assert torch.equal(positions[rows], places(some)[1]), "whole sequences, in their order"
        assert [lengths[seq] for seq in seqs[rows].unique_consecutive().tolist()] == some


def test_classes_are_put_together_in_the_old_order() -> None:
    lengths = [9, 1, 0, 4, 10, 2]
    x = torch.randn(sum(lengths), 3)
    seen: list[list[int]] = []

    def form(some: list[int], y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        seen.append(some)
        assert torch.equal(z, -y) and len(y) == sum(some)
        return y * 2

    assert torch.equal(by_length(lengths, 10, "cpu").apply(form, x, -x), x * 2)
    assert seen == [[9, 10], [4], [2], [1]]
    assert torch.equal(by_length([6, 6], 4, "cpu").map(sum).apply(lambda n, y: y * n, x), x * 12)
