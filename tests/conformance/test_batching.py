"""Requests that share steps, pages and slots answer as if each were alone."""

from typing import Any

import pytest

from tiny import (
    CASES,
    FAMILIES,
    GROWING,
    ONE_OF_EACH,
    assert_dense,
    assert_same,
    finish,
    greedy,
    make_engine,
    prompt_of,
    run,
    run_one,
    samples,
    watch_plans,
)
from yocolm.engine.outputs import RequestOutput
from yocolm.engine.sampling_params import SamplingParams

LITTLE_ROOM: list[dict[str, Any]] = [
    {"seqs": 1},
    {"seqs": 3},
    {"pages": 5},
    {"pages": 7, "budget": 3},
]
CROWDED: list[dict[str, Any]] = [{"budget": 11}, {"budget": 5, "pages": 14, "seqs": 4}]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_mixed_batches(name: str, dtype: str) -> None:
    """Prompts of others are in every phase while each one decodes."""
    engine = make_engine(name, dtype, budget=9)
    plans = watch_plans(engine)
    outputs: dict[str, RequestOutput] = {}
    for i, length in enumerate((3, 17, 1, 5, 30, 8)):
        engine.add_request(str(i), prompt_of(length, seed=i), greedy(9 - i))
        outputs.update((out.request_id, out) for out in engine.step() if out.finished)
    outputs |= finish(engine)
    assert any(0 < plan.num_single < len(plan.scheduled) for plan in plans), "no mixed step"
    assert any(len(plan.scheduled) - plan.num_single > 1 for plan in plans), "no two prompts"
    assert len(outputs) == 6
    for output in outputs.values():
        assert_dense(output, name, dtype)


@pytest.mark.parametrize(("name", "dtype"), [case for case in CASES if case[0] in GROWING])
def test_preempted_and_resumed(name: str, dtype: str) -> None:
    """Nine pages for three requests of five: the newer ones are preempted with output."""
    engine = make_engine(name, dtype, pages=9, page_size=4, budget=7)
    requests = {str(i): (prompt_of(8 + i, seed=i), greedy(10)) for i in range(3)}
    outputs = run(engine, requests)
    assert engine.scheduler.num_preemptions >= 2
    for output in outputs.values():
        assert_dense(output, name, dtype)


def test_preempted_again_and_again() -> None:
    for name in GROWING:
        engine = make_engine(name, "float64", pages=6, page_size=2, budget=3, seqs=4)
        requests = {str(i): (prompt_of(2 + i, seed=i), greedy(7 - i)) for i in range(5)}
        outputs = run(engine, requests)
        assert engine.scheduler.num_preemptions >= 3
        for output in outputs.values():
            assert_dense(output, name, "float64")


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_slots_and_pages_of_a_previous_owner(name: str, dtype: str) -> None:
    """One slot, six pages: everything that the second request uses was the first one's."""
    engine = make_engine(name, dtype, pages=6, seqs=1)
    for length in (19, 1, 7, 13, 3):
        prompt = prompt_of(length, seed=length)
        assert_dense(run_one(engine, prompt, greedy(4)), name, dtype)


@pytest.mark.parametrize("length", [1, 7, 8, 9])
def test_forks_of_full_and_of_partial_pages(length: int) -> None:
    for name in FAMILIES:
        engine = make_engine(name, "float64")
        output = run_one(engine, prompt_of(length), samples(3))
        assert [sample.index for sample in output.outputs] == [0, 1, 2]
        assert len({tuple(sample.token_ids) for sample in output.outputs}) == 3
        assert_dense(output, name, "float64", is_greedy=False)


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_forks_with_and_without_room(name: str, dtype: str) -> None:
    """Siblings that find no slot, or no page, are recomputed: their tokens stay the same."""
    prompt, params = prompt_of(10), samples(4)
    wanted = run_one(make_engine(name, dtype), prompt, params)
    assert_dense(wanted, name, dtype, is_greedy=False)
    for limits in LITTLE_ROOM:
        engine = make_engine(name, dtype, **limits)
        output = run_one(engine, prompt, params)
        assert_dense(output, name, dtype, is_greedy=False)
        if dtype != "bfloat16":  # whose rounding can move a draw
            assert_same(output, wanted, dtype)


def test_forks_among_others() -> None:
    requests = {
        "plain": (prompt_of(12, 1), greedy(12)),
        "forked": (prompt_of(9, 2), samples(3)),
        "long": (prompt_of(40, 3), greedy(3)),
        "forked too": (prompt_of(5, 4), samples(2, 12, seed=5)),
    }
    for name in FAMILIES:
        for limits in CROWDED:
            outputs = run(make_engine(name, "float64", **limits), requests)
            for request_id, output in outputs.items():
                assert_dense(output, name, "float64", is_greedy="forked" not in request_id)


def test_siblings_end_on_their_own() -> None:
    """A sample that ends at its first token, or later, leaves the others unharmed."""
    prompt = prompt_of(9)
    for name in ONE_OF_EACH:
        free = run_one(make_engine(name, "float64"), prompt, samples(3, 6))
        for victim in range(3):
            for place in (0, 2):
                stop = free.outputs[victim].token_ids[place]
                params = samples(3, 6, stop_token_ids=[stop])
                output = run_one(make_engine(name, "float64"), prompt, params)
                for ours, theirs in zip(output.outputs, free.outputs, strict=True):
                    tokens = theirs.token_ids
                    end = tokens.index(stop) + 1 if stop in tokens else len(tokens)
                    assert ours.token_ids == tokens[:end]
                    assert ours.finish_reason == ("stop" if stop in tokens else "length")


def test_draws_depend_on_seed_and_index_only() -> None:
    """The same request alone, in a crowd, in chunks and after preemptions draws the same tokens."""
    params = SamplingParams(seed=7, max_tokens=10, top_k=20, top_p=0.95, logprobs=0)
    wanted = run_one(make_engine("retention"), prompt_of(9), params)
    crowd = {str(i): (prompt_of(5 + i, i), samples(2, 9, seed=i)) for i in range(3)}
    for limits in CROWDED:
        engine = make_engine("retention", **limits)
        outputs = run(engine, crowd | {"same": (prompt_of(9), params)})
        assert_same(outputs["same"], wanted)
        again = run_one(engine, prompt_of(9), params)
        assert_same(again, wanted)
    other = run_one(make_engine("retention"), prompt_of(9), samples(1, 10, seed=8))
    assert other.outputs[0].token_ids != wanted.outputs[0].token_ids
