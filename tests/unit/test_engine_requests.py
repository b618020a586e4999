"""Requests at their limits: what is refused, and how; what ends them; abort in every phase."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from scripted import tokenizer
from tiny import (
    FAMILIES,
    VOCAB,
    assert_dense,
    assert_empty,
    assert_same,
    finish,
    greedy,
    make_engine,
    prompt_of,
    run,
    run_one,
    samples,
    tiny_model,
)
from yocolm.engine.engine import Engine
from yocolm.engine.sampling_params import SamplingParams
from yocolm.engine.settings import EngineSettings
from yocolm.errors import ConfigError, RequestError
from yocolm.models.base import CausalLM

NAME = "retention"
EOS = 7


def rejected(engine: Engine, prompt: Any, message: str, **params: Any) -> None:
    """Refused by a message that says so, without a trace."""
    with pytest.raises(RequestError, match=message):
        engine.add_request("bad", prompt, SamplingParams(**params))
    assert not engine.has_unfinished_requests()
    engine.check()


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "no tokens"),
        ((), "no tokens"),
        ([0, VOCAB], f"prompt token id {VOCAB} is outside the vocabulary: give 0 to {VOCAB - 1}"),
        ([-1], "prompt token id -1"),
        ([1.0], "prompt holds 1.0; token ids are integers"),
        ([True], "prompt holds True"),
        (["a"], "prompt holds 'a'"),
        ("text", "no tokenizer"),
        (None, "prompt is None; it must be text or a list of token ids"),
        (5, "prompt is 5"),
        (b"\x01", "prompt is b"),
        ({}, "give 'prompt' or 'prompt_token_ids'"),
        ({"prompt_tokens": [1]}, r"keys \['prompt_tokens'\]"),
        ({"prompt_token_ids": []}, "no tokens"),
    ],
)
def test_bad_prompts(prompt: Any, message: str) -> None:
    rejected(make_engine(NAME), prompt, message)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"logit_bias": {VOCAB: 1.0}}, f"logit_bias token id {VOCAB} is outside"),
        ({"stop_token_ids": [3, 999]}, "stop_token_ids 999 is outside"),
        ({"logprobs": VOCAB + 1}, f"logprobs={VOCAB + 1} exceeds the vocabulary of {VOCAB}"),
        ({"prompt_logprobs": VOCAB + 1}, "prompt_logprobs=62 exceeds"),
        ({"prompt_logprobs": 1, "prompt_logprobs_start": 5}, "prompt_logprobs_start=5 is past"),
        ({"stop": ["x"]}, "need a tokenizer: use stop_token_ids"),
    ],
)
def test_parameters_that_do_not_fit_the_model(params: dict[str, Any], message: str) -> None:
    rejected(make_engine(NAME), [1, 2, 3, 4], message, **params)


def test_tokens_of_other_media_are_refused() -> None:
    config = replace(FAMILIES["gemma4"], media_token_ids=(("image", 7), ("audio", 9)))
    engine = Engine(cast(CausalLM, tiny_model("gemma4")), config)
    with pytest.raises(RequestError, match="token id 9 at place 2 stands for audio input"):
        engine.add_request("one", [1, 2, 9], greedy())
    assert not engine.has_unfinished_requests()


def test_whatever_is_an_integer_is_a_token() -> None:
    wanted = run_one(make_engine(NAME), [1, 2, 3], greedy())
    engine = make_engine(NAME)
    prompts: list[Any] = [(1, 2, 3), list(np.arange(1, 4)), range(1, 4)]
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, greedy())
    engine.add_request("dict", {"prompt_token_ids": [1, 2, 3]}, greedy())
    for output in finish(engine).values():
        assert_same(output, wanted)


def test_text_and_token_ids_together() -> None:
    """As in vLLM, the ids are what counts and the text comes back."""
    config = replace(FAMILIES[NAME], vocab_size=VOCAB)
    assert config.vocab_size < tokenizer().vocab_size
    engine = make_engine(NAME, tokenizer=tokenizer())
    engine.add_request("one", {"prompt": "ab", "prompt_token_ids": [5, 6]}, greedy())
    output = finish(engine)["one"]
    assert output.prompt == "ab" and output.prompt_token_ids == [5, 6]


def test_arguments_of_the_wrong_type() -> None:
    engine: Any = make_engine(NAME)
    for request_id, params in ((5, None), (None, None), (["a"], None), ("a", {"n": 1})):
        with pytest.raises(RequestError, match="must be text and params=.* SamplingParams"):
            engine.add_request(request_id, [1, 2], params)
    assert not engine.has_unfinished_requests()


def test_half_characters_are_refused() -> None:
    engine = make_engine(NAME, tokenizer=tokenizer())
    rejected(engine, "bad \udcff", "is half a character, .* give UTF-8")


def test_the_block_table_is_no_wider_than_the_pool() -> None:
    config = replace(FAMILIES[NAME], max_position_embeddings=2**31 - 1)
    model = make_engine(NAME).runner.model
    engine = Engine(model, config, settings=EngineSettings(kv_memory="1MB", max_num_seqs=2))
    assert len(run_one(engine, prompt_of(5), greedy(3)).outputs[0].token_ids) == 3


def test_a_request_id_in_use() -> None:
    engine = make_engine(NAME)
    engine.add_request("one", [1], greedy())
    with pytest.raises(RequestError, match="request_id 'one' is in use"):
        engine.add_request("one", [2], greedy())
    assert finish(engine)["one"].prompt_token_ids == [1]
    engine.add_request("one", [2], greedy())
    assert finish(engine)["one"].prompt_token_ids == [2]


def test_prompts_at_the_limit_of_the_context() -> None:
    engine = make_engine(NAME, length=20)
    rejected(engine, prompt_of(20), "20 tokens leaves no room for output within max_model_len=20")
    rejected(engine, prompt_of(21), "max_model_len=20", max_tokens=0, prompt_logprobs=0)
    output = run_one(engine, prompt_of(19), greedy(5))
    assert len(output.outputs[0].token_ids) == 1
    assert output.outputs[0].finish_reason == "length"
    assert_dense(output, NAME)
    scored = run_one(engine, prompt_of(20), greedy(0, prompt_logprobs=0))
    assert scored.outputs[0].token_ids == [] and scored.outputs[0].finish_reason == "length"
    assert_dense(scored, NAME)
    to_the_end = run_one(engine, prompt_of(3), SamplingParams(max_tokens=None, seed=0))
    assert len(to_the_end.outputs[0].token_ids) == 17


def test_prompts_at_the_limit_of_the_pages() -> None:
    engine = make_engine(NAME, pages=3, page_size=4)
    rejected(engine, prompt_of(13), "the 12 tokens that the KV pages hold", max_tokens=1)
    rejected(engine, prompt_of(9), "lower max_tokens or raise kv_memory", max_tokens=5)
    for length, max_tokens in ((12, 1), (9, 4), (1, 12)):
        output = run_one(engine, prompt_of(length), greedy(max_tokens))
        assert len(output.outputs[0].token_ids) == max_tokens
        assert_dense(output, NAME)


@pytest.mark.parametrize("name", FAMILIES)
def test_memory_that_holds_nothing(name: str) -> None:
    with pytest.raises(ConfigError, match=r"kv_memory=64 bytes hold no page .*at least \d+ bytes"):
        make_engine_with(name, kv_memory=64, max_num_seqs=2)
    with pytest.raises(ConfigError, match="kv_memory='lots' is no amount"):
        make_engine_with(name, kv_memory="lots")
    least = 3 * make_engine(name).spec.slot_bytes(4) + 2 * make_engine(name).spec.page_bytes(8, 4)
    with pytest.raises(ConfigError, match=f"at least {least} bytes"):
        make_engine_with(name, kv_memory=least - 1, max_num_seqs=2, page_size=8)
    engine = make_engine_with(name, kv_memory=least, max_num_seqs=2, page_size=8)
    assert_dense(run_one(engine, prompt_of(4), greedy(4)), name)


def make_engine_with(name: str, **settings: Any) -> Engine:
    template = make_engine(name)
    return Engine(template.runner.model, FAMILIES[name], None, EngineSettings(**settings))


@pytest.mark.parametrize("value", [0, 3])
def test_prompt_logprobs_may_be_refused(value: int) -> None:
    engine = make_engine_with(NAME, kv_memory="1MB", prompt_logprobs="reject")
    rejected(engine, [1, 2], f"prompt_logprobs={value}: this engine is set", prompt_logprobs=value)
    assert run_one(engine, [1, 2], greedy(prompt_logprobs=None)).prompt_logprobs is None
    with pytest.raises(ConfigError, match="prompt_logprobs='no'"):
        EngineSettings(prompt_logprobs="no")  # pyright: ignore[reportArgumentType]


def test_shapes_of_results() -> None:
    prompt = prompt_of(6)
    output = run_one(make_engine(NAME), prompt, greedy(3, logprobs=0, prompt_logprobs=0))
    assert output.prompt is None and output.prompt_token_ids == prompt
    assert output.finished and output.num_cached_tokens == 0
    assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
    assert [list(entry or {}) for entry in output.prompt_logprobs[1:]] == [[t] for t in prompt[1:]]
    (sample,) = output.outputs
    assert sample.logprobs is not None
    assert [list(entry) for entry in sample.logprobs] == [[token] for token in sample.token_ids]
    assert sample.cumulative_logprob == pytest.approx(
        sum(entry[t].logprob for entry, t in zip(sample.logprobs, sample.token_ids, strict=True))
    )
    assert (sample.index, sample.text, sample.finished()) == (0, "", True)


def test_no_logprobs_unless_asked_for() -> None:
    output = run_one(make_engine(NAME), prompt_of(6), SamplingParams())
    (sample,) = output.outputs
    assert output.prompt_logprobs is sample.logprobs is sample.cumulative_logprob is None
    assert len(sample.token_ids) == 16 and sample.finish_reason == "length"


def test_one_token_in_and_one_out() -> None:
    output = run_one(make_engine(NAME), [5], greedy(1))
    assert output.prompt_logprobs == [None] and len(output.outputs[0].token_ids) == 1
    assert_dense(output, NAME)


def test_greedy_ignores_what_cuts_the_distribution() -> None:
    wanted = run_one(make_engine(NAME), prompt_of(8), greedy(8))
    cut = greedy(8, top_p=0.01, top_k=1, min_p=1.0, seed=5)
    assert_same(run_one(make_engine(NAME), prompt_of(8), cut), wanted)
    tokens = run_one(make_engine(NAME), prompt_of(8), greedy(8, n=3)).outputs
    assert [sample.token_ids for sample in tokens] == [wanted.outputs[0].token_ids] * 3


def test_samples_differ_unless_seeded() -> None:
    engine = make_engine(NAME)
    free = [run_one(engine, prompt_of(8), samples(3, seed=None)) for _ in range(2)]
    fixed = [run_one(engine, prompt_of(8), samples(3, seed=4)) for _ in range(2)]
    drawn = [tuple(sample.token_ids) for output in free for sample in output.outputs]
    assert len(set(drawn)) == 6
    assert_same(fixed[0], fixed[1])
    # The first of several samples is the one that a single sample would be.
    single = run_one(engine, prompt_of(8), samples(1, seed=4))
    assert single.outputs[0].token_ids == fixed[0].outputs[0].token_ids


def test_end_tokens() -> None:
    likely = {"logit_bias": {EOS: 100.0}}
    engine = make_engine(NAME, eos=(EOS, 9))
    sample = run_one(engine, prompt_of(5), greedy(6, **likely)).outputs[0]
    assert (sample.token_ids, sample.finish_reason, sample.stop_reason) == ([EOS], "stop", None)
    sample = run_one(engine, prompt_of(5), greedy(6, min_tokens=3, **likely)).outputs[0]
    assert EOS not in sample.token_ids[:3] and 9 not in sample.token_ids[:3]
    assert sample.token_ids[3:] == [EOS] and sample.finish_reason == "stop"
    sample = run_one(engine, prompt_of(5), greedy(3, min_tokens=3, **likely)).outputs[0]
    assert EOS not in sample.token_ids and sample.finish_reason == "length"
    sample = run_one(engine, prompt_of(5), greedy(3, ignore_eos=True, **likely)).outputs[0]
    assert sample.token_ids == [EOS] * 3 and sample.finish_reason == "length"
    both = greedy(3, ignore_eos=True, min_tokens=3, **likely)
    assert run_one(engine, prompt_of(5), both).outputs[0].token_ids == [EOS] * 3


def test_stop_tokens() -> None:
    engine = make_engine(NAME)
    likely = {"logit_bias": {EOS: 100.0}, "stop_token_ids": [3, EOS]}
    sample = run_one(engine, prompt_of(5), greedy(6, **likely)).outputs[0]
    assert (sample.token_ids, sample.finish_reason, sample.stop_reason) == ([EOS], "stop", EOS)
    sample = run_one(engine, prompt_of(5), greedy(6, min_tokens=2, **likely)).outputs[0]
    assert not set(sample.token_ids[:2]) & {3, EOS} and sample.token_ids[2:] == [EOS]


def test_end_tokens_that_the_model_does_not_have() -> None:
    engine = make_engine(NAME, eos=(VOCAB, 50256, -1))
    output = run_one(engine, prompt_of(5), greedy(4, min_tokens=3))
    assert len(output.outputs[0].token_ids) == 4
    assert_dense(output, NAME)


def started(engine: Engine, steps: int) -> None:
    for _ in range(steps):
        engine.step()


def until(engine: Engine, event: Callable[[], bool]) -> None:
    for _ in range(100):
        if event():
            return
        engine.step()
    pytest.fail("it did not happen")


def check_abort(engine: Engine, request_id: str, num_tokens: int | None = None) -> None:
    """Abort; the others go on as if nothing had been, and all memory comes back."""
    output = engine.abort(request_id)
    engine.check()
    assert output is not None and output.finished and output.error is None
    assert {sample.finish_reason for sample in output.outputs} <= {"abort", "length"}
    if num_tokens is not None:
        assert [len(sample.token_ids) for sample in output.outputs] == [num_tokens]
    assert engine.abort(request_id) is None
    for other in finish(engine).values():
        assert_dense(other, NAME)
    assert_empty(engine)


def test_abort_while_waiting() -> None:
    engine = make_engine(NAME, seqs=1)
    engine.add_request("running", prompt_of(9), greedy(4))
    engine.add_request("victim", prompt_of(8), greedy(4))
    started(engine, 2)
    check_abort(engine, "victim", 0)
    engine.add_request("victim", prompt_of(8), greedy(4))
    check_abort(engine, "victim", 0)


@pytest.mark.parametrize("steps", range(1, 9))
def test_abort_at_every_step_of_a_chunked_prefill(steps: int) -> None:
    engine = make_engine(NAME, budget=5)
    engine.add_request("other", prompt_of(4), greedy(9))
    engine.add_request("victim", prompt_of(25), greedy(4))
    engine.add_request("behind", prompt_of(6), greedy(4))
    started(engine, steps)
    check_abort(engine, "victim", max(0, steps - 6))


def test_abort_while_preempted() -> None:
    engine = make_engine(NAME, pages=9, budget=7)
    for i in range(3):
        engine.add_request(str(i), prompt_of(8 + i, i), greedy(10))
    until(engine, lambda: engine.scheduler.num_preemptions > 0)
    assert engine.scheduler.waiting[0].request.request_id == "2"
    check_abort(engine, "2")


@pytest.mark.parametrize("limits", [{}, {"seqs": 2}, {"budget": 2}])
@pytest.mark.parametrize("later", range(3))
def test_abort_after_a_fork(limits: dict[str, Any], later: int) -> None:
    """At once, with the copies still to be made, and later."""
    engine = make_engine(NAME, **limits)
    engine.add_request("other", prompt_of(3, 1), greedy(9))
    engine.add_request("victim", prompt_of(6), samples(4, 9))
    until(engine, lambda: any(len(s.request.sequences) > 1 for s in engine.scheduler.running))
    started(engine, later)
    check_abort(engine, "victim")


def test_abort_of_what_is_not_there() -> None:
    engine = make_engine(NAME)
    assert engine.abort("nobody") is None
    run_one(engine, prompt_of(3), greedy(1))
    assert engine.abort("one") is None


def test_what_follows_an_abort_is_right() -> None:
    engine = make_engine(NAME, pages=6, seqs=2)
    for i in range(4):
        engine.add_request("victim", prompt_of(15, i), greedy(6))
        started(engine, i)
        assert engine.abort("victim") is not None
        outputs = run(engine, {"next": (prompt_of(13, 9), greedy(6))})
        assert_dense(outputs["next"], NAME)


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("page_size", None, "must be an integer"),
        ("checkpoint_spacing", None, "must be an integer"),
        ("max_num_batched_tokens", None, "must be an integer"),
        ("num_checkpoints", -1, "at least 0"),
        ("num_checkpoints", 10**400, "at most"),
        ("mean_tokens", 10**400, "at most"),
        ("ttft_target", 10**400, "seconds above 0 to 1e"),
        ("tpot_target", float("nan"), "seconds above 0"),
        ("tpot_target", 0, "seconds above 0"),
        ("priority_aging", -1.0, "seconds from 0"),
        ("priority_aging", None, "seconds from 0"),
        ("policy", "best", "must be one of fcfs, traffic"),
        ("prefix_caching", 1, "must be True or False"),
    ],
)
def test_settings_that_cannot_be(setting: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineSettings(**{setting: value})


@pytest.mark.parametrize("name", ["kv_memory", "swap_space"])
@pytest.mark.parametrize("value", ["9" * 400 + "GB", 10**400, "-1", "much", True])
def test_amounts_that_cannot_be(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        make_engine_with(NAME, **{"kv_memory": "1MB", name: value})


def test_too_many_checkpoints_are_named_in_the_remedy() -> None:
    with pytest.raises(ConfigError, match="lower .*num_checkpoints"):
        make_engine_with(NAME, kv_memory="1MB", num_checkpoints=10**9)


@pytest.mark.parametrize("value", [True, 1.5, "0", 2**40, None])
def test_priorities_that_cannot_be(value: Any) -> None:
    engine = make_engine(NAME)
    with pytest.raises(RequestError, match="priority="):
        engine.add_request("one", [1, 2], greedy(1), priority=value)
    with pytest.raises(RequestError, match="ttft_target="):
        engine.add_request("one", [1, 2], greedy(1), ttft_target=-1.0)
    engine.check()
