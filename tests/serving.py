"""A server in the process of the test, and what a test says to it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

import httpx2 as httpx

from scripted import scripted_engine
from tiny import assert_empty
from yocolm.chat import ChatTemplate
from yocolm.engine.engine import Engine
from yocolm.engine.outputs import CompletionOutput, RequestOutput
from yocolm.server.app import make_app, make_service
from yocolm.server.service import Service
from yocolm.server.settings import gather

TEMPLATE = ChatTemplate(
    {"default": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"}
)
Result = TypeVar("Result")


def service_of(engine: Engine, **settings: Any) -> Service:
    """A service with settings as a configuration file gives them."""
    return make_service(engine, TEMPLATE, gather({}, settings, environment={}), "tiny")


@contextlib.asynccontextmanager
async def client_of(service: Service) -> AsyncIterator[httpx.AsyncClient]:
    """A client; the engine's thread runs meanwhile, and has nothing left at the end."""
    app = make_app(service)
    root = service.settings.root_path  # paths then begin with it, as uvicorn hands them on
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False, root_path=root)
    service.loop.start()
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            yield client
    finally:
        await service.loop.stop()
    if service.loop.death is None:
        assert not service.engine.has_unfinished_requests()
        service.engine.check()
        assert_empty(service.engine)


def talk(service: Service, work: Callable[[httpx.AsyncClient], Awaitable[Result]]) -> Result:
    """Do ``work`` with a client."""

    async def main() -> Result:
        async with client_of(service) as client:
            return await asyncio.wait_for(work(client), 60)

    return asyncio.run(main())


def post(service: Service, path: str, body: Any, **headers: str) -> httpx.Response:
    """The answer to one request; ``body`` is JSON, or bytes as they are."""
    if isinstance(body, dict) and path.startswith("/v1/"):
        body = {"model": service.model_names[0], **body}
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return talk(service, lambda client: client.post(path, content=content, headers=headers))


def says(tokens: Sequence[int], path: str, body: dict[str, Any], **settings: Any) -> httpx.Response:
    """The answer of a server whose model draws ``tokens``."""
    return post(service_of(scripted_engine(tokens), **settings), path, body)


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The chunks of a stream, which ends as it should."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]" and all(line.startswith("data: ") for line in lines)
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def error_of(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The body of an error in OpenAI's shape."""
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]


def part(text: str, token: int, finished: bool = False) -> RequestOutput:
    """A delta of request "a" with one token."""
    reason = "length" if finished else None
    sample = CompletionOutput(0, text, [token], finish_reason=reason)
    return RequestOutput("a", None, [1], None, [sample], finished)
