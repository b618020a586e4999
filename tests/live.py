"""A real server in a process of its own, on a free port."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

SOURCES = Path(__file__).parents[1] / "src"


class LiveServer:
    """``yocolm serve`` with some options."""

    def __init__(self, *options: str, program: str | None = None) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        start = ["-m", "yocolm.cli"] if program is None else ["-c", program]
        command = [sys.executable, *start, "serve", "--port", str(self.port), *options]
        variables = {k: v for k, v in os.environ.items() if not k.startswith("YOCOLM_")}
        self.process = subprocess.Popen(
            command,
            env={**variables, "PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_until_ready(self) -> None:
        for _ in range(1200):
            if self.process.poll() is not None:
                raise AssertionError(f"it did not start: {self.end()[1]}")
            with contextlib.suppress(OSError):
                if self.get("/ready")[0] == 200:
                    return
            time.sleep(0.05)
        raise AssertionError("it is not ready")

    def get(self, path: str) -> tuple[int, str]:
        """Status and body."""
        try:
            with urlopen(self.url + path, timeout=60) as answer:
                return answer.status, answer.read().decode()
        except HTTPError as error:
            return error.code, error.read().decode()

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        """Status and JSON."""
        if isinstance(body, dict) and path.startswith("/v1/"):
            body = {"model": "bundled", **body}
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        try:
            with urlopen(Request(self.url + path, content), timeout=60) as answer:
                return answer.status, json.load(answer)
        except HTTPError as error:
            return error.code, json.load(error)

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        lines = re.findall(rf"^yocolm:{name}{{.*}} (\S+)$", self.get("/metrics")[1], re.MULTILINE)
        assert lines, name
        return sum(map(float, lines))

    def wait_until_idle(self) -> None:
        """Nothing runs or waits; then no state may be held."""
        for _ in range(600):
            if self.metric("num_requests_running") + self.metric("num_requests_waiting") == 0:
                break
            time.sleep(0.05)
        assert self.metric("pool_bytes") == 0
        assert self.metric("num_requests_running") == 0

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self, timeout: float = 60) -> tuple[int, str]:
        """Wait for its end: exit status and log."""
        _, log = self.process.communicate(timeout=timeout)
        return self.process.returncode, log


@contextlib.contextmanager
def live(*options: str, program: str | None = None) -> Iterator[LiveServer]:
    """A server that is ready, and killed at the end if it still runs."""
    server = LiveServer(*options, program=program)
    try:
        server.wait_until_ready()
        yield server
    finally:
        if server.process.poll() is None:
            server.signal(signal.SIGKILL)
            server.end()
        assert server.process.stderr is not None
        server.process.stderr.close()
