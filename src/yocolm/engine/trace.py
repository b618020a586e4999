"""Traces: which requests arrive when, how long they are, and what tokens they share.

A trace says lengths only. Tokens come from *lines*, endless rows of tokens: each session is one,
each request has one of its own, and all requests without a session share one. A prompt is the
first ``shared_prefix`` tokens of its session's line, then its own. So two prompts have in common
exactly what a trace says, and a prefix cache meets what it would meet in earnest.
"""

from __future__ import annotations

import csv
import heapq
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from yocolm.errors import ConfigError

ALIASES = {  # of published traces
    "arrival": ("arrival_seconds", "arrival_s", "arrival_time", "arrived_at", "timestamp"),
    "prompt_tokens": ("num_prefill_tokens", "contexttokens", "input_tokens", "request_tokens"),
    "output_tokens": ("num_decode_tokens", "generatedtokens", "response_tokens"),
    "session": ("session_id",),
}
MAX_TOKENS = 2**26  # of a request: its prompt is made, and takes eight bytes each
MAX_NUMBER = 2**31  # seconds, priorities
_COMMON = 0  # the line that requests without a session share


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    arrival: seconds. A request of a session arrives only when the one before it there has ended.
    prompt_tokens, output_tokens: at least 1 each.
    session: turns of one conversation; None belongs to none.
    shared_prefix: how many tokens of the prompt come from the session's line. None: all of them
        and the reply too, so that the next turn continues this one; without a session, none.
    priority, ttft_target, tpot_target: as in a request; seconds.
    """

    arrival: float
    prompt_tokens: int
    output_tokens: int
    session: str | None = None
    shared_prefix: int | None = None
    priority: int = 0
    ttft_target: float | None = None
    tpot_target: float | None = None

    @property
    def shared(self) -> int:
        """How many tokens, from the first on, reply included, are of the line that is shared."""
        if self.shared_prefix is not None:
            return min(self.shared_prefix, self.prompt_tokens)
        return 0 if self.session is None else self.prompt_tokens + self.output_tokens


@dataclass(slots=True)
class Served:
    """What became of a trace's request. Times are in seconds on the clock of ``arrival``.

    arrival: when it could arrive, later than the trace says if the turn before it ended later.
    num_cached: prompt tokens that came from the prefix cache. error: why it got no answer.
    """

    arrival: float
    first_token: float | None = None
    ended: float | None = None
    num_cached: int = 0
    num_preemptions: int = 0
    predicted_ttft: float | None = None
    error: str | None = None


Trace = list[TraceRequest]
COLUMNS = tuple(field.name for field in fields(TraceRequest))


class Tokens:
    """The tokens of a trace's requests.

    With a ``vocab_size`` they are pseudo-random ids from ``first`` on (so that what a model gives
    special meaning can be left out), else numbers that are never the same on two lines.
    """

    def __init__(self, trace: Trace, vocab_size: int | None = None, first: int = 0) -> None:
        if vocab_size is not None and not 0 <= first < vocab_size:
            raise ConfigError(f"first={first} must be below the vocabulary of {vocab_size}")
        names = dict.fromkeys(request.session for request in trace if request.session is not None)
        self._trace = trace
        self._lines = {name: number for number, name in enumerate(names, _COMMON + 1)}
        self._own = len(self._lines) + 1
        self._vocab, self._first = vocab_size, first

    def span(self, index: int, start: int, stop: int) -> np.ndarray:
        """Int64 tokens at positions start..stop-1 of request ``index``, prompt and reply."""
        request = self._trace[index]
        line = _COMMON if request.session is None else self._lines[request.session]
        cut = min(max(request.shared, start), stop)
        if cut == start:
            return self._row(self._own + index, start, stop)
        return np.concatenate(
            (self._row(line, start, cut), self._row(self._own + index, cut, stop))
        )

    def row(self, index: int, start: int, count: int) -> list[int]:
        """The same as ``span`` as a list, quick for few tokens of one line."""
        if count != 1 or self._vocab is not None:
            return self.span(index, start, start + count).tolist()
        request = self._trace[index]
        if start >= request.shared:
            line = self._own + index
        else:
            line = _COMMON if request.session is None else self._lines[request.session]
        return [(line << 32) + start]

    def prompt(self, index: int) -> np.ndarray:
        """The prompt of request ``index``."""
        return self.span(index, 0, self._trace[index].prompt_tokens)

    def _row(self, line: int, start: int, stop: int) -> np.ndarray:
        places = np.arange(start, stop, dtype=np.int64) + (line << 32)
        if self._vocab is None:
            return places
        mixed = places.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)  # splitmix64's finish
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
        return (mixed % np.uint64(self._vocab - self._first)).astype(np.int64) + self._first


class Arrivals:
    """Which requests of a trace come next: turns of a session one after another."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._next_turn: dict[int, int] = {}
        self._due: list[tuple[float, int]] = []
        last: dict[str, int] = {}
        for index, request in enumerate(trace):
            before = None if request.session is None else last.get(request.session)
            if before is None:
                self._due.append((request.arrival, index))
            else:
                self._next_turn[before] = index
            if request.session is not None:
                last[request.session] = index
        heapq.heapify(self._due)

    @property
    def next_at(self) -> float | None:
        """When the next one arrives that waits for no other."""
        return self._due[0][0] if self._due else None

    def due(self, now: float) -> Iterator[tuple[int, float]]:
        """Those that have arrived by ``now``, once each: index and time."""
        while self._due and self._due[0][0] <= now:
            at, index = heapq.heappop(self._due)
            yield index, at

    def ended(self, index: int, now: float) -> None:
        """Request ``index`` has ended: the next turn of its session may arrive."""
        turn = self._next_turn.pop(index, None)
        if turn is not None:
            heapq.heappush(self._due, (max(self._trace[turn].arrival, now), turn))


def read_trace(path: str | Path) -> Trace:
    """A CSV trace, in order of arrival.

    Columns: ``arrival`` (seconds), ``prompt_tokens``, ``output_tokens``, and if wanted those of
    ``TraceRequest``; others are ignored. The names in published traces (``arrived_at``,
    ``num_prefill_tokens``, ...) are understood; three columns of numbers need no names.
    Raises ConfigError naming the line.
    """
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            rows = [(number, row) for number, row in enumerate(csv.reader(file), 1) if any(row)]
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path} is no CSV file: {error}") from None
    if not rows:
        raise ConfigError(f"{path} is empty: give a line for every request")
    names = _columns(path, rows[0][1])
    if names is None:
        names = {name: place for place, name in enumerate(COLUMNS[:3])}
    else:
        rows = rows[1:]
    trace = [_request(f"{path}, line {number}", names, row) for number, row in rows]
    if not trace:
        raise ConfigError(f"{path} has column names but no requests")
    return sorted(trace, key=lambda request: request.arrival)


def write_trace(path: str | Path, trace: Iterable[TraceRequest]) -> None:
    """Write all columns; ``read_trace`` reads it back as it was."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for request in trace:
            values = [getattr(request, name) for name in COLUMNS]
            writer.writerow(["" if value is None else value for value in values])


def _columns(path: str | Path, head: list[str]) -> dict[str, int] | None:
    """Which column is where; None if the first line holds numbers already."""
    if len(head) >= 3 and all(_is_number(cell) for cell in head[:3]):
        return None
    places = {cell.strip().lower(): place for place, cell in enumerate(head)}
    found = {}
    for name in COLUMNS:
        known = [places[n] for n in (name, *ALIASES.get(name, ())) if n in places]
        if known:
            found[name] = known[0]
    missing = [name for name in COLUMNS[:3] if name not in found]
    if missing:
        raise ConfigError(
            f"{path} has the columns {', '.join(head)}; {', '.join(missing)} is missing: name it so"
        )
    return found


def _request(where: str, names: dict[str, int], row: list[str]) -> TraceRequest:
    cells = {name: row[place].strip() for name, place in names.items() if place < len(row)}

    def read(
        name: str,
        convert: Callable[[str], Any],
        least: float,
        default: Any,
        most: int = MAX_NUMBER,
    ) -> Any:
        text = cells.get(name, "")
        if not text and name not in COLUMNS[:3]:
            return default
        try:
            value = convert(text)
        except ValueError:
            raise ConfigError(f"{where}: {name}={text!r} is not a number") from None
        if not least <= value <= most:
            raise ConfigError(f"{where}: {name}={text[:40]} must be from {least} to {most}")
        return value

    return TraceRequest(
        arrival=read("arrival", _seconds, 0, None),
        prompt_tokens=read("prompt_tokens", _whole, 1, None, MAX_TOKENS),
        output_tokens=read("output_tokens", _whole, 1, None, MAX_TOKENS),
        session=cells.get("session") or None,
        shared_prefix=read("shared_prefix", _whole, 0, None, MAX_TOKENS),
        priority=read("priority", _whole, -MAX_NUMBER, 0),
        ttft_target=read("ttft_target", _seconds, 0, None),
        tpot_target=read("tpot_target", _seconds, 0, None),
    )


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _seconds(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def _whole(text: str) -> int:
    value = _seconds(text)
    if value != int(value):
        raise ValueError(text)
    return int(value)
