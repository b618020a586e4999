"""Attention of any rows over keys in blocks: pages, rings and a step's own tokens."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from packed import DTYPES, apart, places, randn
from tolerances import OPS
from yocolm.ops import block_attention
from yocolm.ops.attention import attention_reference
from yocolm.ops.block_attention import (
    KeySource,
    RowBlocks,
    attend_blocks,
    cut_rows,
    expand_pairs,
    page_pairs,
    ring_pairs,
    token_pairs,
)
from yocolm.ops.blocks import cut_blocks

HEADS, KV_HEADS, KEY, VALUE = 4, 2, 8, 6
GARBAGE = 1e30
LENGTHS = [1, 7, 0, 16, 33, 200]
ROWS = {
    "last": [[0], [6], [], [15], [32], [199]],
    "middle": [[0], [2], [], [9], [4], [77]],
    "mixed": [[], [1, 2, 6], [], [15], list(range(33)), [0, 3, 100, 198]],
    "all": [list(range(length)) for length in LENGTHS],
    "one sequence": [[], [], [], [], [], list(range(50, 180))],
}


class Case(NamedTuple):
    """Packed keys and values of all sequences, and queries of some of their rows."""

    q: Tensor
    k: Tensor
    v: Tensor
    lengths: list[int]
    cu_rows: Tensor
    positions: Tensor
    row_seqs: Tensor

    def expected(self, scale: float | None = None, window: int = 0, softcap: float = 0.0) -> Tensor:
        q, k, v = (x.double() for x in (self.q, self.k, self.v))
        where = (self.row_seqs, self.positions)
        return attention_reference(q, k, v, where, places(self.lengths), scale, window, softcap)


def make_case(
    lengths: list[int], rows: list[list[int]], dtype: torch.dtype = torch.float64
) -> Case:
    counts = torch.tensor([len(positions) for positions in rows])
    tokens = sum(lengths)
    return Case(
        q=randn(int(counts.sum()), HEADS, KEY, seed=1, dtype=dtype),
        k=randn(tokens, KV_HEADS, KEY, seed=2, dtype=dtype),
        v=randn(tokens, KV_HEADS, VALUE, seed=3, dtype=dtype),
        lengths=lengths,
        cu_rows=torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0))),
        positions=torch.tensor([p for positions in rows for p in positions]),
        row_seqs=torch.repeat_interleave(torch.arange(len(rows)), counts),
    )


def block_tables(lengths: list[int], size: int, permuted: bool) -> Tensor:
    """Pages from 1 on for every sequence, in order or shuffled; unused entries are page 0."""
    counts = [-(-length // size) for length in lengths]
    numbers = torch.arange(1, sum(counts) + 1)
    if permuted:
        numbers = numbers[torch.randperm(len(numbers), generator=torch.Generator().manual_seed(7))]
    table = torch.zeros(len(lengths), max(counts) + 1, dtype=torch.int64)
    for seq, pages in enumerate(torch.split(numbers, counts)):
        table[seq, : len(pages)] = pages
    return table


def to_pages(x: Tensor, lengths: list[int], table: Tensor, size: int) -> Tensor:
    """A pool [pages, heads, size, dim] of packed ``x``; all that belongs to nobody is garbage."""
    pool = torch.full((int(table.max()) + 3, size, *x.shape[1:]), GARBAGE, dtype=x.dtype)
    seqs, positions = places(lengths)
    where = table[seqs, positions // size], positions % size
    return pool.index_put(where, x).transpose(1, 2)


def attend_pages(
    case: Case,
    table: Tensor,
    size: int,
    scale: float | None = None,
    window: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    k, v = (to_pages(x, case.lengths, table, size) for x in (case.k, case.v))
    groups = [
        (rows, [KeySource(k, v, page_pairs(rows, table, size))])
        for rows in cut_rows(case.cu_rows, case.positions)
    ]
    return attend_blocks(case.q, groups, scale, window, softcap)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("permuted", [False, True], ids=["in order", "permuted"])
@pytest.mark.parametrize("size", [1, 16, 256])
@pytest.mark.parametrize("rows", ROWS)
def test_pages(rows: str, size: int, permuted: bool, dtype: str) -> None:
    """Garbage in pages, and in places of pages, beyond a sequence's length must not leak."""
    case = make_case(LENGTHS, ROWS[rows], DTYPES[dtype])
    out = attend_pages(case, block_tables(LENGTHS, size, permuted), size)
    assert out.dtype == case.q.dtype
    assert apart(out, case.expected()) <= OPS[dtype]


@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize("window", [0, 1, 20])
@pytest.mark.parametrize("rows", ["middle", "mixed"])
def test_pages_with_scale_window_and_cap(rows: str, window: int, softcap: float) -> None:
    case = make_case(LENGTHS, ROWS[rows])
    out = attend_pages(case, block_tables(LENGTHS, 16, True), 16, 0.9, window, softcap)
    assert apart(out, case.expected(0.9, window, softcap)) <= OPS["float64"]


@pytest.mark.parametrize("elements", [1, 300, 5000])
@pytest.mark.parametrize("rows", ["last", "all"])
def test_several_tiles(rows: str, elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_attention, "TILE_ELEMENTS", elements)
    case = make_case(LENGTHS, ROWS[rows])
    out = attend_pages(case, block_tables(LENGTHS, 16, True), 16)
    assert apart(out, case.expected()) <= OPS["float64"]


def test_shared_pages() -> None:
    """Forked sequences read the same pages: here all of them, each from a position of its own."""
    lengths, size = [40], 16
    table = block_tables(lengths, size, True)
    case = make_case(lengths, [[3, 17, 17, 39]])
    shared = case._replace(cu_rows=torch.tensor([0, 1, 1, 2, 3, 4]), lengths=lengths)
    k, v = (to_pages(x, lengths, table, size) for x in (case.k, case.v))
    groups = [
        (rows, [KeySource(k, v, page_pairs(rows, table.expand(5, -1), size))])
        for rows in cut_rows(shared.cu_rows, shared.positions)
    ]
    assert apart(attend_blocks(case.q, groups), case.expected()) <= OPS["float64"]


def test_large_scores() -> None:
    """Scores in the thousands neither overflow nor drown the others, whichever tile they are in."""
    case = make_case(LENGTHS, ROWS["mixed"])
    case = case._replace(q=case.q * 1000)
    out = attend_pages(case, block_tables(LENGTHS, 16, False), 16)
    assert apart(out, case.expected()) <= OPS["float64"]


@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize("rows", ["mixed", "last"])
def test_gradients(rows: str, softcap: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_attention, "TILE_ELEMENTS", 2000)
    case = make_case(LENGTHS, ROWS[rows])
    leaves = [x.requires_grad_() for x in case[:3]]
    out = attend_pages(case, block_tables(LENGTHS, 16, True), 16, softcap=softcap)
    expected = case.expected(softcap=softcap)
    weights = randn(*out.shape, seed=4)
    actual = torch.autograd.grad((out * weights).sum(), leaves)
    wanted = torch.autograd.grad((expected * weights).sum(), leaves)
    assert max(map(apart, actual, wanted)) <= OPS["float64"]


# Windows: a ring of what came before the step, and the step's own tokens


def attend_window(
    case: Case, starts: list[int], window: int, block: int, softcap: float = 0.0
) -> Tensor:
    """The first ``starts`` tokens of each sequence lie in its ring, the others in blocks."""
    seqs, positions = places(case.lengths)
    before = torch.tensor(starts)
    old = positions < before[seqs]
    slots = torch.tensor([2 * seq + 1 for seq in range(len(starts))])
    new_counts = [length - start for length, start in zip(case.lengths, starts, strict=True)]
    blocks = cut_blocks(new_counts, block)
    kept = old & (positions >= before[seqs] - window)
    where = slots[seqs[kept]], positions[kept] % window

    def ring(x: Tensor) -> Tensor:
        pool = torch.full((2 * len(starts) + 2, window, *x.shape[1:]), GARBAGE, dtype=x.dtype)
        return pool.index_put(where, x[kept]).transpose(1, 2)

    new = [blocks.spread(x[~old]).transpose(1, 2) for x in (case.k, case.v)]
    groups = []
    for rows in cut_rows(case.cu_rows, case.positions):
        from_ring = KeySource(ring(case.k), ring(case.v), ring_pairs(rows, slots, before, window))
        own = KeySource(new[0], new[1], token_pairs(rows, blocks, before, window))
        groups.append((rows, [from_ring, own]))
    return attend_blocks(case.q, groups, None, window, softcap)


@pytest.mark.parametrize("block", [4, 64])
@pytest.mark.parametrize("window", [1, 2, 5])
@pytest.mark.parametrize("new", [1, 4, 5, 6, 13])
def test_window_before_and_after_the_ring_wraps(window: int, new: int, block: int) -> None:
    """All numbers of earlier tokens around the window at once, and steps longer than it."""
    starts = list(range(2 * window + 2))
    lengths = [start + new for start in starts]
    rows = [list(range(start, start + new)) for start in starts]
    case = make_case(lengths, rows)
    out = attend_window(case, starts, window, block)
    assert apart(out, case.expected(window=window)) <= OPS["float64"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_window_of_uneven_steps_and_rows(dtype: str) -> None:
    """Steps of no, one and many tokens, with rows at their ends, in the middle, or nowhere."""
    starts, news = [0, 3, 9, 40, 12, 0, 30], [20, 1, 0, 1, 17, 1, 150]
    rows = [[19], [3], [], [], [12, 15, 20, 28], [0], list(range(60, 170, 3))]
    lengths = [start + new for start, new in zip(starts, news, strict=True)]
    case = make_case(lengths, rows, DTYPES[dtype])
    out = attend_window(case, starts, window=10, block=64)
    assert apart(out, case.expected(window=10)) <= OPS[dtype]


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_any_window_step(data: st.DataObject) -> None:
    window, block = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 8))
    steps = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=4)
    starts, news = map(list, zip(*data.draw(steps), strict=True))
    lengths = [start + new for start, new in zip(starts, news, strict=True)]
    rows = [
        sorted(data.draw(st.sets(st.integers(start, length - 1)))) if new else []
        for start, new, length in zip(starts, news, lengths, strict=True)
    ]
    if not any(rows):
        return
    softcap = data.draw(st.sampled_from([0.0, 2.0]))
    case = make_case(lengths, rows)
    out = attend_window(case, starts, window, block, softcap)
    assert apart(out, case.expected(window=window, softcap=softcap)) <= OPS["float64"]


# The index plans


def test_cut_rows_groups_singles_and_blocks() -> None:
    cu_rows = torch.tensor([0, 1, 1, 3, 4, 4 + 130])
    positions = torch.cat((torch.tensor([9, 4, 6, 2]), torch.arange(20, 150)))
    singles, several = cut_rows(cu_rows, positions)
    assert singles.index.tolist() == [[0], [3]] and singles.seq.tolist() == [0, 3]
    assert several.seq.tolist() == [2, 4, 4, 4]
    assert several.index[0].tolist() == [1, 2] + [134] * 62
    assert several.positions[0].tolist() == [4, 6] + [-1] * 62
    assert several.first.tolist() == [4, 20, 84, 148] and several.last.tolist() == [6, 83, 147, 149]
    real = torch.cat([group.index[group.index < 134] for group in (singles, several)])
    assert sorted(real.tolist()) == list(range(134))
    assert cut_rows(torch.tensor([0, 0]), positions[:0]) == []


def test_expand_pairs() -> None:
    which, number = expand_pairs(torch.tensor([2, 5, 0, 3]), torch.tensor([4, 5, 1, 1]))
    assert which.tolist() == [0, 0, 2] and number.tolist() == [2, 3, 0]


def test_pairs_leave_out_what_no_row_sees() -> None:
    """A decode at position 40 with a window of 8 reads 1 or 2 token blocks and no whole past."""
    rows = RowBlocks(torch.tensor([[0]]), torch.tensor([[40]]), torch.tensor([0]), 1)
    blocks = cut_blocks([41], 4)
    pairs = token_pairs(rows, blocks, torch.tensor([0]), window=8)
    assert pairs.key_positions[:, 0].tolist() == [32, 36, 40]
    assert len(page_pairs(rows, torch.arange(20)[None], 16).row_block) == 3
    assert len(ring_pairs(rows, torch.tensor([1]), torch.tensor([32]), window=8).row_block) == 0
    assert len(ring_pairs(rows, torch.tensor([1]), torch.tensor([34]), window=8).row_block) == 1


def test_pages_are_read_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decodes of forked samples, which share pages, and of others collect no page."""
    copied: list[int] = []
    select = torch.Tensor.index_select

    def spy(self: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
        copied.append(len(index))
        return select(self, dim, index)

    shared = list(range(1, 21))
    tables = torch.tensor([shared + [25 + i] for i in range(3)] + [list(range(30, 51))])
    positions = torch.full((4,), 21 * 4 - 1)
    k, v = (randn(60, KV_HEADS, 4, KEY, seed=seed) for seed in (1, 2))
    q = randn(4, HEADS, KEY, seed=3)
    [rows] = cut_rows(torch.arange(5), positions)
    pairs = page_pairs(rows, tables, 4)
    monkeypatch.setattr(torch.Tensor, "index_select", spy)
    out = attend_blocks(q, [(rows, [KeySource(k, v, pairs)])])
    assert sum(copied) <= 2 * 3, "at most the three tails, keys and values"
    keys = torch.arange(21 * 4)
    for i in range(4):
        own_k, own_v = (x[tables[i]].transpose(1, 2).flatten(0, 1) for x in (k, v))
        where = torch.zeros(1, dtype=torch.int64), positions[:1]
        exact = attention_reference(
            q[i : i + 1], own_k, own_v, where, (torch.zeros_like(keys), keys)
        )
        assert apart(out[i : i + 1], exact) <= OPS["float64"]
