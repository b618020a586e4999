"""Logits that are not finite fail their request, a step that raises fails its own; others go on."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from spying import Spy
from tiny import (
    assert_dense,
    assert_same,
    finish,
    fresh_model,
    greedy,
    make_engine,
    prompt_of,
    run,
    run_one,
    samples,
    tiny_model,
)
from yocolm.engine.engine import Engine
from yocolm.engine.outputs import RequestOutput
from yocolm.engine.sampling_params import SamplingParams

UNTIED = ["retention-grouped", "window-grouped", "llama"]
BAD = 60  # its embedding is not finite
LIMITS: dict[str, Any] = {"pages": 16, "seqs": 4, "budget": 11}  # pages and slots change hands
EVERY = pytest.mark.parametrize("name", UNTIED)


def poisoned_model(name: str, value: float) -> nn.Module:
    model = fresh_model(name)
    with torch.no_grad():
        model.get_parameter("embed_tokens.weight")[BAD] = value
    return model


def poisoned_engine(name: str, value: float = float("nan")) -> Engine:
    return make_engine(name, model=poisoned_model(name, value), **LIMITS)


def good_prompt(length: int, seed: int = 0) -> list[int]:
    return [token % BAD for token in prompt_of(length, seed)]


def bad_prompt(length: int, at: int) -> list[int]:
    prompt = good_prompt(length, seed=99)
    prompt[at] = BAD
    return prompt


def careful(max_tokens: int = 5, **more: Any) -> SamplingParams:
    """Greedy, and never draws the bad token."""
    return greedy(max_tokens, logit_bias={BAD: -100.0}, **more)


def assert_failed(output: RequestOutput) -> None:
    assert output.finished and output.error is not None and "not finite" in output.error
    assert [sample.finish_reason for sample in output.outputs] == ["error"] * len(output.outputs)


@EVERY
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_only_the_request_with_the_bad_token_fails(name: str, value: float) -> None:
    engine = poisoned_engine(name, value)
    for at in (0, 13, 8):
        requests = {str(i): (good_prompt(6 + i, i), careful()) for i in range(3)}
        requests["bad"] = (bad_prompt(14, at), careful())
        requests |= {str(i): (good_prompt(6 + i, i), careful(prompt_logprobs=None)) for i in (4, 5)}
        outputs = run(engine, requests)
        assert_failed(outputs.pop("bad"))
        for output in outputs.values():
            assert_dense(output, name, is_greedy=False)


@EVERY
def test_scores_are_not_needed_to_notice(name: str) -> None:
    engine = poisoned_engine(name)
    unscored, tail = careful(prompt_logprobs=None), careful(prompt_logprobs_start=12)
    for params in (unscored, tail):
        assert_failed(run_one(engine, bad_prompt(14, 2), params))


@EVERY
def test_turning_bad_while_decoding(name: str) -> None:
    """The bad token is drawn first; what was drawn before the failure is kept."""
    engine = poisoned_engine(name)
    engine.add_request("good", good_prompt(7), careful(12))
    engine.add_request("bad", good_prompt(9, 1), greedy(6, logit_bias={BAD: 100.0}))
    outputs = finish(engine)
    assert_failed(outputs["bad"])
    assert outputs["bad"].outputs[0].token_ids == [BAD]
    assert_dense(outputs["good"], name, is_greedy=False)


@EVERY
def test_one_bad_sample_fails_its_request(name: str) -> None:
    engine = poisoned_engine(name)
    some = samples(4, 6, logit_bias={BAD: 5.0}, seed=3)
    output = run_one(engine, good_prompt(9), some)
    assert output.error is not None and len(output.outputs) == 4
    assert any(BAD in sample.token_ids for sample in output.outputs)
    assert {sample.finish_reason for sample in output.outputs} <= {"error", "length"}
    assert_failed(run_one(engine, bad_prompt(9, 3), samples(3)))
    assert_dense(run_one(engine, good_prompt(9), careful()), name, is_greedy=False)


@EVERY
def test_later_owners_of_pages_and_slots_see_nothing_of_it(name: str) -> None:
    engine = poisoned_engine(name)
    for length in (1, 3, 14, 30):
        assert_failed(run_one(engine, bad_prompt(40, 39), careful(prompt_logprobs=None)))
        output = run_one(engine, good_prompt(length), careful(9))
        assert_dense(output, name, is_greedy=False)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_bad_rows_of_logits(value: float) -> None:
    """One row of the step's logits: its owner fails, whoever that is."""
    spy = Spy(tiny_model("retention"))
    engine = make_engine("retention", model=spy)
    requests = {str(i): (prompt_of(5 + i, i), greedy(6, prompt_logprobs=None)) for i in range(4)}
    calls: list[int] = []

    def spoil(logits: Tensor) -> Tensor:
        calls.append(len(logits))
        if len(calls) == 3:
            logits[2] = value
        return logits

    spy.after["logits"] = spoil
    outputs = run(engine, requests)
    assert_failed(outputs.pop("2"))
    for output in outputs.values():
        assert_dense(output, "retention")


def test_one_infinity_among_the_logits() -> None:
    """Minus infinity masks a token; plus infinity is an error."""
    spy = Spy(tiny_model("llama"))
    engine = make_engine("llama", model=spy)
    spy.after["logits"] = lambda logits: logits.index_fill(1, torch.tensor([7]), float("-inf"))
    assert run_one(engine, prompt_of(5), greedy(5)).error is None
    spy.after["logits"] = lambda logits: logits.index_fill(1, torch.tensor([7]), float("inf"))
    assert_failed(run_one(engine, prompt_of(5), greedy(5)))


def once(error: BaseException, after: int) -> Callable[[], None]:
    """Raises at the call after so many."""
    calls = iter(range(after + 1))

    def maybe_raise() -> None:
        if next(calls, None) == after:
            raise error

    return maybe_raise


@pytest.mark.parametrize("method", ["embed", "write", "read", "logits"])
@pytest.mark.parametrize(
    ("error", "after"), [(RuntimeError, 0), (RuntimeError, 3), (ValueError, 1)]
)
def test_a_step_that_raises_fails_its_requests_and_no_others(
    method: str, error: type[Exception], after: int
) -> None:
    for name in ("window-grouped", "retention", "llama"):
        spy = Spy(tiny_model(name))
        engine = make_engine(name, model=spy, seqs=2, budget=4)
        spy.before[method] = once(error("out of memory, say"), after)
        requests = {str(i): (prompt_of(6 + i, i), greedy(7)) for i in range(5)}
        outputs = run(engine, requests)
        failed = [output for output in outputs.values() if output.error is not None]
        assert 1 <= len(failed) <= 2, "only two run at once"
        for output in outputs.values():
            if output in failed:
                assert output.error is not None and "out of memory, say" in output.error
                assert output.outputs[0].finish_reason == "error"
            else:
                assert_dense(output, name)


@pytest.mark.parametrize("name", ["window-grouped", "retention", "llama"])
def test_what_a_failed_step_should_have_copied_is_not_missed(name: str) -> None:
    """Samples whose copies failed, but which had no turn in the step, are computed anew."""
    engine = make_engine(name, budget=4)
    prompt, params = prompt_of(2), samples(2)
    wanted = run_one(make_engine(name), prompt, params)
    engine.add_request("first", prompt_of(2, 1), samples(4))
    engine.add_request("second", prompt, params)
    engine.step()  # computes both prompts; the four samples of the first fill the next step

    def fail(kind: str, sources: list[int], targets: list[int]) -> None:
        raise RuntimeError("no memory to copy")

    copy, engine.runner.state.copy = engine.runner.state.copy, fail
    (output,) = engine.step()
    assert output.request_id == "first" and output.error is not None
    engine.runner.state.copy = copy
    assert_same(finish(engine)["second"], wanted)


@pytest.mark.parametrize("method", ["write", "read", "logits"])
def test_an_interrupted_step_can_be_taken_again(method: str) -> None:
    for name in ("window-grouped", "retention", "llama"):
        spy = Spy(tiny_model(name))
        engine = make_engine(name, model=spy, budget=8)
        for i in range(3):
            engine.add_request(str(i), prompt_of(6 + i, i), greedy(7))
        for after in (1, 2, 5):
            spy.before[method] = once(KeyboardInterrupt(), after)
            with pytest.raises(KeyboardInterrupt):
                finish(engine)
            engine.check()
        outputs = finish(engine)
        assert outputs
        for output in outputs.values():
            assert_dense(output, name)


def test_an_idle_step_does_nothing() -> None:
    engine = make_engine("retention")
    assert engine.step() == []
    assert not engine.has_unfinished_requests()
    engine.check()


@pytest.mark.parametrize("where", ["_keep_prompt_scores", "_keep_samples"])
def test_an_interrupt_between_run_and_results(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing advances twice, and what ended in that step is still delivered."""
    for name in ("window-grouped", "retention", "llama"):
        engine = make_engine(name, "float64", budget=8)
        for i in range(3):
            engine.add_request(
                str(i), prompt_of(6 + i, i), SamplingParams(temperature=0, max_tokens=7)
            )
        done = {}
        for after in (1, 2, 5):
            keep, stop = getattr(engine, where), once(KeyboardInterrupt(), after)

            def interrupted(*args: Any, keep: Any = keep, stop: Any = stop) -> Any:
                stop()
                return keep(*args)

            monkeypatch.setattr(engine, where, interrupted)
            with pytest.raises(KeyboardInterrupt):
                while True:
                    done.update((o.request_id, o) for o in engine.step() if o.finished)
            monkeypatch.setattr(engine, where, keep)
            engine.check()
        while engine.has_unfinished_requests() or len(done) < 3:
            done.update((o.request_id, o) for o in engine.step() if o.finished)
        engine.check()
        for i in range(3):
            params = SamplingParams(temperature=0, max_tokens=7)
            alone = run_one(make_engine(name, "float64"), prompt_of(6 + i, i), params)
            assert done[str(i)].outputs[0].token_ids == alone.outputs[0].token_ids
