"""Outputs that follow a schema, a regex or a grammar, whatever else happens to their sequences."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any, cast

import pytest
import torch

from spying import Spy
from tiny import FAMILIES, assert_same, finish
from yocolm.engine.engine import Engine
from yocolm.engine.guided import Guide, GuidedParams, GuideFactory
from yocolm.engine.outputs import CompletionOutput, RequestOutput
from yocolm.engine.request import Sequence as Sample
from yocolm.engine.sampling_params import SamplingParams
from yocolm.engine.settings import EngineSettings
from yocolm.errors import RequestError
from yocolm.models.base import CausalLM
from yocolm.models.registry import build_model, load_tokenizer
from yocolm.tokenizer import JsonTokenizer, Tokenizer

END = 0
PROMPT = [5, 6, 7]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["a", "é"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["name", "count", "kind", "tags"],
    "additionalProperties": False,
}
REGEX = r"[a-c]{2,4}-[0-9]{1,9}(é|日本)"
CHOICES = ["yes", "no", 'a "quoted"\nline \\ 😀', "yes, but"]
SUM = 'start: sum ("+" sum){0,3}\nsum: "(" one ("+" one){0,2} ")" | one\none: /[1-9]{1,2}/\n'


@cache
def tokenizer() -> JsonTokenizer:
    found = load_tokenizer("bundled")
    assert isinstance(found, JsonTokenizer)
    return found


@cache
def model(vocab: int) -> Spy:
    module = build_model(replace(FAMILIES["retention"], vocab_size=vocab), "cpu", torch.float32)
    init = module.init_weights
    assert callable(init)
    init(0)
    return Spy(module)


def engine(
    vocab: int = 4096 + 40,
    ends: Sequence[int] = (END,),
    tokens: Tokenizer | None = None,
    **settings: Any,
) -> Engine:
    """Random weights in a vocabulary that is padded, as many are."""
    config = replace(FAMILIES["retention"], vocab_size=vocab)
    limits = EngineSettings(**{"kv_memory": "2MB", "max_num_seqs": 8, "page_size": 8, **settings})
    return Engine(cast(CausalLM, model(vocab)), config, tokens or tokenizer(), limits, ends)


def guided(
    max_tokens: int = 60, params: dict[str, Any] | None = None, **form: Any
) -> SamplingParams:
    fields = {"max_tokens": max_tokens, "seed": 1, **(params or {})}
    return SamplingParams(structured_outputs=GuidedParams(**form), **fields)


def fits_schema(text: str) -> None:
    value = json.loads(text)
    assert set(value) == set(SCHEMA["properties"]) and len(value["name"]) <= 6
    assert 0 <= value["count"] <= 99 and value["kind"] in ("a", "é")
    assert len(value["tags"]) <= 2 and all(isinstance(tag, bool) for tag in value["tags"])


def run(target: Engine, *params: SamplingParams) -> list[RequestOutput]:
    for i, one in enumerate(params):
        target.add_request(str(i), PROMPT, one)
    done = finish(target)
    return [done[str(i)] for i in range(len(params))]


def stopped(output: RequestOutput) -> list[CompletionOutput]:
    assert output.error is None
    assert [sample.finish_reason for sample in output.outputs] == ["stop"] * len(output.outputs)
    return output.outputs


FORMS: dict[str, tuple[dict[str, Any], Any]] = {
    "json": ({"json": SCHEMA}, fits_schema),
    "json text": ({"json": json.dumps(SCHEMA)}, fits_schema),
    "regex": ({"regex": REGEX}, lambda text: re.fullmatch(REGEX, text)),
    "choice": ({"choice": CHOICES}, lambda text: text in CHOICES),
    "grammar": ({"grammar": SUM}, lambda text: re.fullmatch(r"[()+\d]+", text) and eval(text)),
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("temperature", [0.0, 1.0, 50.0])
def test_every_output_has_the_form(name: str, temperature: float) -> None:
    form, check = FORMS[name]
    params = [
        guided(params={"seed": seed, "temperature": temperature, "n": 2}, max_tokens=240, **form)
        for seed in range(3)
    ]
    for output in run(engine(), *params):
        for sample in stopped(output):
            assert check(sample.text) is not False, sample.text
            assert sample.text == tokenizer().decode(sample.token_ids)


def test_many_choices() -> None:
    choices = [f"{i} / [{i}] \\d \n#é" for i in range(10_000)]
    for output in run(engine(), *(guided(choice=choices, params={"seed": s}) for s in range(3))):
        assert stopped(output)[0].text in choices


def test_any_object() -> None:
    form = guided(json_object=True, max_tokens=400, params={"logit_bias": {}})
    (output,) = run(engine(), form)
    (sample,) = output.outputs
    if sample.finish_reason == "stop":  # a random model may never close it
        assert isinstance(json.loads(sample.text), dict)
    assert sample.text.startswith("{")


def test_every_choice_can_be_drawn() -> None:
    params = [
        guided(choice=CHOICES, params={"n": 8, "seed": seed, "temperature": 50.0})
        for seed in range(8)
    ]
    found = {sample.text for output in run(engine(), *params) for sample in stopped(output)}
    assert found == set(CHOICES)


@pytest.mark.parametrize("limits", [{"kv_memory": 51_200}, {"max_num_batched_tokens": 3}])
def test_sequences_that_are_preempted_cut_and_forked(limits: dict[str, Any]) -> None:
    """What they draw is what they draw alone."""
    params = [
        guided(22, {"n": 3, "seed": seed, "logprobs": 0}, regex="[ab]{20}x") for seed in range(3)
    ]
    roomy = run(engine(), *params)
    target = engine(**limits)
    tight = run(target, *params)
    if "kv_memory" in limits:
        assert target.scheduler.num_preemptions > 0
    for ours, theirs in zip(tight, roomy, strict=True):
        assert_same(ours, theirs)
        assert all(re.fullmatch("[ab]{20}x", sample.text) for sample in stopped(ours))


def test_neighbours_draw_what_they_would_draw_without() -> None:
    """Bit for bit, logprobs included."""
    plain = [
        SamplingParams(seed=i, max_tokens=12, logprobs=3, temperature=0.9, top_p=top_p, min_p=0.01)
        for i, top_p in enumerate((1.0, 0.9, 0.5))
    ]
    without = run(engine(), *plain, *[SamplingParams(seed=9, max_tokens=12)] * 2)[:3]
    beside = run(engine(), *plain, guided(12, regex="[a-z]+"), guided(12, regex="[a-z]+"))[:3]
    for ours, theirs in zip(beside, without, strict=True):
        assert ours.outputs == theirs.outputs


def test_the_end_is_allowed_where_the_grammar_may_end() -> None:
    """Nowhere else, however likely it is; and then it comes."""
    wants_to_end = {"logit_bias": {END: 100.0}, "temperature": 0.0}
    (sample,) = run(engine(), guided(regex="a{3,9}", params=wants_to_end))[0].outputs
    assert sample.text == "aaa" and sample.token_ids[-1] == END
    assert (sample.finish_reason, sample.stop_reason) == ("stop", None)
    (sample,) = run(engine(), guided(regex="(a|b)*", params=wants_to_end))[0].outputs
    assert sample.text == "" and sample.token_ids == [END]


def test_a_complete_output_ends_without_an_end_token() -> None:
    (sample,) = run(engine(), guided(choice=["yes"]))[0].outputs
    assert sample.text == "yes" and END not in sample.token_ids
    assert (sample.finish_reason, sample.stop_reason) == ("stop", None)


def test_min_tokens_and_ignored_ends() -> None:
    wants_to_end = {"logit_bias": {END: 100.0}, "temperature": 0.0}
    long = guided(regex="(a|b){3,40}", params={**wants_to_end, "min_tokens": 5})
    (sample,) = run(engine(), long)[0].outputs
    assert len(sample.token_ids) == 6 and sample.token_ids[-1] == END
    ignoring = guided(12, regex="(a|b)+", params={**wants_to_end, "ignore_eos": True})
    (sample,) = run(engine(), ignoring)[0].outputs
    assert len(sample.token_ids) == 12 and sample.finish_reason == "length"
    for more in ({"ignore_eos": True}, {"min_tokens": 50}, {"ignore_eos": True, "min_tokens": 50}):
        (sample,) = run(engine(), guided(choice=["no"], params={**wants_to_end, **more}))[0].outputs
        assert sample.text == "no" and sample.finish_reason == "stop"


def test_other_limits_still_hold() -> None:
    (sample,) = run(engine(), guided(3, regex="a{50}", params={"logit_bias": {40: 9.0}}))[0].outputs
    assert len(sample.token_ids) == 3 and sample.finish_reason == "length"
    assert set(sample.text) == {"a"}
    (sample,) = run(engine(), guided(regex="ab+c", params={"stop": "b"}))[0].outputs
    assert sample.text == "a" and sample.stop_reason == "b"


def test_penalties_and_biases_do_not_lead_outside() -> None:
    outside = tokenizer().encode("z")[0]
    pushed = {"logit_bias": {outside: 100.0}, "repetition_penalty": 1.5, "top_k": 1}
    (output,) = run(engine(), guided(regex="[ab]{9}", params=pushed))
    assert re.fullmatch("[ab]{9}", stopped(output)[0].text)


def test_streams_of_several_ends() -> None:
    """Every end token that the model has may end it."""
    for end in (END, 9):
        likely = {"logit_bias": {end: 100.0}, "temperature": 0.0}
        (sample,) = run(engine(ends=(END, 9)), guided(regex="a+", params=likely))[0].outputs
        assert sample.text == "a" and sample.token_ids[-1] == end


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"regex": "(a"}, "structured_outputs.regex cannot be used: .*unclosed group"),
        ({"regex": r"(a)\1"}, "backreferences are not supported"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"json": {"type": "objekt"}}, "structured_outputs.json cannot be used: .*objekt"),
        ({"json": {"unevaluatedProperties": False}}, "Unimplemented keys.*unevaluatedProperties"),
        ({"json": {"type": "string", "pattern": "(("}}, "structured_outputs.json cannot be used"),
        ({"json": False}, "structured_outputs.json cannot be used"),
        ({"grammar": "start: foo"}, "structured_outputs.grammar cannot be used: .*foo"),
        ({"grammar": "???"}, "structured_outputs.grammar cannot be used"),
        ({"grammar": 'start: ("a"{1000}){1000}'}, "grammar cannot be used: .*Too many items"),
        ({"grammar": "start: " + "(" * 9999 + '"a"' + ")" * 9999}, "too deeply nested"),
        ({"regex": "(" * 9999 + "a" + ")" * 9999}, "structured_outputs.regex cannot be used"),
        ({"json": {"$ref": "#"}}, "json cannot be used: it allows no output"),
        ({"json": {"$ref": "file:///etc/passwd"}}, "json cannot be used: .*not present"),
        ({"choice": ["\ud800"]}, "choice cannot be used: .*surrogates"),
    ],
)
def test_forms_that_cannot_be(form: dict[str, Any], message: str) -> None:
    target = engine()
    with pytest.raises(RequestError, match=message) as caught:
        target.add_request("bad", PROMPT, guided(**form))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500
    with pytest.raises(RequestError, match=message):
        target.validate(PROMPT, guided(**form))
    assert not target.has_unfinished_requests()


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({}, "has none of them; give one of json, json_object, regex, choice, grammar"),
        ({"json": {}, "regex": "a"}, "has json and regex; give one"),
        ({"json": "{broken"}, "json is not JSON"),
        ({"json": [1]}, "must be a JSON schema"),
        ({"json": {"a": object()}}, "json is not JSON"),
        ({"regex": 5}, "regex=5 must be text"),
        ({"grammar": ["a"]}, "must be text"),
        ({"choice": "yes"}, "must be a list of 1 to"),
        ({"choice": []}, "must be a list of 1 to"),
        ({"choice": ["a", 5]}, "holds 5; give texts"),
        ({"choice": [""]}, "holds ''"),
        ({"json_object": 5}, "json_object=5 must be True or False"),
        ({"json_object": False}, "none of them"),
    ],
)
def test_parameters_that_cannot_be(form: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        GuidedParams(**form)


def test_what_an_engine_may_lack() -> None:
    with pytest.raises(RequestError, match="structured_outputs=5 must be GuidedParams"):
        SamplingParams(structured_outputs=cast(Any, 5))
    with pytest.raises(RequestError, match="needs an end-of-text token"):
        engine(ends=()).add_request("one", PROMPT, guided(regex="a"))
    without = engine()
    bare = Engine(without.runner.model, without.config, None, without.settings, (END,))
    with pytest.raises(RequestError, match="needs a tokenizer"):
        bare.add_request("one", PROMPT, guided(regex="a"))


def test_a_parser_that_gives_up_fails_its_request_alone() -> None:
    target = engine()
    target.add_request("bad", PROMPT, guided(regex="[ab]{30}", params={"n": 2}))
    target.add_request("good", PROMPT, guided(regex="[ab]{9}"))
    target.step()
    target.scheduler.requests["bad"].sequences[1].guide = BrokenGuide.of(target)
    done = finish(target)
    assert done["bad"].error == "structured_outputs: too complex" and done["bad"].finished
    assert {sample.finish_reason for sample in done["bad"].outputs} == {"error"}
    assert re.fullmatch("[ab]{9}", stopped(done["good"])[0].text)


class BrokenGuide(Guide):
    """Its parser has met a limit."""

    @classmethod
    def of(cls, target: Engine) -> "BrokenGuide":
        guide = target.guides.start(GuidedParams(regex="a"))
        return cls(guide.matcher, guide.words)

    @property
    def error(self) -> str:
        return "structured_outputs: too complex"


def test_masks_are_computed_while_the_model_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    target = engine()
    order: list[str] = []
    start, write = target.runner._mask_worker.start, target.runner.model.write

    def watched_start(guides: Sequence[Guide]) -> Any:
        order.append(f"masks of {len(guides)}")
        return start(guides)

    def watched_write(*arguments: Any) -> Any:
        order.append("write")
        return write(*arguments)

    monkeypatch.setattr(target.runner._mask_worker, "start", watched_start)
    monkeypatch.setattr(target.runner.model, "write", watched_write)
    run(target, guided(2, regex="[ab]{9}", params={"n": 3}), SamplingParams(max_tokens=2, seed=0))
    # The first draw of three samples needs one mask; the plain request never one.
    assert order == ["masks of 1", "write", "masks of 3", "write"]


@pytest.mark.parametrize("at", range(4))
def test_an_interrupt_leaves_guides_where_the_outputs_are(
    at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the masks, while the model runs, between a guide and its output, and behind both."""
    target = engine()
    for i in range(3):
        target.add_request(str(i), PROMPT, guided(regex="[ab]{3}c{4}[de]{5}", params={"n": 2}))
    for _ in range(3):
        target.step()
    calls = iter(range(3))

    def cut(*arguments: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if at == 0:
            patch.setattr(target.runner._mask_worker, "start", cut)
        elif at == 1:
            patch.setattr(target.runner.model, "write", cut)
        elif at == 2:
            append = Sample.append

            def half(seq: Sample, token_id: int, logprob: float) -> None:
                if next(calls) < 2:
                    return append(seq, token_id, logprob)
                assert seq.guide is not None
                seq.guide.advance(token_id)
                raise KeyboardInterrupt

            patch.setattr(Sample, "append", half)
        else:
            patch.setattr(target, "_keep_samples", cut)
        with pytest.raises(KeyboardInterrupt):
            target.step()
    for output in finish(target).values():
        for sample in stopped(output):
            whole = tokenizer().decode(sample.token_ids)
            assert re.fullmatch("[ab]{3}c{4}[de]{5}", whole), whole


def test_a_grammar_is_compiled_once() -> None:
    target = engine()
    for i in range(3):
        target.add_request(str(i), PROMPT, guided(json=dict(SCHEMA)))
    assert target.guides._compile.cache_info().misses == 1
    finish(target)


def test_a_tokenizer_of_bytes_alone() -> None:
    """Such as the YOCO authors', which has no tokenizer.json."""

    class Bytes(Tokenizer):
        vocab_size, bos_token_id, eos_token_ids = 257, None, (256,)

        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            return list(text.encode())

        def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
            return bytes(i for i in ids if i < 256).decode(errors="replace")

        def is_special(self, token_id: int) -> bool:
            return token_id == 256

        def token_bytes(self, token_id: int) -> bytes | None:
            return bytes([token_id]) if token_id < 256 else b"<end>"

        def token_string(self, token_id: int) -> str | None:
            return None

    target = engine(vocab=260, ends=(256,), tokens=Bytes())
    params = [guided(regex=REGEX, params={"seed": seed}, max_tokens=200) for seed in range(5)]
    for output in run(target, *params):
        assert re.fullmatch(REGEX, stopped(output)[0].text)


def test_a_vocabulary_smaller_than_the_tokenizers() -> None:
    (output,) = run(engine(vocab=300), guided(regex="[a-e]{5}"))
    assert re.fullmatch("[a-e]{5}", stopped(output)[0].text)


def test_a_grammar_in_use_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where many others were compiled since; afterwards it is let go."""
    monkeypatch.setattr("yocolm.engine.guided.CACHED_GRAMMARS", 1)
    target = engine()
    compiled, compile_now = [], GuideFactory._compile_now

    def counted(self: GuideFactory, params: GuidedParams) -> Guide:
        compiled.append(params.regex)
        return compile_now(self, params)

    monkeypatch.setattr(GuideFactory, "_compile_now", counted)
    factory = GuideFactory(target.tokenizer, target.config.vocab_size, target.eos_token_ids)
    first, second = GuidedParams(regex="a"), GuidedParams(regex="b")
    for params in (first, second, first, second):
        factory.start(params)
    assert compiled == ["a", "b"] and len(factory._held) == 2
    del first, params, second
    assert len(factory._held) == 1  # of the one in the cache
