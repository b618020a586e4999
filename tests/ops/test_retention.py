"""Gated retention: recurrent, parallel, chunkwise and stepwise forms agree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from packed import apart, randn
from tolerances import OPS
from yocolm.ops.blocks import cut_blocks
from yocolm.ops.retention import (
    CHUNK_SIZE,
    gated_retention,
    retention_chunkwise,
    retention_parallel,
    retention_recurrent,
    retention_step,
)

STRONG, WEAK, MODEL = "strong", "weak", "model"
GATES = (STRONG, WEAK, MODEL)
RAGGED = (0, 65, 1, 0, 257, 1, 2, 0)
LENGTHS = [(1,), (2,), (63,), (64,), (65,), (255,), (256,), (257,), (700,), RAGGED, (0,)]
CHUNK_SIZES = (16, 50, 64, 256)
HEADS, KEY, VALUE = 2, 4, 3


class Inputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    initial_state: Tensor

    @property
    def tokens(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v, self.log_decay

    def map(self, change: Callable[[Tensor], Tensor]) -> Inputs:
        return Inputs._make(map(change, self))

    def to(self, dtype: torch.dtype) -> Inputs:
        return self.map(lambda x: x.detach().to(dtype))

    def part(self, where: slice | Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.q[where], self.k[where], self.v[where], self.log_decay[where]


Form = Callable[[Inputs], tuple[Tensor, Tensor]]


def recurrent(lengths: Sequence[int]) -> Form:
    return lambda x: retention_recurrent(*x.tokens, list(lengths), x.initial_state)


def chunkwise(lengths: Sequence[int], size: int = CHUNK_SIZE) -> Form:
    return lambda x: gated_retention(*x.tokens, list(lengths), x.initial_state, chunk_size=size)


def make_inputs(lengths: tuple[int, ...], gate: str, heads: int = HEADS) -> Inputs:
    """Float32 numbers, so that every form and dtype starts from the same ones."""
    tokens = sum(lengths)
    uniform = torch.rand(tokens, heads, generator=torch.Generator().manual_seed(5))
    log_decay = {
        STRONG: -2.0 - 0.1 * uniform,
        WEAK: -uniform * 0.6931 / 10_000,  # half-lives of more than 10,000 tokens
        MODEL: torch.nn.functional.logsigmoid(8 * uniform - 4) / 16,
    }[gate]
    return Inputs(
        q=randn(tokens, heads, KEY, dtype=torch.float32, seed=0),
        k=randn(tokens, heads, KEY, dtype=torch.float32, seed=1),
        v=randn(tokens, heads, VALUE, dtype=torch.float32, seed=2),
        log_decay=log_decay,
        initial_state=randn(len(lengths), heads, KEY, VALUE, dtype=torch.float32, seed=3),
    )


def results(form: Form, inputs: Inputs) -> dict[str, Tensor]:
    """Output, final state, and the gradients of a sum of both with random weights."""
    leaves = inputs.map(lambda x: x.clone().requires_grad_())
    out, final = form(leaves)
    loss = (out * randn(*out.shape, dtype=out.dtype, seed=10)).sum()
    loss = loss + (final * randn(*final.shape, dtype=final.dtype, seed=11)).sum()
    grads = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    return {"output": out, "state": final, **dict(zip(Inputs._fields, grads, strict=True))}


@lru_cache(maxsize=4)
def exact(lengths: tuple[int, ...], gate: str) -> dict[str, Tensor]:
    return results(recurrent(lengths), make_inputs(lengths, gate).to(torch.float64))


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    errors = {name: apart(actual[name], expected[name]) for name in actual}
    assert max(errors.values()) <= tolerance, errors


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_chunkwise_equals_recurrent(lengths: tuple[int, ...], gate: str, dtype: str) -> None:
    inputs = make_inputs(lengths, gate).to(getattr(torch, dtype))
    for size in CHUNK_SIZES:
        actual = results(chunkwise(lengths, size), inputs)
        assert all(x.dtype == inputs.q.dtype for x in actual.values())
        assert_same(actual, exact(lengths, gate), OPS[dtype])


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_five_thousand_tokens(gate: str, dtype: str) -> None:
    inputs = make_inputs((5_000,), gate, heads=1)
    expected = recurrent([5_000])(inputs.to(torch.float64))
    actual = chunkwise([5_000])(inputs.to(getattr(torch, dtype)))
    for got, wanted in zip(actual, expected, strict=True):
        assert apart(got, wanted) <= OPS[dtype]


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_gradients_at_five_thousand_tokens(gate: str, dtype: str) -> None:
    """Against a scan of the recurrence by doubling, which shares nothing with the chunks."""
    inputs = make_inputs((5_000,), gate, heads=1)

    def scan(x: Inputs) -> tuple[Tensor, Tensor]:
        decay = x.log_decay.exp()[..., None, None]
        states = x.k.unsqueeze(-1) * x.v.unsqueeze(-2)
        states = torch.cat((states[:1] + decay[:1] * x.initial_state, states[1:]))
        step = 1
        while step < len(states):
            joined = states[step:] + decay[step:] * states[:-step]
            states = torch.cat((states[:step], joined))
            decay = torch.cat((decay[:step], decay[step:] * decay[:-step]))
            step *= 2
        return (x.q.unsqueeze(-2) @ states).squeeze(-2) * KEY**-0.5, states[-1:]

    expected = results(scan, inputs.to(torch.float64))
    actual = results(chunkwise([5_000]), inputs.to(getattr(torch, dtype)))
    assert_same(actual, expected, OPS[dtype])


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_parallel_equals_recurrent(gate: str, dtype: str) -> None:
    inputs = make_inputs((257,), gate)

    def parallel(x: Inputs) -> tuple[Tensor, Tensor]:
        return retention_parallel(*x.tokens), x.initial_state

    def from_nothing(x: Inputs) -> tuple[Tensor, Tensor]:
        return retention_recurrent(*x.tokens, [257])[0], x.initial_state

    expected = results(from_nothing, inputs.to(torch.float64))
    actual = results(parallel, inputs.to(getattr(torch, dtype)))
    assert_same(actual, expected, OPS[dtype])


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_steps_equal_recurrent(gate: str, dtype: str) -> None:
    steps, sequences = 40, 3
    lengths = (steps,) * sequences
    inputs = make_inputs(lengths, gate)
    expected, final = recurrent(lengths)(inputs.to(torch.float64))
    inputs = inputs.to(getattr(torch, dtype))
    state = inputs.initial_state.clone()
    outputs = [
        retention_step(*inputs.part(slice(step, None, steps)), state) for step in range(steps)
    ]
    assert apart(torch.stack(outputs, 1).flatten(0, 1), expected) <= OPS[dtype]
    assert apart(state, final) <= OPS[dtype]


@pytest.mark.parametrize("gate", [STRONG, MODEL])
def test_any_split_gives_the_same_output_and_state(gate: str) -> None:
    tokens, size = 137, 32
    inputs = make_inputs((tokens,), gate).to(torch.float64)
    state = inputs.initial_state
    out, final = chunkwise([tokens], size)(inputs)
    for at in (0, 1, 2, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 136, 137):
        before, after = inputs.part(slice(0, at)), inputs.part(slice(at, tokens))
        first, middle = gated_retention(*before, [at], state, chunk_size=size)
        second, last = gated_retention(*after, [tokens - at], middle, chunk_size=size)
        assert apart(torch.cat((first, second)), out) <= OPS["float64"], at
        assert apart(last, final) <= OPS["float64"], at


@settings(deadline=None, max_examples=40)
@given(
    chunks=st.lists(st.lists(st.integers(0, 40), min_size=3, max_size=3), min_size=1, max_size=5),
    size=st.integers(1, 40),
    gate=st.sampled_from(GATES),
)
def test_chunked_prefill_of_several_sequences(
    chunks: list[list[int]], size: int, gate: str
) -> None:
    """Three sequences advance together by uneven amounts, some by nothing at all."""
    lengths = tuple(map(sum, zip(*chunks, strict=True)))
    inputs = make_inputs(lengths, gate).to(torch.float64)
    out, final = recurrent(lengths)(inputs)
    begins = [sum(lengths[:seq]) for seq in range(3)]
    state, done = inputs.initial_state, [0, 0, 0]
    outputs = torch.empty_like(out)
    for counts in chunks:
        firsts = [begin + at for begin, at in zip(begins, done, strict=True)]
        spans = [range(first, first + n) for first, n in zip(firsts, counts, strict=True)]
        tokens = torch.tensor([token for span in spans for token in span], dtype=torch.int64)
        step = Inputs(*inputs.part(tokens), state)
        outputs[tokens], state = chunkwise(counts, size)(step)
        done = [at + count for at, count in zip(done, counts, strict=True)]
    assert apart(outputs, out) <= OPS["float64"]
    assert apart(state, final) <= OPS["float64"]


def test_padding_does_not_advance_the_state() -> None:
    """The short sequence is padded to the block of the long one; alone it is not padded."""
    lengths = (5, 64)
    inputs = make_inputs(lengths, STRONG).to(torch.float64)
    _, together = chunkwise(lengths, 64)(inputs)
    short = inputs.part(slice(0, 5))
    _, alone = gated_retention(*short, [5], inputs.initial_state[:1], chunk_size=5)
    assert apart(together[:1], alone) <= OPS["float64"]


def test_empty_sequences_keep_their_state() -> None:
    inputs = make_inputs((0, 7, 0), MODEL)
    _, final = chunkwise([0, 7, 0])(inputs)
    assert torch.equal(final[[0, 2]], inputs.initial_state[[0, 2]])


@pytest.mark.parametrize("sequences", [0, 2])
def test_no_tokens(sequences: int) -> None:
    inputs = make_inputs((0,) * sequences, MODEL)
    out, final = gated_retention(*inputs.tokens, [0] * sequences)
    assert out.shape == (0, HEADS, VALUE)
    assert torch.equal(final, torch.zeros(sequences, HEADS, KEY, VALUE))


def test_inputs_and_initial_state_are_left_alone() -> None:
    inputs = make_inputs(RAGGED, MODEL)
    before = inputs.map(torch.clone)
    results(chunkwise(RAGGED), inputs)
    chunkwise(RAGGED)(inputs)
    assert all(map(torch.equal, inputs, before))


def rounded_to_bfloat16(inputs: Inputs) -> Inputs:
    """What a bfloat16 model hands over: decays and state stay in float32."""
    log_decay, state = inputs.log_decay, inputs.initial_state
    return inputs.to(torch.bfloat16)._replace(log_decay=log_decay, initial_state=state)


def test_bfloat16_inputs_keep_a_float32_state() -> None:
    inputs = make_inputs((300,), WEAK)
    rounded = rounded_to_bfloat16(inputs)
    wide = rounded.to(torch.float32)
    out, final = chunkwise([300])(rounded)
    wide_out, wide_final = chunkwise([300])(wide)
    assert out.dtype == torch.bfloat16 and torch.equal(out, wide_out.bfloat16())
    assert final.dtype == torch.float32 and torch.equal(final, wide_final)

    state, wide_state = inputs.initial_state.clone(), inputs.initial_state.clone()
    step = retention_step(*rounded.part(slice(0, 1)), state)
    wide_step = retention_step(*wide.part(slice(0, 1)), wide_state)
    assert step.dtype == torch.bfloat16 and torch.equal(step, wide_step.bfloat16())
    assert torch.equal(state, wide_state)


def test_bfloat16_gradients() -> None:
    """Of a loss whose float64 gradients start from the same rounded inputs."""
    inputs = make_inputs((130,), MODEL)
    rounded = rounded_to_bfloat16(inputs)
    actual = results(chunkwise([130]), rounded)
    assert actual["q"].dtype == actual["k"].dtype == actual["v"].dtype == torch.bfloat16
    assert actual["log_decay"].dtype == actual["initial_state"].dtype == torch.float32
    expected = results(recurrent([130]), rounded.to(torch.float64))
    assert_same(actual, expected, OPS["bfloat16"])


@pytest.mark.parametrize("log_decay", [-2.0, -100.0, -10_000.0])
def test_strong_gates_neither_overflow_nor_spoil_gradients(log_decay: float) -> None:
    inputs = make_inputs((600,), STRONG)
    inputs = inputs._replace(log_decay=torch.full_like(inputs.log_decay, log_decay))

    expected = results(recurrent([600]), inputs.to(torch.float64))
    assert_same(results(chunkwise([600]), inputs), expected, OPS["float32"])


def test_gates_that_never_decay() -> None:
    inputs = make_inputs((600,), WEAK)
    inputs = inputs._replace(log_decay=torch.zeros_like(inputs.log_decay))
    out, final = gated_retention(*inputs.tokens, [600])
    q, k, v = (x.double() for x in inputs.tokens[:3])
    states = torch.einsum("thk,thv->thkv", k, v).cumsum(0)
    assert apart(out, torch.einsum("thk,thkv->thv", q, states) * KEY**-0.5) <= OPS["float32"]
    assert apart(final, states[-1:]) <= OPS["float32"]


def test_gradcheck() -> None:
    lengths = (2, 0, 3)
    leaves = make_inputs(lengths, MODEL, heads=1).to(torch.float64).map(Tensor.requires_grad_)

    def form(*x: Tensor) -> tuple[Tensor, Tensor]:
        return chunkwise(lengths, size=2)(Inputs._make(x))

    assert torch.autograd.gradcheck(form, tuple(leaves))


def test_autocast_changes_nothing() -> None:
    inputs = make_inputs((130,), MODEL)
    plain = results(chunkwise([130], 64), inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = results(chunkwise([130], 64), inputs)
    assert all(torch.equal(cast[name], plain[name]) for name in plain)

    state, cast_state = inputs.initial_state.clone(), inputs.initial_state.clone()
    step = retention_step(*inputs.part(slice(0, 1)), state)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast_step = retention_step(*inputs.part(slice(0, 1)), cast_state)
    assert torch.equal(step, cast_step) and torch.equal(state, cast_state)


def test_strided_inputs_and_a_given_scale() -> None:
    """Models pass slices of one projection."""
    stacked = randn(64, 4, HEADS, KEY, dtype=torch.float32)
    q, k, v, _ = stacked.unbind(1)
    log_decay = make_inputs((64,), MODEL).log_decay
    blocks = cut_blocks([64], 64)
    out, _ = retention_chunkwise(q, k, v, log_decay, blocks, scale=0.3)
    dense = Inputs(q, k, v, log_decay, torch.zeros(1, HEADS, KEY, KEY)).to(torch.float64)
    expected, _ = retention_recurrent(*dense.map(Tensor.contiguous).tokens, [64], scale=0.3)
    assert apart(out, expected) <= OPS["float32"]


def test_gradients_make_no_difference_to_the_result() -> None:
    inputs = make_inputs(RAGGED, MODEL)
    out, final = chunkwise(RAGGED)(inputs)
    recorded = results(chunkwise(RAGGED), inputs)
    assert torch.equal(out, recorded["output"]) and torch.equal(final, recorded["state"])


def test_bad_arguments_are_named() -> None:
    inputs = make_inputs((5,), MODEL)
    with pytest.raises(ValueError, match="lengths sum to 4, but there are 5 tokens"):
        gated_retention(*inputs.tokens, [4])
    with pytest.raises(ValueError, match="chunk_size is 0"):
        gated_retention(*inputs.tokens, [5], chunk_size=0)
