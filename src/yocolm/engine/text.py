"""A sequence's text as it grows: decoding that splits no character, and stop strings."""

from __future__ import annotations

from yocolm.engine.sampling_params import SamplingParams
from yocolm.tokenizer import StreamDecoder, Tokenizer


class SequenceText:
    """Text of one sequence. ``visible`` is what may be shown already.

    While the sequence runs, as many characters are held back as a stop string could still claim.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._decoder = StreamDecoder(tokenizer, params.skip_special_tokens)
        self._params = params
        self._stops = params.stop_strings
        longest = max((len(stop) for stop in self._stops), default=1)
        self._held = 0 if params.include_stop_str_in_output else longest - 1
        self._searched = 0  # characters in which no stop string may end any more
        self._ended = False
        self.text = ""

    @property
    def visible(self) -> str:
        if self._ended or not self._held:
            return self.text
        return self.text[: -self._held]

    def push(self, token_id: int, may_stop: bool) -> str | None:
        """Add a token. Returns the stop string that it completes, if it may stop yet."""
        self.text += self._decoder.push(token_id)
        return self._find_stop(may_stop)

    def end(self, may_stop: bool = False) -> str | None:
        """No token follows: give out what was held back."""
        self.text += self._decoder.finish()
        stop = self._find_stop(may_stop)
        self._ended = True
        return stop

    def _find_stop(self, may_stop: bool) -> str | None:
        """Cut the text at the earliest stop string that the new part completes.

        One that was complete before it might stop (``min_tokens``) is text like any other.
        """
        searched, self._searched = self._searched, len(self.text)
        if not may_stop:
            return None
        starts = {stop: max(0, searched - len(stop) + 1) for stop in self._stops}
        found = [(self.text.find(stop, start), stop) for stop, start in starts.items()]
        found = [(at, stop) for at, stop in found if at >= 0]
        if not found:
            return None
        at, stop = min(found)
        kept = at + len(stop) if self._params.include_stop_str_in_output else at
        self.text = self.text[:kept]
        self._ended = True
        return stop
