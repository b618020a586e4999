"""What a request may cost: one that will be refused costs little, none holds up the others."""

from typing import Any

import httpx2 as httpx
import pytest

from scripted import say, scripted_engine, tokenizer
from serving import error_of, post, service_of, talk
from yocolm.server import service as service_module
from yocolm.tokenizer import JsonTokenizer

COMPLETIONS, CHAT, EMBEDDINGS = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"
HELLO = say("hello", " world", " w", "or", "ld")
USER = {"role": "user", "content": "hello"}
LONG = "hello " * 1000  # at least 750 tokens of up to 8 characters; the context has 256


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that have been tokenised."""
    texts: list[str] = []
    encode = JsonTokenizer.encode

    def watched(self: JsonTokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        texts.append(text)
        return encode(self, text, add_special_tokens)

    monkeypatch.setattr(JsonTokenizer, "encode", watched)
    return texts


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, {"prompt": LONG}, "prompt"),
        (CHAT, {"messages": [{"role": "user", "content": LONG}]}, "messages"),
        (EMBEDDINGS, {"input": ["a", LONG]}, "input"),
    ],
)
def test_a_text_that_cannot_fit_is_not_tokenised(
    path: str, body: Any, param: str, encoded: list[str]
) -> None:
    error = error_of(post(service_of(scripted_engine(HELLO)), path, body))
    assert error["param"] == param and error["code"] == "context_length_exceeded"
    assert "at least" in error["message"] and "max_model_len=256" in error["message"]
    assert not any(LONG in text for text in encoded)


def test_more_samples_than_there_is_room_for(encoded: list[str]) -> None:
    body = {"prompt": ["hello"] * 100, "n": 100}
    error = error_of(post(service_of(scripted_engine(HELLO)), COMPLETIONS, body))
    assert error["param"] == "n" and "10000 samples" in error["message"] and not encoded


@pytest.mark.parametrize(
    ("path", "body"),
    [(COMPLETIONS, {"prompt": ["hello"] * 64}), (EMBEDDINGS, {"input": ["hello"] * 64})],
)
def test_many_prompts_change_threads_once(
    path: str, body: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is short, all together are long."""
    works: list[int] = []
    off_loop = service_module.off_loop

    async def watched(size: int, work: Any) -> Any:
        works.append(size)
        return await off_loop(size, work)

    monkeypatch.setattr(service_module, "off_loop", watched)
    service = service_of(scripted_engine(HELLO * 64), max_queue=100)
    answer = post(service, path, {**body, "max_tokens": 1} if path == COMPLETIONS else body)
    assert answer.status_code == 200, answer.text
    _, prepared = works  # the first is the body
    assert prepared > service_module.SHORT


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "hello"}),
        (CHAT, {"messages": [USER]}),
        (EMBEDDINGS, {"input": "hello"}),
        (COMPLETIONS, {"nonsense": 1}),
    ],
)
@pytest.mark.parametrize(("state", "status"), [("full", 429), ("draining", 503), ("dead", 503)])
def test_a_server_that_takes_nothing_does_no_work(
    path: str, body: Any, state: str, status: int, encoded: list[str]
) -> None:
    service = service_of(scripted_engine(HELLO))

    async def work(client: httpx.AsyncClient) -> None:
        if state == "full":
            service.loop._load = service.loop.capacity
        elif state == "draining":
            service.loop.draining = True
        else:
            service.loop.death = "it broke"
        answer = await client.post(path, json={"model": "tiny", **body})
        error_of(answer, status)
        counted = await client.post("/tokenize", json={"prompt": "hello"})
        assert counted.status_code == 200  # which needs no engine
        service.loop.death = None

    talk(service, work)
    assert encoded == ["hello"]  # of /tokenize


def test_time_to_the_first_token_counts_from_the_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    service = service_of(scripted_engine(HELLO))
    arrivals: list[float] = []
    during: list[float] = []
    encode, open_jobs = JsonTokenizer.encode, service.loop.open

    def watched(self: JsonTokenizer, *args: Any, **kwargs: Any) -> list[int]:
        during.append(service_module.time.monotonic())
        return encode(self, *args, **kwargs)

    def opened(jobs: Any) -> Any:
        arrivals.extend(job.arrival for job in jobs)
        return open_jobs(jobs)

    monkeypatch.setattr(JsonTokenizer, "encode", watched)
    monkeypatch.setattr(service.loop, "open", opened)
    body = {"prompt": ["hello", "world"], "max_tokens": 2}
    assert post(service, COMPLETIONS, body).status_code == 200
    assert len(arrivals) == 2 and max(arrivals) <= min(during)


def test_min_tokens_beyond_the_context() -> None:
    """Without max_tokens nothing else would refuse them."""
    for path, body in ((COMPLETIONS, {"prompt": "hello"}), (CHAT, {"messages": [USER]})):
        error = error_of(
            post(service_of(scripted_engine(HELLO)), path, {**body, "min_tokens": 999})
        )
        assert error["param"] == "min_tokens" and "min_tokens=999" in error["message"]
        assert "256 tokens" in error["message"]


def test_min_tokens_that_just_fit() -> None:
    room = 256 - len(tokenizer().encode("hello"))
    service = service_of(scripted_engine(say("o") * 256))
    answer = post(service, COMPLETIONS, {"prompt": "hello", "temperature": 0, "min_tokens": room})
    assert answer.json()["usage"]["completion_tokens"] == room
