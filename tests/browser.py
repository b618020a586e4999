"""A headless Chromium, told what to do through its debugging pipe: no driver is needed."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser")
# Puts the two ends of the pipe where the browser expects them, as descriptors 3 and 4.
_START = """
import fcntl, os, sys
reads, writes = (fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3])
os.dup2(reads, 3)
os.dup2(writes, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Tab:
    """One page of a browser."""

    def __init__(self, send: int, receive: int) -> None:
        self._send, self._receive, self._left = send, receive, b""
        self._count = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> Any:
        """The result of a command of the DevTools protocol."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._send, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._count:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._left:
            data = os.read(self._receive, 2**20)
            assert data, "the browser has gone"
            self._left += data
        message, _, self._left = self._left.partition(b"\0")
        return json.loads(message)

    def show(self, width: int, height: int, dark: bool = False) -> None:
        """Size in pixels of the page, and what the system prefers."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            **{"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600},
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def value(self, expression: str) -> Any:
        """What JavaScript makes of an expression (of a promise: what it brings)."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, expression: str, seconds: float = 60) -> Any:
        """Wait until an expression is true; its value."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            value = self.value(expression)
            if value:
                return value
            time.sleep(0.05)
        raise AssertionError(f"never true: {expression}; the page: {self.value(_TEXT)}")

    def text(self, selector: str) -> str:
        return self.value(f"document.querySelector({json.dumps(selector)}).innerText")

    def click(self, selector: str) -> None:
        self.value(f"document.querySelector({json.dumps(selector)}).click()")

    def type(self, selector: str, text: str) -> None:
        self.value(f"document.querySelector({json.dumps(selector)}).focus()")
        self.call("Input.insertText", text=text)

    def picture(self, path: Path, whole: bool = True) -> None:
        """A PNG of the page: of all of it, or of what is in view."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    def complaints(self) -> list[str]:
        """What went wrong in the page: exceptions, errors in its console, refused requests."""
        found = []
        for event in self.events:
            method, about = event.get("method"), event.get("params", {})
            if method == "Runtime.exceptionThrown":
                found.append(json.dumps(about["exceptionDetails"]))
            if method == "Log.entryAdded" and about["entry"]["level"] == "error":
                found.append(about["entry"]["text"] + " " + about["entry"].get("url", ""))
            if method == "Runtime.consoleAPICalled" and about["type"] in ("error", "assert"):
                found.append(json.dumps(about["args"]))
        return found

    def hosts(self) -> set[str]:
        """The beginnings of the addresses that the page has asked for anything."""
        sent = [e for e in self.events if e.get("method") == "Network.requestWillBeSent"]
        urls = [event["params"]["request"]["url"] for event in sent]
        return {"/".join(url.split("/")[:3]) for url in urls if url != "about:blank"}


_TEXT = "document.body.innerText.slice(0, 2000)"


@contextlib.contextmanager
def browser() -> Iterator[Tab]:
    """A new browser, with nothing of an earlier one; it is gone at the end."""
    assert PROGRAM is not None
    commands, answers = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        options += ["--remote-debugging-pipe", f"--user-data-dir={profile}", "--no-first-run"]
        options += ["--disable-background-networking", "--hide-scrollbars"]
        ends = commands[0], answers[1]
        process = subprocess.Popen(
            [sys.executable, "-c", _START, *map(str, ends), PROGRAM, *options],
            pass_fds=ends,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for end in ends:
            os.close(end)
        try:
            yield Tab(commands[1], answers[0])
        finally:
            os.close(commands[1])  # which ends it
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            os.close(answers[0])
