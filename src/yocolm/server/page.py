"""The live page at ``/``: static files of the package, and the data that they show.

The page itself needs no key, since a browser cannot send one before there is a page to ask for it;
all that it shows does.
"""

from __future__ import annotations

import hashlib
import html
from dataclasses import dataclass
from importlib.resources import files
from math import isfinite

from fastapi import Request
from starlette.responses import Response

from yocolm.server.errors import ApiError, shown
from yocolm.server.service import Service
from yocolm.server.stream import JSON

_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_PAGE = "index.html"
# Nothing but our own files runs or is asked for, and nobody may put a frame around it.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # that is: ask whether it is still the same
}


@dataclass(frozen=True)
class _File:
    content: bytes
    media_type: str


def _load() -> dict[str, _File]:
    folder = files("yocolm.server") / "static"
    found = {}
    for file in folder.iterdir():
        kind = file.name.rpartition(".")[2]
        if kind in _TYPES:
            found[file.name] = _File(file.read_bytes(), _TYPES[kind])
    return found


_FILES = _load()
ASSETS = tuple(f"/live/{name}" for name in _FILES if name != _PAGE)


async def page(service: Service, request: Request) -> Response:
    """The live page."""
    file, root = _FILES[_PAGE], request.scope.get("root_path", "")
    # Behind a proxy's path the page may be asked for without a slash at its end.
    base = f"{html.escape(root)}/" if root else ""
    return _answer(request, file.content.replace(b"{{base}}", base.encode()), file.media_type)


async def asset(service: Service, request: Request) -> Response:
    """A file of the live page."""
    file = _FILES[request.url.path.rpartition("/")[2]]
    return _answer(request, file.content, file.media_type)


async def live_data(service: Service, request: Request) -> Response:
    """What the live page shows: pools, phases, queue and requests, numbers only."""
    given, since = request.query_params.get("since"), None
    if given is not None:
        try:
            since = float(given)
        except ValueError:
            since = float("nan")
        if not isfinite(since):
            raise ApiError(
                f"since={shown(given)} must be a time as 'now' of an earlier answer: leave it out",
                param="since",
            )
    headers = {"cache-control": "no-store"}
    return Response(service.live.data(since), media_type=JSON, headers=headers)


def _answer(request: Request, content: bytes, media_type: str) -> Response:
    tag = f'"{hashlib.sha256(content).hexdigest()[:20]}"'
    headers = {**_HEADERS, "etag": tag}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(content, media_type=media_type, headers=headers)
