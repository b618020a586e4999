"""A report as one HTML file, readable without scripts or network."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any

from yocolm.eval.charts import CLASSES, STYLE, Chart, doubling, escape, legend, plain_linear

if TYPE_CHECKING:
    from yocolm.eval.report import Curves, Grid, Report

_WORST, _BEST = (178, 60, 20), (20, 110, 130)  # of a cell; half way it is nearly white
_MIDDLE = (245, 240, 225)
_SHOWN = 100  # wrong answers
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem;
  color: var(--ink); background: var(--page) }
h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin-top: 2rem }
.scroll { overflow-x: auto } table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .25rem .6rem; text-align: right; white-space: nowrap }
th { font-weight: 600 } td.text, th.text { text-align: left; white-space: normal }
table.plain td, table.plain th { border-bottom: 1px solid var(--rule) }
figure { margin: 0; background: var(--card); border: 1px solid var(--rule); border-radius: 10px;
  padding: 14px 14px 8px } figcaption { color: var(--soft); text-align: center }
.remark { background: var(--card); border-left: 4px solid var(--p3); padding: .5rem .8rem }
"""


def page(report: Report) -> str:
    """The whole file."""
    title = escape(f"{report.kind}: {report.model}")
    parts = [f"<h1>{title}</h1>", f"<p><strong>{escape(report.headline)}</strong></p>"]
    parts += [f'<p class="remark">{escape(note)}</p>' for note in report.notes]
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
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{title}</title>\n<style>{STYLE}{_STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n"
        "</html>\n"
    )


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
    """Lines over a logarithmic axis, with dots at their points."""
    points = [point for line in curves.lines.values() for point in line]
    if not points:
        return ""
    xs, ys = [x for x, _ in points], [y for _, y in points]
    margin = 0.05 * (max(ys) - min(ys)) or 0.5
    chart = Chart(
        doubling(min(xs), max(xs)),
        plain_linear(min(ys) - margin, max(ys) + margin),
        f"{curves.title}: {curves.y_title} over {curves.x_title}",
        tall=True,
    )
    names = list(zip(cycle(CLASSES), curves.lines))
    for kind, name in names:
        chart.line(kind, curves.lines[name])
        chart.dots(kind, curves.lines[name])
    return (
        f"<h2>{escape(curves.title)}</h2>\n<figure>{legend(names)}{chart.html()}"
        f"<figcaption>{escape(curves.y_title)}, over {escape(curves.x_title)}</figcaption></figure>"
    )


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
