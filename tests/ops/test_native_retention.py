"""Retention on the slots of a pool, natively: against the recurrence in float64."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from packed import DTYPES, apart, randn
from tolerances import OPS
from yocolm.ops.blocks import Blocks
from yocolm.ops.native import retention as native_retention
from yocolm.ops.native.library import native
from yocolm.ops.retention import retention_recurrent
from yocolm.ops.slot_retention import advance_slots, prefill_slots, step_slots

pytestmark = pytest.mark.skipif(native().handle is None, reason=native().reason)

STATE = OPS["float32"]  # of states whatever the dtype of the inputs
# Heads, K, V: whole vectors, whole panels and more, and nothing that fits.
SIZES = [(2, 64, 64), (1, 128, 128), (3, 16, 32), (2, 7, 5), (1, 33, 50), (1, 20, 300), (1, 9, 577)]
SIZES += [(1, 256, 256)]
GATES = ("strong", "weak", "model", "mixed")
RAGGED = (5, 64, 1, 0, 130, 49, 2)
SPREAD = (0, 3, 7, 9, 12)  # slots that nobody uses


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


class Case(NamedTuple):
    """Packed sequences as a model hands them over: q, k and v are slices of one projection."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    pool: Tensor
    slots: Tensor

    def part(self, where: slice | Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.q[where], self.k[where], self.v[where], self.log_decay[where]


def gates(kind: str, tokens: int, heads: int) -> Tensor:
    u = torch.rand(tokens, heads, generator=torch.Generator().manual_seed(5))
    return {
        "strong": -2 - u,
        "weak": -u * 0.6931 / 10_000,
        "model": torch.nn.functional.logsigmoid(8 * u - 4) / 16,
        "mixed": torch.where(u < 0.1, torch.tensor(-1e4), -u * 1e-3),  # forgets all, now and then
    }[kind]


def make_case(
    lengths: tuple[int, ...],
    sizes: tuple[int, int, int] = (2, 16, 24),
    dtype: str = "float32",
    gate: str = "model",
) -> Case:
    """Whatever nobody should read is NaN: the projection's gate, between the heads, free slots."""
    heads, key, value = sizes
    tokens, widest = sum(lengths), max(key, value) + 3
    stacked = randn(tokens, 4, heads, widest, dtype=DTYPES[dtype])
    stacked[:, 0, :, key:] = stacked[:, 1, :, key:] = stacked[:, 2, :, value:] = float("nan")
    stacked[:, 3] = float("nan")
    q, k, v, _ = stacked.unbind(1)
    pool = randn(len(lengths) + 6, heads, key, value, dtype=torch.float32, seed=3)
    free = [slot for slot in SPREAD if slot < len(pool)]
    pool[free] = float("nan")
    used = torch.tensor([slot for slot in range(len(pool)) if slot not in free])
    order = torch.randperm(len(used), generator=torch.Generator().manual_seed(1))
    slots = used[order][: len(lengths)]
    log_decay = gates(gate, tokens, heads)
    return Case(q[..., :key], k[..., :key], v[..., :value], log_decay, pool, slots)


def exact(
    case: Case, lengths: tuple[int, ...], where: slice | Tensor = slice(None)
) -> tuple[Tensor, Tensor]:
    inputs = [x.double() for x in case.part(where)]
    q, k, v, log_decay = inputs
    state = case.pool[case.slots].double()
    return retention_recurrent(q, k, v, log_decay, list(lengths), state)


def no_blocks() -> Blocks:
    raise AssertionError("the native form needs no blocks")


def starts_of(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)])


def prefill(case: Case, lengths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    inputs = case.part(slice(None))
    return prefill_slots(*inputs, case.pool, case.slots, starts_of(lengths), no_blocks)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_prefill(sizes: tuple[int, int, int], gate: str, dtype: str) -> None:
    case = make_case(RAGGED, sizes, dtype, gate)
    before = case.pool.clone()
    out, final = prefill(case, RAGGED)
    expected, state = exact(case, RAGGED)
    assert out.dtype == case.v.dtype
    assert apart(out, expected) <= OPS[dtype]
    assert apart(final, state) <= STATE
    assert same_bits(case.pool, before)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_step(sizes: tuple[int, int, int], gate: str, dtype: str) -> None:
    lengths = (1,) * 7
    case = make_case(lengths, sizes, dtype, gate)
    before = case.pool.clone()
    expected, state = exact(case, lengths)
    out = step_slots(*case.part(slice(None)), case.pool, case.slots)
    assert out.dtype == case.v.dtype
    assert apart(out, expected) <= OPS[dtype]
    assert apart(case.pool[case.slots], state) <= STATE
    free = torch.ones(len(case.pool), dtype=torch.bool).index_fill(0, case.slots, False)
    assert same_bits(case.pool[free], before[free])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_advance_by_the_first_tokens(sizes: tuple[int, int, int], dtype: str) -> None:
    case = make_case(RAGGED, sizes, dtype)
    before = case.pool.clone()
    counts = (0, 10, 1, 0, 127, 48, 1)
    starts = starts_of(RAGGED)[:-1]
    first = [torch.arange(n) + start for n, start in zip(counts, starts, strict=True)]
    _, state = exact(case, counts, torch.cat(first))
    k, v, log_decay = case.k, case.v, case.log_decay
    advance_slots(k, v, log_decay, case.pool, case.slots, starts, torch.tensor(counts))
    assert apart(case.pool[case.slots], state) <= STATE
    unchanged = torch.ones(len(case.pool), dtype=torch.bool)
    unchanged[case.slots[torch.tensor(counts) > 0]] = False
    assert same_bits(case.pool[unchanged], before[unchanged])


@pytest.mark.parametrize("gate", GATES)
def test_five_thousand_tokens(gate: str) -> None:
    case = make_case((5_000,), (1, 8, 8), gate=gate)
    out, final = prefill(case, (5_000,))
    expected, state = exact(case, (5_000,))
    assert apart(out, expected) <= OPS["float32"]
    assert apart(final, state) <= STATE


def test_what_follows_an_enormous_decay_is_not_lost_in_it() -> None:
    """Sums of log-decays are differences of large numbers there; minus infinity is a decay too."""
    case = make_case((90,), gate="weak")
    for token, log_decay in ((0, -1e30), (40, -1e6), (60, float("-inf"))):
        case.log_decay[token] = log_decay
    out, final = prefill(case, (90,))
    finite = case._replace(log_decay=case.log_decay.clamp(min=-1e3))
    expected, state = exact(finite, (90,))
    assert apart(out, expected) <= 2e-6
    assert apart(final, state) <= 2e-6


@pytest.mark.parametrize("chunk", [1, 6, 16, 17, 48])
def test_splits_give_the_same_output_and_state(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_retention, "CHUNK", chunk)
    tokens = 101
    case = make_case((tokens,), (2, 16, 24))
    out, final = prefill(case, (tokens,))
    expected, state = exact(case, (tokens,))
    assert apart(out, expected) <= OPS["float32"] and apart(final, state) <= STATE
    for at in range(1, tokens) if chunk == 48 else (1, 15, 16, 17, 47, 48, 49, 96, 100):
        parts = []
        pool = case.pool.clone()
        for where, count in ((slice(0, at), at), (slice(at, tokens), tokens - at)):
            cu_seqlens = torch.tensor([0, count])
            inputs = case.part(where)
            part, state = prefill_slots(*inputs, pool, case.slots, cu_seqlens, no_blocks)
            pool[case.slots] = state
            parts.append(part)
        assert apart(torch.cat(parts), out) <= OPS["float32"], at
        assert apart(state, final) <= STATE, at


def test_steps_equal_a_prefill() -> None:
    case = make_case((60,), (2, 64, 64))
    out, final = prefill(case, (60,))
    steps = [
        step_slots(*case.part(slice(token, token + 1)), case.pool, case.slots)
        for token in range(60)
    ]
    assert apart(torch.cat(steps), out) <= OPS["float32"]
    assert apart(case.pool[case.slots], final) <= STATE


@pytest.mark.parametrize("sizes", [(1, 64, 64), (3, 32, 100), (16, 64, 64)], ids=str)
def test_neither_threads_nor_the_others_change_a_bit(sizes: tuple[int, int, int]) -> None:
    """Few heads are shared out by columns; a sequence's numbers are its own."""
    lengths = (300, 1, 40)
    case = make_case(lengths, sizes)
    before, threads = case.pool.clone(), torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            case.pool.copy_(before)
            out, final = prefill(case, lengths)
            one = step_slots(*case.part(slice(0, 3)), case.pool, case.slots)
            results.append((out, final, one, case.pool[case.slots]))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))
    case.pool.copy_(before)
    alone = case.part(slice(301, 341))
    cu_seqlens = torch.tensor([0, 40])
    out, final = prefill_slots(*alone, case.pool, case.slots[2:], cu_seqlens, no_blocks)
    assert torch.equal(out, results[0][0][301:])
    assert torch.equal(final[0], results[0][1][2])


def test_not_a_number_stays_in_its_sequence_and_head() -> None:
    case = make_case(RAGGED, (2, 16, 24))
    good, state = prefill(case, RAGGED)
    case.k[70, 0] = case.log_decay[3, 1] = float("nan")  # of the fifth sequence, and the first
    out, final = prefill(case, RAGGED)
    bad = torch.zeros_like(good, dtype=torch.bool)
    bad[70:, 0] = bad[:5, 1] = True
    bad[200:, 0] = False  # behind its end
    assert torch.equal(out[~bad], good[~bad])
    spoiled = torch.zeros_like(state, dtype=torch.bool)
    spoiled[4, 0] = spoiled[0, 1] = True
    assert torch.equal(final[~spoiled], state[~spoiled])
    assert final[spoiled].isnan().all()


def test_pads_share_a_slot_and_harm_nobody() -> None:
    case = make_case((1,) * 6, (2, 16, 24))
    expected, state = exact(case, (1,) * 6)
    case.slots[4:] = 0  # scratch, full of NaN
    out = step_slots(*case.part(slice(None)), case.pool, case.slots)
    assert apart(out[:4], expected[:4]) <= OPS["float32"]
    assert apart(case.pool[case.slots[:4]], state[:4]) <= STATE


@pytest.mark.parametrize("count", [0, 1])
def test_nothing_to_do(count: int) -> None:
    case = make_case((0,) * count)
    out, final = prefill(case, (0,) * count)
    assert out.shape == (0, 2, 24)
    assert torch.equal(final, case.pool[case.slots])
    none = make_case(())
    assert step_slots(*none.part(slice(None)), none.pool, none.slots).shape == (0, 2, 24)


def test_a_given_scale_and_output() -> None:
    case = make_case((50, 1))
    expected, _ = exact(case, (50, 1))
    factor = 0.3 / 16**-0.5
    buffer = torch.full((53, 2, 24), float("nan"))
    inputs = case.part(slice(0, 50))
    cu_seqlens = torch.tensor([0, 50])
    out, _ = prefill_slots(
        *inputs, case.pool, case.slots[:1], cu_seqlens, no_blocks, scale=0.3, out=buffer[1:51]
    )
    last = case.part(slice(50, 51))
    step_slots(*last, case.pool, case.slots[1:], scale=0.3, out=buffer[51:52])
    assert out.data_ptr() == buffer[1:].data_ptr()
    assert apart(buffer[1:52], expected * factor) <= OPS["float32"]
    assert buffer[[0, 52]].isnan().all()


@torch.no_grad()
def test_inputs_and_slots_that_are_views() -> None:
    q, k, v = (randn(2, 3, 16, dtype=torch.float32, seed=seed)[..., ::2] for seed in range(3))
    decay, slots = -randn(2, 3, dtype=torch.float32).abs(), torch.tensor([4, 9, 1, 9])[::2]
    pools = [randn(6, 3, 8, 8, dtype=torch.float32, seed=5) for _ in range(2)]
    found = step_slots(q, k, v, decay, pools[0], slots)
    q, k, v = (x.contiguous() for x in (q, k, v))
    exact = step_slots(q, k, v, decay, pools[1], slots.contiguous())
    torch.testing.assert_close(found, exact)
    torch.testing.assert_close(pools[0], pools[1])


@torch.no_grad()
def test_one_state_shared_out_by_columns() -> None:
    q, k = (randn(1, 1, 16, dtype=torch.float32, seed=seed) for seed in (1, 2))
    v, decay = randn(1, 1, 512, dtype=torch.float32, seed=3), torch.tensor([[-0.3]])
    slots, threads, results = torch.tensor([1]), torch.get_num_threads(), []
    try:
        for count in (1, 4, 8, 16):
            torch.set_num_threads(count)
            pool = randn(2, 1, 16, 512, dtype=torch.float32, seed=4)
            results.append((step_slots(q, k, v, decay, pool, slots), pool))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))
