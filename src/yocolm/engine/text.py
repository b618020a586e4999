"""A sequence's text as it grows: decoding that splits no character, and stop strings."""

from __future__ import annotations

from yocolm.engine.sampling_params import SamplingParams
from yocolm.tokenizer import StreamDecoder, Tokenizer


class SequenceText:
    """Text of one sequence. ``visible`` is what may be shown already.

    While the sequence runs, as many characters are held back as a stop string could still claim.
    A token costs the same whatever came before it; only ``visible`` looks at the whole text.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._decoder = StreamDecoder(tokenizer, params.skip_special_tokens)
        self._params = params
        self._stops = params.stop_strings
        self._reach = max((len(stop) for stop in self._stops), default=1) - 1
        self._shown: list[str] = []  # may be shown, since the last `take`
        self._hidden = ""  # held back
        self._recent = ""  # the last characters, in which a stop string may have begun
        self._ended = False

    @property
    def visible(self) -> str:
        """All that may be shown; without what ``take`` has given out."""
        text = "".join(self._shown)
        self._shown = [text]
        return text

    def take(self) -> str:
        """What may be shown and was not taken before."""
        text = "".join(self._shown)
        self._shown.clear()
        return text

    def push(self, token_id: int, may_stop: bool) -> str | None:
        """Add a token. Returns the stop string that it completes, if it may stop yet."""
        return self._add(self._decoder.push(token_id), may_stop)

    def end(self, may_stop: bool = False) -> str | None:
        """No token follows: give out what was held back."""
        if self._ended:
            return None
        stop = self._add(self._decoder.finish(), may_stop)
        self._shown.append(self._hidden)
        self._hidden, self._ended = "", True
        return stop

    def _add(self, piece: str, may_stop: bool) -> str | None:
        if not piece:
            return None
        window = self._recent + piece
        pending = self._hidden + piece
        stop, end = self._find_stop(window, len(self._recent)) if may_stop else (None, 0)
        if stop is not None:
            # What is pending is the end of the window.
            self._shown.append(pending[: end - len(window) + len(pending)])
            self._hidden, self._ended = "", True
            return stop
        held = 0 if self._params.include_stop_str_in_output else self._reach
        split = max(0, len(pending) - held)
        self._shown.append(pending[:split])
        self._hidden = pending[split:]
        self._recent = window[max(0, len(window) - self._reach) :]
        return None

    def _find_stop(self, window: str, searched: int) -> tuple[str | None, int]:
        """The earliest stop string that ends behind the ``searched`` characters of ``window``, and
        where the text is to be cut.

        One that was complete before it might stop (``min_tokens``) is text like any other.
        """
        starts = {stop: max(0, searched - len(stop) + 1) for stop in self._stops}
        found = [(window.find(stop, start), stop) for stop, start in starts.items()]
        found = [(at, stop) for at, stop in found if at >= 0]
        if not found:
            return None, 0
        at, stop = min(found)
        return stop, at + len(stop) if self._params.include_stop_str_in_output else at
