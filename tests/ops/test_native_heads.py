"""Heads finished and written natively, against their PyTorch forms in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from elementwise import (
    NATIVE_DTYPES,
    check,
    check_rows,
    check_threads,
    needs_native,
    surrounded,
    threads,
    wide,
)
from packed import DTYPES, apart, randn
from tolerances import OPS
from yocolm.ops.heads import KeyForm, finish_heads, finish_kv, page_places, write_heads
from yocolm.ops.native import heads as native
from yocolm.ops.rope import Rotation, rotate, rotation

pytestmark = needs_native
EPS = 1e-6
LAYOUTS = {
    "interleaved": {"interleaved": True},
    "halves": {"interleaved": False},
    "partial": {"interleaved": False, "fraction": 0.25},
}


def table(count: int, size: int, layout: str, start: int = 0) -> Rotation:
    positions = torch.arange(start, start + count)
    return rotation(positions, size, 10_000.0, inclusive=False, **LAYOUTS[layout])


@pytest.mark.parametrize("dtype", NATIVE_DTYPES)
@pytest.mark.parametrize("size", [8, 16, 24, 40, 64, 72, 256, 512])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_heads_are_normed_and_turned(layout: str, size: int, dtype: str) -> None:
    for count, heads in ((0, 2), (1, 1), (5, 3)):
        fused = surrounded(count, 1 + 2 * heads, size, dtype=dtype, seed=1)
        x, v = fused[:, 1 : 1 + heads], fused[:, 1 + heads :]
        weight = randn(size, dtype=DTYPES[dtype], seed=2)
        rope = table(count, size, layout, start=70)
        (out,) = check(finish_heads, x, weight, EPS, rope, dtype=dtype)
        assert out.shape == (count, heads, size)
        check(finish_heads, x, weight, EPS, None, dtype=dtype)
        check(finish_heads, x, None, 0.1, rope, dtype=dtype)
        check(finish_heads, x, None, None, rope, dtype=dtype)
        check(finish_heads, x, None, None, None, dtype=dtype)
        check(rotate, x, rope, dtype=dtype)
        form = KeyForm(weight, True, EPS, rope)
        check(finish_kv, x, v, form, dtype=dtype)
        check(finish_kv, x, x, form, dtype=dtype)
        check(finish_kv, x, v[..., : size // 2], KeyForm(), dtype=dtype)
        check(finish_kv, x, x, KeyForm(rope=rope), dtype=dtype)


@pytest.mark.parametrize("dtype", NATIVE_DTYPES)
def test_odd_sizes_have_no_rotation(dtype: str) -> None:
    x, weight = surrounded(3, 2, 7, dtype=dtype), randn(7, dtype=DTYPES[dtype])
    check(finish_heads, x, weight, EPS, None, dtype=dtype)
    check(finish_heads, x.transpose(1, 2), None, 0.1, None, dtype=dtype)  # no contiguous heads


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nan_stays_in_its_row(layout: str) -> None:
    x = randn(5, 3, 48, dtype=torch.bfloat16)
    weight = randn(48, dtype=torch.bfloat16)
    check_rows(finish_heads, x, x, weight, EPS, table(5, 48, layout), row=2)


def random_places(lengths: list[int], size: int, before: list[int]) -> tuple[Tensor, ...]:
    """Pages and offsets of sequences' new tokens behind ``before`` older ones; pages shuffled."""
    owned = [(old + new) // size + 1 for old, new in zip(before, lengths, strict=True)]
    block_table = torch.zeros(len(lengths), max(owned), dtype=torch.int64)
    for seq, pages in enumerate((torch.randperm(99) + 1)[: sum(owned)].split(owned)):
        block_table[seq, : len(pages)] = pages
    seq_ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    positions = torch.cat([torch.arange(b, b + n) for b, n in zip(before, lengths, strict=True)])
    return block_table, seq_ids, positions


@pytest.mark.parametrize("dtype", NATIVE_DTYPES)
@pytest.mark.parametrize("count", [1, 2])
def test_pages_are_cleared_and_written(count: int, dtype: str) -> None:
    """What is neither written nor on a page that begins stays as it was, NaN included."""
    size, heads, dim = 4, 3, 24
    block_table, seq_ids, positions = random_places([9, 1, 3, 0, 17], size, [0, 4, 3, 5, 2])
    page, offset = page_places(block_table, seq_ids, positions, size)
    assert torch.equal(page, block_table[seq_ids, positions // size])
    assert torch.equal(offset, positions % size)
    fused = surrounded(len(page), 2 * heads, dim, dtype=dtype, seed=3)
    k, v = fused[:, :heads], fused[:, heads:, : dim // 2]
    weight, rope = randn(dim, dtype=DTYPES[dtype], seed=4), table(len(page), dim, "halves")
    form = KeyForm(weight, True, EPS, rope)

    def pools(kind: torch.dtype) -> list[Tensor]:
        filled = [torch.full((100, heads, size, d), float("nan"), dtype=kind) for d in (24, 12)]
        for pool in filled:
            pool[:50] = 7.0
        return filled

    with torch.no_grad(), threads(count):
        written, expected = pools(DTYPES[dtype]), pools(torch.float64)
        write_heads(k, v, form, written[0], written[1], page, offset)
        k, v, form = wide((k, v, form))
        write_heads(k, v, form, expected[0], expected[1], page, offset)
        for got, exact in zip(written, expected, strict=True):
            assert torch.equal(got.isnan(), exact.isnan())
            assert torch.equal(got == 7.0, exact == 7.0) and torch.equal(got == 0, exact == 0)
            assert apart(got.nan_to_num(), exact.nan_to_num()) <= OPS[dtype]


def test_pads_and_nothing_at_all_go_to_scratch() -> None:
    k = randn(4, 2, 8, dtype=torch.bfloat16)
    pools = [torch.full((3, 2, 4, 8), 5.0, dtype=torch.bfloat16) for _ in range(2)]
    nowhere = torch.zeros(4, dtype=torch.int64)
    with torch.no_grad():
        write_heads(k, k, KeyForm(), pools[0], pools[1], nowhere, nowhere)
        write_heads(k[:0], k[:0], KeyForm(), pools[0], pools[1], nowhere[:0], nowhere[:0])
    for pool in pools:
        assert bool((pool[1:] == 5.0).all()) and bool((pool[0, :, 1:] == 0).all())
        assert torch.equal(pool[0, :, 0], k[3])


def test_a_pool_of_another_dtype_is_written_by_pytorch() -> None:
    k = randn(2, 1, 8, dtype=torch.float32)
    pools = [torch.ones(2, 1, 4, 8, dtype=torch.bfloat16) for _ in range(2)]
    with torch.no_grad():
        write_heads(k, k, KeyForm(), pools[0], pools[1], torch.tensor([1, 1]), torch.tensor([0, 1]))
    assert torch.equal(pools[1][1, 0, :2], k[:, 0].bfloat16())
    assert bool((pools[0][1, 0, 2:] == 0).all()) and bool((pools[0][0] == 1).all())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [2, 6, 34, 256])
def test_tables_are_torchs(size: int, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To a unit in the last place of float32, up to positions of many millions."""
    positions = torch.cat((torch.arange(70), torch.randint(0, 50_000_000, (200,))))
    keys: dict[str, Any] = {"inclusive": layout == "interleaved", "factor": 2.0, **LAYOUTS[layout]}
    got = rotation(positions, size, 640_000.0, **keys)
    monkeypatch.setattr(native, "indices_fit", lambda *_: False)
    expected = rotation(positions, size, 640_000.0, **keys)
    for ours, theirs in ((got.cos, expected.cos), (got.sin, expected.sin)):
        assert ours.dtype == torch.float32 and ours.shape == theirs.shape
        assert bool(((ours - theirs).abs() <= theirs.abs() * 2**-23 + 1e-12).all())
    assert math.isclose(float(got.cos[0].sum()), got.cos.shape[-1])


def test_threads_share_heads() -> None:
    x = randn(200, 6, 128, dtype=torch.bfloat16)
    rope, weight = table(200, 128, "halves"), randn(128, dtype=torch.bfloat16)
    check_threads(finish_heads, x, weight, EPS, rope)
    check_threads(finish_kv, x, x, KeyForm(weight, True, EPS, rope))
    check_threads(
        lambda: rotation(torch.arange(3000), 128, 1e4, interleaved=True, inclusive=True)[:2]
    )


@torch.no_grad()
def test_keys_and_values_with_strides_of_their_own() -> None:
    k = randn(5, 6, 8, dtype=torch.float32, seed=1)[:, 1:4:2]
    v = randn(2, 9, 5, 12, dtype=torch.float32, seed=2).transpose(0, 2)[:, 3, :, :]
    pools = [torch.zeros(3, 2, 4, size) for size in (8, 12)]
    page, offset = torch.tensor([1, 1, 1, 1, 2]), torch.tensor([0, 1, 2, 3, 0])
    write_heads(k, v, KeyForm(), pools[0], pools[1], page, offset)
    for pool, x in zip(pools, (k, v), strict=True):
        assert torch.equal(pool[page, :, offset], x)
