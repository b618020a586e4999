"""Charts for a report that is one HTML file: shapes as SVG, every word as HTML beside it.

The SVG is stretched to the width that the page gives it and its strokes are not, so a chart is as
sharp and as readable on a phone as on a desktop, without a script. Colours are CSS classes.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

WIDTH, HEIGHT = 2000, 1000  # of the drawing, in its own units
COLOURS = ("#0b6bb8", "#8a4fb5", "#d1600a", "#0b8a66", "#8b96a3")
CLASSES = ("c1", "c2", "c3", "c4", "c5")  # that have them
# What a page needs for charts: colours, light and dark, and where the parts of a chart stand.
STYLE = f"""
:root {{ {"; ".join(f"--p{i}: {colour}" for i, colour in enumerate(COLOURS, 1))} }}
"""
STYLE += """
:root {
  color-scheme: light dark;
  --page: #f6f7f9; --card: #ffffff; --ink: #16202b; --soft: #5a6675; --rule: #dfe3e9;
  --grid: #e6e9ee;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #0e1319; --card: #161d26; --ink: #e6ebf1; --soft: #9aa7b5; --rule: #2a3441;
    --grid: #222b36; --p1: #4aa8f5; --p2: #c292ea; --p3: #f39a45; --p4: #3cc79c; --p5: #7d8896;
  }
}
.legend { display: flex; flex-wrap: wrap; gap: 4px 16px; margin: 0 0 10px; padding: 0;
  list-style: none; font-size: 13.5px; }
.legend i { display: inline-block; width: 11px; height: 11px; border-radius: 3px;
  background: var(--c, transparent); margin-right: 6px; }
.plot { display: grid; grid-template-columns: 62px minmax(0, 1fr); font-size: 12px;
  grid-template-rows: 200px 22px; color: var(--soft); font-variant-numeric: tabular-nums; }
.plot.tall { grid-template-rows: 250px 22px; }
.ys { position: relative; }
.ys span { position: absolute; right: 8px; transform: translateY(50%); line-height: 1;
  white-space: nowrap; }
.canvas { position: relative; min-width: 0; border-bottom: 1px solid var(--soft);
  outline-offset: 3px; }
.canvas svg { position: absolute; inset: 0; width: 100%; height: 100%; overflow: visible;
  display: block; }
.xs { position: relative; grid-column: 2; margin-top: 5px; }
.xs span { position: absolute; transform: translateX(-50%); white-space: nowrap; }
.xs .first { transform: none; } .xs .last { transform: translateX(-100%); }
.note { position: absolute; font-size: 11px; line-height: 1; padding: 1px 3px;
  background: var(--card); border-radius: 3px; }
.note.end { transform: translateX(-100%); }
.axis { position: absolute; font-size: 11.5px; background: var(--card); padding: 0 3px;
  border-radius: 3px; opacity: .9; pointer-events: none; }
.axis.right { right: 2px; bottom: 3px; } .axis.up { left: 3px; top: 2px; }
path { vector-effect: non-scaling-stroke; }
path.grid { display: inline; stroke: var(--grid); stroke-width: 1; fill: none; }
.area { fill: var(--c); stroke: none; }
.line { fill: none; stroke: var(--c); stroke-width: 1.75; stroke-linejoin: round; }
.dots { fill: none; stroke: var(--c); stroke-linecap: round; stroke-width: 6.5; }
.dots.few { stroke-width: 3; opacity: .45; } .dots.some { stroke-width: 4; opacity: .75; }
.mark { fill: none; stroke: var(--soft); stroke-width: 1; stroke-dasharray: 3 3; }
.c1 { --c: var(--p1); } .c2 { --c: var(--p2); } .c3 { --c: var(--p3); } .c4 { --c: var(--p4); }
.c5 { --c: var(--p5); }
@media (max-width: 560px) { .thin span:nth-child(2n) { display: none; } }
"""
GAP = "\N{NO-BREAK SPACE}"
_SECONDS = ((1, "s"), (1e3, "ms"), (1e6, "µs"))
Text = Callable[[float], str]
Points = Iterable[tuple[float, float]]


def escape(text: object) -> str:
    return html.escape(str(text), quote=True)


def seconds_text(value: float) -> str:
    """Seconds with their unit, three digits: "2.50 ms"."""
    size = abs(value)
    if value == 0 or size >= 120:
        return f"{_digits(value / 60)}{GAP}min" if value else f"0{GAP}s"
    scale, unit = next((s, u) for s, u in _SECONDS if size >= 0.9995 / s or u == "µs")
    return f"{_digits(value * scale)}{GAP}{unit}"


def bytes_text(value: float) -> str:
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while abs(value) >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{_digits(value)}{GAP}{units[0]}"


def count_text(value: float) -> str:
    for unit in ("", "k", "M"):
        if abs(value) < 1000:
            return f"{value:.0f}" if not unit and value == int(value) else _digits(value) + unit
        value /= 1000
    return f"{_digits(value)}G"


def length_text(length: float) -> str:
    """Tokens: 1M, 32K, or the number."""
    count = int(length)
    for unit, size in (("M", 1024**2), ("K", 1024)):
        if count >= size and count % size == 0:
            return f"{count // size}{unit}"
    return str(count)


def percent_text(value: float) -> str:
    return f"{_digits(100 * value)}{GAP}%"


def _digits(value: float) -> str:
    """Three significant digits, none that are zeros behind the point of a round number."""
    size = abs(value)
    places = 0 if size >= 100 else 1 if size >= 10 else 2
    text = f"{value:.{places}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


@dataclass(frozen=True)
class Axis:
    """From ``low`` to ``high``; ``ticks`` are values with the text beside them."""

    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    log: bool = False

    def place(self, value: float) -> float:
        """Where ``value`` is between the ends, from 0 to 1; what lies outside is at the end."""
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(max(value, self.low))
        return min(max((value - low) / (high - low), 0.0), 1.0)


def linear(
    low: float, high: float, text: Text = count_text, count: int = 5, base: float = 10
) -> Axis:
    """An axis with round ticks: 1, 2 and 5 times powers of ten (or powers of two of ``base`` 2)."""
    if not high > low:
        high = low + 1
    rough = (high - low) / count
    if base == 2:
        step = 2.0 ** round(math.log2(rough))
    else:
        power = 10 ** math.floor(math.log10(rough))
        step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough * 0.7)
    first = math.ceil(low / step - 1e-9)
    values = [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]
    return Axis(low, high, tuple((value, text(value)) for value in values))


def plain_linear(low: float, high: float, count: int = 5) -> Axis:
    """As ``linear``; all ticks have the decimals that their steps need."""
    axis = linear(low, high, str, count)
    values = [value for value, _ in axis.ticks]
    step = values[1] - values[0] if len(values) > 1 else 1.0
    places = max(0, -math.floor(math.log10(step) + 1e-9))
    return replace(axis, ticks=tuple((value, f"{value:.{places}f}") for value in values))


def clock(begin: float, end: float, count: int = 6) -> Axis:
    """An axis of time in seconds, its ticks in seconds, minutes or hours as it is long."""
    size, unit = next(
        (size, unit)
        for size, unit in ((1, "s"), (60, "min"), (3600, "h"))
        if end <= 180 * size or unit == "h"
    )
    plain = plain_linear(begin / size, max(end, begin + 1e-6) / size, count)
    ticks = tuple((value * size, f"{text}{GAP}{unit}") for value, text in plain.ticks)
    return Axis(begin, plain.high * size, ticks)


def logarithmic(low: float, high: float, text: Text = count_text) -> Axis:
    """An axis by ratio, with ticks at powers of ten, and between them if there are few."""
    low = max(low, 1e-12)
    if high < low * 1.5:
        low, high = low / 1.25, high * 1.25
    decades = math.log10(high / low)
    steps = (1, 1.5, 2, 3, 4, 5, 7) if decades < 0.7 else (1, 2, 5) if decades <= 2.2 else (1,)
    every = max(1, math.ceil(decades / 6))
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    values = [m * 10.0**p for p in powers if p % every == 0 for m in steps]
    kept = [v for v in values if low * 0.999 <= v <= high * 1.001]
    return Axis(low, high, tuple((value, text(value)) for value in kept), log=True)


def doubling(low: float, high: float) -> Axis:
    """An axis by ratio over numbers of tokens, with ticks at powers of two."""
    if not high > low:
        low, high = low / 2, high * 2
    return Axis(low, high, tuple((tick, length_text(tick)) for tick in powers(low, high)), log=True)


def powers(low: float, high: float) -> list[float]:
    """Powers of two within bounds, at most a dozen of them."""
    first, last = math.ceil(math.log2(low)), math.floor(math.log2(high))
    step = max(1, (last - first) // 10)
    return [2.0**power for power in range(first, last + 1, step)]


def named(values: Sequence[float], text: Text = count_text) -> Axis:
    """An axis by ratio whose ticks are the ``values`` themselves, with room at both ends."""
    low, high = min(values), max(values)
    room = (high / low) ** 0.06 if high > low else 2.0
    ticks = tuple((value, text(value)) for value in values)
    return Axis(low / room, high * room, ticks, log=True)


@dataclass(frozen=True)
class Hover:
    """What is said beside the pointer: at each of ``at`` (x values) a title and lines of text."""

    at: Sequence[float]
    titles: Sequence[str]
    lines: Sequence[tuple[str, str, Sequence[str]]]  # class of the colour, name, a text for each


@dataclass
class Chart:
    """One set of axes. ``says``: what it shows, for those who cannot see it."""

    x: Axis
    y: Axis
    says: str
    tall: bool = False
    hover: Hover | None = None
    _shapes: list[str] = field(default_factory=list)
    _notes: list[str] = field(default_factory=list)

    def area(self, kind: str, spans: Iterable[tuple[float, float, float, float]]) -> None:
        """Rectangles, each from x to x and from y to y, side by side into one shape."""
        path = "".join(
            f"M{left} {low}V{high}H{right}V{low}Z"
            for left, right, low, high in map(self._corners, spans)
            if low != high and left != right
        )
        self._path(f"area {kind}", path)

    def under(self, kind: str, points: Points) -> None:
        """What is below a line."""
        path = _joined(self._at(x, y) for x, y in points)
        first, last = path[1:].split(" ")[0], path.split("L")[-1].split("M")[-1].split(" ")[0]
        self._path(f"area {kind}", path and f"{path}L{last} {HEIGHT}L{first} {HEIGHT}Z")

    def line(self, kind: str, points: Points) -> None:
        self._path(f"line {kind}", _joined(self._at(x, y) for x, y in points))

    def staircase(self, kind: str, spans: Iterable[tuple[float, float, float]]) -> None:
        """A value over each span (x, x, y), with gaps where spans do not meet."""
        path, end = "", None
        for left, right, value in spans:
            (a, y), (b, _) = self._at(left, value), self._at(right, value)
            path += f"V{y}H{b}" if end == a else f"M{a} {y}H{b}"
            end = b
        self._path(f"line {kind}", path)

    def dots(self, kind: str, points: Points) -> None:
        """Round, and of the same size however the drawing is stretched: lines without length."""
        places = dict.fromkeys(self._at(x, y) for x, y in points)
        self._path(f"dots {kind}", "".join(f"M{x} {y}h0" for x, y in places))

    def mark(self, kind: str, x: float, text: str = "", row: int = 0) -> None:
        """An upright line, with a word at its top, or so many rows below that."""
        at, _ = self._at(x, self.y.low)
        self._path(f"mark {kind}", f"M{at} 0V{HEIGHT}")
        if text:
            side = "end" if at > 0.7 * WIDTH else "start"
            style = f"left:{100 * at / WIDTH:.2f}%;top:{2 + 14 * row}px"
            self._notes.append(f'<span class="note {side}" style="{style}">{escape(text)}</span>')

    def _at(self, x: float, y: float) -> tuple[int, int]:
        return round(WIDTH * self.x.place(x)), round(HEIGHT * (1 - self.y.place(y)))

    def _corners(self, span: tuple[float, float, float, float]) -> tuple[int, int, int, int]:
        left, right, low, high = span
        (a, c), (b, d) = self._at(left, low), self._at(right, high)
        return a, b, c, d

    def _path(self, kind: str, path: str) -> None:
        if path:
            self._shapes.append(f'<path class="{kind}" d="{path}"/>')

    def html(self, names: tuple[str, str] = ("", "")) -> str:
        """The chart with its axes, and their ``names`` if given, as wide as there is room."""
        rows = [(100 * self.y.place(v), text) for v, text in self.y.ticks]
        columns = [(100 * self.x.place(v), text) for v, text in self.x.ticks]
        grid = "".join(f"M0 {HEIGHT - 10 * p:.0f}H{WIDTH}" for p, _ in rows)
        grid += "".join(f"M{WIDTH * p / 100:.0f} 0V{HEIGHT}" for p, _ in columns)
        y_texts = "".join(f'<span style="bottom:{p:.2f}%">{escape(t)}</span>' for p, t in rows)
        x_texts = "".join(
            f'<span class="{_edge(p)}" style="left:{p:.2f}%">{escape(t)}</span>' for p, t in columns
        )
        words = "".join(
            f'<span class="axis {way}">{escape(name)}</span>'
            for way, name in zip(("right", "up"), names, strict=True)
            if name
        )
        thin = " thin" if len(columns) > 4 else ""
        return (
            f'<div class="plot{" tall" if self.tall else ""}"><div class="ys">{y_texts}</div>'
            f'<div class="canvas"{self._focus()}><svg viewBox="0 0 {WIDTH} {HEIGHT}" '
            f'preserveAspectRatio="none" role="img" aria-label="{escape(self.says)}">'
            f'<path class="grid" d="{grid}"/>{"".join(self._shapes)}</svg>'
            f"{''.join(self._notes)}{words}{self._hover_data()}</div>"
            f'<div class="xs{thin}">{x_texts}</div></div>'
        )

    def _focus(self) -> str:
        return "" if self.hover is None else ' tabindex="0"'

    def _hover_data(self) -> str:
        if self.hover is None:
            return ""
        data = {
            "x": [round(self.x.place(value), 4) for value in self.hover.at],
            "titles": list(self.hover.titles),
            "lines": [[kind, name, list(texts)] for kind, name, texts in self.hover.lines],
        }
        return f'<script type="application/json">{embedded(data)}</script>'


def embedded(data: object) -> str:
    """JSON that may stand in a script element."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _edge(percent: float) -> str:
    return "first" if percent < 2 else "last" if percent > 98 else "inner"


def _joined(places: Iterable[tuple[int, int]]) -> str:
    path, last = "", None
    for place in places:
        if place != last:
            path += f"{'L' if path else 'M'}{place[0]} {place[1]}"
        last = place
    return path


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """Names beside their colours: pairs of class and text."""
    items = "".join(f'<li><i class="{kind}"></i>{escape(text)}</li>' for kind, text in entries)
    return f'<ul class="legend">{items}</ul>'


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table that scrolls sideways where it has to; its first column names the row."""
    top = "".join(f'<th scope="col">{escape(text)}</th>' for text in head)
    body = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>'
        + "".join(f"<td>{escape(text)}</td>" for text in row[1:])
        + "</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll" tabindex="0"><table><thead><tr>{top}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )
