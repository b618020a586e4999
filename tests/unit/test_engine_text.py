"""Text as it streams: whole characters, nothing that a stop string takes back, all of the text."""

import codecs
import random
from collections.abc import Sequence
from typing import Any

import pytest

from scripted import END, say, scripted_engine, spell, stream, tokenizer
from tiny import finish
from yocolm.engine.outputs import CompletionOutput
from yocolm.engine.sampling_params import SamplingParams

LONG = "naïve 😀👩‍👩‍👧 日本語テキスト, hello world"


def sample_of(tokens: Sequence[int], **params: Any) -> CompletionOutput:
    """The final sample, once it is sure that no shown text was ever taken back."""
    limits = {"max_tokens": len(tokens), **params}
    outputs = stream(tokens, SamplingParams(**limits))
    shown = [output.outputs[0].text for output in outputs]
    for before, after in zip(shown, shown[1:], strict=False):
        assert after.startswith(before), "text was taken back"
    assert not any("\ufffd" in text for text in shown[:-1]), "a character was split"
    return outputs[-1].outputs[0]


def test_characters_of_several_tokens() -> None:
    sample = sample_of(spell(LONG))
    assert sample.text == LONG and len(sample.token_ids) == len(LONG.encode())
    assert sample.finish_reason == "length" and sample.stop_reason is None


def test_a_character_that_never_ends() -> None:
    tokens = spell("a😀")[:-1]
    sample = sample_of(tokens)
    assert sample.text == tokenizer().decode(tokens) == "a\ufffd"


@pytest.mark.parametrize("stop", ["o w", "low", "lo wo", " world", "hello world", "d"])
@pytest.mark.parametrize("bytewise", [True, False])
def test_stop_strings_over_the_borders_of_tokens(stop: str, bytewise: bool) -> None:
    text = "hellow, hello world"
    tokens = spell(text) if bytewise else say("hello", "w", ",", " ", "he", "ll", "o", " world")
    at = text.index(stop)
    sample = sample_of(tokens, stop=stop)
    assert (sample.text, sample.finish_reason, sample.stop_reason) == (text[:at], "stop", stop)
    with_it = sample_of(tokens, stop=stop, include_stop_str_in_output=True)
    assert with_it.text == text[: at + len(stop)] and with_it.stop_reason == stop
    assert with_it.token_ids == sample.token_ids


def test_the_first_stop_string_of_several() -> None:
    tokens = spell("one, two; three")
    assert sample_of(tokens, stop=["three", "; ", "two; t"]).text == "one, two"
    assert sample_of(tokens, stop=["four", "n", "one"]).text == "o"
    assert sample_of(tokens, stop=["o", "one"]).text == ""
    assert sample_of(tokens, stop=["five"]).text == "one, two; three"


def test_stop_strings_of_several_bytes() -> None:
    tokens = spell("日本語テキスト")
    sample = sample_of(tokens, stop=["語テ"])
    assert sample.text == "日本" and len(sample.token_ids) == 12


def test_a_stop_string_in_the_last_token_allowed() -> None:
    sample = sample_of(say("hello", " world"), stop=["wor"])
    assert (sample.text, sample.finish_reason) == ("hello ", "stop")


def test_what_might_have_become_a_stop_string_comes_out_at_the_end() -> None:
    assert sample_of(spell("hello wor"), stop=[" world"]).text == "hello wor"
    engine = scripted_engine(spell("hello wor"))
    engine.add_request("one", "he", SamplingParams(stop=[" world"], max_tokens=50))
    shown = [engine.step()[0].outputs[0].text for _ in range(9)]
    assert shown[-1] == "hell"  # five characters are held back
    aborted = engine.abort("one")
    assert aborted is not None and aborted.outputs[0].text == "hello wor"


def test_min_tokens_holds_for_stop_strings() -> None:
    """A stop string that was complete too early is text; a later one stops."""
    tokens = spell("ab.cd.ef.gh")
    sample = sample_of(tokens, stop=["."], min_tokens=4)
    assert (sample.text, sample.token_ids) == ("ab.cd", tokens[:6])
    assert sample_of(tokens, stop=[".", "zzzz"], min_tokens=4).text == "ab.cd"
    assert sample_of(tokens, stop=["b.c"], min_tokens=4).text == "ab.cd.ef.gh"
    assert sample_of(tokens, stop=["b.cd"], min_tokens=4).text == "a"
    shown = sample_of(tokens, stop=["."], min_tokens=4, include_stop_str_in_output=True)
    assert shown.text == "ab.cd."


def test_the_end_token_is_not_text() -> None:
    tokens = [*spell("ab"), *say(END), *spell("cd")]
    sample = sample_of(tokens)
    assert (sample.text, sample.finish_reason, sample.stop_reason) == ("ab", "stop", None)
    assert sample.token_ids == tokens[:3]
    assert sample_of(tokens, ignore_eos=True).text == "abcd"
    assert sample_of(tokens, ignore_eos=True, skip_special_tokens=False).text == "ab</s>cd"
    assert sample_of(tokens, skip_special_tokens=False).text == "ab"
    shown = sample_of(tokens, skip_special_tokens=False, include_stop_str_in_output=True)
    assert shown.text == "ab</s>"


def test_stop_tokens_are_text_only_if_asked_for() -> None:
    tokens = say("hello", " world", "or")
    (world,) = say(" world")
    sample = sample_of(tokens, stop_token_ids=[world])
    assert (sample.text, sample.finish_reason, sample.stop_reason) == ("hello", "stop", world)
    assert sample.token_ids == tokens[:2]
    shown = sample_of(tokens, stop_token_ids=[world], include_stop_str_in_output=True)
    assert shown.text == "hello world" and shown.stop_reason == world


def test_a_stop_token_may_begin_like_a_stop_string() -> None:
    """What was held back for a stop string comes out when a stop token ends the text."""
    (world,) = say(" world")
    sample = sample_of(say("hello", " world"), stop_token_ids=[world], stop=["llo!"])
    assert sample.text == "hello"


def test_no_text_where_none_is_wanted() -> None:
    tokens = spell("abc")
    assert sample_of(tokens, detokenize=False).text == ""
    engine = scripted_engine(tokens, with_tokenizer=False)
    engine.add_request("one", [1, 2], SamplingParams(max_tokens=3, logprobs=0))
    sample = finish(engine)["one"].outputs[0]
    assert sample.text == "" and sample.token_ids == tokens
    assert sample.logprobs is not None and sample.logprobs[0][tokens[0]].decoded_token is None


def test_decoded_tokens_of_logprobs() -> None:
    sample = sample_of(say("hello", " world"), logprobs=0)
    assert sample.logprobs is not None
    decoded = [entry.decoded_token for row in sample.logprobs for entry in row.values()]
    assert decoded == ["hello", " world"]


def expected(tokens: Sequence[int], params: SamplingParams) -> tuple[str, int, str | None]:
    """Text, number of tokens and stop string, token by token from the bytes."""
    decoder, text = codecs.getincrementaldecoder("utf-8")(errors="replace"), ""
    for count, token in enumerate(tokens, 1):
        last = count == len(tokens)
        before, text = text, text + decoder.decode(tokenizer().token_bytes(token) or b"", last)
        ends = [
            (at, stop)
            for stop in params.stop_strings
            for at in range(len(text))
            if text.startswith(stop, at) and at + len(stop) > len(before)
        ]
        if ends and count > params.min_tokens:
            at, stop = min(ends)
            end = at + len(stop) if params.include_stop_str_in_output else at
            return text[:end], count, stop
    return text, len(tokens), None


def test_random_texts_and_stop_strings() -> None:
    rng = random.Random(0)
    letters = "aab é😀"
    stopped = 0
    for _ in range(60):
        text = "".join(rng.choices(letters, k=rng.randint(1, 14)))
        tokens = spell(text) + spell("😀")[: rng.choice([0, 0, 2])]
        stops = ["".join(rng.choices(letters, k=rng.randint(1, 4))) for _ in range(3)]
        params = SamplingParams(
            stop=stops[: rng.randint(0, 3)],
            max_tokens=len(tokens),
            min_tokens=rng.choice([0, 0, rng.randint(0, len(tokens))]),
            include_stop_str_in_output=rng.random() < 0.5,
        )
        fields = {name: getattr(params, name) for name in ("stop", "max_tokens", "min_tokens")}
        fields["include_stop_str_in_output"] = params.include_stop_str_in_output
        sample = sample_of(tokens, **fields)
        got = (sample.text, len(sample.token_ids), sample.stop_reason)
        assert got == expected(tokens, params), (text, params)
        stopped += sample.finish_reason == "stop"
    assert 10 < stopped < 50
