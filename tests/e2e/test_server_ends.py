"""How a server ends: signals, running requests, an engine that dies, settings that cannot be."""

import json
import signal
import socket
import ssl
import threading
import time
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from live import LiveServer, live
from yocolm.cli import main

LONG = {"model": "bundled", "prompt": "It is", "max_tokens": 150}
LONG |= {"ignore_eos": True, "stream": True}
DIES = """
import sys
from yocolm.engine import scheduler
schedule = scheduler.Scheduler.schedule
def fail(self, now):
    if len(self.running) > 1:
        raise AssertionError("broken on purpose")
    return schedule(self, now)
scheduler.Scheduler.schedule = fail
from yocolm.cli import main
sys.exit(main())
"""


class Reader(threading.Thread):
    """Reads one stream to its end."""

    def __init__(self, server: LiveServer, fields: Any) -> None:
        super().__init__()
        self.server, self.fields, self.begun = server, fields, threading.Event()
        self.text, self.failed = "", ""
        self.start()

    def run(self) -> None:
        request = Request(self.server.url + "/v1/completions", json.dumps(self.fields).encode())
        try:
            with urlopen(request, timeout=60) as answer:
                for line in answer:
                    self.begun.set()
                    self.text += line.decode()
        except OSError as error:
            self.failed = str(error)
        self.begun.set()


def test_running_requests_finish_after_sigterm() -> None:
    with live() as server:
        reader = Reader(server, LONG)
        assert reader.begun.wait(30)
        server.signal(signal.SIGTERM)
        status, refused = 200, {}
        while status == 200:  # the signal is on its way
            status, refused = server.post("/v1/completions", {"prompt": "a", "max_tokens": 1})
        assert status == 503 and "shutting down" in refused["error"]["message"]
        reader.join(60)
        assert reader.text.endswith("data: [DONE]\n\n") and not reader.failed
        assert reader.text.count('"text"') > 100 and "error" not in reader.text
        code, log = server.end()
        assert code == 0 and "Traceback" not in log


def test_a_drain_has_its_limit() -> None:
    with live("--drain-timeout", "0.3") as server:
        reader = Reader(server, {**LONG, "max_tokens": 2000})
        assert reader.begun.wait(30)
        server.signal(signal.SIGINT)
        reader.join(60)
        assert "shutting down" in reader.text and reader.text.endswith("data: [DONE]\n\n")
        code, log = server.end()
        assert code == 0 and "Traceback" not in log


def test_the_second_signal_stops_at_once() -> None:
    with live("--drain-timeout", "1000") as server:
        reader = Reader(server, {**LONG, "max_tokens": 2000})
        assert reader.begun.wait(30)
        server.signal(signal.SIGTERM)
        while server.get("/ready")[0] == 200:
            time.sleep(0.01)
        server.signal(signal.SIGTERM)
        assert server.end(20)[0] == 128 + signal.SIGTERM
        reader.join(60)
        assert "[DONE]" not in reader.text


def test_an_engine_that_dies_ends_the_process() -> None:
    """Whoever waits is told, /health is red, and the exit status is not 0."""
    with live(program=DIES) as server:
        readers = [Reader(server, {**LONG, "max_tokens": 1000}) for _ in range(3)]
        for reader in readers:
            reader.join(60)
        told = [reader.text + reader.failed for reader in readers]
        assert all("broken on purpose" in text or "HTTP Error 50" in text for text in told), told
        status, body = server.get("/health")
        assert status == 503 and "broken on purpose" in body
        code, log = server.end()
        assert code == 1 and "broken on purpose" in log


def test_settings_from_a_file_and_keys(tmp_path: Path) -> None:
    config = tmp_path / "server.yaml"
    config.write_text(
        "model: bundled\nserved_model_name: [austen]\napi_key: [secret]\nroot_path: /llm\n"
    )
    with live("--config", str(config), "--max-model-len", "64", "--max-num-seqs", "2") as server:
        assert server.get("/v1/models")[0] == 401
        assert json.loads(server.get("/openapi.json")[1])["servers"] == [{"url": "/llm"}]
        request = Request(server.url + "/v1/models", headers={"Authorization": "Bearer secret"})
        with urlopen(request, timeout=30) as answer:
            [model] = json.load(answer)["data"]
        assert model["id"] == "austen" and model["max_model_len"] == 64
        server.signal(signal.SIGTERM)
        assert server.end()[0] == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--port", "99999"], "--port='99999'"),
        (["--config", "nowhere.yaml"], "nowhere.yaml"),
        (["nowhere/model"], "nowhere/model"),
        (["--chat-template", "nowhere.jinja"], "nowhere.jinja"),
        (["--tool-parser", "nonsense"], "nonsense"),
        (["--kv-memory", "1KB"], "kv_memory"),
        (["--ssl-keyfile", "nowhere.pem", "--ssl-certfile", "nowhere.pem"], "nowhere.pem"),
        (["--ssl-ca-certs", "nowhere.pem"], "give ssl_keyfile and ssl_certfile"),
    ],
)
def test_settings_that_cannot_be(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *options]) == 1
    error = capsys.readouterr().err
    assert error.splitlines()[-1].startswith("error: ") and message in error
    assert "Traceback" not in error


def test_a_port_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["serve", "--port", str(port)]) == 1
    assert f"port {port}: " in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("mutual", [False, True])
def test_tls(tmp_path: Path, mutual: bool) -> None:
    key, certificate = make_certificate(tmp_path)
    options = ["--ssl-keyfile", str(key), "--ssl-certfile", str(certificate)]
    server = LiveServer(*options, *(["--ssl-ca-certs", str(certificate)] if mutual else []))
    server.url = server.url.replace("http://127.0.0.1", "https://localhost")
    context = ssl.create_default_context(cafile=str(certificate))
    if mutual:
        context.load_cert_chain(certificate, key)
    try:
        for _ in range(600):
            try:
                with urlopen(server.url + "/health", timeout=10, context=context) as answer:
                    assert answer.status == 200
                break
            except ConnectionError:
                time.sleep(0.05)
            except OSError as error:
                assert "refused" in str(error), error
                time.sleep(0.05)
        if mutual:
            nobody = ssl.create_default_context(cafile=str(certificate))
            with pytest.raises(OSError, match=r"(?i)certificate required|reset|closed|EOF"):
                urlopen(server.url + "/health", timeout=10, context=nobody).close()
        server.signal(signal.SIGTERM)
        assert server.end()[0] == 0
    finally:
        if server.process.poll() is None:
            server.process.kill()
            server.end()


def make_certificate(folder: Path) -> tuple[Path, Path]:
    import shutil
    import subprocess

    program = shutil.which("openssl")
    if program is None:
        pytest.skip("needs openssl to make a certificate")
    key, certificate = folder / "key.pem", folder / "cert.pem"
    command = [program, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    command += ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    return key, certificate
