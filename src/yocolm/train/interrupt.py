"""Ctrl-C as a request that the training loop honours where its state is whole."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any


class StopRequest:
    """A context in which the first Ctrl-C (or SIGTERM) only sets ``requested``.

    The second acts as usual. Outside the main thread, and where a signal is ignored (``nohup``),
    nothing changes.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.requested = False
        self._say = say
        self._usual: dict[int, Any] = {}

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
        self.requested = True
        self.__exit__()
        with suppress(RuntimeError):  # the signal may have come in the middle of a print
            self._say("stopping: finishing this step and saving; Ctrl-C again stops at once")
