"""How far the loading of a model has come, on one line of a terminal."""

from __future__ import annotations

from typing import TextIO


class LoadingLine:
    """Called with bytes that are done and in all; its line is erased at the end.

    Nothing is written if ``out`` is None or no terminal.
    """

    def __init__(self, name: str, out: TextIO | None) -> None:
        self._name = name
        self._out = out if out is not None and out.isatty() else None
        self._shown = ""

    def __enter__(self) -> LoadingLine:
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown:
            self._write("\r" + " " * len(self._shown) + "\r")

    def __call__(self, done: int, total: int) -> None:
        text = f"loading {self._name}: {100 * done // max(1, total)} % of {total / 1e9:.1f} GB"
        if self._out is not None and text != self._shown:
            self._write("\r" + text)
            self._shown = text

    def _write(self, text: str) -> None:
        assert self._out is not None
        self._out.write(text)
        self._out.flush()
