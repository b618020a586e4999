import math
from fractions import Fraction
from typing import Any

import pytest

from yocolm.engine.sampling_params import SamplingParams
from yocolm.errors import RequestError


def test_defaults_are_those_of_vllm() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k) == (1, 1.0, 1.0, 0)
    assert (params.max_tokens, params.min_tokens, params.repetition_penalty) == (16, 0, 1.0)
    assert params.logprobs is params.prompt_logprobs is params.seed is None
    assert params.stop == [] and params.stop_token_ids == []


def test_zero_logprobs_is_on() -> None:
    params = SamplingParams(logprobs=0, prompt_logprobs=0)
    assert params.logprobs == 0 and params.prompt_logprobs == 0


def test_values_are_normalised() -> None:
    params = SamplingParams(stop="end", stop_token_ids=[3], top_k=-1, seed=-1, logit_bias={7: 2})
    assert params.stop == params.stop_strings == ["end"]
    assert params.stop_token_ids == [3]
    assert params.top_k == 0 and params.seed is None
    assert params.logit_bias == {7: 2.0}


def test_greedy_takes_any_top_p() -> None:
    assert SamplingParams(temperature=0, top_p=0.3).greedy
    assert not SamplingParams(temperature=0.1).greedy


def test_a_top_k_beyond_every_vocabulary_keeps_all() -> None:
    assert SamplingParams(top_k=10**30).top_k == 2**31 - 1


@pytest.mark.parametrize(
    "given",
    [
        {"temperature": 10**400},
        {"temperature": 10**5000},
        {"top_p": Fraction(10**400, 3)},
        {"seed": 10**5000},
        {"logit_bias": {1: -(10**5000)}},
        {"min_tokens": 10**5000},
    ],
)
def test_numbers_beyond_all_floats_and_spellings(given: dict[str, Any]) -> None:
    """float() and str() raise errors of their own for them."""
    [name] = given
    with pytest.raises(RequestError, match=rf"{name}.*a number of more than 60 digits"):
        SamplingParams(**given)


def test_numbers_of_numpy_are_numbers() -> None:
    numpy = pytest.importorskip("numpy")
    params = SamplingParams(temperature=numpy.float32(0.5), max_tokens=numpy.int64(3))
    assert type(params.temperature) is float and type(params.max_tokens) is int


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 0),
        ("n", 1.0),
        ("n", True),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.inf),
        ("repetition_penalty", 1e-320),
        ("temperature", 1e300),
        ("n", 10**9),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", "1"),
        ("temperature", None),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("top_k", 5.0),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("seed", -2),
        ("seed", 2**64),
        ("seed", "7"),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", [1]),
        ("stop", 1),
        ("stop_token_ids", [1.5]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", 4),
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("min_tokens", -1),
        ("logprobs", -1),
        ("logprobs", True),
        ("prompt_logprobs", -1),
        ("prompt_logprobs_start", -1),
        ("logit_bias", {"7": 1.0}),
        ("logit_bias", {7: math.inf}),
        ("logit_bias", {7: 101.0}),
        ("logit_bias", [(7, 1.0)]),
        ("ignore_eos", 1),
        ("detokenize", None),
    ],
)
def test_bad_values_are_named(name: str, value: object) -> None:
    with pytest.raises(RequestError, match=name):
        SamplingParams(**{name: value})  # pyright: ignore[reportArgumentType]


def test_message_names_value_limit_and_type() -> None:
    with pytest.raises(RequestError, match="top_p=1.5 is out of range: give a number from 0.0"):
        SamplingParams(top_p=1.5)
    with pytest.raises(RequestError, match="n=0 is out of range: give an integer from 1 to 16384"):
        SamplingParams(n=0)
    with pytest.raises(RequestError, match="max_tokens='3' must be an integer of at least 0"):
        SamplingParams(max_tokens="3")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens=5 exceeds max_tokens=4"),
        ({"max_tokens": 0}, "max_tokens=0 asks for nothing"),
        ({"max_tokens": 0, "prompt_logprobs": 0, "n": 2}, "n=2 draws no samples"),
        ({"prompt_logprobs_start": 3}, "prompt_logprobs_start=3 needs prompt_logprobs"),
        ({"stop": "x", "detokenize": False}, "needs text"),
    ],
)
def test_contradictions_are_named(params: dict[str, int], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(**params)  # pyright: ignore[reportArgumentType]


def test_no_limit_and_scoring_only_are_allowed() -> None:
    assert SamplingParams(max_tokens=None, min_tokens=100).max_tokens is None
    assert SamplingParams(max_tokens=0, prompt_logprobs=0).max_tokens == 0
