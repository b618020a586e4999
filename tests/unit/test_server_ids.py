"""X-Request-Id: every answer has the client's own, errors and streams as well."""

from typing import Any

import httpx2 as httpx
import pytest

from scripted import say, scripted_engine
from serving import service_of, talk
from yocolm.server import extra

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = say("hello", " world")
FINE = {"model": "tiny", "prompt": "hello", "max_tokens": 1}
KEY = {"authorization": "Bearer secret"}
CASES: list[tuple[str, str, Any, dict[str, str], int]] = [
    ("POST", COMPLETIONS, FINE, KEY, 200),
    ("POST", COMPLETIONS, {**FINE, "stream": True}, KEY, 200),
    ("POST", COMPLETIONS, {**FINE, "echo": True, "max_tokens": 0, "stream": True}, KEY, 200),
    ("POST", "/v1/embeddings", {"model": "tiny", "input": "hello"}, KEY, 200),
    ("POST", "/tokenize", {"prompt": "hello"}, KEY, 200),
    ("GET", "/health", None, {}, 200),
    ("POST", COMPLETIONS, {**FINE, "model": "other"}, KEY, 404),
    ("POST", COMPLETIONS, {**FINE, "n": 0}, KEY, 400),
    ("GET", "/nowhere", None, KEY, 404),
    ("GET", CHAT, None, KEY, 405),
    ("POST", COMPLETIONS, FINE, {}, 401),
    ("POST", COMPLETIONS, {**FINE, "prompt": "a" * 5000}, KEY, 413),
    ("GET", "/version", None, KEY, 500),
]


@pytest.mark.parametrize(("method", "path", "body", "headers", "status"), CASES)
def test_every_answer_has_the_id_that_was_sent(
    method: str,
    path: str,
    body: Any,
    headers: dict[str, str],
    status: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: Any) -> Any:
        raise KeyError("a fault of ours")

    monkeypatch.setattr(extra, "__version__", property(broken))  # no JSON: /version fails
    service = service_of(scripted_engine(HELLO * 3), api_key=["secret"], max_body=4096)

    async def work(client: httpx.AsyncClient) -> None:
        async def ids(**more: str) -> list[str]:
            answer = await client.request(method, path, json=body, headers={**headers, **more})
            assert answer.status_code == status, answer.text
            return answer.headers.get_list("x-request-id")

        assert await ids(**{"x-request-id": "mine-1"}) == ["mine-1"]
        [first], [odd] = await ids(), await ids(**{"x-request-id": "a b"})
        assert len(first) == len(odd) == 32 and first != odd

    talk(service, work)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content-type": "application/json", "origin": "http://a.example"}, 200),
        ({"content-type": "text/plain"}, 200),  # a command that names no type of its own
        ({"content-type": "text/plain", "origin": "http://a.example"}, 415),
        ({"content-type": "application/json", "content-encoding": "gzip"}, 415),
    ],
)
def test_pages_of_other_sites_and_packed_bodies_are_refused(
    headers: dict[str, str], status: int
) -> None:
    service = service_of(scripted_engine(HELLO))

    async def work(client: httpx.AsyncClient) -> None:
        content = b'{"model": "tiny", "prompt": "hello"}'
        answer = await client.post("/tokenize", content=content, headers=headers)
        assert answer.status_code == status
        assert status == 200 or "send" in answer.json()["error"]["message"]

    talk(service, work)
