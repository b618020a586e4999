"""What a client is told when something goes wrong, in OpenAI's shape."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError

from yocolm.errors import RequestError, YocolmError

SHOWN = 80  # characters of a value in a message
_NAME = re.compile(r"(?:each (?:of|token id in) )?([a-z_]+)(?:=|:|\[| \d| token id)")
_SELF_NAMED = re.compile(r"([a-z_]+)[=:]")
_BRANCH = re.compile(r"\[|^(str|int|float|bool|dict|list|function-|constrained-|[A-Z])")


class ApiError(YocolmError):
    """An answer other than 200: a status and OpenAI's error body.

    ``param`` names the field at fault; ``retry_after`` is in seconds.
    """

    def __init__(
        self,
        message: str,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        kind: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message, self.status, self.param, self.code = message, status, param, code
        self.kind = kind or _kind(status)
        self.retry_after = retry_after

    @property
    def body(self) -> dict[str, Any]:
        fields = {"message": self.message, "type": self.kind, "param": self.param}
        return {"error": {**fields, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        headers = {}
        if self.retry_after is not None:
            headers["Retry-After"] = str(self.retry_after)
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return headers


class ClientGone(Exception):
    """The client has closed its connection: nobody is there to be told."""


def _kind(status: int) -> str:
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
    if status in kinds:
        return kinds[status]
    return "invalid_request_error" if status < 500 else "server_error"


def unavailable(message: str, retry_after: int = 5) -> ApiError:
    return ApiError(message, 503, code="unavailable", retry_after=retry_after)


def failed(message: str) -> ApiError:
    """The server's own fault: a step that raised, logits that are not finite."""
    return ApiError(message, 500, code="internal_error")


def shown(value: object) -> str:
    """A value for a message, cut where it is long."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 10**60:
        return "a number of more than 60 digits"
    text = repr(value[: 2 * SHOWN]) if isinstance(value, str | bytes | list) else repr(value)
    return text if len(text) <= SHOWN else text[:SHOWN] + "..."


def from_request_error(
    error: RequestError, fields: Iterable[str], renamed: Mapping[str, str] | None = None
) -> ApiError:
    """A 400 from what the engine refuses; it names the field where the message does.

    Args:
        fields: names that the client may have sent.
        renamed: parameters of the engine that come from a field of another name.
    """
    message = str(error)
    form = (renamed or {}).get("structured_outputs")
    if form is not None and message.startswith("structured_outputs"):
        return ApiError(f"{form}: {message}", param=form, code="invalid_value")
    match = _NAME.match(message)
    name = match.group(1) if match else None
    if name is not None and renamed and name in renamed:
        message = message.replace(name, renamed[name], 1)
        name = renamed[name]
    if name is None or name not in fields:
        named = (renamed or {}).get("prompt", "prompt")
        name = named if "prompt" in message and named in fields else None
    code = "context_length_exceeded" if "max_model_len" in message else None
    return ApiError(message, param=name, code=code)


def from_validation_error(error: ValidationError) -> ApiError:
    """A 400 from the first field that pydantic refuses, with all that it might have been."""
    details = error.errors(include_url=False)
    first = details[0]
    path = _path(first["loc"])
    same = [d for d in details if _path(d["loc"]) == path] or [first]
    reasons = list(dict.fromkeys(_reason(d) for d in same))[:4]
    if first["type"] == "json_invalid":
        return ApiError(f"the body is not valid JSON: {first['msg']}", code="invalid_json")
    if first["type"] == "extra_forbidden":
        message = f"{path}: unknown field; leave it out"
        return ApiError(message, param=path, code="unknown_parameter")
    if first["type"] == "missing":
        return ApiError(f"{path}: required, but not given", param=path, code="missing_parameter")
    named = _SELF_NAMED.match(reasons[0]) if first["type"] == "value_error" else None
    if named is not None:  # a check of several fields, which names one itself
        path = f"{path}.{named.group(1)}" if path else named.group(1)
        return ApiError(reasons[0], param=path, code="invalid_value")
    where = f"{path}=" if path else "the body is "
    message = f"{where}{shown(first['input'])}: {', or '.join(reasons)}"
    return ApiError(message, param=path or None, code="invalid_value")


def _reason(detail: Any) -> str:
    if detail["type"] == "value_error":
        return str(detail["ctx"]["error"])
    message = str(detail["msg"])
    return message[:1].lower() + message[1:]


def _path(location: tuple[int | str, ...]) -> str:
    """The place in the body as it is written, without the branches of a union."""
    text = ""
    for index, part in enumerate(location):
        if isinstance(part, int):
            text += f"[{part}]"
        elif index == 0:
            text = part
        elif not _BRANCH.search(part):
            text += f".{part}"
    return text
