"""Chunks that continue from a ring, against plain attention over the whole history."""

from __future__ import annotations

import pytest
import torch

from packed import DTYPES, apart, places, randn
from tolerances import OPS
from yocolm.ops import band_attention as band_module
from yocolm.ops.attention import attention_reference
from yocolm.ops.band_attention import band_attention, cut_band

HEADS, GROUPS, DIM = 4, 2, 8


def check(starts: list[int], lengths: list[int], window: int, dtype: torch.dtype) -> float:
    """How far the band is from the reference, for sequences with `starts` earlier tokens."""
    totals = [start + length for start, length in zip(starts, lengths, strict=True)]
    seqs, positions = places(totals)
    k = randn(sum(totals), GROUPS, DIM, dtype=dtype, seed=1)
    v = randn(sum(totals), GROUPS, DIM, dtype=dtype, seed=2)
    new = positions >= torch.tensor(starts)[seqs]
    q = randn(int(new.sum()), HEADS, DIM, dtype=dtype, seed=3)
    # Places that no token has gone into hold something finite that must not be seen.
    rings = [torch.full((len(starts), GROUPS, window, DIM), 1e3, dtype=dtype) for _ in range(2)]
    for token in torch.nonzero(~new).squeeze(1).tolist():  # in order: later tokens overwrite
        for ring, x in zip(rings, (k, v), strict=True):
            ring[seqs[token], :, positions[token] % window] = x[token]
    band = cut_band(lengths, torch.tensor(starts), window)
    found = band_attention(q, k[new], v[new], rings[0], rings[1], band)
    expected = attention_reference(
        q.double(),
        k.double(),
        v.double(),
        (seqs[new], positions[new]),
        (seqs, positions),
        window=window,
    )
    return apart(found, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("step", [3, 128])
@pytest.mark.parametrize("window", [1, 2, 7, 16])
@pytest.mark.parametrize(
    ("starts", "lengths"),
    [
        ([0], [1]),
        ([0], [40]),  # longer than the window, from nothing
        ([3], [5]),  # the ring is not full
        ([50], [3]),  # it has wrapped
        ([16, 0, 15, 17, 100], [2, 9, 33, 1, 16]),
    ],
)
def test_band_equals_reference(
    starts: list[int],
    lengths: list[int],
    window: int,
    step: int,
    dtype: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(band_module, "BAND_BLOCK", 8)  # several blocks a sequence
    monkeypatch.setattr(band_module, "REACH_STEP", step)
    assert check(starts, lengths, window, DTYPES[dtype]) <= OPS[dtype]


def test_a_window_of_several_steps() -> None:
    """As in real models, whose windows are four steps and more."""
    assert 2 * band_module.REACH_STEP < 300
    assert check([0, 450, 100], [700, 90, 300], 300, torch.float64) <= OPS["float64"]


def test_every_offset_around_the_window() -> None:
    window = 6
    for start in range(2 * window + 2):
        for length in (1, window - 1, window, window + 1):
            assert check([start], [length], window, torch.float64) <= OPS["float64"]
