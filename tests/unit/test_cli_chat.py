"""`yocolm chat`: with a model here, and with a server that says what a test wants it to say."""

import http.server
import io
import json
import re
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from yocolm import cli, cli_chat
from yocolm.cli_chat import Conversation, Message, Piece, Server
from yocolm.errors import RequestError

REPORT = re.compile(r"^\[\d+ tokens(?:, \d+\.\d tokens/s)?, the first after \d+\.\d\d s\]$", re.M)


class Script:
    """Answers with what it is given, and keeps what it was asked."""

    def __init__(self, *answers: Any) -> None:
        self.answers = iter(answers)
        self.asked: list[list[Message]] = []

    def answer(self, messages: list[Message]) -> Iterator[Piece]:
        self.asked.append([dict(message) for message in messages])
        for count, part in enumerate(next(self.answers), 1):
            if isinstance(part, BaseException):
                raise part
            yield Piece(part, count)


def talk(backend: Any, text: str, system: str | None = None) -> tuple[Conversation, int, str]:
    out = io.StringIO()
    conversation = Conversation(backend, system, out)
    code = conversation.talk(cli_chat._lines(io.StringIO(text), out))
    return conversation, code, out.getvalue()


def contents(messages: list[Message]) -> list[str]:
    return [f"{message['role'][0]}:{message['content']}" for message in messages]


def test_a_conversation() -> None:
    script = Script(["Hel", "lo"], ["Good", "."], ["New"])
    conversation, code, shown = talk(script, "Hi\n\n  \nHow?\n/reset\nAgain\n/exit\nnever\n")
    assert code == 0
    assert [contents(asked) for asked in script.asked] == [
        ["u:Hi"],
        ["u:Hi", "a:Hello", "u:How?"],
        ["u:Again"],
    ]
    assert contents(conversation.messages) == ["u:Again", "a:New"]
    assert "Hello\n[2 tokens" in shown and len(REPORT.findall(shown)) == 3


def test_system_messages_and_slashes() -> None:
    script = Script(["a"], ["b"], ["c"])
    _, _, shown = talk(script, "//x\n/system  Be brief.\ny\n/reset\n/what\nz\n", system="Be kind.")
    assert [contents(asked) for asked in script.asked] == [
        ["s:Be kind.", "u:/x"],
        ["s:Be brief.", "u:y"],
        ["s:Be brief.", "u:z"],
    ]
    assert "/reset   forget" in shown


def test_lines_that_go_on() -> None:
    script = Script(["a"], ["b"])
    talk(script, "one\\\ntwo\nthree\\\n")
    assert [contents(asked)[-1] for asked in script.asked] == ["u:one\ntwo", "u:three"]


def test_an_answer_that_is_stopped_or_fails() -> None:
    script = Script(["half", KeyboardInterrupt()], ["x", RequestError("too\nlong")], ["ok"])
    conversation, code, shown = talk(script, "1\n2\n3\n")
    assert code == 1
    assert contents(conversation.messages) == ["u:1", "a:half", "u:3", "a:ok"]
    assert "x\nerror: too long\n" in shown


def test_with_a_model_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi\n/reset\nHi\n"))
    assert cli.main(["chat", "--seed", "1", "--max-tokens", "5", "--system", "Be brief."]) == 0
    shown = capsys.readouterr().out
    first, second, rest = REPORT.sub("|", shown).split("|\n")
    assert first.strip() and first == second and rest == ""


def test_a_model_that_cannot_chat(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["chat", "--model", "random:tiny-nothing"]) == 1
    assert capsys.readouterr().err.startswith("error: ")


class Fake(http.server.BaseHTTPRequestHandler):
    """An OpenAI-compatible server's surface; ``plan`` is what it does next."""

    plan: list[Any] = []
    seen: list[tuple[str, dict[str, Any] | None, str | None]] = []

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._respond(None)

    def do_POST(self) -> None:
        self._respond(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _respond(self, body: dict[str, Any] | None) -> None:
        Fake.seen.append((self.path, body, self.headers["Authorization"]))
        status, text = Fake.plan.pop(0)
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())


@pytest.fixture
def url() -> Iterator[str]:
    Fake.plan, Fake.seen = [(200, '{"data": [{"id": "m"}]}')], []
    server = http.server.HTTPServer(("127.0.0.1", 0), Fake)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def events(*parts: str, end: str = "data: [DONE]\n\n") -> str:
    chunks = [{"choices": [{"delta": {"content": part}}]} for part in parts]
    listed: list[Any] = [{"choices": [{"delta": {"role": "assistant"}}]}, *chunks]
    usage = {"choices": [], "usage": {"completion_tokens": 7}}
    lines = [f"data: {json.dumps(event)}\n\n" for event in [*listed, usage]]
    return ": comment\n\n" + "".join(lines) + end


def test_with_a_server(url: str) -> None:
    Fake.plan.append((200, events("Hé", "", "llo")))
    _, code, shown = talk(Server(url + "/", None, "secret", {"temperature": 0.5}), "Hi\n")
    assert code == 0 and "Héllo\n[7 tokens" in shown
    (models, _, key), (path, body, _) = Fake.seen
    assert (models, path, key) == ("/v1/models", "/v1/chat/completions", "Bearer secret")
    assert body == {
        "model": "m",
        "messages": [{"role": "user", "content": "Hi"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.5,
    }


def test_servers_that_fail(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "from outside")
    server = Server(url + "/v1", None, None, {})
    assert Fake.seen[0][2] == "Bearer from outside"
    for answer, message in (
        ((400, '{"error": {"message": "no such field"}}'), "400: no such field"),
        ((503, "busy"), "503: busy"),
        ((200, events("x", end="")), "broke off the answer"),
        ((200, 'data: {"error": {"message": "it failed"}}\n\n'), "it failed"),
        ((200, "data: <html>\n\n"), "does not speak OpenAI's API"),
    ):
        Fake.plan.append(answer)
        conversation, code, shown = talk(server, "Hi\n")
        assert code == 1 and message in shown and conversation.messages == []


def test_no_server(url: str) -> None:
    Fake.plan[:] = [(200, '{"data": []}')]
    with pytest.raises(RequestError, match="serves no model: give --model"):
        Server(url, None, None, {})
    with pytest.raises(RequestError, match="must begin with http"):
        Server("localhost:8000", None, None, {})
    with pytest.raises(RequestError, match="is `yocolm serve` running there"):
        Server("http://127.0.0.1:9", None, None, {})
