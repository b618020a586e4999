"""What the cost model is made of: tables of seconds by tokens, FLOPs as coefficients. No torch."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable

from yocolm.engine.hardware import Curve, Hardware
from yocolm.models.spec import RETENTION_CHUNK, Mixer, ModelSpec, visible_tokens

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)  # tokens of a step
MOVED = 8  # tokens up to which a linear waits for its weights
FARTHEST = 32.0  # how many times what was measured, or a part of it, anything may become


class Table:
    """Seconds of a part of the model by tokens: ascending, linear in between and beyond."""

    __slots__ = ("seconds", "tokens", "_first", "_moved")

    def __init__(self, curve: Curve) -> None:
        self.tokens = [tokens for tokens, _ in curve]
        self.seconds = [seconds for _, seconds in curve]
        for i in range(len(curve) - 2, -1, -1):  # a time that is too long was disturbed
            self.seconds[i] = min(self.seconds[i], self.seconds[i + 1])
        self._first = tuple(self.seconds)
        self._moved = bisect_right(self.tokens, MOVED) - 1

    def at(self, tokens: int) -> tuple[float, float]:
        """Seconds that are bound by memory, and those of more tokens, by arithmetic."""
        known, seconds = self.tokens, self.seconds
        most = seconds[self._moved]
        if tokens <= known[0]:
            return seconds[0], 0.0
        i = bisect_right(known, tokens)
        if i == len(known):
            if i == 1:
                return most, 0.0
            i -= 1
        low, base = known[i - 1], seconds[i - 1]
        whole = base + (tokens - low) * (seconds[i] - base) / (known[i] - low)
        return (whole, 0.0) if whole <= most else (most, whole - most)

    def scale(self, tokens: int, change: float) -> None:
        """Change the logarithms of the points about ``tokens``."""
        known, last = self.tokens, len(self.tokens) - 1
        i = min(bisect_right(known, tokens), last)
        if i == 0:
            points: tuple[tuple[int, float], ...] = ((0, 1.0),)
        else:
            share = min(1.0, max(0.0, (tokens - known[i - 1]) / (known[i] - known[i - 1])))
            points = ((i - 1, 1 - share), (i, share))
        for place, weight in points:
            value = self._kept(place, self.seconds[place] * math.exp(change * weight))
            low = self.seconds[place - 1] if place else 0.0
            high = self.seconds[place + 1] if place < last else math.inf
            self.seconds[place] = min(max(value, low), high)

    def multiply(self, memory: float, compute: float) -> None:
        """Change both parts of all points."""
        most = self.seconds[self._moved]
        for place, seconds in enumerate(self.seconds):
            part = min(seconds, most)
            value = self._kept(place, memory * part + compute * (seconds - part))
            self.seconds[place] = max(value, self.seconds[place - 1]) if place else value

    def _kept(self, place: int, value: float) -> float:
        return min(max(value, self._first[place] / FARTHEST), self._first[place] * FARTHEST)

    @property
    def curve(self) -> Curve:
        return tuple(zip(self.tokens, self.seconds, strict=True))


class Mixing:
    """FLOPs of the token mixing of several layers, as coefficients."""

    __slots__ = ("fixed", "growing", "recurrent", "windows", "within")

    def __init__(self, mixers: Iterable[Mixer]) -> None:
        self.growing = self.fixed = self.within = 0
        windows: dict[int, int] = {}
        for mixer in mixers:
            if mixer.kind == "recurrent":
                self.fixed += mixer.flops(1)
                self.within += mixer.flops(1, 2) - mixer.flops(1)
            elif mixer.window:
                windows[mixer.window] = windows.get(mixer.window, 0) + mixer.flops(1)
            else:
                self.growing += mixer.flops(1)
        self.windows = tuple(windows.items())

    def flops(self, start: int, stop: int) -> float:
        """Of the tokens ``start .. stop - 1`` of a sequence, as a chunk."""
        count = stop - start
        flops = self.growing * count * (start + stop + 1) / 2
        if self.fixed:
            inside = count if count < RETENTION_CHUNK else RETENTION_CHUNK
            flops += count * (self.fixed + self.within * inside / 2)
        for window, size in self.windows:
            flops += size * (visible_tokens(stop, window) - visible_tokens(start, window))
        return flops


def model_tables(
    spec: ModelSpec, dtype_bytes: int, hardware: Hardware
) -> tuple[Curve, Curve, Curve]:
    """Seconds of both halves and the logits at numbers of tokens: measured, or from the rates."""
    if hardware.holds_for(spec, dtype_bytes):
        return hardware.write_table, hardware.read_table, hardware.logits_table
    head = spec.logits_flops_per_row

    def curve(params: int, flops: int, layers: int) -> Curve:
        return tuple(
            (tokens, layers * hardware.layer_seconds + _linear(params, flops, tokens))
            for tokens in BUCKETS
        )

    def _linear(params: int, flops: int, tokens: int) -> float:
        touched = min(params, tokens * flops / 2)  # of experts, not all at few tokens
        moved = touched * dtype_bytes / hardware.weight_bandwidth
        return max(moved, tokens * flops / hardware.matrix_rate(tokens, dtype_bytes))

    return (
        curve(spec.write_params, spec.write_flops_per_token, len(spec.write_mixers)),
        curve(spec.read_params, spec.read_flops_per_row, len(spec.read_mixers)),
        tuple((n, hardware.logits_factor * s) for n, s in curve(spec.head_params, head, 0)),
    )
