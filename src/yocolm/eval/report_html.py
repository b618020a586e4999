"""A report as one HTML file, readable without scripts or network."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from yocolm.eval.report import Curves, Grid, Report

_WORST, _BEST = (178, 60, 20), (20, 110, 130)  # of a cell; half way it is nearly white
_MIDDLE = (245, 240, 225)
_SHOWN = 100  # wrong answers
LINE_COLOURS = ("#146e82", "#b23c14", "#6a4c93", "#4c7a34", "#8a6d1d", "#444444")
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem;
  color: #222; background: #fff }
h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin-top: 2rem }
.scroll { overflow-x: auto } table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .25rem .6rem; text-align: right; white-space: nowrap }
th { font-weight: 600 } td.text, th.text { text-align: left; white-space: normal }
table.plain td, table.plain th { border-bottom: 1px solid #ddd }
figure { margin: 0 } svg { width: 100%; height: auto }
svg text { font: 12px system-ui, sans-serif; fill: #222 }
.note { background: #fff6dd; padding: .5rem .8rem }
"""


def page(report: Report) -> str:
    """The whole file."""
    title = escape(f"{report.kind}: {report.model}")
    parts = [f"<h1>{title}</h1>", f"<p><strong>{escape(report.headline)}</strong></p>"]
    parts += [f'<p class="note">{escape(note)}</p>' for note in report.notes]
    parts += [grid_html(grid) for grid in report.grids]
    parts += [curves_html(curves) for curves in report.curves]
    if report.curves:
        parts.append(_cells(report.cells))
    parts.append(_pairs("Totals", report.summary))
    parts.append(_pairs("Settings", report.settings))
    parts.append(_wrong(report.samples))
    body = "\n".join(part for part in parts if part)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n"
        "</html>\n"
    )


def escape(text: object) -> str:
    return html.escape(str(text), quote=True)


def grid_html(grid: Grid) -> str:
    """A heat map: a table whose cells are coloured by their values, which stand in them."""
    head = "".join(f"<th>{escape(name)}</th>" for name in grid.columns)
    rows = []
    for name, values, counts in zip(grid.rows, grid.values, grid.counts, strict=True):
        cells = "".join(
            "<td>-</td>"
            if value is None
            else f'<td style="background:{colour(value)};color:{_ink(value)}" '
            f'title="{count} questions">{100 * value:.3g}</td>'
            for value, count in zip(values, counts, strict=True)
        )
        rows.append(f"<tr><th>{escape(name)}</th>{cells}</tr>")
    corner = f"{escape(grid.row_title)} \\ {escape(grid.column_title)}"
    return (
        f'<h2>{escape(grid.title)} (%)</h2>\n<div class="scroll"><table>\n'
        f"<tr><th>{corner}</th>{head}</tr>\n" + "\n".join(rows) + "\n</table></div>"
    )


def colour(value: float) -> str:
    """From 0 (red-brown) over one half (cream) to 1 (teal)."""
    ends = (_WORST, _MIDDLE) if value < 0.5 else (_MIDDLE, _BEST)
    share = 2 * value if value < 0.5 else 2 * value - 1
    mixed = (round(a + (b - a) * share) for a, b in zip(*ends, strict=True))
    return "rgb({},{},{})".format(*mixed)


def _ink(value: float) -> str:
    return "#fff" if value < 0.2 or value > 0.75 else "#222"


def curves_html(curves: Curves) -> str:
    """Lines over a logarithmic axis, with its numbers."""
    points = [point for line in curves.lines.values() for point in line]
    if not points:
        return ""
    width, height, left, bottom = 800, 360, 60, 40
    low_x, high_x = min(x for x, _ in points), max(x for x, _ in points)
    low_y, high_y = min(y for _, y in points), max(y for _, y in points)
    margin = 0.05 * (high_y - low_y) or 0.5
    low_y, high_y = low_y - margin, high_y + margin
    span = math.log(high_x / low_x) or 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        across = left + math.log(x / low_x) / span * (width - left - 20)
        return across, (high_y - y) / (high_y - low_y) * (height - bottom - 10) + 10

    parts = []
    for tick in powers(low_x, high_x):
        across, _ = place(tick, low_y)
        parts.append(
            f'<line x1="{across:.1f}" x2="{across:.1f}" y1="10" y2="{height - bottom}" '
            f'stroke="#eee"/><text x="{across:.1f}" y="{height - bottom + 16}" '
            f'text-anchor="middle">{size_text(tick)}</text>'
        )
    for step in range(6):
        value = low_y + (high_y - low_y) * step / 5
        _, down = place(low_x, value)
        parts.append(
            f'<line x1="{left}" x2="{width - 20}" y1="{down:.1f}" y2="{down:.1f}" stroke="#eee"/>'
            f'<text x="{left - 6}" y="{down + 4:.1f}" text-anchor="end">{value:.3f}</text>'
        )
    names = []
    for index, (name, line) in enumerate(curves.lines.items()):
        ink = LINE_COLOURS[index % len(LINE_COLOURS)]
        path = " ".join("{:.1f},{:.1f}".format(*place(x, y)) for x, y in line)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{ink}" stroke-width="2"/>')
        parts += [
            '<circle cx="{:.1f}" cy="{:.1f}" r="3" fill="{}"/>'.format(*place(x, y), ink)
            for x, y in line
        ]
        names.append(f'<span style="color:{ink}">&#9632; {escape(name)}</span>')
    label = f'<text x="{width / 2}" y="{height - 4}" text-anchor="middle">'
    return (
        f'<h2>{escape(curves.title)}</h2>\n<figure><svg viewBox="0 0 {width} {height}" '
        f'role="img" aria-label="{escape(curves.title)}">{"".join(parts)}'
        f"{label}{escape(curves.x_title)}</text></svg>\n"
        f"<figcaption>{escape(curves.y_title)}: {' '.join(names)}</figcaption></figure>"
    )


def powers(low: float, high: float) -> list[float]:
    """Powers of two within bounds, at most a dozen of them."""
    first, last = math.ceil(math.log2(low)), math.floor(math.log2(high))
    step = max(1, (last - first) // 10)
    return [2.0**power for power in range(first, last + 1, step)]


def size_text(value: float) -> str:
    """1536 is "1.5K", 1048576 "1M"."""
    for unit in ("", "K", "M"):
        if value < 1024 or unit == "M":
            return f"{value:.4g}{unit}"
        value /= 1024
    return ""


def _cells(cells: Sequence[dict[str, Any]]) -> str:
    if not cells:
        return ""
    names = list(cells[0])
    head = "".join(f"<th>{escape(name.replace('_', ' '))}</th>" for name in names)
    rows = "\n".join(
        "<tr>" + "".join(f"<td>{escape(shown(cell[name]))}</td>" for name in names) + "</tr>"
        for cell in cells
    )
    return (
        f'<h2>Table</h2>\n<div class="scroll"><table class="plain">\n<tr>{head}</tr>\n{rows}\n'
        "</table></div>"
    )


def _pairs(title: str, values: dict[str, Any]) -> str:
    rows = "\n".join(
        f'<tr><th class="text">{escape(name.replace("_", " "))}</th>'
        f'<td class="text">{escape(shown(value))}</td></tr>'
        for name, value in values.items()
    )
    return f'<h2>{title}</h2>\n<table class="plain">\n{rows}\n</table>'


def shown(value: Any) -> str:
    """A value of a table or of the settings."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "-"}[value]
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.4f}".rstrip("0").rstrip(".")
    if isinstance(value, (list, tuple)):
        return ", ".join(map(shown, value)) or "-"
    if isinstance(value, dict):
        return ", ".join(f"{name}: {shown(one)}" for name, one in value.items())
    return str(value)


def _wrong(samples: Sequence[dict[str, Any]]) -> str:
    """Answers that are not right, at most so many."""
    wrong = [sample for sample in samples if sample["score"] < 1]
    if not wrong:
        return ""
    names = [name for name in wrong[0] if name not in ("prompt_tokens", "seconds")]
    head = "".join(f'<th class="text">{escape(name)}</th>' for name in names)
    rows = "\n".join(
        "<tr>"
        + "".join(f'<td class="text">{escape(shown(one[name]))}</td>' for name in names)
        + "</tr>"
        for one in wrong[:_SHOWN]
    )
    more = f" (the first {_SHOWN} of {len(wrong)})" if len(wrong) > _SHOWN else ""
    return (
        f'<h2>Not wholly right{more}</h2>\n<div class="scroll"><table class="plain">\n'
        f"<tr>{head}</tr>\n{rows}\n</table></div>"
    )
