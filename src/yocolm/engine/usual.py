"""What requests are usually like, going by those that have been. No torch."""

from __future__ import annotations

from yocolm.engine.request import Request, Sequence

USUAL_OUTPUT = 128  # tokens of a reply, before any has been seen
MEMORY = 32  # requests that an average goes back


class Outputs:
    """What requests have been like so far, as running means."""

    def __init__(self) -> None:
        self.computed_share = 1.0  # of a prompt: what no cache had
        self._length = float(USUAL_OUTPUT)
        self._to_the_end = 0.5  # share of replies that went on until max_tokens
        self._finished = self._arrived = 0
        self._tokens = 0.0  # of a prompt
        self._gap = 0.0  # seconds between arrivals
        self._last_arrival: float | None = None

    def arrived(self, request: Request, now: float) -> None:
        """A request has come, at the time ``now`` in seconds."""
        if self._last_arrival is not None:
            self._arrived += 1
            weight = max(1 / self._arrived, 1 / MEMORY)
            gap = max(now - self._last_arrival, 1e-6)
            # Means of gaps and of tokens, not of their ratio: two that come together are no flood.
            self._gap += weight * (gap - self._gap)
            self._tokens += weight * (request.num_prompt - self._tokens)
        self._last_arrival = now

    def arriving(self, seconds: float) -> int:
        """Tokens of prompts that will come within so many seconds: as many as in half of all cases,
        since most often it is none or few."""
        if not self._gap:
            return 0
        count = int(seconds / self._gap + 1 / 3)  # nearly the median of Poisson's distribution
        return round(count * self._tokens * self.computed_share)

    def finished(self, seq: Sequence, num_cached: int = 0) -> None:
        """A sequence has ended, of whose prompt ``num_cached`` tokens needed no computation."""
        if seq.num_output == 0 or seq.finish_reason not in ("stop", "length"):
            return
        self._finished += 1
        weight = max(1 / self._finished, 1 / MEMORY)
        length = float(seq.finish_reason == "length")
        self._to_the_end += weight * (length - self._to_the_end)
        self._length += weight * (seq.num_output - self._length)
        share = 1 - num_cached / seq.request.num_prompt
        self.computed_share += weight * (share - self.computed_share)

    def expected(self, request: Request, max_model_len: int) -> float:
        """Tokens of a reply."""
        most = request.max_length(max_model_len) - request.num_prompt
        if request.params.max_tokens is None:
            return float(min(self._length, most))
        share = self._to_the_end
        return max(1.0, share * most + (1 - share) * min(self._length, most))

    def remaining(self, seq: Sequence, max_model_len: int) -> float:
        """Tokens that a sequence which runs will still draw."""
        expected = self.expected(seq.request, max_model_len)
        most = seq.request.max_length(max_model_len) - seq.num_tokens
        # Who is past the mean has, of lengths that vary much, about half of it before them.
        return min(max(most, 1), max(expected - seq.num_output, expected / 2))
