"""One prompt computed in every way there is: all give the logprobs of the dense forward pass."""

import pytest
import torch

from blocks import shrink_blocks
from tiny import (
    CASES,
    DTYPES,
    FAMILIES,
    assert_dense,
    dense_logprobs,
    greedy,
    make_engine,
    packed_logits,
    prompt_of,
    run,
    run_one,
    tiny_model,
)
from tolerances import CROSS_PATH
from yocolm.models.base import Batch
from yocolm.models.dense import DenseState

RAGGED = (1, 6, 13, 5, 2, 70, 131)  # around the windows, the tests' pages and the ops' blocks
PROMPT = 13  # more than two windows


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_dense_sequences_do_not_see_each_other(name: str, dtype: str) -> None:
    sequences = [prompt_of(length, seed) for seed, length in enumerate(RAGGED)]
    logprobs = packed_logits(tiny_model(name, dtype), sequences).log_softmax(-1)
    for sequence, rows in zip(sequences, logprobs.split(list(RAGGED)), strict=True):
        alone = dense_logprobs(name, dtype, tuple(sequence))
        assert (rows - alone).abs().max() <= CROSS_PATH[dtype]


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_dense_rows_are_rows_of_the_whole(
    name: str, small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if small:
        shrink_blocks(monkeypatch)
    sequences = [prompt_of(length, seed) for seed, length in enumerate(RAGGED)]
    model, total = tiny_model(name, "float64"), sum(RAGGED)
    whole = packed_logits(model, sequences)
    some = (torch.rand(total) < 0.2).nonzero().squeeze(1).tolist()
    last = (torch.tensor(RAGGED).cumsum(0) - 1).tolist()
    for rows in (some, last, last[3:4], [0], [7, 8, 9, 97, 227], list(range(1, total))):
        selected = packed_logits(model, sequences, rows)
        assert (selected - whole[rows]).abs().max() <= CROSS_PATH["float64"]


@pytest.mark.parametrize("chunk_size", [1, 3, 64])
def test_dense_state_may_cut_retention_anywhere(chunk_size: int) -> None:
    for name in ("retention", "retention-grouped"):
        model, tokens = tiny_model(name, "float64"), prompt_of(70)
        batch = Batch.packed(torch.tensor(tokens), [len(tokens)])
        with torch.no_grad():
            hidden = model(batch, DenseState(chunk_size))
            whole = model(batch, DenseState())
        assert (hidden - whole).abs().max() <= CROSS_PATH["float64"]


@pytest.mark.parametrize("budget", range(1, PROMPT + 2))
@pytest.mark.parametrize(("page_size", "small"), [(1, True), (4, False), (64, True)])
def test_chunked_at_every_boundary(
    page_size: int, small: bool, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A budget of one token is the stepwise way: the whole prompt goes through decode."""
    if small:
        shrink_blocks(monkeypatch)
    for name in FAMILIES:
        engine = make_engine(name, "float64", page_size=page_size, budget=budget)
        output = run_one(engine, prompt_of(PROMPT), greedy(3))
        assert_dense(output, name, "float64")
        assert engine.scheduler.num_steps == -(-PROMPT // budget) + 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_chunked_in_the_dtypes_of_deployment(name: str, dtype: str) -> None:
    for budget in (1, 2, 5, 7, 12, 13):
        engine = make_engine(name, dtype, budget=budget)
        assert_dense(run_one(engine, prompt_of(PROMPT), greedy(3)), name, dtype)


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_long_chunks_cross_the_blocks_of_the_ops(name: str, dtype: str) -> None:
    """Retention is cut at 128 tokens, window keys and query rows at 64."""
    prompt = prompt_of(200)
    for budget, page_size in ((200, 64), (129, 16), (65, 4)):
        engine = make_engine(name, dtype, page_size=page_size, budget=budget)
        assert_dense(run_one(engine, prompt, greedy(2)), name, dtype)


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_decoding_from_one_token(name: str, dtype: str) -> None:
    output = run_one(make_engine(name, dtype), prompt_of(1), greedy(20))
    assert output.prompt_logprobs == [None]
    assert_dense(output, name, dtype)


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_scored_tokens_equal_generated_ones(name: str, dtype: str) -> None:
    """What decoding said of its tokens, prefill says of the same tokens in a prompt."""
    prompt = prompt_of(6)
    sample = run_one(make_engine(name, dtype), prompt, greedy(12)).outputs[0]
    scored = run_one(make_engine(name, dtype), prompt + sample.token_ids, greedy(1))
    assert sample.logprobs is not None and scored.prompt_logprobs is not None
    for token, ours, theirs in zip(
        sample.token_ids, sample.logprobs, scored.prompt_logprobs[6:], strict=True
    ):
        assert theirs is not None
        assert abs(ours[token].logprob - theirs[token].logprob) <= CROSS_PATH[dtype]


@pytest.mark.parametrize("start", [0, 1, 2, 5, 11, 12, 13])
def test_scoring_from_a_position_on(start: int) -> None:
    params = greedy(2, prompt_logprobs=1, prompt_logprobs_start=start)
    for name in FAMILIES:
        for budget in (4, 64):
            engine = make_engine(name, "float64", budget=budget)
            output = run_one(engine, prompt_of(PROMPT), params)
            assert output.prompt_logprobs is not None
            scored = [position for position, entry in enumerate(output.prompt_logprobs) if entry]
            assert scored == list(range(max(start, 1), PROMPT))
            assert_dense(output, name, "float64")


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_made_in_blocks_of_rows(name: str) -> None:
    engine = make_engine(name, "float64")
    engine.runner.drawer.logit_rows = 2
    requests = {str(i): (prompt_of(5 + i, i), greedy(4)) for i in range(5)}
    for output in run(engine, requests).values():
        assert_dense(output, name, "float64")


def test_likeliest_tokens_are_the_likeliest() -> None:
    output = run_one(make_engine("retention"), prompt_of(9), greedy(3, logprobs=5))
    sample = output.outputs[0]
    rows = dense_logprobs("retention", "float32", (*output.prompt_token_ids, *sample.token_ids))
    assert sample.logprobs is not None and output.prompt_logprobs is not None
    for row, entries in enumerate(sample.logprobs, 8):
        assert set(rows[row].topk(5).indices.tolist()) == set(entries)
        assert [entry.rank for entry in entries.values()] == [1, 2, 3, 4, 5]
    for row, entries in enumerate(output.prompt_logprobs[1:]):
        token, ranks = output.prompt_token_ids[row + 1], (rows[row] > rows[row].min()).sum()
        assert entries is not None and list(entries)[0] == token and int(ranks) > 0
        own = int((rows[row] > rows[row][token]).sum()) + 1
        assert entries[token].rank == own
        assert len(entries) == (3 if own > 2 else 2)


def test_all_dtypes_are_served() -> None:
    for name, dtype in DTYPES.items():
        state = make_engine("window", name).runner.state
        assert state.pages[0][0].dtype == dtype and state.rings[0][0].dtype == dtype
        retention = make_engine("retention", name).runner.state
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        assert retention.recurrent[0].dtype == wide
