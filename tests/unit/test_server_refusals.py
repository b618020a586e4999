"""Every bad request gets a 400 that names the field, the value and the limit, and nothing runs."""

import json
from typing import Any

import pytest

from scripted import scripted_engine, tokenizer
from serving import error_of, post, service_of, talk

COMPLETIONS, CHAT, EMBEDDINGS = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"
USER = {"role": "user", "content": "hello"}
VOCAB = tokenizer().vocab_size

BOTH: list[tuple[dict[str, Any], str, str]] = [
    ({"nonsense": 1}, "nonsense", "unknown field"),
    ({"temperature": "hot"}, "temperature", "'hot'"),
    ({"temperature": -0.5}, "temperature", "-0.5"),
    ({"temperature": True}, "temperature", "True"),
    ({"temperature": 1e300}, "temperature", "out of range"),
    ({"top_p": 0}, "top_p", "at least"),
    ({"top_p": 1.5}, "top_p", "from 0.0 to 1.0"),
    ({"top_k": -2}, "top_k", "at least -1"),
    ({"top_k": 1.5}, "top_k", "1.5"),
    ({"min_p": 2}, "min_p", "from 0.0 to 1.0"),
    ({"presence_penalty": 3}, "presence_penalty", "from -2.0 to 2.0"),
    ({"frequency_penalty": -3}, "frequency_penalty", "from -2.0 to 2.0"),
    ({"repetition_penalty": 0}, "repetition_penalty", "at least"),
    ({"seed": 2**64}, "seed", "from -1 to"),
    ({"seed": 1.0}, "seed", "1.0"),
    ({"n": 0}, "n", "greater than or equal to 1"),
    ({"n": 129}, "n", "less than or equal to 128"),
    ({"n": "2"}, "n", "'2'"),
    ({"max_tokens": -1}, "max_tokens", "-1"),
    ({"max_tokens": 10**30}, "max_tokens", "context of 256"),
    ({"max_tokens": 257}, "max_tokens", "context of 256"),
    ({"max_tokens": 10**4000}, "max_tokens", "more than 60 digits"),
    ({"min_tokens": 10**4000}, "min_tokens", "more than 60 digits"),
    ({"max_tokens": 1.5}, "max_tokens", "1.5"),
    ({"max_tokens": "5"}, "max_tokens", "'5'"),
    ({"max_tokens": 0}, "max_tokens", "asks for nothing"),
    ({"max_tokens": 3, "min_tokens": 4}, "min_tokens", "exceeds max_tokens=3"),
    ({"stop": [""]}, "stop", "not empty"),
    ({"stop": 5}, "stop", "5"),
    ({"stop": ["a"] * 65}, "stop", "at most 64"),
    ({"stop": "x" * 1001}, "stop", "1000 characters"),
    ({"stop_token_ids": [VOCAB]}, "stop_token_ids", f"0 to {VOCAB - 1}"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids[0]", "'a'"),
    ({"stop_token_ids": [1] * 1025}, "stop_token_ids", "1024"),
    ({"logit_bias": {str(VOCAB): 1}}, "logit_bias", f"0 to {VOCAB - 1}"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "'x'"),
    ({"logit_bias": {"1": 101}}, "logit_bias", "from -100.0 to 100.0"),
    ({"logit_bias": {"1": "a"}}, "logit_bias", "'a'"),
    ({"logit_bias": [1]}, "logit_bias", "[1]"),
    ({"ignore_eos": 1}, "ignore_eos", "1"),
    ({"stream": "yes"}, "stream", "'yes'"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream=true"),
    (
        {"stream": True, "stream_options": {"x": 1}},
        "stream_options.x",
        "unknown field",
    ),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "limit of 20"),
    ({"prompt_logprobs": -1}, "prompt_logprobs", "-1"),
    ({"user": 5}, "user", "5"),
    ({"use_beam_search": True}, "use_beam_search", "not supported"),
    ({"bad_words": ["a"]}, "bad_words", "not supported"),
    ({"priority": 1.5}, "priority", "1.5"),
    ({"priority": True}, "priority", "True"),
    ({"priority": 2**31 + 1}, "priority", "less than or equal to 2147483648"),
    ({"ttft_target": 0}, "ttft_target", "greater than 0"),
    ({"tpot_target": -0.5}, "tpot_target", "-0.5"),
    ({"ttft_target": "1"}, "ttft_target", "'1'"),
    ({"tpot_target": 1e7}, "tpot_target", "less than or equal to 1000000"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "'xml'"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema"),
    ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_regex", "give one of them"),
    ({"guided_choice": []}, "guided_choice", "at least 1"),
    ({"guided_json": "{"}, "guided_json", "not JSON"),
    ({"guided_json": "[" * 100_000}, "guided_json", "not JSON"),
    ({"guided_json": "[1]"}, "guided_json", "must be a JSON schema"),
    ({"logit_bias": {"1": 10**400}}, "logit_bias", "from -100.0 to 100.0"),
    ({"logit_bias": {"1": -(10**4000)}}, "logit_bias", "more than 60 digits"),
    ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
]
ONE: list[tuple[str, dict[str, Any], str | None, str]] = [
    (COMPLETIONS, {}, "prompt", "required"),
    (COMPLETIONS, {"model": None, "prompt": "a"}, "model", "None"),
    (COMPLETIONS, {"prompt": None}, "prompt", "None"),
    (COMPLETIONS, {"prompt": []}, "prompt", "[]"),
    (COMPLETIONS, {"prompt": ""}, "prompt", "no tokens"),
    (COMPLETIONS, {"prompt": 5}, "prompt", "5"),
    (COMPLETIONS, {"prompt": [1, "a"]}, "prompt", "mix"),
    (COMPLETIONS, {"prompt": [[1], [True]]}, "prompt", "True"),
    (COMPLETIONS, {"prompt": [VOCAB]}, "prompt", f"0 to {VOCAB - 1}"),
    (COMPLETIONS, {"prompt": [-1]}, "prompt", "-1"),
    (COMPLETIONS, {"prompt": [10**40]}, "prompt", "outside the vocabulary"),
    (COMPLETIONS, {"prompt": ["a"] * 2049}, "prompt", "2048"),
    (COMPLETIONS, {"prompt": [1] * 256}, "prompt", "max_model_len=256"),
    (COMPLETIONS, {"prompt": "a" * 5000}, "prompt", "max_model_len=256"),
    (COMPLETIONS, {"prompt": "a", "suffix": "b"}, "suffix", "not supported"),
    (COMPLETIONS, {"prompt": "a", "logprobs": 21}, "logprobs", "limit of 20"),
    (COMPLETIONS, {"prompt": "a", "logprobs": True}, "logprobs", "True"),
    (COMPLETIONS, {"prompt": "a", "logprobs": -1}, "logprobs", "-1"),
    (COMPLETIONS, {"prompt": "a", "best_of": 0}, "best_of", "0"),
    (COMPLETIONS, {"prompt": "a", "echo": "x"}, "echo", "'x'"),
    (COMPLETIONS, {"prompt": ["a"] * 100, "n": 128}, "n", "at most"),
    (COMPLETIONS, {"prompt": "a", "messages": [USER]}, "messages", "unknown field"),
    (CHAT, {}, "messages", "required"),
    (CHAT, {"messages": []}, "messages", "at least 1"),
    (CHAT, {"messages": "hi"}, "messages", "'hi'"),
    (CHAT, {"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role", "'robot'"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0]", "needs content"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "5"),
    (CHAT, {"messages": [{**USER, "x": 1}]}, "messages[0].x", "unknown field"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content",
        "'image_url'",
    ),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
        "messages[0].content",
        "text only",
    ),
    (
        CHAT,
        {"messages": [{**USER, "reasoning_content": "x"}]},
        "messages[0].reasoning_content",
        "not supported",
    ),
    (CHAT, {"messages": [USER], "top_logprobs": 2}, "top_logprobs", "needs logprobs=true"),
    (CHAT, {"messages": [USER], "logprobs": 1}, "logprobs", "1"),
    (CHAT, {"messages": [USER], "logprobs": True, "top_logprobs": 21}, "top_logprobs", "of 20"),
    (CHAT, {"messages": [USER], "max_tokens": 3, "max_completion_tokens": 4}, None, "differ"),
    (CHAT, {"messages": [USER], "max_completion_tokens": 999}, "max_completion_tokens", "256"),
    (CHAT, {"messages": [USER], "tool_choice": "auto"}, None, "needs tools"),
    (CHAT, {"messages": [USER], "tools": [{"type": "x"}]}, "tools[0].type", "'x'"),
    (CHAT, {"messages": [USER], "modalities": ["audio"]}, None, "modalities"),
    (CHAT, {"messages": [USER], "store": True}, None, "store=True"),
    (CHAT, {"messages": [USER], "reasoning_effort": "high"}, None, "reasoning_effort"),
    (CHAT, {"messages": [USER], "functions": []}, None, "functions"),
    *(
        (
            path,
            {"messages": [USER], "chat_template_kwargs": {name: 1}},
            "chat_template_kwargs",
            f"holds {name!r}",
        )
        for path in (CHAT, "/tokenize")
        for name in ("messages", "self", "tools", "add_generation_prompt", "documents")
    ),
    # A template is a program: clients do not bring theirs, under either name.
    (CHAT, {"messages": [USER], "chat_template": "{{ 1 }}"}, None, "chat_template="),
    (CHAT, {"messages": [USER], "chat_template": "default"}, None, "chat_template="),
    (
        CHAT,
        {"messages": [USER], "chat_template_kwargs": {"chat_template": "{{ 1 }}"}},
        "chat_template_kwargs",
        "'chat_template', which is not for clients",
    ),
    ("/tokenize", {"messages": [USER], "chat_template": "{{ 1 }}"}, None, "chat_template"),
    (
        "/tokenize",
        {"messages": [USER], "chat_template_kwargs": {"chat_template": "{{ 1 }}"}},
        None,
        "chat_template",
    ),
    (EMBEDDINGS, {}, "input", "required"),
    (EMBEDDINGS, {"input": []}, "input", "[]"),
    (EMBEDDINGS, {"input": ""}, "input", "no tokens"),
    (EMBEDDINGS, {"input": "a", "dimensions": 8}, None, "dimensions=8"),
    (EMBEDDINGS, {"input": "a", "encoding_format": "hex"}, "encoding_format", "'hex'"),
    ("/tokenize", {}, None, "either prompt or messages"),
    ("/tokenize", {"prompt": 5}, "prompt", "5"),
    ("/detokenize", {"tokens": [VOCAB]}, "tokens", f"0 to {VOCAB - 1}"),
    ("/detokenize", {"tokens": "abc"}, "tokens", "'abc'"),
]


def check(path: str, body: Any, param: str | None, message: str) -> None:
    error = error_of(post(service_of(scripted_engine([])), path, body))
    assert message in error["message"], error
    assert error["type"] == "invalid_request_error"
    if param is not None:
        assert error["param"] == param, error
    assert len(error["message"]) < 600


@pytest.mark.parametrize(("more", "param", "message"), BOTH)
def test_fields_of_completions_and_chat(more: dict[str, Any], param: str, message: str) -> None:
    check(COMPLETIONS, {"prompt": "a", **more}, param, message)
    check(CHAT, {"messages": [USER], **more}, param, message)


@pytest.mark.parametrize(("path", "body", "param", "message"), ONE)
def test_fields_of_one_route(
    path: str, body: dict[str, Any], param: str | None, message: str
) -> None:
    check(path, body, param, message)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"prompt": "\\ud800"}',
        b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}",
        b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "a", "logit_bias": {"1": NaN}}',
    ],
)
def test_bodies_that_are_no_request(body: bytes) -> None:
    assert error_of(post(service_of(scripted_engine([])), COMPLETIONS, body))["message"]


def test_many_errors_are_told_as_one() -> None:
    many = {"prompt": "a", **{f"x{i}": i for i in range(3000)}}
    check(COMPLETIONS, many, "x0", "unknown field")
    check(COMPLETIONS, {"prompt": "a", "stop_token_ids": ["a"] * 10_000}, None, "stop_token_ids")


def test_variables_of_a_template_may_have_any_other_name() -> None:
    for name in ("service", "work", "variables", "kwargs", "request"):
        body = {"messages": [USER], "chat_template_kwargs": {name: 1}}
        assert post(service_of(scripted_engine([])), "/tokenize", body).status_code == 200


def test_arguments_of_calls_that_are_no_json() -> None:
    """What a model once wrote comes back as it wrote it, nested too deeply or not."""
    for arguments in ("[" * 100_000, "{"):
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        said = {"role": "assistant", "content": None, "tool_calls": [call]}
        body = {"messages": [USER, said]}
        answer = post(service_of(scripted_engine([])), "/tokenize", body)
        assert answer.status_code == 200, answer.text


def test_a_long_name_of_a_model_is_cut() -> None:
    body = {"model": "m" * 100_000, "prompt": "a"}
    error = error_of(post(service_of(scripted_engine([])), COMPLETIONS, body), 404)
    assert error["param"] == "model" and len(error["message"]) < 300


def test_a_model_that_is_not_here() -> None:
    service = service_of(scripted_engine([]), served_model_name=["one", "two"])
    for path, body in ((COMPLETIONS, {"prompt": "a"}), (EMBEDDINGS, {"input": "a"})):
        error = error_of(post(service, path, {**body, "model": "gpt"}), 404)
        assert error["code"] == "model_not_found" and "one, two" in error["message"]
        service = service_of(scripted_engine([]), served_model_name=["one", "two"])


def test_paths_and_methods() -> None:
    async def work(client: Any) -> None:
        assert error_of(await client.get("/v1/nothing"), 404)["type"] == "not_found_error"
        assert "GET" in error_of(await client.get(COMPLETIONS), 405)["message"]
        assert error_of(await client.get("/v1/models/x"), 404)["code"] == "model_not_found"
        assert (await client.get("/v1/models/tiny")).json()["max_model_len"] == 256

    talk(service_of(scripted_engine([])), work)


def test_no_model() -> None:
    for path in (COMPLETIONS, CHAT, EMBEDDINGS):
        error = error_of(post(service_of(scripted_engine([])), path, b"{}"))
        assert error["param"] == "model" and error["code"] == "missing_parameter"


def test_large_bodies() -> None:
    service = service_of(scripted_engine([]), max_body=2000)
    big = {"prompt": "a" * 3000}

    async def chunks() -> Any:
        for _ in range(30):
            yield b"a" * 100

    async def work(client: Any) -> None:
        error = error_of(await client.post(COMPLETIONS, json=big), 413)
        assert "at most 2000" in error["message"]
        error = error_of(await client.post(COMPLETIONS, content=chunks()), 413)
        assert "more than 2000" in error["message"]

    talk(service, work)


def test_keys() -> None:
    service = service_of(scripted_engine([1]), api_key=["first", "second"])

    async def work(client: Any) -> None:
        for headers in (
            {},
            {"authorization": "first"},
            {"authorization": "Bearer"},
            {"authorization": "Bearer firs"},
            {"authorization": "Basic first"},
            {"authorization": "Bearer first,second"},
        ):
            for path in ("/v1/models", "/docs", "/nothing"):
                answer = await client.get(path, headers=headers)
                assert (answer.status_code == 401) == (path != "/docs")
            error = error_of(await client.post(COMPLETIONS, json={}, headers=headers), 401)
            assert error["code"] == "invalid_api_key"
        for key in ("first", "second"):
            headers = {"authorization": f"Bearer {key}"}
            assert (await client.get("/v1/models", headers=headers)).status_code == 200
        for path in ("/health", "/ready", "/metrics", "/version"):
            assert (await client.get(path)).status_code == 200

    talk(service, work)


def test_prompt_logprobs_may_be_refused() -> None:
    from dataclasses import replace

    for more in ({"prompt_logprobs": 0}, {"echo": True, "logprobs": 0}):
        engine = scripted_engine([])
        engine.settings = replace(engine.settings, prompt_logprobs="reject")
        error = error_of(post(service_of(engine), COMPLETIONS, {"prompt": "ab", **more}))
        assert "logprobs=0" in error["message"] and error["param"] in more


def test_the_description_names_every_field() -> None:
    async def work(client: Any) -> dict[str, Any]:
        return (await client.get("/openapi.json")).json()

    schema = talk(service_of(scripted_engine([])), work)
    completion = schema["components"]["schemas"]["CompletionRequest"]
    assert completion["additionalProperties"] is False
    assert {"prompt", "echo", "logprobs", "guided_regex"} <= set(completion["properties"])
    text = json.dumps(schema)
    for reference in set(part.split('"')[0] for part in text.split("#/components/schemas/")[1:]):
        assert reference in schema["components"]["schemas"], reference
