"""The part of a serving report that goes by time: pools, phases, queue. From JSON, no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

from yocolm.bench.recording import PHASES
from yocolm.eval.charts import (
    Axis,
    Chart,
    Hover,
    bytes_text,
    clock,
    count_text,
    escape,
    legend,
    linear,
    percent_text,
    seconds_text,
    table,
)

PHASE_NAMES = {
    "self_prefill": "self-prefill",
    "kv_finalize": "kv-finalize",
    "cross_decode": "cross-decode",
    "sample": "sample",
    "overhead": "overhead",
}
MAX_BARS = 320  # of a chart over time: more steps are put together
DETAIL = 100  # steps that are shown one by one
LONGEST = 8


class Timeline:
    """The steps of a run, in about MAX_BARS groups of neighbours in time at most."""

    def __init__(self, steps: dict[str, list[float]], end: float | None = None) -> None:
        """``end``: of what is shown, if that is not where these steps end."""
        self.steps = {"number": list(range(1, len(steps["at"]) + 1)), **steps}
        at, lasted = steps["at"], steps["seconds"]
        self.end = end or max((a + s for a, s in zip(at, lasted, strict=True)), default=0.0)
        self.groups = grouped(at, self.end)

    def only(self, picks: Sequence[int], end: float | None = None) -> Timeline:
        """Of some steps alone."""
        columns = self.steps.items()
        return Timeline({name: [values[i] for i in picks] for name, values in columns}, end)

    def span(self, group: range) -> tuple[float, float]:
        """When a group begins and ends."""
        at, lasted = self.steps["at"], self.steps["seconds"]
        return at[group[0]], at[group[-1]] + lasted[group[-1]]

    def busy(self) -> list[tuple[float, float]]:
        """The spans of all groups, without the cracks between them, but with idle gaps."""
        spans = [self.span(group) for group in self.groups]
        crack = self.end / (MAX_BARS if len(spans) < len(self.steps["at"]) else 1000)
        following = [begin for begin, _ in spans[1:]] + [self.end]
        return [
            (begin, after if after - end < crack else end)
            for (begin, end), after in zip(spans, following, strict=True)
        ]

    def lasting(self) -> list[tuple[float, float]]:
        """As ``busy``, each until the next begins: of what stays while no step runs."""
        begins = [self.steps["at"][group[0]] for group in self.groups]
        return list(zip(begins, [*begins[1:], self.end], strict=True))

    def mean(self, name: str) -> list[float]:
        """A column, averaged over each group."""
        values = self.steps[name]
        return [fmean(values[group[0] : group[-1] + 1]) for group in self.groups]

    def titles(self) -> list[str]:
        """What is said of each group beside the pointer."""
        texts = []
        for group in self.groups:
            begin, _ = self.span(group)
            number = self.steps["number"][group[0]]
            count = f"{len(group)} steps" if len(group) > 1 else f"step {number}"
            texts.append(f"at {seconds_text(begin)}, {count}")
        return texts

    def middles(self) -> list[float]:
        return [(begin + end) / 2 for begin, end in self.busy()]


def grouped(at: Sequence[float], end: float, most: int = MAX_BARS) -> list[range]:
    """Ranges of steps: each its own, or if there are more than ``most``, by equal times."""
    if len(at) <= most:
        return [range(i, i + 1) for i in range(len(at))]
    groups, first, width = [], 0, end / most
    for i in range(1, len(at) + 1):
        if i == len(at) or int(at[i] / width) != int(at[first] / width):
            groups.append(range(first, i))
            first = i
    return groups


def pools_section(result: dict[str, Any], timeline: Timeline) -> str:
    """The three pools, and what is swapped out."""
    pools = result["pools"]
    page, window, recurrent = (
        pools[name] for name in ("page_bytes", "window_bytes", "recurrent_bytes")
    )
    parts, absent = [], []
    kinds = (
        ("Global KV", "pages", page, f"pages of {pools['page_size']} tokens"),
        ("Windows", "slots", window, "slots, one a sequence"),
        ("Recurrent state", "slots", recurrent, "slots, one a sequence"),
    )
    for title, unit, size, what in kinds:
        if not size:
            absent.append(title.lower())
            continue
        count = result[f"num_{unit}"]
        about = f"{count:,} {what}, {bytes_text(size)} each: {bytes_text(count * size)} in all"
        top = _shown(timeline, unit, count)
        if top < count:
            about += f", of which {bytes_text(top * size)} are shown"
        parts.append(card(title, about, _pool_chart(title, unit, size, count, top, timeline)))
    key = legend([("used", "in use"), ("kept", "kept by the prefix cache"), ("free", "free")])
    none = f'<p class="aside">This model has no {" and no ".join(absent)}.</p>' if absent else ""
    return f'{key}<div class="grid three">{"".join(parts)}</div>{none}{_swapped(pools, timeline)}'


def _shown(timeline: Timeline, unit: str, count: int) -> int:
    """How much of a pool of ``count`` a chart shows: all, unless most of it was never touched."""
    steps = timeline.steps
    taken = max(map(sum, zip(steps[f"{unit}_used"], steps[f"{unit}_kept"], strict=True)))
    return count if taken > count / 4 else max(1, round(1.5 * taken))


def _pool_chart(
    title: str, unit: str, size: int, count: int, shown: int, timeline: Timeline
) -> str:
    used, kept = timeline.mean(f"{unit}_used"), timeline.mean(f"{unit}_kept")
    spans, top = timeline.lasting(), shown * size
    most = max((u + k for u, k in zip(used, kept, strict=True)), default=0.0)
    says = (
        f"{title} over {seconds_text(timeline.end)}: at most {bytes_text(size * max(used))} in use"
        f" and {bytes_text(size * most)} with what is kept, of {bytes_text(count * size)}"
    )
    y = Axis(0, top, tuple((share * top, bytes_text(share * top)) for share in (0, 0.5, 1)))
    chart = Chart(clock(0, timeline.end, 4), y, says)
    levels = [
        (u * size, (u + k) * size, (b, e)) for u, k, (b, e) in zip(used, kept, spans, strict=True)
    ]
    chart.area("free", [(0, timeline.end, 0, top)])
    chart.area("kept", [(b, e, low, high) for low, high, (b, e) in levels])
    chart.area("used", [(b, e, 0, low) for low, _, (b, e) in levels])
    free = [count - u - k for u, k in zip(used, kept, strict=True)]
    chart.hover = Hover(
        timeline.middles(),
        timeline.titles(),
        [
            (kind, name, [f"{bytes_text(v * size)} ({_amount(v)} {unit})" for v in values])
            for kind, name, values in (
                ("used", "in use", used),
                ("kept", "kept", kept),
                ("free", "free", free),
            )
        ],
    )
    return chart.html()


def _swapped(pools: dict[str, int], timeline: Timeline) -> str:
    blocks, states = (timeline.mean(f"{name}_swapped") for name in ("blocks", "states"))
    slot = pools["window_bytes"] + pools["recurrent_bytes"]
    pages = [pools["page_bytes"] * value for value in blocks]
    slots = [slot * value for value in states]
    top = max((p + s for p, s in zip(pages, slots, strict=True)), default=0.0)
    if not top:
        return '<p class="aside">Nothing was swapped out.</p>'
    says = f"Swapped out over time: at most {bytes_text(top)}"
    chart = Chart(clock(0, timeline.end), linear(0, top * 1.05, bytes_text, 4, base=2), says)
    spans = timeline.lasting()
    chart.area("c1", [(b, e, 0, p) for (b, e), p in zip(spans, pages, strict=True)])
    chart.area("c2", [(b, e, p, p + s) for (b, e), p, s in zip(spans, pages, slots, strict=True)])
    chart.hover = Hover(
        timeline.middles(),
        timeline.titles(),
        [
            ("c1", "pages", [bytes_text(p) for p in pages]),
            ("c2", "states", [bytes_text(s) for s in slots]),
        ],
    )
    key = legend([("c1", "pages of global KV"), ("c2", "windows and recurrent state")])
    return card("Swapped out", "Bytes in the swap space.", key + chart.html())


def phases_section(timeline: Timeline) -> str:
    """Where the time went, and every step."""
    key = legend([(f"c{i}", PHASE_NAMES[name]) for i, name in enumerate(PHASES, 1)])
    parts = [key, card("Where the time went", "Share of the time by phase.", _shares(timeline))]
    count = len(timeline.steps["at"])
    chunks = timeline.steps["chunks"]
    for title, picks in (
        ("Steps with chunks of prompts", [i for i in range(count) if chunks[i]]),
        ("Steps of decodes only", [i for i in range(count) if not chunks[i]]),
    ):
        if picks:
            parts.append(_steps_card(title, timeline.only(picks, timeline.end)))
    if count > MAX_BARS:
        detail = detail_of(timeline)
        about = f"The {DETAIL} steps of the busiest stretch, each a bar as wide as it was long."
        parts.append(card("Step by step", about, _bars(detail, False, detail.steps["at"][0])))
    return "".join(parts) + _longest(timeline)


def _steps_card(title: str, timeline: Timeline) -> str:
    many = len(timeline.groups) < len(timeline.steps["at"])
    about = (
        "Seconds of a step by phase: each bar the mean of neighbouring steps, behind it in grey "
        "their longest."
        if many
        else "Seconds of each step by phase; bars are as wide as the step was long."
    )
    return card(title, about, _bars(timeline, many))


def _longest(timeline: Timeline) -> str:
    """The steps that took most, and what they did."""
    steps = timeline.steps
    order = sorted(range(len(steps["at"])), key=lambda i: -steps["seconds"][i])[:LONGEST]
    predicted = [sum(v) for v in zip(*(steps[f"predicted.{name}"] for name in PHASES), strict=True)]
    rows = [
        [
            seconds_text(steps["at"][i]),
            seconds_text(steps["seconds"][i]),
            seconds_text(predicted[i]) if predicted[i] else "-",
            *(f"{steps[name][i]:,.0f}" for name in ("tokens", "rows", "chunks", "sequences")),
        ]
        for i in order
    ]
    head = ["at", "took", "predicted", "tokens", "rows", "chunks", "sequences"]
    return f"<h3>The longest steps</h3>{table(head, rows)}"


def detail_of(timeline: Timeline, size: int = DETAIL) -> Timeline:
    """The neighbouring steps with the most chunks of prompts among them."""
    chunks = [min(value, 1) for value in timeline.steps["chunks"]]
    total = best = sum(chunks[:size])
    first = 0
    for i in range(size, len(chunks)):
        total += chunks[i] - chunks[i - size]
        if total > best:
            best, first = total, i - size + 1
    return timeline.only(range(first, min(first + size, len(chunks))))


def _shares(timeline: Timeline) -> str:
    """Stacked shares of equal pieces of time; what is left is idle."""
    count = min(MAX_BARS, max(20, len(timeline.groups)))
    width = (timeline.end or 1.0) / count
    pieces = [[0.0] * len(PHASES) for _ in range(count)]
    columns = [timeline.steps[f"actual.{name}"] for name in PHASES]
    for at, phases in zip(timeline.steps["at"], zip(*columns, strict=True), strict=True):
        _spread(pieces, width, at, phases)
    says = "Share of the time that each phase took, over time. Overall: " + ", ".join(
        f"{PHASE_NAMES[name]} {percent_text(sum(column) / (timeline.end or 1.0))}"
        for name, column in zip(PHASES, columns, strict=True)
    )
    chart = Chart(clock(0, timeline.end), linear(0, 1, percent_text, 4), says)
    edges = [(i * width, (i + 1) * width) for i in range(count)]
    shares = [[value / width for value in piece] for piece in pieces]
    _stack(chart, edges, shares)
    idle = [max(1 - sum(share), 0.0) for share in shares]
    lines = [
        (f"c{k + 1}", PHASE_NAMES[name], [percent_text(share[k]) for share in shares])
        for k, name in enumerate(PHASES)
    ]
    lines.append(("free", "idle", [percent_text(value) for value in idle]))
    middles = [(a + b) / 2 for a, b in edges]
    titles = [f"{seconds_text(a)} to {seconds_text(b)}" for a, b in edges]
    chart.hover = Hover(middles, titles, lines)
    return chart.html()


def _spread(pieces: list[list[float]], width: float, at: float, phases: Sequence[float]) -> None:
    """Add a step's phases, one after another, to the pieces of time that they fall into."""
    last = len(pieces) - 1
    for k, seconds in enumerate(phases):
        end = at + seconds
        while at < end:
            piece = min(int(at / width + 1e-9), last)
            until = end if piece == last else min(end, (piece + 1) * width)
            pieces[piece][k] += until - at
            at = until


def _bars(timeline: Timeline, many: bool, begin: float = 0.0) -> str:
    columns = [timeline.mean(f"actual.{name}") for name in PHASES]
    values = list(zip(*columns, strict=True))
    seconds = timeline.steps["seconds"]
    longest = [max(seconds[group[0] : group[-1] + 1]) for group in timeline.groups]
    top = max([*longest, *map(sum, values)], default=1.0)
    says = f"Seconds of steps by phase over time; the longest step took {seconds_text(top)}"
    chart = Chart(
        clock(begin, timeline.end), linear(0, top * 1.04, seconds_text, 4), says, tall=True
    )
    spans = timeline.busy()
    if many:
        chart.area("peak", [(a, b, 0, v) for (a, b), v in zip(spans, longest, strict=True)])
    _stack(chart, spans, values)
    lines = [
        (f"c{k + 1}", PHASE_NAMES[name], [seconds_text(value) for value in columns[k]])
        for k, name in enumerate(PHASES)
    ]
    for name, word in (("tokens", "tokens"), ("rows", "rows"), ("running", "running")):
        lines.append(("", word, [_amount(value) for value in timeline.mean(name)]))
    if many:
        lines.append(("peak", "longest", [seconds_text(value) for value in longest]))
    chart.hover = Hover(timeline.middles(), timeline.titles(), lines)
    return chart.html()


def _stack(
    chart: Chart, spans: Sequence[tuple[float, float]], values: Sequence[Sequence[float]]
) -> None:
    """One area for each part of ``values``, one on another, over ``spans``."""
    floor = [0.0] * len(spans)
    for k in range(len(PHASES)):
        ceiling = [low + value[k] for low, value in zip(floor, values, strict=True)]
        chart.area(
            f"c{k + 1}",
            [(a, b, lo, hi) for (a, b), lo, hi in zip(spans, floor, ceiling, strict=True)],
        )
        floor = ceiling


def queue_section(timeline: Timeline) -> str:
    """Requests that run and wait, tokens through each half."""
    running, waiting = timeline.mean("running"), timeline.mean("waiting")
    spans = timeline.lasting()
    top = max([*running, *waiting, 1.0])
    says = f"Running and waiting requests over time, at most {max(running, default=0):.0f} running"
    says += f" and {max(waiting, default=0):.0f} waiting"
    queue = Chart(clock(0, timeline.end), linear(0, top * 1.05, count_text, 4), says)
    for kind, values in (("used", running), ("c2", waiting)):
        queue.staircase(kind, [(a, b, v) for (a, b), v in zip(spans, values, strict=True)])
    lines = [
        ("used", "running", [_amount(value) for value in running]),
        ("c2", "waiting", [_amount(value) for value in waiting]),
    ]
    queue.hover = Hover(timeline.middles(), timeline.titles(), lines)
    key = legend([("used", "running"), ("c2", "waiting")])
    parts = [card("Queue", "Sequences that run and that wait.", key + queue.html())]
    parts.append(card("Rows skipped", *_rates(timeline)))
    return f'<div class="grid two">{"".join(parts)}</div>'


def _rates(timeline: Timeline) -> tuple[str, str]:
    """Tokens a second through the first half: those that the second half saw, and the others."""
    spans = timeline.busy()
    rows = _rate(timeline, spans, lambda i: timeline.steps["rows"][i])
    tokens = _rate(timeline, spans, lambda i: timeline.steps["tokens"][i])
    total, seen = sum(timeline.steps["tokens"]), sum(timeline.steps["rows"])
    share = percent_text(1 - seen / total) if total else "none"
    about = f"Tokens a second through the first half; {share} of all skipped the second."
    top = max(tokens, default=1.0) or 1.0
    chart = Chart(clock(0, timeline.end), linear(0, top * 1.05, count_text, 4), about)
    edges = list(zip(spans, rows, tokens, strict=True))
    chart.area("used", [(a, b, 0, low) for (a, b), low, _ in edges])
    chart.area("skipped", [(a, b, low, high) for (a, b), low, high in edges])
    skipped = [high - low for _, low, high in edges]
    lines = [
        ("used", "through both", [f"{count_text(value)}/s" for value in rows]),
        ("skipped", "skipped", [f"{count_text(value)}/s" for value in skipped]),
    ]
    chart.hover = Hover(timeline.middles(), timeline.titles(), lines)
    key = legend([("used", "through both halves"), ("skipped", "first half only")])
    return about, key + chart.html()


def _rate(
    timeline: Timeline, spans: Sequence[tuple[float, float]], value: Callable[[int], float]
) -> list[float]:
    return [
        sum(value(i) for i in group) / max(end - begin, 1e-9)
        for group, (begin, end) in zip(timeline.groups, spans, strict=True)
    ]


def _amount(value: float) -> str:
    return count_text(round(value, 1))


def card(title: str, about: str, content: str = "") -> str:
    return (
        f"<figure><figcaption><h3>{escape(title)}</h3><p>{escape(about)}</p></figcaption>"
        f"{content}</figure>"
    )
