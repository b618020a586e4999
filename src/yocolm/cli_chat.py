"""`yocolm chat`: a conversation in the terminal, with a server or with a model in this process."""

from __future__ import annotations

import argparse
import http.client
import importlib
import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TextIO, cast

from yocolm.errors import RequestError, YocolmError

try:
    import readline  # input() edits lines with it
except ImportError:  # not on every system
    readline = None

HELP = """\
/reset   forget the conversation
/system TEXT   set the system message, and forget the conversation
/exit    leave (so does Ctrl-D); Ctrl-C stops an answer
A line that ends in \\ goes on in the next one; // begins a message with a slash."""
TIMEOUT = 600.0  # seconds without a byte from the server
_SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed")

Message = dict[str, str]


@dataclass
class Piece:
    """Text of an answer as it comes, and how many tokens it is (None: not known yet)."""

    text: str
    tokens: int | None = None


class Backend(Protocol):
    """Who answers."""

    def answer(self, messages: list[Message]) -> Iterator[Piece]:
        """The answer to a conversation; closing the iterator stops it. Raises YocolmError."""
        ...


def run(arguments: argparse.Namespace) -> int:
    sampling = {name: getattr(arguments, name) for name in _SAMPLING}
    sampling = {name: value for name, value in sampling.items() if value is not None}
    if arguments.url is not None:
        backend: Backend = Server(arguments.url, arguments.model, arguments.api_key, sampling)
    else:
        local = importlib.import_module("yocolm.cli_chat_local")  # not needed, and slow, with --url
        backend = local.InProcess(arguments, sampling)
    return Conversation(backend, arguments.system, sys.stdout).talk(_lines(sys.stdin, sys.stdout))


class Conversation:
    """The history, and the loop that extends it."""

    def __init__(self, backend: Backend, system: str | None, out: TextIO) -> None:
        self._backend, self._system, self._out = backend, system, out
        self.messages: list[Message] = []
        self._failed = False
        self._reset()

    def talk(self, lines: Iterator[str]) -> int:
        """Answer line after line. Returns 0, or 1 if an answer has failed."""
        for line in lines:
            if line.startswith("/") and not line.startswith("//"):
                if not self._command(line):
                    break
            elif line.strip():
                self._ask(line[1:] if line.startswith("//") else line)
        return int(self._failed)

    def _command(self, line: str) -> bool:
        """Carry out a command; False to leave."""
        name, _, rest = line.strip().partition(" ")
        if name in ("/exit", "/quit"):
            return False
        if name == "/reset":
            self._reset()
        elif name == "/system":
            self._system = rest.strip() or None
            self._reset()
        else:
            print(HELP, file=self._out)
        return True

    def _reset(self) -> None:
        self.messages = []
        if self._system is not None:
            self.messages.append({"role": "system", "content": self._system})

    def _ask(self, text: str) -> None:
        """Print the answer as it comes; one that fails leaves no trace in the history."""
        self.messages.append({"role": "user", "content": text})
        clock, parts = _Clock(), []
        pieces = self._backend.answer(self.messages)
        try:
            for piece in pieces:
                clock.count(piece)
                parts.append(piece.text)
                self._out.write(piece.text)
                self._out.flush()
        except KeyboardInterrupt:
            cast(Any, pieces).close()  # what was said stays said
        except (YocolmError, OSError) as error:
            self.messages.pop()
            self._failed = True
            print("\n" * bool(parts) + "error:", " ".join(str(error).split()), file=self._out)
            return
        self.messages.append({"role": "assistant", "content": "".join(parts)})
        print(f"\n{clock.report()}", file=self._out, flush=True)


class _Clock:
    """Counts tokens and time."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._first = self._last = self._start
        self._tokens = self._pieces = 0

    def count(self, piece: Piece) -> None:
        self._last = time.perf_counter()
        if self._pieces == 0:
            self._first = self._last
        self._pieces += 1
        self._tokens = self._tokens if piece.tokens is None else piece.tokens

    def report(self) -> str:
        """Tokens, their rate after the first one, and how long that one took."""
        tokens = self._tokens or self._pieces
        seconds = self._last - self._first
        rate = f", {(tokens - 1) / seconds:.1f} tokens/s" if tokens > 1 and seconds > 0 else ""
        return f"[{tokens} tokens{rate}, the first after {self._first - self._start:.2f} s]"


def _lines(source: TextIO, out: TextIO) -> Iterator[str]:
    """What is typed, or piped in, with continued lines joined."""
    typed = source.isatty()
    if typed:
        print("Type a message, or /help.", file=out)
    line = ""
    while piece := _typed_line(out) if typed else source.readline():
        if piece.endswith("\\\n"):
            line += piece[:-2] + "\n"
            continue
        yield line + piece.removesuffix("\n")
        line = ""
    if line:
        yield line.removesuffix("\n")


def _typed_line(out: TextIO) -> str:
    """A line with its end; empty if there are no more."""
    try:
        return input("> ") + "\n"
    except EOFError:
        print(file=out)
        return ""


class Server:
    """An OpenAI-compatible server, by its base URL (with or without ``/v1``)."""

    def __init__(
        self, url: str, model: str | None, api_key: str | None, sampling: Mapping[str, Any]
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise RequestError(f"--url={url!r} must begin with http:// or https://")
        url = url.rstrip("/")
        self._base = url if url.endswith("/v1") else f"{url}/v1"
        self._key = api_key or os.environ.get("OPENAI_API_KEY")
        self._sampling = dict(sampling)
        self._model = model or self._first_model()

    def answer(self, messages: list[Message]) -> Iterator[Piece]:
        body = {
            "model": self._model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._sampling,
        }
        with self._request("chat/completions", body) as response:
            try:
                for data in _events(response):
                    if data == "[DONE]":
                        return
                    yield from self._pieces(data)
            except http.client.HTTPException as error:
                raise RequestError(f"the server broke off the answer: {error!r}") from error
        raise RequestError("the server broke off the answer")

    def _pieces(self, data: str) -> Iterator[Piece]:
        event = _object(data)
        if event.get("error"):
            raise RequestError(_error_text(event))
        usage = event.get("usage") or {}
        tokens = usage.get("completion_tokens")
        text = "".join(
            (choice.get("delta") or {}).get("content") or ""
            for choice in event.get("choices") or []
        )
        if text or tokens is not None:
            yield Piece(text, tokens)

    def _first_model(self) -> str:
        with self._request("models", None) as response:
            models = _object(response.read().decode(errors="replace")).get("data") or []
        if not models:
            raise RequestError(f"{self._base} serves no model: give --model")
        return models[0]["id"]

    def _request(self, path: str, body: Mapping[str, Any] | None) -> Any:
        headers = {"Content-Type": "application/json"}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        request = urllib.request.Request(
            f"{self._base}/{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers=headers,
        )
        try:
            return urllib.request.urlopen(request, timeout=TIMEOUT)
        except urllib.error.HTTPError as error:
            with error:
                text = error.read().decode(errors="replace")
            raise RequestError(f"{self._base}: {error.code}: {_error_text(text)}") from error
        except urllib.error.URLError as error:
            raise RequestError(
                f"no answer from {self._base} ({error.reason}); is `yocolm serve` running there?"
            ) from error


def _events(response: Iterable[bytes]) -> Iterator[str]:
    """The data of server-sent events."""
    for line in response:
        text = line.decode(errors="replace").strip()
        if text.startswith("data:"):
            yield text.removeprefix("data:").strip()


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise RequestError(f"the server does not speak OpenAI's API: {text[:80]!r}") from error
    return value if isinstance(value, dict) else {}


def _error_text(answer: str | Mapping[str, Any]) -> str:
    """The message of an error in OpenAI's shape, or the text as it is."""
    if isinstance(answer, str):
        try:
            answer = json.loads(answer)
        except ValueError:
            return str(answer)[:200]
    inner = answer.get("error") if isinstance(answer, Mapping) else None
    message = inner.get("message") if isinstance(inner, Mapping) else inner
    return str(message or answer)[:500]
