"""Answers of completions and chat from a model that says what the test wants."""

import threading
from typing import Any

import pytest

from scripted import say, scripted_engine, spell, tokenizer
from serving import TEMPLATE, error_of, events, post, says, service_of
from tiny import make_engine
from yocolm.engine.outputs import CompletionOutput, RequestOutput
from yocolm.errors import ConfigError
from yocolm.server.app import make_service
from yocolm.server.chat import ChatWriter
from yocolm.server.completions import CompletionWriter, best
from yocolm.server.logprobs import CompletionLogprobs
from yocolm.server.settings import gather

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "hello"}]
HELLO = say("hello", " world", " w", "or", "ld")


def body(**more: Any) -> dict[str, Any]:
    return {"prompt": "hello", "temperature": 0, "max_tokens": 5, **more}


def chat(**more: Any) -> dict[str, Any]:
    return {"messages": USER, "temperature": 0, "max_tokens": 5, **more}


def test_a_completion() -> None:
    answer = says(HELLO, COMPLETIONS, body(model="tiny")).json()
    assert answer["id"].startswith("cmpl-") and answer["object"] == "text_completion"
    assert answer["model"] == "tiny" and isinstance(answer["created"], int)
    [choice] = answer["choices"]
    assert choice["text"] == "hello world world" and choice["index"] == 0
    assert choice["finish_reason"] == "length" and choice["logprobs"] is None
    prompt = len(tokenizer().encode("hello"))
    assert answer["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": 5,
        "total_tokens": prompt + 5,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_a_chat_answer() -> None:
    answer = says(HELLO, CHAT, chat()).json()
    assert answer["id"].startswith("chatcmpl-") and answer["object"] == "chat.completion"
    [choice] = answer["choices"]
    message: dict[str, Any] = {"role": "assistant", "content": "hello world world", "refusal": None}
    message["annotations"] = []
    assert choice["message"] == message and choice["finish_reason"] == "length"
    prompt = tokenizer().encode("user: hello\nassistant:", add_special_tokens=False)
    assert answer["usage"]["prompt_tokens"] == len(prompt)


@pytest.mark.parametrize(
    "text", ["plain", "Zürich – 東京", "👩‍👩‍👧", "a\n\n\tb", 'quote " and \\', "\u2028 line"]
)
@pytest.mark.parametrize("stop", [None, ["never"], ["xyz", "!"]])
def test_deltas_make_the_whole_text(text: str, stop: list[str] | None) -> None:
    """Tokens are single bytes: characters are split, and stop strings hold text back."""
    tokens = spell(text + "!end")
    more: dict[str, Any] = {"max_tokens": len(tokens), "stop": stop}
    whole = says(tokens, COMPLETIONS, body(**more)).json()["choices"][0]
    assert whole["text"] == (text if stop and "!" in stop else text + "!end")
    chunks = events(says(tokens, COMPLETIONS, body(stream=True, **more)))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["text"]
    last = chunks[-1]["choices"][0]
    assert last["finish_reason"] == whole["finish_reason"]
    assert last["stop_reason"] == whole["stop_reason"]
    chunks = events(says(tokens, CHAT, chat(stream=True, **more)))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""} and deltas[-1] == {}
    assert "".join(delta.get("content", "") for delta in deltas) == whole["text"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][:-1] == [None] * (
        len(chunks) - 1
    )


def test_the_models_end() -> None:
    [choice] = says([*say("he"), 0], COMPLETIONS, body()).json()["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("he", "stop", None)
    choice = says([*say("he"), 0, *say("o", "w")], COMPLETIONS, body(ignore_eos=True, max_tokens=4))
    assert choice.json()["choices"][0]["text"] == "heow"
    stops = {"stop_token_ids": say("o"), "include_stop_str_in_output": True}
    choice = says(say("he", "ll", "o"), COMPLETIONS, body(**stops)).json()["choices"][0]
    assert choice["text"] == "hello" and choice["stop_reason"] == say("o")[0]


def test_usage_of_streams() -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    for path, make in ((COMPLETIONS, body), (CHAT, chat)):
        chunks = events(says(HELLO, path, make(**options)))
        assert all(chunk["usage"] is None for chunk in chunks[:-1])
        assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 5
        assert len({chunk["id"] for chunk in chunks}) == 1
        without = events(says(HELLO, path, make(stream=True)))
        assert not any("usage" in chunk for chunk in without)
        each = {"stream": True, "stream_options": {"continuous_usage_stats": True}}
        counts = [c["usage"]["completion_tokens"] for c in events(says(HELLO, path, make(**each)))]
        assert counts == sorted(counts) and counts[-1] == 5


def test_several_prompts_and_samples() -> None:
    prompts = ["hello", "he", "world"]
    answer = says(HELLO, COMPLETIONS, body(prompt=prompts, n=2, echo=True)).json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    for choice in answer["choices"]:
        assert choice["text"] == prompts[choice["index"] // 2] + "hello world world"
    assert answer["usage"]["completion_tokens"] == 30
    chunks = events(says(HELLO, COMPLETIONS, body(prompt=prompts, n=2, echo=True, stream=True)))
    texts = dict.fromkeys(range(6), "")
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == {choice["index"]: choice["text"] for choice in answer["choices"]}
    answer = says(HELLO, CHAT, chat(n=3)).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]


def test_prompts_as_token_ids() -> None:
    ids = tokenizer().encode("hello")
    for prompt, count in ((ids, 1), ([ids, ids], 2), (["hello", "hello"], 2)):
        answer = says(HELLO, COMPLETIONS, body(prompt=prompt, echo=True)).json()
        assert [c["text"] for c in answer["choices"]] == ["hellohello world world"] * count
        assert answer["usage"]["prompt_tokens"] == count * len(ids)


@pytest.mark.parametrize("top", [0, 1, 3])
def test_echo_with_logprobs(top: int) -> None:
    """What evaluation harnesses send: the prompt's tokens, then exactly those drawn."""
    prompt = say("he", "ll", "o", " w")
    for limit in (0, 1, 2):
        asked = body(prompt=prompt, echo=True, logprobs=top, max_tokens=limit)
        tokens = [*HELLO[:1], *HELLO]  # the first is what the prompt's own rows say
        [choice] = says(tokens, COMPLETIONS, asked).json()["choices"]
        parts = choice["logprobs"]
        drawn = ["hello", " world"][:limit]
        assert parts["tokens"] == ["he", "ll", "o", " w", *drawn]
        assert choice["text"] == "".join(parts["tokens"])
        assert parts["token_logprobs"][0] is None and parts["top_logprobs"][0] is None
        assert all(isinstance(value, float) for value in parts["token_logprobs"][1:])
        assert parts["text_offset"] == [0, 2, 4, 5, 7, 12][: 4 + limit]
        for tops in parts["top_logprobs"][1:]:
            assert max(1, top) <= len(tops) <= top + 1
        streamed = events(says(tokens, COMPLETIONS, {**asked, "stream": True}))
        for name, values in parts.items():
            pieces = [c["choices"][0]["logprobs"] for c in streamed]
            joined = [value for piece in pieces if piece for value in piece[name]]
            assert joined == values


def test_echo_of_nothing_more() -> None:
    asked = body(echo=True, max_tokens=0, prompt=["hello", "he"])
    answer = says([], COMPLETIONS, asked, prompt_logprobs="reject").json()
    assert [choice["text"] for choice in answer["choices"]] == ["hello", "he"]
    assert answer["usage"]["completion_tokens"] == 0
    chunks = events(says([], COMPLETIONS, {**asked, "stream": True}))
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["hello", "he"]


def test_logprobs_of_half_characters() -> None:
    tokens = spell("é!")
    [choice] = says(tokens, COMPLETIONS, body(logprobs=0, max_tokens=3)).json()["choices"]
    assert choice["logprobs"]["tokens"] == ["bytes:\\xc3", "bytes:\\xa9", "!"]
    assert choice["logprobs"]["text_offset"] == [0, 0, 1]
    answer = says(tokens, CHAT, chat(logprobs=True, top_logprobs=2, max_tokens=3)).json()
    content = answer["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in content] == [[0xC3], [0xA9], [0x21]]
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)
    assert all(entry["top_logprobs"][0]["token"] == entry["token"] for entry in content)
    as_ids = body(logprobs=0, max_tokens=3, return_tokens_as_token_ids=True)
    [choice] = says(tokens, COMPLETIONS, as_ids).json()["choices"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in tokens]


def test_no_logprobs_unless_asked_for() -> None:
    for more in ({}, {"logprobs": False}, {"logprobs": None}):
        assert says(HELLO, CHAT, chat(**more)).json()["choices"][0]["logprobs"] is None
    [entry] = says(HELLO, CHAT, chat(logprobs=True, max_tokens=1)).json()["choices"][0]["logprobs"][
        "content"
    ]
    assert entry["token"] == "hello" and entry["top_logprobs"] == []


def test_prompt_logprobs_as_in_vllm() -> None:
    prompt = say("he", "ll", "o")
    tokens = [*HELLO, *HELLO]  # one for the prompt's own rows as well
    answer = says(tokens, COMPLETIONS, body(prompt=prompt, prompt_logprobs=0)).json()
    scores = answer["choices"][0]["prompt_logprobs"]
    assert scores[0] is None and [list(entry) for entry in scores[1:]] == [
        [str(token)] for token in prompt[1:]
    ]
    assert scores[1][str(prompt[1])]["decoded_token"] == "ll"
    assert says(tokens, CHAT, chat(prompt_logprobs=1)).json()["prompt_logprobs"][0] is None


def test_a_stream_of_a_chat_tells_of_its_prompt_once() -> None:
    tokens = [*HELLO, *HELLO]
    asked = chat(prompt_logprobs=1, return_token_ids=True, logprobs=True, n=2)
    whole = says(tokens, CHAT, asked).json()
    prompt = tokenizer().encode("user: hello\nassistant:", add_special_tokens=False)
    assert whole["prompt_token_ids"] == prompt and len(whole["prompt_logprobs"]) == len(prompt)
    chunks = events(says(tokens, CHAT, {**asked, "stream": True}))
    for name in ("prompt_logprobs", "prompt_token_ids"):
        assert [chunk[name] for chunk in chunks if name in chunk] == [whole[name]]
        assert name in chunks[0]
    for chunk in events(says(tokens, CHAT, chat(stream=True))):
        assert "prompt_logprobs" not in chunk and "prompt_token_ids" not in chunk


def test_a_prompt_is_written_once_for_all_its_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """The work on log-probabilities does not grow with n times the prompt."""
    built: list[int] = []
    build = CompletionLogprobs.build

    def watched(self: CompletionLogprobs, tokens: Any, entries: Any) -> Any:
        built.append(len(tokens))
        return build(self, tokens, entries)

    monkeypatch.setattr(CompletionLogprobs, "build", watched)
    prompt = spell("é hello " * 5)
    asked = body(prompt=prompt, echo=True, logprobs=2, n=8, max_tokens=2)
    for more in ({}, {"stream": True}):
        built.clear()
        answer = says([*HELLO[:1], *HELLO], COMPLETIONS, {**asked, **more})
        assert answer.status_code == 200
        assert sorted(built)[-1] == len(prompt) and sum(built) == len(prompt) + 8 * 2
    # The prompt is scored in two chunks: its state is kept at the last boundary of its pages.
    whole = says([*HELLO[:1], *HELLO[:1], *HELLO], COMPLETIONS, asked).json()["choices"]
    assert [choice["index"] for choice in whole] == list(range(8))
    for choice in whole:
        assert choice == {**whole[0], "index": choice["index"]}
        assert choice["logprobs"]["tokens"][-2:] == ["hello", " world"]
        assert choice["logprobs"]["text_offset"][-2:] == [40, 45]
        assert len(choice["logprobs"]["top_logprobs"]) == len(prompt) + 2


def test_large_answers_are_written_off_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []
    for writer in (CompletionWriter, ChatWriter):
        monkeypatch.setattr(writer, "whole", _watched(writer.whole, threads))
    main = threading.current_thread()
    for path, asked, large in (
        (COMPLETIONS, body(), False),
        (COMPLETIONS, body(echo=True, logprobs=5, n=8), True),
        (COMPLETIONS, body(prompt="o" * 200, echo=True, max_tokens=0, n=40), True),
        (CHAT, chat(), False),
        (CHAT, chat(logprobs=True, top_logprobs=20, n=8), True),
    ):
        threads.clear()
        assert says([*HELLO, *HELLO], path, asked).status_code == 200
        assert [thread is not main for thread in threads] == [large], asked


def _watched(function: Any, threads: list[threading.Thread]) -> Any:
    def watched(*args: Any) -> Any:
        threads.append(threading.current_thread())
        return function(*args)

    return watched


def test_the_best_are_those_of_the_highest_mean_logprob() -> None:
    """Not of the highest sum, which would favour the short."""

    def sample(index: int, mean: float, length: int) -> CompletionOutput:
        text = f"{index}"
        return CompletionOutput(index, text, [1] * length, mean * length, finish_reason="stop")

    samples = [sample(0, -2.0, 1), sample(1, -0.5, 8), sample(2, -3.0, 1), sample(3, -1.0, 8)]
    output = best(RequestOutput("a", "", [1], None, samples, True), 3)
    assert [(one.index, one.text) for one in output.outputs] == [(0, "1"), (1, "3"), (2, "0")]


def test_best_of_returns_the_best() -> None:
    """The same seed draws the same samples, of which best_of chooses."""
    asked = {"prompt": [1, 2, 3], "max_tokens": 6, "seed": 3, "logprobs": 0, "ignore_eos": True}

    def drawn(**more: Any) -> list[tuple[list[str], float]]:
        service = service_of(make_engine("retention"))
        answer = post(service, COMPLETIONS, {**asked, **more}).json()
        parts = [choice["logprobs"] for choice in answer["choices"]]
        return [(part["tokens"], sum(part["token_logprobs"])) for part in parts]

    everything = drawn(n=6)
    assert len({total for _, total in everything}) == 6
    wanted = sorted(everything, key=lambda sample: -sample[1])[:2]
    assert wanted != everything[:2]  # so that taking the first ones would fail
    assert drawn(n=2, best_of=6) == wanted


def test_best_of() -> None:
    answer = says(HELLO, COMPLETIONS, body(n=2, best_of=4)).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert answer["usage"]["completion_tokens"] == 20
    assert answer["choices"][0]["logprobs"] is None
    error = error_of(says(HELLO, COMPLETIONS, body(n=3, best_of=2)))
    assert error["param"] == "best_of" and "n=3" in error["message"]
    assert error_of(says(HELLO, COMPLETIONS, body(best_of=2, stream=True)))["param"] == "best_of"


@pytest.mark.parametrize("streams", [False, True])
def test_a_call_that_ends_at_the_limit(streams: bool) -> None:
    """An answer with calls that was cut says so; one that ended by itself tells of its calls."""
    text = '<tool_call>{"name": "now"}</tool_call>'
    tool = {"type": "function", "function": {"name": "now"}}
    for tokens, reason in (
        (spell(text + "o"), "length"),
        ([*spell(text), tokenizer().eos_token_ids[0]], "tool_calls"),
    ):
        asked = chat(max_tokens=len(tokens), tools=[tool], stream=streams)
        answer = says(tokens, CHAT, asked, tool_parser="hermes")
        if streams:
            choices = [chunk["choices"][0] for chunk in events(answer)]
            calls = [c for choice in choices for c in choice["delta"].get("tool_calls", ())]
        else:
            choices = answer.json()["choices"]
            calls = choices[0]["message"]["tool_calls"]
        assert [call["function"]["name"] for call in calls] == ["now"]
        assert choices[-1]["finish_reason"] == reason


def test_token_ids_are_returned() -> None:
    answer = says(HELLO, COMPLETIONS, body(return_token_ids=True)).json()["choices"][0]
    assert answer["token_ids"] == HELLO
    assert answer["prompt_token_ids"] == tokenizer().encode("hello")
    assert says(HELLO, CHAT, chat(return_token_ids=True)).json()["choices"][0]["token_ids"] == HELLO


def test_defaults_come_from_the_model() -> None:
    from yocolm.server.params import completion_params
    from yocolm.server.protocol import CompletionRequest

    defaults, asked = {"temperature": 0.25, "top_k": 7}, {"model": "tiny", "prompt": "a"}
    params = completion_params(CompletionRequest.model_validate(asked), defaults, 20)
    assert (params.temperature, params.top_k) == (0.25, 7)
    params = completion_params(
        CompletionRequest.model_validate({**asked, "temperature": 0.5}), defaults, 20
    )
    assert params.temperature == 0.5


def test_turns_end_at_the_models_stop_strings() -> None:
    """An answer in a chat ends there, a completion goes on."""
    settings = gather({}, {}, environment={})
    generation = {"stop_strings": ["ld"]}

    def told(path: str, request: dict[str, Any]) -> Any:
        engine = scripted_engine(HELLO)
        service = make_service(engine, TEMPLATE, settings, "tiny", generation)
        return post(service, path, request).json()["choices"][0]

    answer = told(CHAT, chat())
    assert answer["message"]["content"] == "hello wor" and answer["finish_reason"] == "stop"
    assert told(CHAT, chat(stop=" w"))["message"]["content"] == "hello"
    assert told(CHAT, chat(ignore_eos=True))["message"]["content"] == "hello world world"
    assert told(COMPLETIONS, body())["text"] == "hello world world"


def test_defaults_of_max_tokens() -> None:
    """OpenAI's 16 for completions, the context for chat; both within the context."""
    tokens = say("o") * 256
    for length, wanted in ((1, 16), (250, 6)):
        asked = {"prompt": say("he") * length, "temperature": 0}
        [choice] = says(tokens, COMPLETIONS, asked).json()["choices"]
        assert choice["finish_reason"] == "length" and choice["text"] == "o" * wanted
    answer = says(tokens, CHAT, {"messages": USER, "temperature": 0}).json()
    assert answer["usage"]["total_tokens"] == 256


def test_a_models_own_limit_of_an_answer() -> None:
    """max_new_tokens of generation_config.json, where a chat does not say how much it wants."""
    settings = gather({}, {}, environment={})

    def told(path: str, request: dict[str, Any], limit: Any = 3) -> Any:
        engine = scripted_engine(say("o") * 256)
        service = make_service(engine, TEMPLATE, settings, "tiny", {"max_new_tokens": limit})
        return post(service, path, request).json()["usage"]["completion_tokens"]

    asked = {"messages": USER, "temperature": 0}
    assert told(CHAT, asked) == 3
    assert told(CHAT, {**asked, "max_tokens": 7}) == 7
    assert told(COMPLETIONS, {"prompt": "hello", "temperature": 0}) == 16
    with pytest.raises(ConfigError, match="max_new_tokens is 0; it must be a whole number above 0"):
        told(CHAT, chat(), limit=0)


def test_ids_follow_the_clients() -> None:
    service = service_of(scripted_engine(HELLO))
    answer = post(service, COMPLETIONS, body(), **{"x-request-id": "mine-1"})
    assert answer.json()["id"] == "cmpl-mine-1"
    assert answer.headers.get_list("x-request-id") == ["mine-1"]
    odd = post(service_of(scripted_engine(HELLO)), COMPLETIONS, body(), **{"x-request-id": "a b"})
    assert "a b" not in odd.json()["id"]
