"""The part of a serving report about prompt length, concurrency and fast prefill. No torch."""

from __future__ import annotations

from statistics import median
from typing import Any

from yocolm.bench.serving_timeline import card
from yocolm.eval.charts import (
    Axis,
    Chart,
    Hover,
    legend,
    length_text,
    logarithmic,
    named,
    seconds_text,
    table,
)

TITLES = {
    "ttft": ("TTFT", "Median time to the first token over prompt length"),
    "tpot": ("TPOT", "Median time per token after the first over prompt length"),
}
SIDES = {"on": ("used", "fast prefill on"), "off": ("c2", "fast prefill off")}


def sweep_section(cells: list[dict[str, Any]]) -> str:
    """Charts for each concurrency, fast prefill on and off, and all numbers in a table."""
    parts = [legend(SIDES.values())]
    for name, (title, about) in TITLES.items():
        charts = _charts(name, cells)
        if charts:
            parts.append(f'<h3>{title}</h3><p class="aside">{about}, for requests at once:</p>')
            parts.append(f'<div class="grid three">{charts}</div>')
    return "".join(parts) + _numbers(cells)


def _charts(name: str, cells: list[dict[str, Any]]) -> str:
    """Side by side, on the same axes."""
    found = [
        (cell["concurrency"], cell["prompt"], side, median(times[name]))
        for cell in cells
        for side, times in cell["sides"].items()
        if times[name]
    ]
    if not found:
        return ""
    values = [value for *_, value in found]
    y = logarithmic(min(values) / 1.15, max(values) * 1.15, seconds_text)
    x = named(sorted({prompt for _, prompt, _, _ in found}), length_text)
    parts = []
    for concurrency in sorted({row[0] for row in found}):
        lines = {
            side: [(p, v) for c, p, s, v in found if (c, s) == (concurrency, side)]
            for side in SIDES
        }
        parts.append(card(f"{concurrency} at once", "", _chart(name, x, y, lines)))
    return "".join(parts)


def _chart(name: str, x: Axis, y: Axis, lines: dict[str, list[tuple[float, float]]]) -> str:
    says = f"{TITLES[name][0]} by prompt length: " + "; ".join(
        f"{SIDES[side][1]}: " + ", ".join(f"{length_text(p)} {seconds_text(v)}" for p, v in points)
        for side, points in lines.items()
    )
    chart = Chart(x, y, says)
    for side in ("off", "on"):
        chart.line(f"{SIDES[side][0]} thick", lines[side])
        chart.dots(f"{SIDES[side][0]} many", lines[side])
    at = [prompt for prompt, _ in lines["on"]]
    texts = [(SIDES[s][0], SIDES[s][1], [seconds_text(v) for _, v in lines[s]]) for s in SIDES]
    if len(lines["off"]) == len(at):
        saved = [f"{off / on:.2f}x" for (_, on), (_, off) in zip(*lines.values(), strict=True)]
        texts.append(("", "off / on", saved))
        chart.hover = Hover(at, [f"{length_text(prompt)} tokens" for prompt in at], texts)
    return chart.html()


def _numbers(cells: list[dict[str, Any]]) -> str:
    rows = []
    for cell in cells:
        row = [str(cell["concurrency"]), length_text(cell["prompt"])]
        for name in TITLES:
            on, off = (cell["sides"][side][name] for side in SIDES)
            if not on or not off:
                row += ["-", "-", "-"]
                continue
            ours, theirs = median(on), median(off)
            row += [seconds_text(ours), seconds_text(theirs), f"{theirs / ours:.2f}x"]
        rows.append(row)
    head = ["at once", "prompt", "TTFT on", "off", "off / on", "TPOT on", "off", "off / on"]
    return table(head, rows)
