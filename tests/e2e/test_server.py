"""The real server with the bundled model: the official client, raw HTTP, clients that go."""

import asyncio
import json
import random
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from live import LiveServer, live
from yocolm.engine.llm import LLM
from yocolm.engine.sampling_params import SamplingParams

PROMPT = "It is a truth universally acknowledged, that a single man"
MESSAGES: Any = [
    {"role": "system", "content": "You answer."},
    {"role": "user", "content": [{"type": "text", "text": "Who is Emma?"}]},
]


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live(
        "--page-size", "16", "--max-logprobs", "20", "--log-format", "json", "--log-requests"
    ) as running:
        yield running
        running.wait_until_idle()


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("bundled")


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["bundled"]
    assert client.models.retrieve("bundled").owned_by == "yocolm"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_completions_equal_the_offline_engine(client: openai.OpenAI, llm: LLM) -> None:
    fields: Any = {"model": "bundled", "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
    [offline] = llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=24))
    whole = client.completions.create(**fields)
    assert whole.choices[0].text == offline.outputs[0].text
    assert whole.usage is not None and whole.usage.completion_tokens == 24
    pieces = list(client.completions.create(**fields, stream=True))
    assert "".join(piece.choices[0].text for piece in pieces) == whole.choices[0].text
    seeded = [client.completions.create(**{**fields, "temperature": 1, "seed": 5}) for _ in "ab"]
    assert seeded[0].choices[0].text == seeded[1].choices[0].text != whole.choices[0].text


def test_logprobs_equal_the_offline_engine(client: openai.OpenAI, llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    prompts = [tokenizer.encode(PROMPT[: 20 + 9 * i]) for i in range(4)]
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=1, prompt_logprobs=1)
    answer = client.completions.create(
        model="bundled", prompt=prompts, max_tokens=1, temperature=0, echo=True, logprobs=1, seed=1
    )
    for choice, offline in zip(answer.choices, llm.generate(prompts, params), strict=True):
        ids = offline.prompt_token_ids + offline.outputs[0].token_ids
        entries = (offline.prompt_logprobs or []) + (offline.outputs[0].logprobs or [])
        parts = choice.logprobs
        assert parts is not None and parts.token_logprobs is not None and parts.tokens is not None
        assert len(parts.tokens) == len(ids) and parts.token_logprobs[0] is None
        for token, ours, entry in zip(ids[1:], parts.token_logprobs[1:], entries[1:], strict=True):
            assert entry is not None and abs(entry[token].logprob - (ours or 0)) < 1e-4


def test_chat(client: openai.OpenAI) -> None:
    fields: Any = {"model": "bundled", "messages": MESSAGES, "max_completion_tokens": 12}
    fields["extra_body"] = {"ignore_eos": True}  # nor does the end of a turn cut the text
    whole = client.chat.completions.create(**fields, temperature=0, logprobs=True, top_logprobs=2)
    assert whole.choices[0].message.role == "assistant" and whole.usage is not None
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    spelled = b"".join(bytes(entry.bytes or []) for entry in logprobs.content)
    assert spelled.decode(errors="replace") == whole.choices[0].message.content
    pieces = list(
        client.chat.completions.create(
            **fields, temperature=0, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(p.choices[0].delta.content or "" for p in pieces if p.choices)
    assert text == whole.choices[0].message.content
    used = pieces[-1].usage
    assert used is not None and pieces[-1].choices == []
    assert used.total_tokens == whole.usage.total_tokens
    details = used.prompt_tokens_details
    assert details is not None and details.cached_tokens == 16 * ((used.prompt_tokens - 1) // 16)
    replayed = [*MESSAGES, whole.choices[0].message.model_dump(), MESSAGES[1]]
    again = client.chat.completions.create(**{**fields, "messages": replayed})
    assert again.usage is not None and again.usage.prompt_tokens > whole.usage.prompt_tokens


def test_answers_of_a_given_form(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["Emma", "Anne"]}, "old": {"type": "boolean"}},
        "required": ["name", "old"],
        "additionalProperties": False,
    }
    form: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
    answer = client.chat.completions.create(
        model="bundled", messages=MESSAGES, response_format=form, max_tokens=200
    )
    parsed = json.loads(answer.choices[0].message.content or "")
    assert parsed["name"] in ("Emma", "Anne") and isinstance(parsed["old"], bool)
    assert answer.choices[0].finish_reason == "stop"
    chosen = client.completions.create(
        model="bundled", prompt=PROMPT, extra_body={"guided_choice": ["yes", "no"]}
    )
    assert chosen.choices[0].text in ("yes", "no")
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="bundled", prompt="a", extra_body={"guided_regex": "("})
    assert "guided_regex" in str(caught.value)


def test_tool_calls(client: openai.OpenAI) -> None:
    tools: Any = [
        {
            "type": "function",
            "function": {
                "name": "find",
                "description": "Find a book",
                "parameters": {
                    "type": "object",
                    "properties": {"title": {"type": "string", "maxLength": 12}},
                    "required": ["title"],
                    "additionalProperties": False,
                },
            },
        }
    ]
    fields: Any = {"model": "bundled", "messages": MESSAGES, "tools": tools, "seed": 1}
    fields["tool_choice"] = {"type": "function", "function": {"name": "find"}}
    [choice] = client.chat.completions.create(**fields, max_tokens=300).choices
    [call] = choice.message.tool_calls or []
    assert call.type == "function" and call.function.name == "find"
    assert set(json.loads(call.function.arguments)) == {"title"}
    assert choice.finish_reason == "tool_calls" and not choice.message.content
    pieces = list(client.chat.completions.create(**fields, max_tokens=300, stream=True))
    deltas = [call for p in pieces for call in p.choices[0].delta.tool_calls or []]
    assert deltas[0].id and deltas[0].function and deltas[0].function.name == "find"
    joined = "".join(d.function.arguments or "" for d in deltas if d.function)
    assert joined == call.function.arguments
    assert pieces[-1].choices[0].finish_reason == "tool_calls"
    with pytest.raises(openai.BadRequestError):
        other: Any = {"type": "function", "function": {"name": "other"}}
        client.chat.completions.create(**{**fields, "tool_choice": other})


def test_embeddings(client: openai.OpenAI) -> None:
    texts = ["a good fortune", "a good fortune", "the sea"]
    answer = client.embeddings.create(model="bundled", input=texts)
    one, same, other = (item.embedding for item in answer.data)
    assert one == pytest.approx(same, abs=1e-5) and one != pytest.approx(other, abs=1e-2)
    assert sum(x * x for x in one) == pytest.approx(1.0, abs=1e-4)
    assert [item.index for item in answer.data] == [0, 1, 2] and answer.usage.prompt_tokens > 6
    floats = client.embeddings.create(model="bundled", input=texts[0], encoding_format="float")
    assert floats.data[0].embedding == pytest.approx(one, abs=1e-5)
    mean = client.embeddings.create(
        model="bundled", input=texts[0], extra_body={"pooling": "mean", "normalize": False}
    )
    assert mean.data[0].embedding != pytest.approx(one, abs=1e-2)


def test_tokens_there_and_back(server: LiveServer) -> None:
    status, answer = server.post("/tokenize", {"prompt": PROMPT, "return_token_strs": True})
    assert status == 200 and answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 32768
    assert server.post("/detokenize", {"tokens": answer["tokens"]}) == (200, {"prompt": PROMPT})
    status, chat = server.post("/tokenize", {"messages": MESSAGES})
    assert status == 200 and chat["count"] > 5


def test_what_needs_no_model(server: LiveServer) -> None:
    for path in ("/health", "/ready", "/version", "/docs", "/openapi.json", "/metrics"):
        assert server.get(path)[0] == 200, path
    assert server.get("/nothing")[0] == 404


def test_errors_of_the_client(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="bundled", prompt="a", temperature=-1)
    body: Any = caught.value.body
    assert body["param"] == "temperature" and "-1" in body["message"]
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="a")
    image: Any = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]
    with pytest.raises(openai.BadRequestError, match="image_url"):
        client.chat.completions.create(
            model="bundled", messages=[{"role": "user", "content": image}]
        )


RAW = [
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\n{{{{{",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n{}",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\n" + b"A: " + b"b" * 100_000 + b"\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00",
    b"GARBAGE\r\n\r\n",
    b"PUT /v1/models HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n",
    b"GET /v1/models/%ff%00 HTTP/1.1\r\nHost: x\r\n\r\n",
]


@pytest.mark.parametrize("raw", RAW, ids=range(len(RAW)))
def test_raw_bytes(server: LiveServer, raw: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(raw)
        connection.shutdown(socket.SHUT_WR)
        answer = connection.recv(4096)
    assert b" 5" not in answer.split(b"\r\n", 1)[0], answer
    assert server.get("/health")[0] == 200


async def one_stream(server: LiveServer, source: random.Random, expected: list[str]) -> str:
    """A stream that is read to its end, or that its client leaves somewhere."""
    index = source.randrange(len(expected))
    fields = {
        "model": "bundled",
        "prompt": PROMPT[: 10 + 10 * index],
        "max_tokens": 30,
        "temperature": 0,
        "stream": True,
    }
    body = json.dumps(fields).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    leaves_after = source.choice([None, 0, 1, 300, 2000, 5000])
    try:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()
        got = b""
        while not got.endswith(b"0\r\n\r\n"):
            if leaves_after is not None and len(got) >= leaves_after:
                return "left"
            piece = await reader.read(200)
            assert piece, got
            got += piece
    finally:
        writer.close()
    lines = [line for line in got.split(b"\n") if line.startswith(b"data: {")]
    text = "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines)
    assert text == expected[index]
    return "read"


def test_many_streams_and_clients_that_go(server: LiveServer, llm: LLM) -> None:
    prompts = [PROMPT[: 10 + 10 * i] for i in range(4)]
    params = SamplingParams(temperature=0, max_tokens=30)
    expected = [output.outputs[0].text for output in llm.generate(prompts, params)]

    async def main() -> list[str]:
        sources = [random.Random(seed) for seed in range(48)]
        return await asyncio.gather(*(one_stream(server, s, expected) for s in sources))

    ends = asyncio.run(main())
    assert ends.count("left") > 10 and ends.count("read") > 4
    server.wait_until_idle()


def test_a_client_that_does_not_read_delays_nobody(server: LiveServer) -> None:
    fields = {"prompt": PROMPT, "max_tokens": 1900, "ignore_eos": True, "stream": True}
    fields |= {"logprobs": 20, "model": "bundled"}
    body = json.dumps(fields).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", server.port))
        slow.sendall(head.encode() + body)
        with ThreadPoolExecutor(4) as pool:
            asked = {"prompt": PROMPT, "max_tokens": 8}
            answers = list(pool.map(lambda _: server.post("/v1/completions", asked), range(8)))
        assert all(status == 200 for status, _ in answers)
    server.wait_until_idle()
