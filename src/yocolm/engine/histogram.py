"""Many seconds in little memory: counts in bins of a per mille of their logarithm."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

BINS = 1000  # for a factor of e: a value is known within 0.05 %


def _place(value: float) -> int:
    return round(math.log(max(value, 1e-9)) * BINS)


class Histogram:
    """Counts of positive numbers. Anything below a nanosecond counts as one."""

    def __init__(self) -> None:
        self._counts: defaultdict[int, int] = defaultdict(int)
        self._sum = 0.0

    def add(self, value: float, count: int = 1) -> None:
        self._counts[_place(value)] += count
        self._sum += value * count

    def add_even(self, first: float, growth: float, steps: int, count: int) -> None:
        """``count`` times each of ``first``, ``first + growth``, ...: so many ``steps``;
        ``growth`` is not below 0."""
        self._sum += count * steps * (first + growth * (steps - 1) / 2)
        done, place = 0, _place(first)
        while done < steps:
            beyond = math.exp((place + 0.5) / BINS)  # what is above belongs to the next bin
            end = steps if growth <= 0 else min(steps, math.ceil((beyond - first) / growth))
            if end > done:
                self._counts[place] += count * (end - done)
                done = end
            place += 1

    @property
    def count(self) -> int:
        return sum(self._counts.values())

    @property
    def mean(self) -> float:
        return self._sum / self.count if self.count else math.nan

    def percentiles(self, shares: Sequence[float]) -> list[float]:
        """The smallest values that at least these percentages do not exceed."""
        count, found, seen = self.count, [], 0
        ordered = iter(sorted(self._counts.items()))
        place = -math.inf
        for share in sorted(shares):
            while seen < max(1, math.ceil(count * share / 100)) and count:
                place, number = next(ordered)
                seen += number
            found.append(math.exp(place / BINS) if count else math.nan)
        return found
