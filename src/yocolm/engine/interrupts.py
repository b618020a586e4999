"""Ctrl-C waits while books are kept: half an entry in a queue is worse than a late stop."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class Held:
    """A context in which SIGINT is noted; it is handled at the end, as it would have been.

    Only in the main thread, the one that Python interrupts; elsewhere, and inside another such
    context, it does nothing. ``noted``: whether there was one so far.
    """

    _active = False

    def __init__(self) -> None:
        self.noted = False
        self._handler: Any = None
        self._frame: FrameType | None = None

    def __enter__(self) -> Held:
        if not Held._active and threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler):
                self._handler = handler
                signal.signal(signal.SIGINT, self._note)
                Held._active = True
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.noted, self._frame = True, frame

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._handler is None:
            return
        handler, self._handler = self._handler, None
        Held._active = False
        signal.signal(signal.SIGINT, handler)
        if self.noted and error is None:
            handler(signal.SIGINT, self._frame)

    def released(self) -> _Released:
        """A context within this one in which SIGINT is handled at once."""
        return _Released(self)


class _Released:
    def __init__(self, held: Held) -> None:
        self._held = held

    def __enter__(self) -> None:
        held = self._held
        if held._handler is not None:
            signal.signal(signal.SIGINT, held._handler)
            if held.noted:
                held.noted = False
                held._handler(signal.SIGINT, held._frame)

    def __exit__(self, *_: object) -> None:
        if self._held._handler is not None:
            signal.signal(signal.SIGINT, self._held._note)
