"""Native attention over pages and windows, against the reference in float64."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from packed import DTYPES, apart, places, randn
from tolerances import OPS
from yocolm.ops.attention import attention_reference
from yocolm.ops.native import attention as native
from yocolm.ops.native.library import native as library

pytestmark = pytest.mark.skipif(library().handle is None, reason=library().reason)

LENGTHS = [1, 7, 0, 16, 33, 200, 2500]
STARTS = [0, 3, 0, 15, 0, 120, 2390]
ROWS = {
    "last": [[0], [6], [], [15], [32], [199], [2499]],
    "mixed": [[], [1, 2, 6], [], [15], list(range(33)), [0, 3, 100, 198], [2000]],
    "many": [[0], [], [], [], list(range(33)), list(range(200)), list(range(2400, 2500))],
}
# Query heads, key heads, sizes of keys and values.
HEADS = [
    (4, 1, 64, 64),
    (4, 2, 8, 6),
    (3, 1, 17, 33),
    (10, 2, 80, 96),
    (16, 1, 40, 72),
    (2, 2, 128, 64),
    (34, 1, 16, 16),
    (8, 1, 256, 512),
]
HALVES = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
SIZES = pytest.mark.parametrize("heads", HEADS, ids=str)


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


class Case(NamedTuple):
    """Packed keys and values, queries of some rows, and what they attend to."""

    q: Tensor
    k: Tensor
    v: Tensor
    cu_rows: Tensor
    positions: Tensor
    expected: Tensor


def make_case(
    heads: tuple[int, int, int, int],
    rows: list[list[int]],
    dtype: str,
    *,
    lengths: list[int] = LENGTHS,
    scale: float | None = None,
    window: int = 0,
    softcap: float = 0.0,
) -> Case:
    count, groups, k_dim, v_dim = heads
    counts = [len(positions) for positions in rows]
    tokens = sum(lengths)
    q = randn(sum(counts), count, k_dim + 3, seed=1, dtype=DTYPES[dtype])[..., :k_dim]
    kv = randn(tokens, groups, k_dim + v_dim, seed=2, dtype=DTYPES[dtype])
    k, v = kv.split((k_dim, v_dim), dim=2)  # all three are strided
    positions = torch.tensor([p for of_one in rows for p in of_one], dtype=torch.int64)
    row_seqs = torch.repeat_interleave(torch.tensor(counts))
    where = places(lengths)
    expected = attention_reference(
        q.double(), k.double(), v.double(), (row_seqs, positions), where, scale, window, softcap
    )
    return Case(q, k, v, torch.tensor([0, *accumulate(counts)]), positions, expected)


def to_pages(x: Tensor, table: Tensor, size: int, lengths: list[int]) -> Tensor:
    """A pool of head-major pages; all that belongs to nobody is NaN."""
    shape = int(table.max()) + 2, x.shape[1], size, x.shape[2]
    pool = torch.full(shape, float("nan"), dtype=x.dtype)
    seqs, positions = places(lengths)
    pool[table[seqs, positions // size], :, positions % size] = x
    return pool


def attend_pages(
    case: Case,
    size: int,
    *,
    lengths: list[int] = LENGTHS,
    scale: float | None = None,
    softcap: float = 0.0,
) -> Tensor:
    counts = [-(-length // size) for length in lengths]
    shuffled = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(7)) + 1
    table = torch.zeros(len(lengths), max(counts) + 1, dtype=torch.int64)
    for seq, pages in enumerate(torch.split(shuffled, counts)):
        table[seq, : len(pages)] = pages
    pool = native.describe_pool(*(to_pages(x, table, size, lengths) for x in (case.k, case.v)))
    slots = torch.zeros(len(lengths), dtype=torch.int64)
    batch = native.describe_sequences(
        case.cu_rows, case.positions, torch.tensor(lengths), table, slots
    )
    return native.attend(pool, batch, None, case.q, scale, softcap)


@HALVES
@SIZES
@pytest.mark.parametrize("rows", ROWS)
def test_pages(rows: str, heads: tuple[int, int, int, int], dtype: str) -> None:
    case = make_case(heads, ROWS[rows], dtype)
    for size in (5, 64):
        out = attend_pages(case, size)
        assert out.dtype == case.q.dtype
        assert apart(out, case.expected) <= OPS[dtype]


@HALVES
@pytest.mark.parametrize("rows", ["mixed", "many"])
def test_scale_and_cap(rows: str, dtype: str) -> None:
    case = make_case(HEADS[0], ROWS[rows], dtype, scale=0.9, softcap=1.5)
    assert apart(attend_pages(case, 16, scale=0.9, softcap=1.5), case.expected) <= OPS[dtype]


@HALVES
@pytest.mark.parametrize("rows", [[5999], [5900, 5999], list(range(5950, 5999))], ids=len)
def test_long_sequences_in_parts(rows: list[int], dtype: str) -> None:
    """Few rows of a long sequence are cut by keys; the number of threads changes nothing."""
    case = make_case((4, 2, 32, 32), [rows], dtype, lengths=[6000])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        out = attend_pages(case, 64, lengths=[6000])
        torch.set_num_threads(2)
        assert torch.equal(attend_pages(case, 64, lengths=[6000]), out)
    finally:
        torch.set_num_threads(threads)
    assert apart(out, case.expected) <= OPS[dtype]


@HALVES
def test_large_scores(dtype: str) -> None:
    """Scores in the thousands neither overflow nor drown those of other blocks."""
    case = make_case(HEADS[0], ROWS["mixed"], dtype, scale=1000.0)
    assert apart(attend_pages(case, 16, scale=1000.0), case.expected) <= 4 * OPS[dtype]


@HALVES
@pytest.mark.parametrize("rows", ["last", "mixed", "many"])
def test_a_bad_row_spoils_no_other(rows: str, dtype: str) -> None:
    case = make_case(HEADS[0], ROWS[rows], dtype)
    good = attend_pages(case, 16)
    case.q[-2] = float("nan")
    out = attend_pages(case, 16)
    others = [row for row in range(len(out)) if row != len(out) - 2]
    assert out[-2].isnan().all() and torch.equal(out[others], good[others])


@HALVES
def test_pads(dtype: str) -> None:
    """Rows beyond the last sequence are zero; sequences without keys, without rows, harm nobody."""
    case = make_case(HEADS[0], ROWS["last"], dtype)
    more = case._replace(
        q=torch.cat((case.q, case.q[:3])), positions=torch.cat((case.positions, case.positions[:3]))
    )
    out = attend_pages(more, 16)
    assert torch.equal(out[:-3], attend_pages(case, 16)) and not out[-3:].any()
    case.positions[1] = -1
    assert not attend_pages(case, 16)[1].any()


class Window(NamedTuple):
    """Rings that hold what came before the step, and the step's own tokens, described."""

    pool: native.Description
    own: native.Description
    kv_lens: Tensor
    slots: Tensor


def make_window(case: Case, window: int) -> Window:
    seqs, positions = places(LENGTHS)
    starts, slots = torch.tensor(STARTS), 2 * torch.arange(len(LENGTHS)) + 1
    old = positions < starts[seqs]
    kept = old & (positions >= starts[seqs] - window)

    def ring(x: Tensor) -> Tensor:
        shape = 2 * len(LENGTHS) + 2, x.shape[1], window, x.shape[2]
        pool = torch.full(shape, float("nan"), dtype=x.dtype)
        pool[slots[seqs[kept]], :, positions[kept] % window] = x[kept]
        return pool

    counts = [length - start for length, start in zip(LENGTHS, STARTS, strict=True)]
    own = torch.cat((case.k, case.v), dim=2)[~old]
    k, v = own.split((case.k.shape[2], case.v.shape[2]), dim=2)
    return Window(
        native.describe_pool(ring(case.k), ring(case.v)),
        native.describe_own(k, v, torch.tensor([0, *accumulate(counts)])),
        torch.tensor(LENGTHS),
        slots,
    )


def describe_rows(case: Case, held: Window) -> native.Description:
    table = torch.empty(len(LENGTHS), 0, dtype=torch.int64)
    return native.describe_sequences(case.cu_rows, case.positions, held.kv_lens, table, held.slots)


def step_rows(every: int) -> list[list[int]]:
    """Every so-manieth row of the step."""
    return [
        list(range(length - 1, start - 1, -every))[::-1]
        for length, start in zip(LENGTHS, STARTS, strict=True)
    ]


@HALVES
@SIZES
@pytest.mark.parametrize("window", [1, 5, 20, 300])
def test_windows(window: int, heads: tuple[int, int, int, int], dtype: str) -> None:
    for every, softcap in ((1, 0.0), (2, 1.5), (1000, 0.0)):
        case = make_case(heads, step_rows(every), dtype, window=window, softcap=softcap)
        held = make_window(case, window)
        rows = describe_rows(case, held)
        out = native.attend(held.pool, rows, held.own, case.q, softcap=softcap)
        assert apart(out, case.expected) <= OPS[dtype]


@HALVES
@pytest.mark.parametrize("window", [1, 5, 20, 300])
def test_commit(window: int, dtype: str) -> None:
    """A ring holds the last tokens up to the accepted one; nothing else changes."""
    case = make_case(HEADS[1], step_rows(1), dtype, window=window)
    seqs, positions = places(LENGTHS)
    counts = torch.tensor(LENGTHS) - torch.tensor(STARTS)
    for accepted in (None, torch.zeros_like(counts), counts.clamp(max=2), counts // 2, counts):
        held = make_window(case, window)
        before = [ring.clone() for ring in held.pool.tensors]
        native.commit_window(held.pool, describe_rows(case, held), held.own, accepted)
        ends = torch.tensor(STARTS) + (counts if accepted is None else accepted)
        gap = ends[seqs] - positions
        kept = (gap > 0) & (gap <= window)
        for ring, was, x in zip(held.pool.tensors, before, (case.k, case.v), strict=True):
            was[held.slots[seqs[kept]], :, positions[kept] % window] = x[kept]
            assert torch.equal(ring.nan_to_num(7.0), was.nan_to_num(7.0))


@HALVES
@pytest.mark.parametrize("rows", [[0, 4000], [*range(40), *range(3990, 4040)]], ids=["few", "many"])
def test_rows_of_a_window_that_lie_far_apart(rows: list[int], dtype: str) -> None:
    heads, length, window = HEADS[1], 5000, 64
    case = make_case(heads, [rows], dtype, lengths=[length], window=window)
    pools = [torch.full((2, x.shape[1], window, x.shape[2]), torch.nan).to(x) for x in case[1:3]]
    held = native.describe_pool(*pools)
    own = native.describe_own(case.k, case.v, torch.tensor([0, length]))
    table, one = torch.empty(1, 0, dtype=torch.int64), torch.tensor([1])
    batch = (case.cu_rows, case.positions, torch.tensor([length]), table, one)
    out = native.attend(held, native.describe_sequences(*batch), own, case.q)
    assert apart(out, case.expected) <= OPS[dtype]
