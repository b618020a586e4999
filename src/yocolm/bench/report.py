"""What the benches print and save: medians with their spread, tables, JSON, a plot."""

from __future__ import annotations

import importlib
import json
import os
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from yocolm.errors import MissingDependencyError


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, minimum and maximum."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """How many times the second the first takes: the median over rounds, each taken in turn."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=False))


def milliseconds(values: Sequence[float] | None) -> str:
    """Median and range in milliseconds, or a dash."""
    if not values:
        return "-"
    one = spread([1e3 * value for value in values])
    return f"{_short(one['median'])} ({_short(one['min'])}-{_short(one['max'])})"


def _short(value: float) -> str:
    """Three significant digits, all of those before the point."""
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def gigabytes(size: float | None) -> str:
    return "-" if size is None else f"{size / 1e9:.2f}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they need, the first to the left, the others to the right."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = []
    for row in [head, ["-" * width for width in widths], *rows]:
        cells = [
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def machine() -> dict[str, Any]:
    """What ran it, as far as the system tells."""
    name = platform.processor() or platform.machine()
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        name = next(
            line.split(":")[1].strip() for line in text.splitlines() if "model name" in line
        )
    except (OSError, StopIteration):
        pass
    return {"cpu": name, "cores": os.cpu_count(), "python": platform.python_version()}


def save_json(path: Path, result: Any) -> None:
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def pyplot() -> Any:
    """matplotlib's pyplot without a display; MissingDependencyError naming the extra."""
    try:
        matplotlib = importlib.import_module("matplotlib")
        matplotlib.use("Agg")
        return importlib.import_module("matplotlib.pyplot")
    except ImportError as error:
        raise MissingDependencyError(
            "--plot needs matplotlib: pip install 'yocolm[bench]', or leave --plot out"
        ) from error


def plot_peers(result: dict[str, Any], path: Path) -> None:
    """Time to the first token and per token over prompt lengths, a line for each peer."""
    plt = pyplot()
    batches = sorted({cell["batch"] for cell in result["cells"]})
    figure, axes = plt.subplots(
        len(batches), 2, figsize=(11, 4 * len(batches)), squeeze=False, layout="constrained"
    )
    for row, batch in zip(axes, batches, strict=True):
        for axis, key, title in zip(row, ("ttft", "tpot"), ("first token", "a token"), strict=True):
            for name in result["peers"]:
                points = [
                    (cell["prompt"], statistics.median(cell["times"][name][key]))
                    for cell in result["cells"]
                    if cell["batch"] == batch and cell["times"].get(name, {}).get(key)
                ]
                if points:
                    axis.plot(*zip(*points, strict=True), marker="o", label=name)
            axis.set(xscale="log", yscale="log", xlabel="prompt tokens", ylabel="seconds")
            axis.set_title(f"Seconds to {title}" if key == "ttft" else f"Seconds {title}")
            axis.text(0.02, 0.02, f"batch {batch}", transform=axis.transAxes)
    axes[0][0].legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
