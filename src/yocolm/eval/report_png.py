"""A report as a picture, where matplotlib is installed."""

from __future__ import annotations

from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from yocolm.eval.charts import COLOURS, length_text, powers

if TYPE_CHECKING:
    from yocolm.eval.report import Curves, Grid, Report

_LETTERS = 14  # of a title, for each inch
_NUMBERED = 300  # cells, up to which their values are written into them


def draw(report: Report, path: Path) -> bool:
    """Write the report's grids and curves as PNG; False where matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    heights = [0.35 * len(grid.rows) + 1.4 for grid in report.grids] + [4.0] * len(report.curves)
    widths = [0.7 * len(grid.columns) + 2.5 for grid in report.grids] + [8.0] * len(report.curves)
    if not heights:
        return False
    width = max(5.0, *widths)
    title = wrap(f"{report.kind} of {report.model}: {report.headline}", int(width * _LETTERS))
    figure = Figure(figsize=(width, sum(heights) + 0.2 * len(title)), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle("\n".join(title), fontsize=9)
    axes = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axis, grid in zip(axes, report.grids, strict=False):
        _draw_grid(axis, grid)
    for axis, curves in zip(axes[len(report.grids) :], report.curves, strict=True):
        _draw_curves(axis, curves)
    figure.savefig(path, dpi=130)
    return True


def _draw_grid(axis: Any, grid: Grid) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    colours = LinearSegmentedColormap.from_list("score", ["#b23c14", "#f5f0e1", "#146e82"])
    values = [[float("nan") if v is None else v for v in row] for row in grid.values]
    axis.imshow(values, cmap=colours, vmin=0, vmax=1, aspect="auto")
    axis.set_title(grid.title, fontsize=9)
    axis.set_xticks(range(len(grid.columns)), grid.columns, fontsize=7, rotation=45, ha="right")
    axis.set_yticks(range(len(grid.rows)), grid.rows, fontsize=7)
    axis.set_xlabel(grid.column_title, fontsize=8)
    axis.set_ylabel(grid.row_title, fontsize=8)
    if len(grid.rows) * len(grid.columns) > _NUMBERED:
        return
    for row, line in enumerate(grid.values):
        for column, value in enumerate(line):
            if value is not None:
                ink = "white" if value < 0.2 or value > 0.75 else "#222222"
                axis.text(
                    column, row, f"{100 * value:.3g}", ha="center", va="center", color=ink,
                    fontsize=7,
                )  # fmt: skip


def _draw_curves(axis: Any, curves: Curves) -> None:
    points = [x for line in curves.lines.values() for x, _ in line]
    for index, (name, line) in enumerate(curves.lines.items()):
        ink = COLOURS[index % len(COLOURS)]
        axis.plot(*zip(*line, strict=True), marker="o", markersize=3, color=ink, label=name)
    axis.set_xscale("log", base=2)
    if points:
        ticks = powers(min(points), max(points))
        axis.set_xticks(ticks, [length_text(tick) for tick in ticks], fontsize=7)
    axis.tick_params(labelsize=7)
    axis.set_title(curves.title, fontsize=9)
    axis.set_xlabel(curves.x_title, fontsize=8)
    axis.set_ylabel(curves.y_title, fontsize=8)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=7)
