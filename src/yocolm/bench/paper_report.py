"""What `yocolm bench paper` says: its tables, and all of it for a terminal. No torch."""

from __future__ import annotations

from typing import Any

from yocolm.bench.paper import PARTS, SIDES
from yocolm.bench.paper_reference import ACCOUNT, VALUES
from yocolm.bench.report import table
from yocolm.eval.charts import length_text

MARKS = {"measured": "m", "predicted": "p", "mixed": "m/p"}
LEGEND = "m: measured here; p: predicted; m/p: a ratio of one of each"
NAMES = {"yoco": "YOCO", "transformer": "Transformer"}
Table = tuple[str, list[str], list[list[str]]]


def digits(value: float) -> str:
    """Three significant digits, all of those before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _shown(number: dict[str, Any] | None, factor: float = 1.0) -> str:
    """A number with the mark of its source."""
    if number is None:
        return "-"
    return f"{digits(number['value'] * factor)} {MARKS[number['source']]}"


def _times(ratio: dict[str, Any] | None) -> str:
    return "-" if ratio is None else f"{digits(ratio['value'])}x {MARKS[ratio['source']]}"


def memory_unit(study: dict[str, Any]) -> tuple[float, str]:
    """A factor for bytes, and what they are then."""
    largest = max(row["models"]["transformer"]["total"]["value"] for row in study["rows"])
    return (1e-9, "GB") if largest > 2e9 else (1e-6, "MB")


def tables(study: dict[str, Any]) -> list[Table]:
    """Titles, heads and rows: memory by part, prefill, throughput, and how predictions did."""
    found = (_headline(study), _memory(study), _prefill(study), _throughput(study), _errors(study))
    return [one for one in found if one[2]]


def _memory(study: dict[str, Any]) -> Table:
    factor, unit = memory_unit(study)
    parts = {side: [p for p in PARTS if side == "yoco" or p != "state"] for side in SIDES}
    head = ["length"]
    for side, (first, *others) in parts.items():
        head += [f"{NAMES[side]} {first}", *others, "total"]
    lines = []
    for row in study["rows"]:
        line = [length_text(row["length"])]
        for side in SIDES:
            cell = row["models"][side]
            line += [_shown(cell["memory"][part], factor) for part in parts[side]]
            line.append(_shown(cell["total"], factor) + ("" if cell["fits"] else " !"))
        lines.append([*line, _times(row["ratios"]["memory"])])
    title = f"Memory, {unit}, batch {study['batch']}"
    return _beside_paper(study, "memory", (title, [*head, "times"], lines))


def _prefill(study: dict[str, Any]) -> Table:
    lines = [
        [
            length_text(row["length"]),
            *(_shown(row["models"][side]["prefill"]) for side in SIDES),
            _times(row["ratios"]["prefill"]),
        ]
        for row in study["rows"]
    ]
    head = ["length", *NAMES.values(), "times"]
    title = "Prefill, seconds to the first token"
    return _beside_paper(study, "prefill", (title, head, lines))


def _throughput(study: dict[str, Any]) -> Table:
    head = ["length", "generated", *NAMES.values(), "times"]
    for side in SIDES:
        head += [f"{NAMES[side]} holds", "tokens/s"]
    title = (
        f"Throughput, generated tokens/s of prefill and generation: batch {study['batch']}, then "
        "all that fit"
    )
    lines = [_throughput_row(row) for row in study["rows"]]
    return _beside_paper(study, "throughput", (title, [*head, "times"], lines))


def _beside_paper(study: dict[str, Any], name: str, own: Table) -> Table:
    """The table with the paper's ratios in its last column, where the study is the paper's."""
    if not study["beside_paper"]:
        return own
    title, head, lines = own
    known = [row["paper"][name] for row in study["rows"]]
    theirs = ["-" if ratio is None else f"{ratio:g}x" for ratio in known]
    both = [[*line, ratio] for line, ratio in zip(lines, theirs, strict=True)]
    return title, [*head, "paper"], both


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


def _throughput_row(row: dict[str, Any]) -> list[str]:
    models, ratios = row["models"], row["ratios"]
    line = [length_text(row["length"]), str(row["generated"])]
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
                [f"{unit}, {length_text(length)}", "-" if ours is None else digits(ours)]
                + [digits(theirs)]
            )
    return ("The paper's own values", ["", "YOCO", "Transformer"], lines)


def text_report(result: dict[str, Any]) -> str:
    """Everything, for a terminal."""
    lines: list[str] = []
    for study in result["studies"]:
        lines += [about(study), LEGEND + too_large(study), ""]
        for title, head, rows in tables(study):
            lines += [title, table(head, rows), ""]
        lines += [f"not measured: {text}" for text in failures(study)]
        if study["beside_paper"]:
            title, head, rows = values_table()
            lines += [title, table(head, rows), "", "Why they differ:"]
            lines += [f"- {text}" for text in ACCOUNT] + [""]
    return "\n".join(lines).rstrip()


def too_large(study: dict[str, Any]) -> str:
    """What the mark of memory means, where there is one."""
    cells = [cell for row in study["rows"] for cell in row["models"].values()]
    if all(cell["fits"] for cell in cells):
        return ""
    size = study["memory_bytes"] / 1e9
    return f"; !: more than the {size:,.0f} GB of {study['hardware']}, predicted as if they fitted"


def failures(study: dict[str, Any]) -> list[str]:
    """What was to be measured and could not be, with the reason."""
    return [
        f"{NAMES[side]} at {length_text(row['length'])}: {error}"
        for row in study["rows"]
        for side in SIDES
        for error in row["models"][side]["errors"]
    ]
