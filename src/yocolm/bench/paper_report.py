"""What `yocolm bench paper` prints, draws and saves: tables, one HTML file, a plot. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from string import Template
from typing import Any

from yocolm.bench.charts import Chart, escape, legend, linear, logarithmic, named, seconds_text
from yocolm.bench.charts import table as html_table
from yocolm.bench.paper import PARTS, SIDES
from yocolm.bench.paper_reference import ACCOUNT, VALUES
from yocolm.bench.report import pyplot, table

PAGE = Path(__file__).with_name("paper_report.html")
MARKS = {"measured": "m", "predicted": "p", "mixed": "m/p"}
LEGEND = "m: measured here; p: predicted; m/p: a ratio of one of each"
NAMES = {"yoco": "YOCO", "transformer": "Transformer"}
_CLASSES = {"yoco": "c1", "transformer": "c3"}
_METRICS = (
    ("total", "memory", "Memory", "GB", 1e-9),
    ("prefill", "prefill", "Prefill", "seconds to the first token", 1.0),
    ("throughput", "throughput", "Throughput", "generated tokens/s, equal batch", 1.0),
)
Table = tuple[str, list[str], list[list[str]]]
Points = list[tuple[float, float]]


def length_text(length: int | float) -> str:
    """1M, 32K, or the number."""
    count = int(length)
    for unit, size in (("M", 1024**2), ("K", 1024)):
        if count >= size and count % size == 0:
            return f"{count // size}{unit}"
    return str(count)


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _shown(number: dict[str, Any] | None, factor: float = 1.0) -> str:
    """A number with the mark of its source."""
    if number is None:
        return "-"
    return f"{_digits(number['value'] * factor)} {MARKS[number['source']]}"


def _times(ratio: dict[str, Any] | None) -> str:
    return "-" if ratio is None else f"{_digits(ratio['value'])}x {MARKS[ratio['source']]}"


def tables(study: dict[str, Any]) -> list[Table]:
    """Titles, heads and rows: memory by part, prefill, throughput, and how predictions did."""
    rows, beside = study["rows"], study["beside_paper"]
    paper = ["paper"] if beside else []
    unit = (
        1e-9 if max(row["models"]["transformer"]["total"]["value"] for row in rows) > 2e9 else 1e-6
    )
    size = "GB" if unit == 1e-9 else "MB"
    memory_head = ["length"]
    for side in SIDES:
        parts = [part for part in PARTS if side == "yoco" or part != "state"]
        memory_head += [f"{NAMES[side]} {parts[0]}", *parts[1:], "total"]
    memory_head += ["times", *paper]
    memory, prefill, throughput = [], [], []
    for row in rows:
        models, ratios, length = row["models"], row["ratios"], length_text(row["length"])
        line = [length]
        for side in SIDES:
            cell = models[side]
            for part in PARTS:
                if side == "yoco" or part != "state":
                    line.append(_shown(cell["memory"][part], unit))
            line.append(_shown(cell["total"], unit) + ("" if cell["fits"] else " !"))
        line.append(_times(ratios["memory"]))
        times = [_shown(models[side]["prefill"]) for side in SIDES]
        memory.append(line)
        prefill.append([length, *times, _times(ratios["prefill"])])
        throughput.append(_throughput_row(row, length))
        if beside:
            for name, cells in (
                ("memory", memory),
                ("prefill", prefill),
                ("throughput", throughput),
            ):
                known = row["paper"][name]
                cells[-1].append("-" if known is None else f"{known:g}x")
    batch = study["batch"]
    heads = ["length", "YOCO", "Transformer", "times"]
    most = ["YOCO holds", "tokens/s", "Transformer holds", "tokens/s", "times"]
    found = [
        (f"Memory, {size}, batch {batch}", memory_head, memory),
        ("Prefill, seconds to the first token", [*heads, *paper], prefill),
        (
            f"Throughput, generated tokens/s of prefill and generation: batch {batch}, then all "
            "that fit",
            ["length", "generated", *heads[1:], *most, *paper],
            throughput,
        ),
    ]
    return [one for one in (_headline(study), *found, _errors(study)) if one[2]]


def _headline(study: dict[str, Any]) -> Table:
    lines = [
        [
            f"{one['what']} at {length_text(one['length'])}",
            _times(one["ours"]),
            f"{one['paper']:g}x",
        ]
        for one in study["headline"]
    ]
    return ("How many times better YOCO is", ["", "here", "paper"], lines)


def _throughput_row(row: dict[str, Any], length: str) -> list[str]:
    models, ratios = row["models"], row["ratios"]
    line = [length, str(row["generated"])]
    line += [_shown(models[side]["throughput"]) for side in SIDES] + [_times(ratios["throughput"])]
    for side in SIDES:
        cell = models[side]
        line += [str(cell["most_sequences"]), _shown(cell["most_throughput"])]
    return [*line, _times(ratios["most_throughput"])]


def _errors(study: dict[str, Any]) -> Table:
    """By how much predictions missed what was measured."""
    lines = []
    for row in study["rows"]:
        for side in SIDES:
            cell = row["models"][side]
            numbers = {**cell["memory"], **{key: cell[key] for key in ("prefill", "decode")}}
            if not any(number["measured"] for number in numbers.values()):
                continue
            line = [length_text(row["length"]), NAMES[side]]
            for number in numbers.values():
                known = number["measured"] and number["value"] > 0
                line.append(
                    f"{100 * (number['predicted'] / number['value'] - 1):+.0f} %" if known else "-"
                )
            peak = cell.get("process_peak")
            lines.append([*line, "-" if peak is None else f"{peak / 1e6:,.0f}"])
    head = ["length", "", *PARTS, "prefill", "a token after it", "process peak, MB"]
    return ("Predicted less measured, of what was measured", head, lines)


def about(study: dict[str, Any]) -> str:
    """What was studied, in a line or two."""
    counts = [f"{study['parameters'][side] / 1e6:,.0f}M" for side in SIDES]
    text = (
        f"{study['pair']}: YOCO of {counts[0]} parameters and its Transformer twin of {counts[1]}, "
        f"{study['dtype']}, steps of {study['chunk']} tokens, on {study['hardware']} "
        f"({study['hardware_source']})"
    )
    if study["note"]:
        text += f". {study['note']}"
    return text


def values_table() -> Table:
    """What the paper's text gives of the models themselves."""
    lines = []
    for name, unit in (
        ("memory_gib", "memory, GiB"),
        ("prefill_seconds", "prefill, s"),
        ("throughput", "tokens/s"),
    ):
        for length, (ours, theirs) in VALUES[name].items():
            lines.append(
                [f"{unit}, {length_text(length)}", "-" if ours is None else _digits(ours)]
                + [_digits(theirs)]
            )
    return ("The paper's own values", ["", "YOCO", "Transformer"], lines)


def text_report(result: dict[str, Any]) -> str:
    """Everything, for a terminal."""
    lines: list[str] = []
    for study in result["studies"]:
        lines += [about(study), LEGEND + _too_large(study), ""]
        for title, head, rows in tables(study):
            lines += [title, table(head, rows), ""]
        lines += [f"not measured: {text}" for text in _failures(study)]
        if study["beside_paper"]:
            title, head, rows = values_table()
            lines += [title, table(head, rows), "", "Why they differ:"]
            lines += [f"- {text}" for text in ACCOUNT] + [""]
    return "\n".join(lines).rstrip()


def _too_large(study: dict[str, Any]) -> str:
    cells = [cell for row in study["rows"] for cell in row["models"].values()]
    if all(cell["fits"] for cell in cells):
        return ""
    size = study["memory_bytes"] / 1e9
    return f"; !: more than the {size:,.0f} GB of {study['hardware']}, predicted as if they fitted"


def _failures(study: dict[str, Any]) -> list[str]:
    return [
        f"{NAMES[side]} at {length_text(row['length'])}: {error}"
        for row in study["rows"]
        for side in SIDES
        for error in row["models"][side]["errors"]
    ]


# HTML


def html_report(result: dict[str, Any]) -> str:
    """One page that needs nothing else."""
    body = []
    for study in result["studies"]:
        body.append(f"<h2>{escape(study['pair'])} on {escape(study['hardware'])}</h2>")
        body.append(f"<p>{escape(about(study))}. {escape(LEGEND + _too_large(study))}.</p>")
        body.append('<div class="grid">' + "".join(_figures(study)) + "</div>")
        for title, head, rows in tables(study):
            body.append(f"<h3>{escape(title)}</h3>{html_table(head, rows)}")
        body += [f"<p>Not measured: {escape(text)}</p>" for text in _failures(study)]
        if study["beside_paper"]:
            title, head, rows = values_table()
            body.append(f"<h3>{escape(title)}</h3>{html_table(head, rows)}<h3>Why they differ</h3>")
            body.append("".join(f"<p>{escape(text)}</p>" for text in ACCOUNT))
        if study["hardware_note"]:
            body.append(f'<p class="soft">{escape(study["hardware_note"])}</p>')
    machine = ", ".join(f"{key} {value}" for key, value in result.get("machine", {}).items())
    page = Template(PAGE.read_text(encoding="utf-8"))
    return page.substitute(body="\n".join(body), machine=escape(machine))


def _figures(study: dict[str, Any]) -> list[str]:
    """Memory, prefill and throughput over length, and the ratios of all three."""
    lengths = [row["length"] for row in study["rows"]]
    figures = []
    for key, _, title, unit, factor in _METRICS:
        series = {side: _series(study, side, key, factor) for side in SIDES}
        values = [y for points in series.values() for _, y in points]
        text = seconds_text if key == "prefill" else _digits
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
    figures.append(_ratio_figure(study, lengths))
    return figures


def _ratio_figure(study: dict[str, Any], lengths: Sequence[int]) -> str:
    lines: list[tuple[str, str, Points, bool]] = []
    for kind, (_, name, title, _, _) in zip(("c1", "c2", "c4"), _METRICS, strict=True):
        source = "most_throughput" if name == "throughput" and study["beside_paper"] else name
        ours = [
            (r["length"], r["ratios"][source]["value"])
            for r in study["rows"]
            if r["ratios"][source]
        ]
        theirs = [(r["length"], r["paper"][name]) for r in study["rows"] if r["paper"][name]]
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


def _ratios(study: dict[str, Any], name: str) -> tuple[Points, Points]:
    """Ours and the paper's over lengths, where the study is the paper's."""
    beside = study["beside_paper"]
    source = "most_throughput" if name == "throughput" and beside else name
    rows = study["rows"]
    ours = [(r["length"], r["ratios"][source]["value"]) for r in rows if r["ratios"][source]]
    theirs = [(r["length"], r["paper"][name]) for r in rows if beside and r["paper"][name]]
    return ours, theirs


def _figure(title: str, names: str, chart: Chart) -> str:
    return f"<figure><h3>{escape(title)}</h3>{names}{chart.html(('length', ''))}</figure>"


def _series(study: dict[str, Any], side: str, key: str, factor: float) -> Points:
    return [(row["length"], factor * row["models"][side][key]["value"]) for row in study["rows"]]


def _measured_only(study: dict[str, Any], side: str, key: str, factor: float) -> Points:
    points = zip(study["rows"], _series(study, side, key, factor), strict=True)
    return [p for row, p in points if row["models"][side][key]["source"] == "measured"]


# PNG


def plot(result: dict[str, Any], path: Path) -> None:
    """A row of four plots for each study. Raises MissingDependencyError without matplotlib."""
    plt = pyplot()
    studies = result["studies"]
    figure, axes = plt.subplots(
        len(studies), 4, figsize=(18, 4.2 * len(studies)), squeeze=False, layout="constrained"
    )
    for line, study in zip(axes, studies, strict=True):
        lengths = [row["length"] for row in study["rows"]]
        for axis, (key, _, title, unit, factor) in zip(line, _METRICS, strict=False):
            for side, colour in zip(SIDES, ("tab:blue", "tab:orange"), strict=True):
                known = _measured_only(study, side, key, factor)
                name = f"{NAMES[side]} (dots: measured)" if known else f"{NAMES[side]}, predicted"
                points = zip(*_series(study, side, key, factor), strict=True)
                axis.plot(*points, color=colour, label=name)
                if known:
                    axis.plot(*zip(*known, strict=True), "o", color=colour)
            axis.set_title(f"{study['pair']} on {study['hardware']}: {title}\n{unit}")
            axis.legend()
        _plot_ratios(line[3], study)
        for axis in line:
            _style(axis, lengths, log=axis is not line[0], ticker=plt.matplotlib.ticker)
    figure.savefig(path, dpi=110, format="png")
    plt.close(figure)


def _plot_ratios(axis: Any, study: dict[str, Any]) -> None:
    colours = ("tab:blue", "tab:purple", "tab:green")
    for colour, (_, name, title, _, _) in zip(colours, _METRICS, strict=True):
        source = "most_throughput" if name == "throughput" and study["beside_paper"] else name
        ours = [
            (r["length"], r["ratios"][source]["value"])
            for r in study["rows"]
            if r["ratios"][source]
        ]
        theirs = [(r["length"], r["paper"][name]) for r in study["rows"] if r["paper"][name]]
        if ours:
            axis.plot(*zip(*ours, strict=True), color=colour, label=title)
        if theirs:
            axis.plot(*zip(*theirs, strict=True), "x", color=colour, label=f"{title}, paper")
    axis.set_title("YOCO over Transformer, times")
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
