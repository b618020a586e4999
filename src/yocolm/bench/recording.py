"""What is kept of a run, real or simulated: every step and every request, in columns. No torch."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from yocolm.engine.steps import StepRecord
from yocolm.models.spec import ModelSpec

PHASES = ("self_prefill", "kv_finalize", "cross_decode", "sample", "overhead")
LOAD = ("tokens", "rows", "sequences", "chunks")
USAGE = (
    "pages_used",
    "pages_kept",
    "slots_used",
    "slots_kept",
    "blocks_swapped",
    "states_swapped",
)
MAX_GAPS = 20_000  # times between tokens that are kept one by one; of more, their quantiles
PERCENTILES = (50, 90, 99)


@dataclass
class RequestTimes:
    """One request. ``arrival``, in seconds since the run began, is when it was due.

    ttft, e2e: seconds from there to the first token and to the end; ttft_target, tpot_target: what
    it was to keep, None if nothing was asked.
    """

    arrival: float
    prompt_tokens: int
    output_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    predicted_ttft: float | None = None
    ttft: float | None = None
    e2e: float | None = None
    ttft_target: float | None = None
    tpot_target: float | None = None
    error: str | None = None

    @property
    def tpot(self) -> float | None:
        """Mean seconds a token after the first; None with fewer than two."""
        if self.ttft is None or self.e2e is None or self.output_tokens < 2:
            return None
        return (self.e2e - self.ttft) / (self.output_tokens - 1)

    @property
    def meets(self) -> bool | None:
        """Whether it kept its targets; None if it had none. One that failed did not."""
        if self.ttft_target is None and self.tpot_target is None:
            return None
        return (
            self.error is None
            and self.ttft is not None
            and (self.ttft_target is None or self.ttft <= self.ttft_target)
            and (self.tpot_target is None or (self.tpot or 0.0) <= self.tpot_target)
        )


@dataclass
class Recording:
    """Gathers steps (an engine's ``observer`` is its ``step``), requests and gaps between tokens.

    ``begin``: the time, on the clock of the steps, from which all are counted.
    """

    begin: float = 0.0
    requests: list[RequestTimes] = field(default_factory=list)
    gaps: array[float] = field(default_factory=lambda: array("d"))
    _columns: dict[str, array[float]] = field(default_factory=dict)
    _sizes: tuple[int, int] = (0, 0)

    def step(self, record: StepRecord) -> None:
        """Keep one step; of a run without a forecast its predicted phases are all 0."""
        put = self._put
        put("at", record.at - self.begin)
        put("seconds", record.seconds)
        put("running", record.running)
        put("waiting", record.waiting)
        for name in LOAD:
            put(name, getattr(record.load, name))
        for name in USAGE:
            put(name, getattr(record.usage, name))
        for name in PHASES:
            put(f"actual.{name}", getattr(record.actual, name))
            put(f"predicted.{name}", getattr(record.predicted, name))
        self._sizes = (record.usage.num_pages, record.usage.num_slots)

    def _put(self, name: str, value: float) -> None:
        column = self._columns.get(name)
        if column is None:
            column = self._columns[name] = array("d")
        column.append(value)

    @property
    def num_steps(self) -> int:
        return len(self._columns.get("at", ()))

    def to_json(self) -> dict[str, Any]:
        """``steps`` and ``requests`` in columns, ``gaps``, ``summary``, and the pools' sizes."""
        steps = {name: _compact(column, name) for name, column in self._columns.items()}
        requests = {
            name: [getattr(request, name) for request in self.requests]
            for name in (*RequestTimes.__dataclass_fields__, "tpot", "meets")
        }
        return {
            "num_pages": self._sizes[0],
            "num_slots": self._sizes[1],
            "summary": self.summary(),
            "steps": steps,
            "requests": {name: _compact(values, name) for name, values in requests.items()},
            "gaps": _compact(_thinned(sorted(self.gaps), MAX_GAPS)),
            "num_gaps": len(self.gaps),
        }

    def summary(self) -> dict[str, Any]:
        """Latencies (seconds), rates (a second of the run), shares and errors."""
        done = [r for r in self.requests if r.error is None and r.e2e is not None]
        seconds = self._seconds()
        rate = 1 / seconds if seconds else 0.0
        met = [r.meets for r in self.requests if r.meets is not None]
        tokens, rows = (sum(self._columns.get(name, ())) for name in ("tokens", "rows"))
        prompt = sum(r.prompt_tokens for r in done)
        gaps = sorted(self.gaps)
        return {
            "seconds": seconds,
            "requests": len(self.requests),
            "completed": len(done),
            "failed": sum(r.error is not None for r in self.requests),
            "steps": self.num_steps,
            "request_throughput": len(done) * rate,
            "output_throughput": sum(r.output_tokens for r in done) * rate,
            "total_throughput": (prompt + sum(r.output_tokens for r in done)) * rate,
            "goodput": sum(met) * rate if met else None,
            "met_targets": sum(met) / len(met) if met else None,
            "cached_share": sum(r.cached_tokens for r in done) / prompt if prompt else 0.0,
            "skipped_share": 1 - rows / tokens if tokens else 0.0,
            "preemptions": sum(r.preemptions for r in self.requests),
            "ttft": latency([r.ttft for r in done if r.ttft is not None]),
            "tpot": latency([r.tpot for r in done if r.tpot is not None]),
            "itl": latency(gaps),
            "e2e": latency([r.e2e for r in done if r.e2e is not None]),
            "step_error": self._step_error(),
            "ttft_error": error(
                [(r.predicted_ttft, r.ttft) for r in done if r.predicted_ttft and r.ttft]
            ),
        }

    def _seconds(self) -> float:
        """From the first arrival to the last end of a step or a request."""
        ends = [r.arrival + r.e2e for r in self.requests if r.e2e is not None]
        at, lasted = self._columns.get("at"), self._columns.get("seconds")
        if at and lasted:
            ends.append(at[-1] + lasted[-1])
        return max(ends, default=0.0) - min((r.arrival for r in self.requests), default=0.0)

    def _step_error(self) -> dict[str, float] | None:
        if not self._columns:
            return None
        sums = [
            [sum(phases) for phases in zip(*self._phases(side), strict=True)]
            for side in ("predicted", "actual")
        ]
        return error([(p, a) for p, a in zip(*sums, strict=True) if p > 0 and a > 0])

    def _phases(self, side: str) -> list[array[float]]:
        return [self._columns[f"{side}.{name}"] for name in PHASES]


def latency(values: Sequence[float]) -> dict[str, float] | None:
    """Mean, percentiles and maximum; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    found = {f"p{p}": quantile(ordered, p / 100) for p in PERCENTILES}
    mean = math.fsum(ordered) / len(ordered)
    return {"count": len(ordered), "mean": mean, **found, "max": ordered[-1]}


def error(pairs: Sequence[tuple[float, float]]) -> dict[str, float] | None:
    """Of (predicted, actual): mape, p50 to p99 of the absolute error, bias, all relative."""
    if not pairs:
        return None
    off = [predicted / actual - 1 for predicted, actual in pairs]
    size = sorted(map(abs, off))
    found = {f"p{p}": quantile(size, p / 100) for p in PERCENTILES}
    mape, bias = math.fsum(size) / len(size), math.fsum(off) / len(off)
    return {"count": len(size), "mape": mape, **found, "bias": bias}


def quantile(ordered: Sequence[float], share: float) -> float:
    """Of sorted values, between the two nearest in proportion, as numpy does."""
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def _thinned(ordered: Sequence[float], most: int) -> Sequence[float]:
    """At most so many of sorted values, with the same distribution."""
    if len(ordered) <= most:
        return ordered
    return [quantile(ordered, i / (most - 1)) for i in range(most)]


def _compact(values: Iterable[Any], name: str = "") -> list[Any]:
    """Numbers as short as their meaning is: six digits (times of a long run to 10 microseconds),
    and whole ones without a point."""
    if name in ("at", "arrival"):
        return [round(value, 5) for value in values]
    return [_short(value) for value in values]


def _short(value: Any) -> Any:
    if not isinstance(value, float):
        return value
    return int(value) if value.is_integer() else float(f"{value:.6g}")


def pool_sizes(spec: ModelSpec, page_size: int, dtype_bytes: int) -> dict[str, int]:
    """What one page and one slot are, in bytes; of a slot its windows and its recurrent state."""
    windows, recurrent = (
        sum(store.bytes_per_slot(dtype_bytes) for store in stores)
        for stores in (spec.window_stores, spec.recurrent_stores)
    )
    return {
        "page_size": page_size,
        "page_bytes": spec.page_bytes(page_size, dtype_bytes),
        "window_bytes": windows,
        "recurrent_bytes": recurrent,
    }
