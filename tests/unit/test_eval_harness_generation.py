"""Continuations for tasks: where they end, how they are drawn, what is cut of their contexts."""

from pathlib import Path
from typing import Any

import pytest

from harness_world import (
    FAMILIES,
    Naive,
    model_folder,
    open_llm,
    small,
    text_of,
)
from yocolm.engine.sampling_params import SamplingParams
from yocolm.errors import NumericsError, RequestError
from yocolm.eval.harness import TextModel
from yocolm.eval.harness_generation import generation_params

LENGTH = 96


@pytest.fixture(scope="module", params=FAMILIES)
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Naive]:
    folder = model_folder(tmp_path_factory.mktemp("model"), request.param)
    return folder, Naive(folder, request.param, LENGTH)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"), "yoco-fla-gret-tiny")


@pytest.fixture(scope="module")
def model(folder: Path) -> TextModel:
    return small(folder, LENGTH)


def test_greedy_texts_equal_whole_forward_passes(family: tuple[Path, Naive]) -> None:
    folder, naive = family
    asked = [(text_of(words, words), {"max_gen_toks": 10}) for words in (1, 5, 14, 40, 70)]
    assert len(naive.encode(asked[-1][0])) > LENGTH, "no context is cut"
    answers = small(folder, LENGTH).generate_until(asked)
    drawn = [naive.greedy(context, 10) for context, _ in asked]
    assert answers == [naive.text(tokens) for tokens in drawn]
    assert len(set(answers)) > 2


def test_texts_end_before_the_first_stop_string(family: tuple[Path, Naive]) -> None:
    folder, naive = family
    context = text_of(9, 3)
    whole = naive.text(naive.greedy(context, 24))
    *_, first, second = sorted({whole.index(character) for character in whole})
    late, early = whole[second : second + 2], whole[first : first + 2]
    asked = [
        (context, {"until": [late, early, "never seen"], "max_gen_toks": 24, "do_sample": False}),
        (context, {"until": late, "max_gen_toks": 24}),
        (context, {"max_gen_toks": 24}),
    ]
    answers = small(folder, LENGTH).generate_until(asked)
    assert answers == [whole[:first], whole[:second], whole]
    assert 0 < first < second < len(whole)


def test_the_end_of_text_spelled_out_ends_it_too() -> None:
    params = make({"until": ["\n\n"]}, eos="</s>")
    assert params.stop == ["\n\n", "</s>"]
    assert make({}, eos="").stop == []
    assert make({"until": ["", "."], "stop": "."}, eos="").stop == ["."]


def test_the_end_token_ends_a_text(folder: Path) -> None:
    llm = open_llm(folder, LENGTH, kv_memory="16MB")
    model = TextModel(llm)
    (text,) = model.generate_until([("on the", {"max_gen_toks": 12})])
    [output] = llm.generate(
        [llm.get_tokenizer().encode("on the")], SamplingParams(max_tokens=12, temperature=0)
    )
    assert output.outputs[0].text == text
    third = output.outputs[0].token_ids[2]
    llm.engine.eos_token_ids = frozenset({third})
    (shorter,) = model.generate_until([("on the", {"max_gen_toks": 12})])
    first = output.outputs[0].token_ids.index(third)
    assert shorter == llm.get_tokenizer().decode(output.outputs[0].token_ids[:first])
    (whole,) = model.generate_until([("on the", {"max_gen_toks": 12, "ignore_eos": True})])
    assert whole == text


def make(arguments: dict[str, Any], **more: Any) -> SamplingParams:
    fields = {"max_length": 1000, "eos": "", "seed": 0, "context": "a", "repeat": 0}
    return generation_params(arguments, **{**fields, **more})


@pytest.mark.parametrize(
    ("arguments", "temperature"),
    [
        ({}, 0.0),
        ({"temperature": 0.7}, 0.7),
        ({"temperature": 0.0}, 0.0),
        ({"do_sample": False, "temperature": 0.7}, 0.0),
        ({"do_sample": True, "temperature": 0.7}, 0.7),
        ({"do_sample": True}, 1.0),
        ({"do_sample": None, "temperature": None}, 0.0),
    ],
)
def test_greedy_unless_it_is_to_be_drawn(arguments: dict[str, Any], temperature: float) -> None:
    assert make(arguments).temperature == temperature


@pytest.mark.parametrize(
    ("arguments", "length", "count"),
    [
        ({}, 1000, 256),
        ({}, 257, 256),
        ({}, 256, 128),  # half of what there is, where the default leaves no room
        ({}, 1, 1),
        ({"max_gen_toks": 20}, 100, 20),
        ({"max_new_tokens": "30"}, 100, 30),
        ({"max_tokens": 5, "max_gen_toks": 20}, 100, 20),
        ({"max_gen_toks": 99}, 100, 99),
        ({"max_completion_tokens": 7}, 100, 7),
    ],
)
def test_how_long_texts_may_get(arguments: dict[str, Any], length: int, count: int) -> None:
    assert make(arguments, max_length=length).max_tokens == count


def test_what_is_taken_over() -> None:
    params = make(
        {
            "do_sample": True,
            "top_p": 0.9,
            "top_k": 40,
            "min_p": 0.1,
            "repetition_penalty": 1.2,
            "presence_penalty": 0.5,
            "min_new_tokens": 3,
            "num_beams": 1,
            "skip_special_tokens": False,
            "stop_token_ids": [7],
        }
    )
    assert (params.top_p, params.top_k, params.min_p) == (0.9, 40, 0.1)
    assert (params.repetition_penalty, params.presence_penalty) == (1.2, 0.5)
    assert (params.min_tokens, params.stop_token_ids) == (3, [7])
    assert params.skip_special_tokens is False


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_beams": 4}, "num_beams=4"),
        ({"length_penalty": 1.0}, "'length_penalty' is unknown; known: max_gen_toks"),
        ({"max_gen_toks": 1000}, "max_gen_toks=1000 must be from 1 to 999"),
        ({"max_gen_toks": 0}, "max_gen_toks=0"),
        ({"max_new_tokens": "many"}, "max_new_tokens='many' must be a whole number"),
        ({"until": [1]}, r"until=\[1\] must be a text or a list of texts"),
        ({"until": {"a": 1}}, "until="),
        ({"seed": -3}, "seed=-3"),
        ({"temperature": "hot"}, "temperature='hot'"),
        ({"top_p": 3}, "top_p=3"),
    ],
)
def test_arguments_that_cannot_be(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        make(arguments)


def test_draws_depend_on_the_seed_and_the_text_alone(folder: Path, model: TextModel) -> None:
    drawn: dict[str, Any] = {"do_sample": True, "max_gen_toks": 12}
    asked = [(text_of(4, seed), drawn) for seed in range(4)]
    answers = model.generate_until(asked)
    assert len(set(answers)) == 4
    assert model.generate_until(asked[::-1]) == answers[::-1]
    assert model.generate_until(asked[2:3]) == answers[2:3]
    repeated = model.generate_until([asked[0]] * 3)
    assert repeated[0] == answers[0] and len(set(repeated)) == 3
    model.seed = 5
    assert all(a != b for a, b in zip(model.generate_until(asked), answers, strict=True))
    model.seed = 0
    assert model.generate_until([(asked[0][0], {**drawn, "seed": 0})]) == answers[:1]


def test_an_empty_context_is_continued_from_bos(model: TextModel) -> None:
    answers = model.generate_until([("", {"max_gen_toks": 5}), ("<s>", {"max_gen_toks": 5})])
    assert answers[0] == answers[1] != ""


def test_requests_are_refused_before_any_is_run(model: TextModel) -> None:
    before = model.prompt_tokens
    with pytest.raises(RequestError, match="max_gen_toks=96"):
        model.generate_until([("the", {}), ("a", {"max_gen_toks": LENGTH})])
    assert model.prompt_tokens == before


def test_logits_that_are_not_finite_are_an_error(folder: Path) -> None:
    model = small(folder, LENGTH)
    runner: Any = model.llm.engine.runner
    logits = runner.drawer.model.logits
    runner.drawer.model.logits = lambda hidden: logits(hidden) * float("nan")
    with pytest.raises(NumericsError, match="not finite"):
        model.loglikelihood([("the", " cat")])
    with pytest.raises(NumericsError, match="not finite"):
        model.generate_until([("the", {})])
    runner.drawer.model.logits = logits
    assert model.generate_until([("the", {})])


def test_a_model_without_a_tokenizer_is_refused(folder: Path) -> None:
    with pytest.raises(RequestError, match="has no tokenizer"):
        TextModel(open_llm(folder, LENGTH, skip_tokenizer_init=True, kv_memory="16MB"))


def test_a_text_with_nothing_before_it_needs_bos_or_eos(folder: Path) -> None:
    llm = open_llm(folder, LENGTH, kv_memory="16MB")
    tokenizer: Any = llm.get_tokenizer()
    tokenizer.bos_token_id, tokenizer.eos_token_ids = None, ()
    model = TextModel(llm)
    assert model.loglikelihood([("the", " cat")])[0][0] < 0
    for ask in (lambda: model.loglikelihood([("", "a")]), lambda: model.loglikelihood_rolling("a")):
        with pytest.raises(RequestError, match="neither a BOS nor an EOS"):
            ask()
