"""Prefix hits and swapped sequences answer as if computed anew, and compute only what is new."""

import contextlib
from typing import Any

import pytest
import torch

from tiny import (
    CASES,
    FAMILIES,
    GROWING,
    ONE_OF_EACH,
    assert_dense,
    assert_empty,
    assert_same,
    finish,
    make_engine,
    poison,
    prompt_of,
    run_one,
)
from tiny import (
    greedy as tiny_greedy,
)
from yocolm.engine.cost import CostModel
from yocolm.engine.engine import Engine
from yocolm.engine.outputs import RequestOutput
from yocolm.engine.request import Sequence
from yocolm.engine.sampling_params import SamplingParams
from yocolm.engine.swap import SwapStore
from yocolm.models.spec import model_spec

PAGE = 4
STATEFUL = [name for name in GROWING if model_spec(FAMILIES[name]).slot_bytes(4)]


def keeping(name: str, dtype: str = "float32", **limits: Any) -> Engine:
    limits = {"checkpoints": 12, "page_size": PAGE, "caching": True, **limits}
    return make_engine(name, dtype, **limits)


def greedy(count: int, **more: Any) -> SamplingParams:
    return tiny_greedy(count, **{"prompt_logprobs": None, **more})


def counted(
    engine: Engine, prompt: list[int], params: SamplingParams
) -> tuple[RequestOutput, int, int]:
    """The answer, tokens that were written, and rows that were read for it.

    All memory that nobody owns is NaN before every step.
    """
    stats = engine.runner.stats
    tokens, rows = stats.write_tokens, stats.read_rows
    engine.add_request("one", prompt, params)
    (output,) = [out for out in _steps(engine) if out.finished]
    assert_empty(engine)
    return output, stats.write_tokens - tokens, stats.read_rows - rows


def _steps(engine: Engine) -> list[RequestOutput]:
    outputs: list[RequestOutput] = []
    while engine.has_unfinished_requests():
        poison(engine)
        outputs += engine.step()
        engine.check()
    return outputs


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_the_second_identical_prompt_hits(name: str, dtype: str) -> None:
    """At lengths around the page boundaries, four times, with others in between."""
    grows = name in GROWING
    for length in (1, PAGE - 1, PAGE, PAGE + 1, 4 * PAGE - 1, 4 * PAGE, 4 * PAGE + 1, 27):
        engine = keeping(name, dtype)
        prompt, kept = prompt_of(length, seed=length), (length - 1) // PAGE * PAGE
        for time in range(4):
            output, tokens, rows = counted(engine, prompt, greedy(3))
            assert_dense(output, name, dtype)
            cached = kept if time and grows else output.num_cached_tokens
            assert output.num_cached_tokens == cached
            assert tokens == length - cached + 2 and rows == 3
            assert_dense(run_one(engine, prompt_of(6, seed=90 + time), greedy(2)), name, dtype)


@pytest.mark.parametrize("name", STATEFUL)
@pytest.mark.parametrize("budget", [3, 64])
def test_the_next_turn_computes_what_is_new(name: str, budget: int) -> None:
    engine = keeping(name, budget=budget)
    history = prompt_of(13)
    computed = 0
    for turn in range(4):
        output, tokens, _ = counted(engine, history, greedy(5))
        assert_dense(output, name)
        assert output.num_cached_tokens == computed
        assert tokens == len(history) - computed + 4
        computed = len(history) + 4  # all but the last token drawn
        history = history + output.outputs[0].token_ids + prompt_of(3 + turn, seed=50 + turn)


@pytest.mark.parametrize("name", STATEFUL)
def test_a_branch_point_is_kept_once_two_have_parted_there(name: str) -> None:
    engine = keeping(name)
    common = prompt_of(18)  # four whole pages and two tokens
    first, _, _ = counted(engine, common + prompt_of(9, seed=1), greedy(2))
    second, tokens, _ = counted(engine, common + prompt_of(9, seed=2), greedy(2))
    assert second.num_cached_tokens == 0 and tokens == 27 + 1, "no state where they part"
    third, tokens, _ = counted(engine, common + prompt_of(9, seed=3), greedy(2))
    assert third.num_cached_tokens == 16 and tokens == 27 - 16 + 1
    for output in (first, second, third):
        assert_dense(output, name)


def test_without_state_pages_alone_are_hits() -> None:
    engine = keeping("llama", checkpoints=0)
    common = prompt_of(18)
    counted(engine, common + prompt_of(9, seed=1), greedy(2))
    output, tokens, _ = counted(engine, common + prompt_of(9, seed=2), greedy(2))
    assert output.num_cached_tokens == 16 and tokens == 27 - 16 + 1
    assert_dense(output, "llama")


@pytest.mark.parametrize("name", STATEFUL)
def test_a_long_prompt_is_kept_at_intervals(name: str) -> None:
    engine = keeping(name, checkpoint_spacing=10)  # every 8 tokens: whole pages
    prompt = prompt_of(30)
    counted(engine, prompt, greedy(1))
    for cut, kept in ((25, 24), (24, 16), (17, 16), (9, 8), (8, 0)):
        output, _, _ = counted(engine, prompt[:cut] + prompt_of(7, seed=cut), greedy(2))
        assert output.num_cached_tokens >= kept, cut
        assert_dense(output, name)


@pytest.mark.parametrize("name", STATEFUL)
def test_pages_without_their_state_are_no_hit(name: str) -> None:
    engine = keeping(name)
    prompt = prompt_of(21)
    counted(engine, prompt, greedy(3))
    cache = engine.scheduler.memory.cache
    assert cache is not None
    for slot in list(cache._checkpoints):
        cache.drop_state(slot)
    output, tokens, _ = counted(engine, prompt, greedy(3))
    assert output.num_cached_tokens == 0 and tokens == 21 + 2
    assert_dense(output, name)


@pytest.mark.parametrize("name", ONE_OF_EACH)
@pytest.mark.parametrize("start", [0, 1, 7, 13, 17, 21])
def test_scoring_reads_the_cache_below_its_first_row_only(name: str, start: int) -> None:
    engine = keeping(name, checkpoint_spacing=PAGE)
    prompt = prompt_of(21)
    counted(engine, prompt, greedy(2))
    params = greedy(2, prompt_logprobs=0, prompt_logprobs_start=start)
    output, tokens, rows = counted(engine, prompt, params)
    first = min(max(start, 1) - 1, 20)
    assert output.num_cached_tokens <= first
    if name in STATEFUL:
        assert output.num_cached_tokens == first // PAGE * PAGE
    assert tokens == 21 - output.num_cached_tokens + 1 and rows == 20 - first + 2
    assert_dense(output, name)


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_tiny_pools_evict_and_answer_right(name: str, dtype: str) -> None:
    for checkpoints, pages in ((0, 14), (1, 11), (3, 30)):
        engine = keeping(name, dtype, checkpoints=checkpoints, pages=pages, seqs=2, budget=9)
        common = prompt_of(9)
        prompts = [common + prompt_of(6 + i, seed=i % 3) for i in range(8)]
        for i, prompt in enumerate(prompts):
            engine.add_request(str(i), prompt, greedy(6))
        for output in finish(engine).values():
            assert_dense(output, name, dtype)


def test_samples_of_one_prompt_keep_their_ends() -> None:
    engine = keeping("retention")
    params = greedy(4, n=3, temperature=1.0, seed=5)
    output, _, _ = counted(engine, prompt_of(10), params)
    for sample in output.outputs:
        history = prompt_of(10) + sample.token_ids + prompt_of(2, seed=9)
        after, _, _ = counted(engine, history, greedy(2))
        assert after.num_cached_tokens == 10 + 3
        assert_dense(after, "retention")


def test_a_step_that_raises_leaves_nothing_kept() -> None:
    engine = keeping("window")
    counted(engine, prompt_of(21), greedy(3))
    runner_run = engine.runner.run

    def failing(plan: Any) -> Any:
        raise RuntimeError("out of memory")

    engine.add_request("bad", prompt_of(21), greedy(3))
    engine.runner.run = failing
    (output,) = engine.step()
    assert output.error is not None
    engine.runner.run = runner_run
    engine.check()
    output, tokens, _ = counted(engine, prompt_of(21), greedy(3))
    assert output.num_cached_tokens == 0 and tokens == 21 + 2
    assert_dense(output, "window")


# Swapping


def always_swap(engine: Engine) -> None:
    class Free(CostModel):
        def __init__(self) -> None:
            pass

        def swap_seconds(self, num_bytes: float) -> float:
            return 0.0

        def prefill_seconds(self, start: int, stop: int) -> float:
            return 1.0 + stop - start

    engine.scheduler.memory.cost = Free()


def content(engine: Engine, seq: Sequence) -> list[torch.Tensor]:
    """Copies of all that a running sequence has computed."""
    state, size = engine.runner.state, engine.scheduler.page_pool.page_size
    held = []
    for pair in state.pages:
        for pool in pair:
            tokens = pool[seq.pages].transpose(1, 2).flatten(0, 1)[: seq.num_computed]
            held.append(tokens.clone())
    pools = [*(pool for pair in state.rings for pool in pair), *state.recurrent]
    assert size > 0
    return held + [pool[seq.slot].clone() for pool in pools]


@pytest.mark.parametrize(("name", "dtype"), [case for case in CASES if case[0] in GROWING])
@pytest.mark.parametrize("caching", [False, True])
def test_swapped_and_back(name: str, dtype: str, caching: bool) -> None:
    """Three requests take turns in too few pages; what comes back are the bits that went."""
    engine = keeping(name, dtype, pages=9, budget=7, seqs=4, swap="4MB", caching=caching)
    always_swap(engine)
    memory = engine.scheduler.memory
    take_out, moved = memory.preempt, memory.moved
    out: dict[Sequence, list[torch.Tensor]] = {}
    same: list[bool] = []

    def preempt(seq: Sequence) -> bool:
        held = content(engine, seq)
        swapped = take_out(seq)
        if swapped:
            out[seq] = held
        return swapped

    def back(ticket: int, error: str | None) -> Sequence | None:
        assert error is None
        seq = moved(ticket, error)
        if seq is not None:
            pairs = zip(content(engine, seq), out.pop(seq), strict=True)
            same.append(all(torch.equal(now, before) for now, before in pairs))
        return seq

    memory.preempt, memory.moved = preempt, back
    for i in range(3):
        engine.add_request(str(i), prompt_of(8 + i, seed=i), greedy(14))
    done = {output.request_id: output for output in _steps(engine) if output.finished}
    assert memory.num_swaps and len(same) == memory.num_swaps and all(same)
    for output in done.values():
        assert_dense(output, name, dtype)
    assert memory.usage().blocks_swapped == memory.usage().states_swapped == 0


def test_a_full_page_is_written_once() -> None:
    engine = keeping("retention", pages=12, budget=64, seqs=4, swap="4MB", caching=False)
    always_swap(engine)
    written: list[tuple[int, ...]] = []
    start = engine.swapper.start

    def watched(moves: Any) -> None:
        written.extend(tuple(block for _, block in move.pages) for move in moves if move.out)
        start(moves)

    engine.swapper.start = watched
    for i in range(3):
        engine.add_request(str(i), prompt_of(9, seed=i), greedy(24))
    finish(engine)
    assert engine.scheduler.memory.num_swaps > 1
    most = engine.scheduler.memory.num_swaps * (33 // PAGE + 1)
    assert sum(map(len, written)) < most / 2


def test_aborted_while_it_is_moved() -> None:
    for steps in range(2, 30):
        engine = keeping("retention", pages=9, budget=7, seqs=4, swap="4MB", caching=True)
        always_swap(engine)
        for i in range(3):
            engine.add_request(str(i), prompt_of(8 + i, seed=i), greedy(14))
        for _ in range(steps):
            engine.step()
            engine.check()
        for i in range(3):
            engine.abort(str(i))
            engine.check()
        while engine.scheduler.awaits_moves:
            engine.step()
            engine.check()
        assert_empty(engine)
        assert_dense(run_one(engine, prompt_of(9), greedy(3)), "retention")


def test_a_swap_space_that_is_full_or_broken_has_them_compute_anew() -> None:
    plain = make_engine("window", pages=9, budget=7, seqs=4)
    expected = {}
    for i in range(3):
        plain.add_request(str(i), prompt_of(8 + i, seed=i), greedy(14))
    expected = finish(plain)
    engine = keeping("window", pages=9, budget=7, seqs=4, swap="4MB", caching=False)
    always_swap(engine)
    engine.swapper.poll = lambda running: [(ticket, "broken") for ticket in running]
    for i in range(3):
        engine.add_request(str(i), prompt_of(8 + i, seed=i), greedy(14))
    for request_id, output in finish(engine).items():
        assert_same(output, expected[request_id])
    assert engine.scheduler.memory.num_swaps > 0


# Priorities and policies


def test_priorities_go_first_and_age() -> None:
    engine = keeping("retention", seqs=1, priority_aging=5.0)
    for name, priority, arrival in (("a", 0, 0.0), ("b", 0, 1.0), ("c", -1, 2.0), ("d", 9, 2.5)):
        engine.add_request(name, prompt_of(5), greedy(1), arrival_time=arrival, priority=priority)
    engine.add_request("e", prompt_of(5), greedy(1), arrival_time=60.0, priority=0)
    order = [output.request_id for output in _steps(engine) if output.finished]
    assert order == ["c", "a", "b", "d", "e"]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_by_traffic(name: str, dtype: str) -> None:
    engine = keeping(name, dtype, policy="traffic", budget=16, seqs=4, pages=40, swap="4MB")
    for i in range(9):
        prompt = prompt_of(2 + 7 * (i % 4), seed=i % 5)
        engine.add_request(str(i), prompt, greedy(5), priority=i % 2, tpot_target=1e-3)
    outputs = finish(engine)
    assert len(outputs) == 9
    for output in outputs.values():
        assert_dense(output, name, dtype)


# What was wrong once


def test_what_is_found_again_after_a_preemption_is_no_cached_prompt() -> None:
    engine = make_engine("llama", pages=11, seqs=4, page_size=4, caching=True)
    engine.add_request("a", prompt_of(20, seed=1), greedy(10))
    engine.add_request("b", prompt_of(5, seed=2), greedy(30))
    outputs = finish(engine)
    assert engine.scheduler.num_preemptions == 1
    assert outputs["b"].num_cached_tokens == 0


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("can't start new thread")])
def test_a_store_that_is_interrupted_while_it_is_made(error: BaseException) -> None:
    engine = make_engine("retention", pages=9, budget=7, seqs=4, swap="4MB")
    always_swap(engine)
    swapper = engine.swapper
    make, errors = swapper._make, [error]
    swapper._store = None

    def failing() -> SwapStore:
        if errors:
            raise errors.pop()
        return make()

    swapper._make = failing
    for i in range(3):
        engine.add_request(str(i), prompt_of(8 + i, seed=i), greedy(14))
    while errors:
        with contextlib.suppress(KeyboardInterrupt):
            engine.step()
    assert len(finish(engine, max_steps=300)) == 3


def test_a_start_refused_beside_a_copy_is_tried_again() -> None:
    """The only state that is kept is being copied for c when b asks; then it can go."""
    engine = make_engine("retention", pages=40, seqs=2, page_size=32, caching=True)
    run_one(engine, prompt_of(33), greedy(3))
    engine.add_request("c", prompt_of(32) + prompt_of(2, seed=7), greedy(15))
    engine.add_request("b", prompt_of(6, seed=9), greedy(2))
    order: list[str] = []
    while engine.has_unfinished_requests():
        order += [output.request_id for output in engine.step() if output.finished]
        engine.check()
    assert order == ["b", "c"]


@pytest.mark.parametrize("name", STATEFUL)
def test_the_same_scoring_prompt_again_hits_below_its_first_row(name: str) -> None:
    engine = keeping(name)
    prompt, params = prompt_of(33), greedy(2, prompt_logprobs=0, prompt_logprobs_start=15)
    for cached in (0, 12, 12):
        output, tokens, rows = counted(engine, prompt, params)
        assert output.num_cached_tokens == cached and tokens == 33 - cached + 1
        assert rows == 32 - 14 + 2
        assert_dense(output, name)
