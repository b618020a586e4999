"""The HTML report of `yocolm bench serving`: one file that needs nothing else. No torch."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from string import Template
from typing import Any

from yocolm.bench.recording import PERCENTILES, PHASES, quantile
from yocolm.bench.report import table as text_table
from yocolm.bench.serving_sweep import sweep_section
from yocolm.bench.serving_timeline import (
    PHASE_NAMES,
    Timeline,
    card,
    phases_section,
    pools_section,
    queue_section,
)
from yocolm.errors import ConfigError
from yocolm.eval.charts import (
    GAP,
    STYLE,
    Axis,
    Chart,
    bytes_text,
    clock,
    count_text,
    escape,
    legend,
    linear,
    logarithmic,
    percent_text,
    seconds_text,
    table,
)

PAGE = Path(__file__).with_name("serving_report.html")
LATENCIES = {
    "ttft": ("TTFT", "time to the first token"),
    "tpot": ("TPOT", "time per token after the first, a request's mean"),
    "itl": ("ITL", "time between two tokens"),
    "e2e": ("E2E", "time from arrival to end"),
}
CELLS = 90  # of a scatter, each way: dots in one cell are drawn once
CURVE = 200  # points of a distribution
Tile = tuple[str, str, str]


def report(result: dict[str, Any]) -> str:
    """The page of what ``yocolm bench serving --json`` saves: below a MB, however long the run."""
    timeline = Timeline(result["steps"]) if result["steps"] else None
    nothing = "<p>No step was run.</p>"
    sections = [
        ("overview", "Overview", _overview(result)),
        ("latency", "Latency", _latencies(result)),
        ("pools", "Three pools", pools_section(result, timeline) if timeline else nothing),
        ("phases", "Phases of every step", phases_section(timeline) if timeline else nothing),
        ("queue", "Queue and rows", queue_section(timeline) if timeline else nothing),
        ("forecast", "Predicted and actual", _forecasts(result)),
    ]
    if result.get("sweep"):
        sections.append(("sweep", "Fast prefill on and off", sweep_section(result["sweep"])))
    sections.append(("setup", "Setup", _setup(result)))
    links = "".join(f'<a href="#{name}">{escape(title)}</a>' for name, title, _ in sections)
    body = "".join(
        f'<section id="{name}"><h2>{escape(title)}</h2>{content}</section>'
        for name, title, content in sections
    )
    title = f"Serving {result['model']}"
    page = Template(PAGE.read_text(encoding="utf-8"))
    return page.substitute(
        style=STYLE, title=escape(title), about=escape(_about(result)), links=links, body=body
    )


def report_of(path: Path) -> str:
    """The page of a saved run. ConfigError if the file holds none."""
    try:
        return report(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} holds no run of `yocolm bench serving` ({error!r}); give what --json has saved"
        ) from error


def serving_table(result: dict[str, Any]) -> str:
    """Latencies and rates as text, for a terminal."""
    found = result["summary"]
    columns = ("mean", "p50", "p90", "p99", "max")
    rows = [
        [short, *(f"{1e3 * found[name][column]:.2f}" for column in columns)]
        for name, (short, _) in LATENCIES.items()
        if found[name]
    ]
    lines = [text_table(["ms", *columns], rows), ""]
    lines.append(
        f"{found['completed']} of {found['requests']} requests in {found['seconds']:.1f} s: "
        f"{found['request_throughput']:.2f} requests/s, {found['output_throughput']:.0f} tokens/s "
        f"drawn, {found['total_throughput']:.0f} tokens/s with prompts"
    )
    return "\n".join(lines)


def number(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' * (count != 1)}"


def _about(result: dict[str, Any]) -> str:
    found = result["summary"]
    return (
        f"{number(found['requests'], 'request')} in {seconds_text(found['seconds'])}, "
        f"{number(found['steps'], 'step')}; {result['trace']}"
    )


def _overview(result: dict[str, Any]) -> str:
    """Tiles: a value, its name, and a line below."""
    found = result["summary"]
    tiles = [*_latency_tiles(found), *_rate_tiles(found), *_share_tiles(found)]
    columns = 3 if len(tiles) in (5, 6) else 4
    shown = "".join(
        f'<div class="tile"><dt>{escape(name)}</dt><dd>{escape(value)}</dd><p>{escape(more)}</p>'
        "</div>"
        for value, name, more in tiles
    )
    return f'<dl class="tiles in{columns}">{shown}</dl>'


def _latency_tiles(found: dict[str, Any]) -> Iterator[Tile]:
    for name in ("ttft", "tpot"):
        if found[name]:
            median, most = (seconds_text(found[name][column]) for column in ("p50", "p99"))
            yield median, f"{LATENCIES[name][0]} median", f"99 % within {most}"


def _rate_tiles(found: dict[str, Any]) -> Iterator[Tile]:
    drawn, total = (count_text(found[f"{name}_throughput"]) for name in ("output", "total"))
    yield f"{drawn}/s", "tokens drawn", f"{total}/s with prompts"
    failed = f"{found['failed']} failed" if found["failed"] else "none failed"
    ended = f"{found['completed']} ended, {failed}"
    yield f"{_rate(found['request_throughput'])}/s", "requests", ended
    if found["goodput"] is not None:
        met = f"{percent_text(found['met_targets'])} met their targets"
        yield f"{_rate(found['goodput'])}/s", "goodput", met


def _share_tiles(found: dict[str, Any]) -> Iterator[Tile]:
    yield percent_text(found["skipped_share"]), "rows skipped", "never seen by the second half"
    preempted = number(found["preemptions"], "preemption")
    yield percent_text(found["cached_share"]), "prompt from cache", preempted
    if found["step_error"]:
        more = f"TTFT {percent_text(found['ttft_error']['mape'])}" if found["ttft_error"] else ""
        yield percent_text(found["step_error"]["mape"]), "error of predicted steps", more


def _rate(value: float) -> str:
    return f"{value:.2f}" if value < 10 else count_text(value)


def _latencies(result: dict[str, Any]) -> str:
    """Distributions, and their percentiles in a table."""
    requests, found = result["requests"], result["summary"]
    values = {
        name: [v for v in requests[name] if v is not None] for name in ("ttft", "tpot", "e2e")
    }
    values["itl"] = result["gaps"]
    parts, rows = [], []
    for name, (short, about) in LATENCIES.items():
        if not found[name]:
            continue
        targets = set(requests.get(f"{name}_target", ()))
        target = targets.pop() if len(targets) == 1 else None
        curve = _distribution(short, sorted(values[name]), found[name], target)
        parts.append(card(short, about.capitalize(), curve))
        columns = ("mean", "p50", "p90", "p99", "max")
        rows.append(
            [short, *(seconds_text(found[name][c]) for c in columns), f"{found[name]['count']:,}"]
        )
    if not rows:
        return "<p>No request has ended.</p>"
    key = legend(
        [
            ("used", "share of requests (ITL: of tokens) within"),
            ("mark", "median, 90th and 99th percentile"),
        ]
    )
    head = ["", "mean", "p50", "p90", "p99", "max", "count"]
    numbers = table(head, rows)
    more = f'<div class="grid two after">{_by_request(requests)}</div>'
    return f'{key}<div class="grid two">{"".join(parts)}</div>{numbers}{more}'


def _distribution(
    name: str, ordered: Sequence[float], found: dict[str, float], target: float | None
) -> str:
    low = max(ordered[0], found["max"] / 1e6, 1e-9)
    within = ", ".join(f"{p} % within {seconds_text(found[f'p{p}'])}" for p in PERCENTILES)
    x = logarithmic(low, found["max"], seconds_text)
    chart = Chart(x, linear(0, 1, percent_text, 4), f"{name}: {within}")
    curve = [(x.low, 0.0), *_curve(ordered), (x.high, 1.0)]
    chart.under("soft", curve)
    chart.line("used", curve)
    for row, percent in enumerate(PERCENTILES):
        chart.mark("percentile", found[f"p{percent}"], f"p{percent}", row)
    if target is not None and x.low <= target <= x.high:
        chart.mark("target", target, "target", len(PERCENTILES))
    return chart.html()


def _curve(ordered: Sequence[float]) -> list[tuple[float, float]]:
    """(value, share of all up to it): a stair for each value, or of many a line through CURVE."""
    count = len(ordered)
    if count > CURVE:
        return [(quantile(ordered, i / (CURVE - 1)), i / (CURVE - 1)) for i in range(CURVE)]
    stairs = [((i + up) / count, value) for i, value in enumerate(ordered) for up in (0, 1)]
    return [(value, share) for share, value in stairs]


def _by_request(requests: dict[str, list[Any]]) -> str:
    """TTFT over what it may depend on: the length of the prompt, and when the request came."""
    found = [
        (prompt, arrival, ttft)
        for prompt, arrival, ttft in zip(
            requests["prompt_tokens"], requests["arrival"], requests["ttft"], strict=True
        )
        if ttft
    ]
    if not found:
        return ""
    times, prompts = [row[2] for row in found], [row[0] for row in found]
    y = logarithmic(min(times) / 1.1, max(times) * 1.1, seconds_text)
    by_length = Chart(
        logarithmic(min(prompts), max(prompts), count_text), y, "TTFT over prompt length"
    )
    by_time = Chart(clock(0, max(row[1] for row in found)), y, "TTFT over time of arrival")
    for chart, points in (
        (by_length, [(prompt, ttft) for prompt, _, ttft in found]),
        (by_time, [(arrival, ttft) for _, arrival, ttft in found]),
    ):
        for size, places in dense(chart, points).items():
            chart.dots(f"c1 {size}", places)
    return card(
        "TTFT and the prompt", "Each request by the tokens of its prompt.", by_length.html()
    ) + card("TTFT over time", "Each request by when it came.", by_time.html())


def _forecasts(result: dict[str, Any]) -> str:
    """Steps and first tokens: predicted beside actual, and the distribution of the error."""
    found, steps = result["summary"], result["steps"]
    parts = []
    if found["step_error"]:
        sums = {
            side: [sum(v) for v in zip(*(steps[f"{side}.{name}"] for name in PHASES), strict=True)]
            for side in ("predicted", "actual")
        }
        pairs = [(float(p), float(a)) for p, a in zip(*sums.values(), strict=True)]
        chunky = [count > 0 for count in steps["chunks"]]
        groups = {
            "c3": [pair for pair, chunk in zip(pairs, chunky, strict=True) if chunk],
            "c1": [pair for pair, chunk in zip(pairs, chunky, strict=True) if not chunk],
        }
        key = legend([("c1", "decodes only"), ("c3", "with chunks of prompts")])
        parts.append(_forecast("Step time", groups, found["step_error"], key))
    if found["ttft_error"]:
        requests = result["requests"]
        both = zip(requests["predicted_ttft"], requests["ttft"], strict=True)
        pairs = [(float(p), float(a)) for p, a in both if p and a]
        parts.append(
            _forecast("TTFT, predicted on arrival", {"c1": pairs}, found["ttft_error"], "")
        )
    if not parts:
        return "<p>Nothing was predicted in this run.</p>"
    return "".join(parts) + _phase_errors(steps)


def _forecast(
    title: str, groups: dict[str, list[tuple[float, float]]], found: dict[str, float], key: str
) -> str:
    groups = {kind: [(p, a) for p, a in pairs if p > 0 and a > 0] for kind, pairs in groups.items()}
    pairs = [pair for each in groups.values() for pair in each]
    within = sum(abs(p / a - 1) <= 0.1 for p, a in pairs) / len(pairs)
    about = (
        f"Mean absolute error {percent_text(found['mape'])}, half within "
        f"{percent_text(found['p50'])}, 90 of 100 within {percent_text(found['p90'])}; "
        f"bias {100 * found['bias']:+.1f} %; {percent_text(within)} are off by at most 10 %."
    )
    scatter = card(
        "Predicted over actual",
        "On the line they agree; the band is 10 % to either side.",
        key + _scatter(title, groups),
    )
    errors = card(
        "Error",
        "Share of all by predicted / actual - 1; the last bars hold all beyond.",
        _histogram(title, pairs),
    )
    head = f'<h3>{escape(title)}</h3><p class="aside">{escape(about)}</p>'
    return f'{head}<div class="grid two">{scatter}{errors}</div>'


def _scatter(title: str, groups: dict[str, list[tuple[float, float]]]) -> str:
    values = sorted(value for pairs in groups.values() for pair in pairs for value in pair)
    low, high = values[0] / 1.1, values[-1] * 1.1
    axis = logarithmic(low, high, seconds_text)
    chart = Chart(axis, axis, f"{title}: predicted (up) over actual (right)", tall=True)
    ends = (axis.low, axis.high)
    for kind, factor in (("band", 1.1), ("band", 1 / 1.1), ("diagonal", 1.0)):
        chart.line(kind, [(end, end * factor) for end in _inside(ends, factor)])
    for kind, pairs in groups.items():
        points = [(actual, predicted) for predicted, actual in pairs]
        for size, places in dense(chart, points).items():
            chart.dots(f"{kind} {size}", places)
    return chart.html(("actual", "predicted"))


def _inside(ends: tuple[float, float], factor: float) -> tuple[float, float]:
    """Where a line of ``factor`` times x enters and leaves the square."""
    low, high = ends
    return max(low, low / factor), min(high, high / factor)


def dense(chart: Chart, points: list[tuple[float, float]]) -> dict[str, list[tuple[float, float]]]:
    """Points once for each cell of a grid over ``chart``, by how many fall into it."""
    cells: dict[tuple[int, int], tuple[float, float]] = {}
    counts: Counter[tuple[int, int]] = Counter()
    for x, y in points:
        cell = (round(CELLS * chart.x.place(x)), round(CELLS * chart.y.place(y)))
        cells.setdefault(cell, (x, y))
        counts[cell] += 1
    busiest = max(counts.values(), default=1)
    sizes: dict[str, list[tuple[float, float]]] = {}
    for cell, place in cells.items():
        share = counts[cell] / busiest
        size = "few" if share < 0.03 else "some" if share < 0.3 else "many"
        sizes.setdefault("some" if busiest < 4 else size, []).append(place)
    return sizes


def _histogram(title: str, pairs: list[tuple[float, float]]) -> str:
    off = sorted(abs(predicted / actual - 1) for predicted, actual in pairs)
    edge, count = (0.5 if quantile(off, 0.9) < 0.4 else 1.0), 40 if len(off) > 200 else 20
    width = 2 * edge / count
    bins = [0] * count
    for predicted, actual in pairs:
        place = int((predicted / actual - 1 + edge) / width)
        bins[min(max(place, 0), count - 1)] += 1
    shares = [value / len(pairs) for value in bins]
    marks = (edge * share for share in (-1, -0.5, 0, 0.5, 1))
    x = Axis(-edge, edge, tuple((v, f"{100 * v:+.0f}{GAP}%" if v else "0") for v in marks))
    chart = Chart(
        x,
        linear(0, max(shares) * 1.05, percent_text, 4),
        f"{title}: distribution of the error",
        tall=True,
    )
    spans = [
        (-edge + i * width, -edge + (i + 1) * width, 0.0, share) for i, share in enumerate(shares)
    ]
    chart.area("soft", [(-0.1, 0.1, 0.0, max(shares) * 1.05)])
    chart.area("c1 bars", spans)
    chart.mark("diagonal", 0.0)
    return chart.html()


def _phase_errors(steps: dict[str, list[float]]) -> str:
    rows = []
    for name in PHASES:
        predicted, actual = (sum(steps[f"{side}.{name}"]) for side in ("predicted", "actual"))
        ratio = f"{predicted / actual:.2f}" if actual else "-"
        rows.append([PHASE_NAMES[name], seconds_text(predicted), seconds_text(actual), ratio])
    head = ["phase", "predicted", "actual", "ratio"]
    return f"<h3>All steps together, by phase</h3>{table(head, rows)}"


def _setup(result: dict[str, Any]) -> str:
    machine, pools = result["machine"], result["pools"]
    windows, recurrent = (bytes_text(pools[f"{name}_bytes"]) for name in ("window", "recurrent"))
    where = f"{machine['cores']} cores, {result['device']}, {result['threads']} threads"
    rows = [
        ["model", f"{result['model']}, {result['dtype']}"],
        ["machine", f"{machine['cpu']}, {where}"],
        ["version", f"yocolm {result['version']}, Python {machine['python']}"],
        ["begun", result["begun"]],
        ["trace", result["trace"]],
        ["cost model", result["cost_model"]],
        ["a page", f"{pools['page_size']} tokens, {bytes_text(pools['page_bytes'])}"],
        ["a slot", f"{windows} of windows and {recurrent} of recurrent state"],
    ]
    rows += [[n, str(value)] for n, value in result["settings"].items() if value is not None]
    return table(["", ""], rows)
