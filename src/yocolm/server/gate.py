"""What every exchange passes through: its id, keys, and the size of the body."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable
from uuid import uuid4

from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from yocolm.server.errors import ApiError

REQUEST_ID = "x-request-id"
_PLAIN = re.compile(rb"[\w.:-]{1,100}")


class Gate:
    """Refuses who has no key and bodies that are too large, before anything else looks at them.

    Every answer, errors too, has the header X-Request-Id: the client's own if that is plain, else
    a new one. It is also ``request.state.request_id``.

    Args:
        keys: any of them opens; without keys everything is open.
        open_paths: need no key.
        max_body: in bytes.
    """

    def __init__(
        self, app: ASGIApp, keys: Iterable[str], open_paths: Iterable[str], max_body: int
    ) -> None:
        self._app, self._open, self._max_body = app, frozenset(open_paths), max_body
        self._keys = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        request_id = headers.get(REQUEST_ID.encode(), b"")
        if not _PLAIN.fullmatch(request_id):
            request_id = uuid4().hex.encode()
        scope.setdefault("state", {})["request_id"] = request_id.decode()

        async def identified(message: Message) -> None:
            if message["type"] == "http.response.start":
                pair = REQUEST_ID.encode(), request_id
                message = {**message, "headers": [*message.get("headers", ()), pair]}
            await send(message)

        error = self._refusal(scope, headers)
        if error is not None:
            await _answer(error, scope, receive, identified)
            return
        await self._pass(scope, receive, identified)

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let it through, as long as its body is not too large."""
        read = 0
        started = False

        async def limited() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self._max_body:
                raise self._too_large(f"more than {self._max_body}")
            return message

        async def watched(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, limited, watched)
        except ClientDisconnect:
            pass  # gone while it sent its body
        except ApiError as error:
            if started:
                raise
            await _answer(error, scope, receive, send)

    def _refusal(self, scope: Scope, headers: dict[bytes, bytes]) -> ApiError | None:
        if self._keys and scope["method"] != "OPTIONS" and not self._is_open(scope):
            kind, _, given = headers.get(b"authorization", b"").partition(b" ")
            digest = _digest(given.strip())
            # All keys are compared, each in constant time: the time tells nothing.
            fits = [hmac.compare_digest(digest, key) for key in self._keys]
            if kind.lower() != b"bearer" or not any(fits):
                return ApiError(
                    "no valid API key: send one as 'Authorization: Bearer KEY'",
                    401,
                    code="invalid_api_key",
                )
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length[:20]) > self._max_body:
            return self._too_large(length.decode())
        return None

    def _is_open(self, scope: Scope) -> bool:
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        return path in self._open

    def _too_large(self, length: str) -> ApiError:
        return ApiError(
            f"the body has {length} bytes; at most {self._max_body} are taken (--max-body)",
            413,
            code="request_too_large",
            kind="invalid_request_error",
        )


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


async def _answer(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    headers = {**error.headers, "connection": "close"} if error.status == 413 else error.headers
    await JSONResponse(error.body, error.status, headers)(scope, receive, send)
