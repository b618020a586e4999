"""Counters, gauges and histograms in Prometheus' text form, cheap enough for every token."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "yocolm:"
# Upper bounds of vLLM's histograms, so that its users' dashboards fit.
SECONDS_TO_FIRST = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
SECONDS_PER_TOKEN = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
SECONDS_OF_REQUEST = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
RATIOS = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)
TOKENS = tuple(m * 10**e for e in range(7) for m in (1, 2, 5))
COUNTS = (1, 2, 5, 10, 20)
STEP_TOKENS = tuple(2**e for e in range(15))

Labels = tuple[tuple[str, str], ...]


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _line(name: str, labels: Labels, value: float) -> str:
    inner = ",".join(f'{key}="{_escape(text)}"' for key, text in labels)
    return f"{PREFIX}{name}{{{inner}}} {value:.17g}\n"


class Counter:
    """A number that only grows."""

    kind = "counter"

    def __init__(self) -> None:
        self.value: float = 0.0

    def add(self, amount: float = 1.0) -> None:
        self.value += amount

    def lines(self, name: str, labels: Labels) -> str:
        return _line(name, labels, self.value)


class Gauge:
    """A number that is asked for when it is shown."""

    kind = "gauge"

    def __init__(self, read: Callable[[], float]) -> None:
        self._read = read

    def lines(self, name: str, labels: Labels) -> str:
        return _line(name, labels, self._read())


class ReadCounter(Gauge):
    """A counter that somebody else keeps."""

    kind = "counter"


class Histogram:
    """How often a value fell at or below each of the bounds, ascending."""

    kind = "histogram"

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self, name: str, labels: Labels) -> str:
        parts, total = [], 0
        for bound, count in zip((*self._bounds, None), self._counts, strict=True):
            total += count
            edge = "+Inf" if bound is None else str(float(bound))
            parts.append(_line(f"{name}_bucket", (*labels, ("le", edge)), total))
        parts.append(_line(f"{name}_sum", labels, self._sum))
        return "".join([*parts, _line(f"{name}_count", labels, total)])


Metric = Counter | Gauge | Histogram


class Registry:
    """Metrics by name and labels. ``common`` labels stand on every line."""

    def __init__(self, common: Mapping[str, str]) -> None:
        self._common: Labels = tuple(common.items())
        self._help: dict[str, str] = {}
        self._metrics: dict[str, dict[Labels, Metric]] = {}

    def register(self, name: str, help: str, metric: Metric, **labels: str) -> None:
        self._help[name] = help
        self._metrics.setdefault(name, {})[tuple(labels.items())] = metric

    def counter(self, name: str, help: str, **labels: str) -> Counter:
        counter = Counter()
        self.register(name, help, counter, **labels)
        return counter

    def histogram(self, name: str, help: str, bounds: Sequence[float]) -> Histogram:
        histogram = Histogram(bounds)
        self.register(name, help, histogram)
        return histogram

    def labelled(self, name: str, **labels: str) -> Counter:
        """The counter of these labels, made when it is first asked for."""
        found = self._metrics[name].get(tuple(labels.items()))
        if found is None:
            return self.counter(name, self._help[name], **labels)
        assert isinstance(found, Counter)
        return found

    def render(self) -> str:
        """All metrics in Prometheus' text form."""
        parts = []
        for name, metrics in self._metrics.items():
            kind = next(iter(metrics.values())).kind
            parts.append(f"# HELP {PREFIX}{name} {self._help[name]}\n")
            parts.append(f"# TYPE {PREFIX}{name} {kind}\n")
            parts += (m.lines(name, self._common + labels) for labels, m in metrics.items())
        return "".join(parts)
