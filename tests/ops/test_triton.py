"""Triton's kernels by its interpreter (TRITON_INTERPRET=1), against PyTorch's operations.

Where triton is not installed (it has a gigabyte, and no use without a GPU) nothing runs here;
bench/gpu_check.py makes the same comparisons on a device.
"""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from packed import apart, randn
from yocolm.ops.attention import attention_reference
from yocolm.ops.retention import retention_step as reference_step

pytest.importorskip("triton", reason="triton is not installed: it is for GPUs")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("set TRITON_INTERPRET=1 to run Triton's kernels here", allow_module_level=True)

from yocolm.ops.triton import paged_attention, retention  # noqa: E402

NAN = float("nan")


def paged(lengths: list[int], groups: int, dim: int, size: int) -> tuple[Tensor, Tensor, list]:
    """A pool of pages that is NaN but for the keys of sequences, its block table, and these."""
    pages = [-(-length // size) for length in lengths]
    pool = torch.full((sum(pages) + 1, groups, size, dim), NAN)
    table = torch.zeros(len(lengths), max(pages) + 2, dtype=torch.int64)
    order, keys = list(range(1, sum(pages) + 1))[::-1], []
    for seq, length in enumerate(lengths):
        keys.append(randn(length, groups, dim, seed=seq + dim))
        for position in range(length):
            if position % size == 0:
                table[seq, position // size] = order.pop()
            pool[table[seq, position // size], :, position % size] = keys[-1][position]
    return pool, table, keys


@pytest.mark.parametrize(
    ("heads", "groups", "dim", "value_dim", "softcap"),
    [(4, 4, 16, 16, 0.0), (8, 2, 32, 16, 0.0), (6, 1, 20, 24, 5.0)],
)
def test_rows_attend_to_their_pages(
    heads: int, groups: int, dim: int, value_dim: int, softcap: float
) -> None:
    lengths, seqs, positions = [1, 37, 300], [0, 1, 1, 2, 2], [0, 20, 36, 0, 299]
    k, table, keys = paged(lengths, groups, dim, 8)
    v, _, values = paged(lengths, groups, value_dim, 8)
    q = randn(len(seqs), heads, dim, seed=9)
    found = paged_attention.attend_pages(
        q, k, v, torch.tensor(positions), torch.tensor(seqs), table, 0.3, softcap
    )
    for row, (seq, position) in enumerate(zip(seqs, positions, strict=True)):
        wanted = one_row(q[row], keys[seq][: position + 1], values[seq][: position + 1], softcap)
        assert apart(found[row], wanted) < 1e-5


def one_row(q: Tensor, k: Tensor, v: Tensor, softcap: float) -> Tensor:
    k, v = (x.repeat_interleave(len(q) // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("hk,thk->ht", q, k) * 0.3
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    return torch.einsum("ht,thv->hv", scores.softmax(-1), v)


def test_rows_attend_to_rings_and_own_tokens() -> None:
    window, heads, groups, dim = 7, 4, 2, 16
    lengths, fresh = [1, 12, 30], [1, 3, 1]  # in all, and of these in the step
    ring = torch.full((5, groups, window, dim), NAN)
    values = ring.clone()
    slots = torch.tensor([3, 1, 4])
    own, own_v, seqs, positions, every = [], [], [], [], []
    for seq, (length, count) in enumerate(zip(lengths, fresh, strict=True)):
        k, v = randn(length, groups, dim, seed=seq), randn(length, groups, dim, seed=50 + seq)
        for position in range(length - count):
            ring[slots[seq], :, position % window] = k[position]
            values[slots[seq], :, position % window] = v[position]
        own.append(k[length - count :])
        own_v.append(v[length - count :])
        seqs += [seq] * count
        positions += range(length - count, length)
        every.append((k, v))
    starts, counts = torch.tensor(lengths) - torch.tensor(fresh), torch.tensor(fresh)
    q = randn(len(seqs), heads, dim, seed=9)
    found = paged_attention.attend_window(
        q,
        ring,
        values,
        (torch.cat(own), torch.cat(own_v)),
        torch.tensor(positions),
        torch.tensor(seqs),
        slots,
        starts,
        counts.cumsum(0) - counts,
    )
    for row, (seq, position) in enumerate(zip(seqs, positions, strict=True)):
        k, v = every[seq]
        where = torch.zeros(len(k), dtype=torch.int64), torch.arange(len(k))
        one = torch.zeros(1, dtype=torch.int64), torch.tensor([position])
        wanted = attention_reference(q[row : row + 1], k, v, one, where, window=window)
        assert apart(found[row : row + 1], wanted) < 1e-5


@pytest.mark.parametrize(("dim", "value_dim"), [(16, 16), (12, 40), (128, 256)])
def test_states_are_advanced_in_their_slots(dim: int, value_dim: int) -> None:
    q, k = randn(3, 2, dim), randn(3, 2, dim, seed=1)
    v, decay = randn(3, 2, value_dim, seed=2), -randn(3, 2, seed=3).abs()
    pool = randn(6, 2, dim, value_dim, seed=4)
    pool[0] = NAN
    slots = torch.tensor([4, 0, 2])
    state = pool[slots]
    wanted = reference_step(q, k, v, decay, state)
    before = pool.clone()
    found = retention.retention_step(q, k, v, decay, pool, slots)
    real = [0, 2]
    assert apart(found[real], wanted[real]) < 1e-5 and apart(pool[slots[real]], state[real]) < 1e-5
    assert torch.equal(pool[[1, 3, 5]], before[[1, 3, 5]])
