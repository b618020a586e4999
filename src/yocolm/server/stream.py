"""Server-sent events: what is new of an answer, as soon as there is something new."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any, Protocol

from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from yocolm.server.errors import ApiError, ClientGone, failed
from yocolm.server.loop import Job, Mailbox
from yocolm.server.outputs import Output
from yocolm.server.service import Service

DONE = b"data: [DONE]\n\n"
EVENTS = "text/event-stream"
JSON = "application/json"
PREDICTED_TTFT = "x-predicted-ttft-ms"
_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class Writer(Protocol):
    """Turns what is new into events."""

    def write(self, news: Mapping[str, Output]) -> str: ...

    def end(self) -> str: ...


def event(
    head: str,
    choices: list[dict[str, Any]],
    usage: dict[str, Any] | None,
    tail: str,
    more: str = "",
) -> str:
    """One chunk: ``head`` is the beginning of its JSON, up to the choices; ``tail`` stands where
    there is no ``usage``; ``more`` are further fields, each behind a comma."""
    extra = tail if usage is None else f',"usage":{to_json(usage)}'
    return f'data: {head}"choices":{to_json(choices)}{extra}{more}}}\n\n'


def to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


async def stream_answer(
    service: Service, request: Request, jobs: list[Job], writer: Writer
) -> Response:
    """Start the jobs; the response begins when the engine has taken them, before their first token:
    its headers tell when that is to come. What fails later is an event.
    """
    context = service.answering(request, jobs)
    box = await context.__aenter__()
    try:
        await box.all_queued()
    except BaseException:
        await context.__aexit__(*sys.exc_info())
        raise
    return EventStream(context, box, writer, prediction(jobs))


def prediction(jobs: list[Job]) -> dict[str, str]:
    """The header that tells when the first token of an answer is expected, where that is known."""
    known = [job.predicted_ttft for job in jobs if job.predicted_ttft is not None]
    return {PREDICTED_TTFT: f"{1000 * min(known):.1f}"} if known else {}


class EventStream(Response):
    """The events of one mailbox. A slow client is sent more at a time, not more often."""

    media_type = EVENTS

    def __init__(
        self,
        context: AbstractAsyncContextManager[Mailbox],
        box: Mailbox,
        writer: Writer,
        headers: Mapping[str, str],
    ) -> None:
        super().__init__(None, headers={**_HEADERS, **headers})
        del self.headers["content-length"]
        self._context, self._box, self._writer = context, box, writer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await self._send_events(send)
        except ClientGone:
            pass  # nobody listens
        finally:
            await self._context.__aexit__(None, None, None)

    async def _send_events(self, send: Send) -> None:
        try:
            while True:
                news = await self._box.take()
                text = self._writer.write({name: _good(output) for name, output in news.items()})
                if text:
                    await _send(send, text.encode())
                error = next((o.error for o in news.values() if o.error is not None), None)
                if error is not None:
                    raise failed(error)
                if self._box.done:
                    break
            last = self._writer.end().encode() + DONE
        except ApiError as error:
            last = f"data: {to_json(error.body)}\n\n".encode() + DONE
        await send({"type": "http.response.body", "body": last, "more_body": False})


def _good(output: Output) -> Output:
    """What a request has still drawn before it failed."""
    if output.error is None:
        return output
    kept = [replace(sample, finish_reason=None) for sample in output.outputs if sample.token_ids]
    return replace(output, outputs=kept)


async def _send(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})
