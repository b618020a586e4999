"""Ctrl-C as a request that the training loop honours where its state is whole."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

REPEATS = 1.0  # seconds in which a signal is taken for a repetition of the first


class StopRequest:
    """A context in which the first Ctrl-C (or SIGTERM) only sets ``requested``.

    A second Ctrl-C acts as usual, unless it comes at once: whoever stops a job may signal its
    launcher and its ranks, and the launcher signals the ranks as well. A further SIGTERM is no
    news. Outside the main thread, and where a signal is ignored (``nohup``), nothing changes.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.requested = False
        self._say = say
        self._usual: dict[int, Any] = {}
        self._since = 0.0

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) not in (None, signal.SIG_IGN):
                    self._usual[number] = signal.signal(number, self._request)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._usual.items():
            signal.signal(number, handler)
        self._usual.clear()

    def _request(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            if number == signal.SIGINT and time.monotonic() - self._since > REPEATS:
                self.__exit__()
                signal.raise_signal(number)
            return
        self.requested, self._since = True, time.monotonic()
        with suppress(RuntimeError):  # the signal may have come in the middle of a print
            self._say("stopping: finishing this step and saving; Ctrl-C again stops at once")
