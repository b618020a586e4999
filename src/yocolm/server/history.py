"""What the steps of the last minutes did, second by second: small charts are drawn from it."""

from __future__ import annotations

from math import floor

from yocolm.engine.steps import StepRecord

SECONDS = 300
_FLOWS = (
    *("self_prefill", "kv_finalize", "cross_decode", "sample", "overhead", "predicted"),
    *("steps", "tokens", "rows", "draws"),
)
_LEVELS = ("running", "waiting", "pages_used", "slots_used")
_KEPT = ("pages_kept", "slots_kept")  # stay what they are while nothing runs
_NEVER = [float("-inf")]
COLUMNS = ("at", *_FLOWS, *_LEVELS, *_KEPT)
"""Of a row: its second; seconds by phase, and predicted; counts; and what was held at its end."""


class History:
    """Sums over each of the last ``seconds`` seconds.

    The engine's thread adds and the event loop reads, without a lock: a row belongs to one second
    for good, and one that is read while it is added to is complete the next time.
    """

    def __init__(self, seconds: int = SECONDS) -> None:
        self.seconds = seconds
        self._rows: list[list[float]] = [_NEVER] * seconds
        self._kept = [0.0] * len(_KEPT)  # before the first of the rows

    def add(self, record: StepRecord) -> None:
        """Count a step; one that took longer than a second is spread over those it took."""
        begin, end = record.at, record.at + record.seconds
        if floor(begin) == floor(end):
            self._add(floor(begin), record, 1.0)
            return
        first = max(floor(begin), floor(end) - self.seconds + 1)
        for second in range(first, floor(end) + 1):
            overlap = min(end, second + 1) - max(begin, second)
            self._add(second, record, overlap / record.seconds)

    def _add(self, second: int, record: StepRecord, share: float) -> None:
        row = self._rows[second % self.seconds]
        if row[0] != second:
            if row is not _NEVER:
                self._kept = row[-len(_KEPT) :]
            row = [float(second)] + [0.0] * (len(COLUMNS) - 1)
            self._rows[second % self.seconds] = row
        actual, load, usage = record.actual, record.load, record.usage
        flows = (
            *(actual.self_prefill, actual.kv_finalize, actual.cross_decode, actual.sample),
            *(actual.overhead, record.predicted.total),
            *(1, load.tokens, load.rows, load.draws),
        )
        for place, value in enumerate(flows, 1):
            row[place] += value * share
        row[1 + len(_FLOWS) :] = (
            *(record.running, record.waiting, usage.pages_used, usage.slots_used),
            *(usage.pages_kept, usage.slots_kept),
        )

    def rows(self, now: float, seconds: int) -> list[list[float]]:
        """A row for each of the last ``seconds`` whole seconds before ``now``, oldest first."""
        last, count = floor(now) - 1, min(seconds, self.seconds - 1)
        kept, found = self._kept, []
        for second in range(last - self.seconds + 2, last + 1):
            row = self._rows[second % self.seconds]
            if row[0] == second:
                kept = row[-len(_KEPT) :]
                found.append(row)
            else:
                nothing = [0.0] * (len(_FLOWS) + len(_LEVELS))
                found.append([float(second), *nothing, *kept])
        return found[-count:] if count > 0 else []
