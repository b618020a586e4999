"""Recurrent state of a step: stored at commit, and cut back until then."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from packed import DTYPES, apart, randn
from tolerances import OPS
from yocolm.engine.recurrent import StagedRetention, retain
from yocolm.models.base import Batch
from yocolm.ops.native.library import fits

EVERY = pytest.mark.parametrize("dtype", DTYPES)
HEADS, KEY, VALUE, SLOTS = 2, 16, 12, 9
STATE = {"float64": OPS["float64"], "float32": OPS["float32"], "bfloat16": OPS["float32"]}


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


class Tokens(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor

    def at(self, where: Tensor) -> Tokens:
        return Tokens._make(x[where] for x in self)


def tokens_of(count: int, dtype: str, seed: int = 0) -> Tokens:
    made = DTYPES[dtype]
    uniform = torch.rand(count, HEADS, generator=torch.Generator().manual_seed(seed))
    wide = torch.float64 if dtype == "float64" else torch.float32
    return Tokens(
        randn(count, HEADS, KEY, dtype=made, seed=seed + 1),
        randn(count, HEADS, KEY, dtype=made, seed=seed + 2),
        randn(count, 4, HEADS, VALUE, dtype=made, seed=seed + 3)[:, 2],
        -0.3 * uniform.to(wide),
    )


def pool_of(dtype: str) -> Tensor:
    pool = randn(SLOTS, HEADS, KEY, VALUE, dtype=tokens_of(0, dtype).log_decay.dtype, seed=9)
    pool[0] = float("nan")  # scratch
    return pool


def batch_of(lengths: list[int], slots: list[int]) -> Batch:
    batch = Batch.packed(torch.zeros(sum(lengths)), lengths)
    return replace(batch, slots=torch.tensor(slots))


def step(
    pool: Tensor, tokens: Tokens, lengths: list[int], slots: list[int]
) -> tuple[Tensor, StagedRetention]:
    return retain(pool, *tokens, batch_of(lengths, slots))


def first_tokens(lengths: list[int], counts: list[int]) -> Tensor:
    """Where the first ``counts`` tokens of each packed sequence lie."""
    starts = [sum(lengths[:seq]) for seq in range(len(lengths))]
    spans = [range(start, start + n) for start, n in zip(starts, counts, strict=True)]
    return torch.tensor([token for span in spans for token in span])


@EVERY
@pytest.mark.parametrize(
    ("lengths", "slots"),
    [
        ([5], [4]),
        ([1, 1, 5, 7], [8, 2, 1, 5]),
        ([1, 5, 70, 6], [3, 7, 8, 1]),  # one is too long to be cut
        ([64, 2], [6, 2]),
    ],
    ids=str,
)
def test_a_step_cut_back_is_a_step_of_the_accepted_tokens(
    lengths: list[int], slots: list[int], dtype: str
) -> None:
    tokens = tokens_of(sum(lengths), dtype)
    more = tokens_of(len(lengths), dtype, seed=20)
    cuts = {n: [min(n, x) if 1 < x <= 64 else x for x in lengths] for n in (1, 2, 4, 6, 63)}
    for cut in [*cuts.values(), [x - (1 < x <= 64) for x in lengths], lengths]:
        pool, expected = pool_of(dtype), pool_of(dtype)
        out, staged = step(pool, tokens, lengths, slots)
        staged.commit(torch.tensor(cut))
        where = first_tokens(lengths, cut)
        wanted, other = step(expected, tokens.at(where), cut, slots)
        other.commit()
        assert apart(out[where], wanted) <= OPS[dtype], cut
        assert apart(pool[1:], expected[1:]) <= STATE[dtype], cut
        rest = [slot for slot in range(1, SLOTS) if slot not in slots]
        assert torch.equal(pool[rest], pool_of(dtype)[rest])
        after = [step(states, more, [1] * len(slots), slots)[0] for states in (pool, expected)]
        assert apart(after[0], after[1]) <= OPS[dtype], cut


@EVERY
def test_nothing_accepted_leaves_the_state_as_it_was(dtype: str) -> None:
    pool = pool_of(dtype)
    _, staged = step(pool, tokens_of(9, dtype), [4, 5], [3, 2])
    staged.commit(torch.tensor([0, 5]))
    assert torch.equal(pool[3], pool_of(dtype)[3])
    assert not torch.equal(pool[2], pool_of(dtype)[2])


@EVERY
def test_a_step_that_is_not_committed_harms_no_sequence_of_several_tokens(dtype: str) -> None:
    pool, before = pool_of(dtype), pool_of(dtype)
    step(pool, tokens_of(10, dtype), [1, 4, 5], [6, 3, 2])
    others = [slot for slot in range(1, SLOTS) if slot != 6]
    assert torch.equal(pool[others], before[others])
    assert not torch.equal(pool[6], before[6])  # one token: in place, and recomputed


@EVERY
def test_all_accepted_is_what_no_cut_stores(dtype: str) -> None:
    lengths, slots = [1, 4, 80], [6, 3, 2]
    pools = [pool_of(dtype), pool_of(dtype)]
    for pool, accepted in zip(pools, (None, torch.tensor(lengths)), strict=True):
        step(pool, tokens_of(85, dtype), lengths, slots)[1].commit(accepted)
    assert torch.equal(pools[0][1:], pools[1][1:])


@pytest.mark.parametrize(
    ("accepted", "message"),
    [
        ([0, 4, 65], "accepted 0 of 1 tokens"),
        ([1, 5, 65], "accepted 5 of 4 tokens"),
        ([1, -1, 65], "accepted -1 of 4 tokens"),
        ([1, 4, 64], "accepted 64 of 65 tokens"),
    ],
)
def test_what_cannot_be_accepted_is_named(accepted: list[int], message: str) -> None:
    pool = pool_of("float32")
    _, staged = step(pool, tokens_of(70, "float32"), [1, 4, 65], [6, 3, 2])
    after = pool.clone()
    with pytest.raises(ValueError, match=message):
        staged.commit(torch.tensor(accepted))
    assert torch.equal(pool[1:], after[1:])
    _, singles = step(pool, tokens_of(1, "float32"), [1], [5])
    with pytest.raises(ValueError, match="accepted 0 of 1"):
        singles.commit(torch.tensor([0]))


def test_single_tokens_read_nothing_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the same calls can run over static buffers."""
    pool, tokens = pool_of("float32"), tokens_of(3, "float32")
    batch = batch_of([1, 1, 1], [5, 1, 0])  # the last one is a pad

    def read(*_: object) -> None:
        raise AssertionError("read on the host")

    if not fits(pool):
        pytest.skip("PyTorch's form looks whether states lie side by side")
    for name in ("tolist", "item", "__int__", "__bool__", "__index__"):
        monkeypatch.setattr(Tensor, name, read)
    retain(pool, *tokens, batch)[1].commit()
    assert "lengths" not in vars(batch)
