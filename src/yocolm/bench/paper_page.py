"""What `yocolm bench paper` draws: a page that needs nothing else, and plots as PNG. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from string import Template
from typing import Any

from yocolm.bench.paper import PARTS, SIDES
from yocolm.bench.paper_reference import ACCOUNT
from yocolm.bench.paper_report import (
    LEGEND,
    NAMES,
    about,
    digits,
    failures,
    memory_unit,
    tables,
    too_large,
    values_table,
)
from yocolm.bench.report import pyplot
from yocolm.eval.charts import (
    STYLE,
    Axis,
    Chart,
    escape,
    legend,
    length_text,
    linear,
    logarithmic,
    named,
    seconds_text,
    table,
)

PAGE = Path(__file__).with_name("paper_report.html")
Points = list[tuple[float, float]]
_CLASSES = {"yoco": "c1", "transformer": "c3"}
_COLOURS = {"yoco": "tab:blue", "transformer": "tab:orange"}
_PARTS = dict(zip(PARTS, ("c5", "c1", "c4", "c2"), strict=True))
_METRICS = (
    ("total", "memory", "Memory"),
    ("prefill", "prefill", "Prefill"),
    ("throughput", "throughput", "Throughput"),
)


def _unit(study: dict[str, Any], key: str) -> tuple[float, str]:
    """A factor for what a metric is kept in, and what it is then."""
    if key == "total":
        return memory_unit(study)
    return 1.0, "seconds to the first token" if key == "prefill" else "tokens/s, equal batch"


def html_report(result: dict[str, Any]) -> str:
    """One page that needs nothing else."""
    body = []
    for study in result["studies"]:
        body.append(f"<h2>{escape(study['pair'])} on {escape(study['hardware'])}</h2>")
        body.append(f"<p>{escape(about(study))}. {escape(LEGEND + too_large(study))}.</p>")
        body.append('<div class="grid">' + "".join(_figures(study)) + "</div>")
        for title, head, rows in tables(study):
            body.append(f"<h3>{escape(title)}</h3>{table(head, rows)}")
        body += [f"<p>Not measured: {escape(text)}</p>" for text in failures(study)]
        if study["beside_paper"]:
            title, head, rows = values_table()
            body.append(f"<h3>{escape(title)}</h3>{table(head, rows)}<h3>Why they differ</h3>")
            body.append("".join(f"<p>{escape(text)}</p>" for text in ACCOUNT))
        if study["hardware_note"]:
            body.append(f'<p class="soft">{escape(study["hardware_note"])}</p>')
    machine = ", ".join(f"{key} {value}" for key, value in result.get("machine", {}).items())
    page = Template(PAGE.read_text(encoding="utf-8"))
    return page.substitute(style=STYLE, body="\n".join(body), machine=escape(machine))


def _figures(study: dict[str, Any]) -> list[str]:
    """Memory, prefill and throughput over length, and the ratios of all three."""
    lengths = [row["length"] for row in study["rows"]]
    figures = []
    for key, _, title in _METRICS:
        factor, unit = _unit(study, key)
        series = {side: _series(study, side, key, factor) for side in SIDES}
        values = [y for points in series.values() for _, y in points]
        text = seconds_text if key == "prefill" else digits
        axis = (
            linear(0, max(values))
            if key == "total"
            else logarithmic(min(values), max(values), text)
        )
        chart = Chart(named(lengths, length_text), axis, f"{title} of both over length")
        for side, points in series.items():
            chart.line(_CLASSES[side], points)
            chart.dots(f"{_CLASSES[side]} many", _measured_only(study, side, key, factor))
        names = legend((_CLASSES[side], NAMES[side]) for side in SIDES)
        figures.append(_figure(f"{title}: {unit}", names, chart))
    return [*figures, _ratio_figure(study, lengths), _parts_figure(study)]


def _parts_figure(study: dict[str, Any]) -> str:
    """What the memory of both is made of, at the longest of the lengths."""
    row = max(study["rows"], key=lambda row: row["length"])
    factor, unit = memory_unit(study)
    top = factor * max(cell["total"]["value"] for cell in row["models"].values())
    bars = Axis(0, 2, tuple((i + 0.5, NAMES[side]) for i, side in enumerate(SIDES)))
    chart = Chart(bars, linear(0, top), "Memory of both by part")
    base = dict.fromkeys(SIDES, 0.0)
    for part, kind in _PARTS.items():
        spans = []
        for i, side in enumerate(SIDES):
            low = base[side]
            base[side] += factor * row["models"][side]["memory"][part]["value"]
            spans.append((i + 0.2, i + 0.8, low, base[side]))
        chart.area(kind, spans)
    names = legend((kind, part) for part, kind in _PARTS.items())
    title = f"Memory by part at {length_text(row['length'])}, {unit}"
    return f"<figure><h3>{escape(title)}</h3>{names}{chart.html()}</figure>"


def _ratios(study: dict[str, Any], name: str) -> tuple[Points, Points]:
    """Ours and the paper's over lengths, where the study is the paper's."""
    beside = study["beside_paper"]
    source = "most_throughput" if name == "throughput" and beside else name
    rows = study["rows"]
    ours = [(r["length"], r["ratios"][source]["value"]) for r in rows if r["ratios"][source]]
    theirs = [(r["length"], r["paper"][name]) for r in rows if beside and r["paper"][name]]
    return ours, theirs


def _ratio_figure(study: dict[str, Any], lengths: Sequence[int]) -> str:
    lines: list[tuple[str, str, Points, bool]] = []
    for kind, (_, name, title) in zip(("c1", "c2", "c4"), _METRICS, strict=True):
        ours, theirs = _ratios(study, name)
        lines.append((kind, title, ours, False))
        if study["beside_paper"]:
            lines.append((kind, f"{title}, paper", theirs, True))
    values = [y for *_, points, _ in lines for _, y in points]
    axis = logarithmic(min([1.0, *values]), max([2.0, *values]), lambda value: f"{value:g}x")
    chart = Chart(named(lengths, length_text), axis, "How many times better YOCO is, over length")
    for kind, _, points, dotted in lines:
        if dotted:
            chart.dots(f"{kind} many", points)
        else:
            chart.line(kind, points)
    entries = [(kind, title) for kind, title, _, dotted in lines if not dotted]
    dots = "; dots: the paper" if study["beside_paper"] else ""
    return _figure(f"YOCO over Transformer{dots}", legend(entries), chart)


def _figure(title: str, names: str, chart: Chart) -> str:
    return f"<figure><h3>{escape(title)}</h3>{names}{chart.html()}</figure>"


def _series(study: dict[str, Any], side: str, key: str, factor: float) -> Points:
    return [(row["length"], factor * row["models"][side][key]["value"]) for row in study["rows"]]


def _measured_only(study: dict[str, Any], side: str, key: str, factor: float) -> Points:
    points = zip(study["rows"], _series(study, side, key, factor), strict=True)
    return [p for row, p in points if row["models"][side][key]["source"] == "measured"]


def plot(result: dict[str, Any], path: Path) -> None:
    """A row of five plots for each study. Raises MissingDependencyError without matplotlib."""
    plt = pyplot()
    studies = result["studies"]
    figure, axes = plt.subplots(
        len(studies), 5, figsize=(22, 4.2 * len(studies)), squeeze=False, layout="constrained"
    )
    for line, study in zip(axes, studies, strict=True):
        lengths = [row["length"] for row in study["rows"]]
        for axis, (key, _, title) in zip(line, _METRICS, strict=False):
            factor, unit = _unit(study, key)
            for side, colour in _COLOURS.items():
                known = _measured_only(study, side, key, factor)
                name = f"{NAMES[side]} (dots: measured)" if known else f"{NAMES[side]}, predicted"
                points = zip(*_series(study, side, key, factor), strict=True)
                axis.plot(*points, color=colour, label=name)
                if known:
                    axis.plot(*zip(*known, strict=True), "o", color=colour)
            axis.set_title(f"{study['pair']} on {study['hardware']}: {title}\n{unit}")
            axis.legend()
        _plot_ratios(line[3], study)
        _plot_parts(line[4], study)
        for axis in line[:4]:
            _style(axis, lengths, log=axis is not line[0], ticker=plt.matplotlib.ticker)
    figure.savefig(path, dpi=110, format="png")
    plt.close(figure)


def _plot_ratios(axis: Any, study: dict[str, Any]) -> None:
    colours = ("tab:blue", "tab:purple", "tab:green")
    for colour, (_, name, title) in zip(colours, _METRICS, strict=True):
        ours, theirs = _ratios(study, name)
        if ours:
            axis.plot(*zip(*ours, strict=True), color=colour, label=title)
        if theirs:
            axis.plot(*zip(*theirs, strict=True), "x", color=colour, label=f"{title}, paper")
    axis.set_title("YOCO over Transformer, times")
    axis.legend()


def _plot_parts(axis: Any, study: dict[str, Any]) -> None:
    row = max(study["rows"], key=lambda row: row["length"])
    factor, unit = memory_unit(study)
    base = [0.0 for _ in SIDES]
    for part, colour in zip(
        PARTS, ("tab:gray", "tab:blue", "tab:green", "tab:purple"), strict=True
    ):
        sizes = [factor * row["models"][side]["memory"][part]["value"] for side in SIDES]
        axis.bar([NAMES[side] for side in SIDES], sizes, bottom=base, color=colour, label=part)
        base = [low + size for low, size in zip(base, sizes, strict=True)]
    axis.set_title(f"Memory by part at {length_text(row['length'])}\n{unit}")
    axis.legend()


def _style(axis: Any, lengths: Sequence[int], log: bool, ticker: Any) -> None:
    axis.set_xscale("log", base=2)
    axis.set_xticks(lengths, [length_text(length) for length in lengths])
    if log:
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.yaxis.set_minor_locator(ticker.NullLocator())
    axis.grid(alpha=0.3)
