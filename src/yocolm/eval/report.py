"""What an evaluation found, as JSON, as text for a terminal, as one HTML file and as a picture.

Numbers stand in grids (heat maps) and curves. The HTML needs nothing else: heat maps are tables
with coloured cells, curves are SVG. The picture needs matplotlib.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from yocolm.errors import RequestError
from yocolm.eval.report_html import page, shown
from yocolm.eval.report_png import draw

Sample = Mapping[str, Any]  # a question and its answer, with a ``score``
JSON_FILE, HTML_FILE, PNG_FILE = "report.json", "report.html", "report.png"


@dataclass(frozen=True)
class Side:
    """One side of a table: what samples have under ``key``, and how it is shown."""

    key: str
    values: Sequence[Any]
    shown: Callable[[Any], str] = str

    @classmethod
    def lengths(cls, lengths: Sequence[int]) -> Side:
        return cls("length", lengths, "{:,}".format)


@dataclass(frozen=True)
class Grid:
    """Means from 0 to 1 by row and column; None where nothing was asked."""

    title: str
    row_title: str
    rows: list[str]
    column_title: str
    columns: list[str]
    values: list[list[float | None]]
    counts: list[list[int]]

    @classmethod
    def of(cls, title: str, rows: Side, columns: Side, samples: Sequence[Sample]) -> Grid:
        """Of the scores of ``samples`` at each place."""
        found = scores_by(samples, rows.key, columns.key)
        cells = [[found.get((row, column), []) for column in columns.values] for row in rows.values]
        return cls(
            title,
            rows.key,
            [rows.shown(value) for value in rows.values],
            columns.key,
            [columns.shown(value) for value in columns.values],
            [[mean(cell) for cell in line] for line in cells],
            [[len(cell) for cell in line] for line in cells],
        )

    def text(self) -> str:
        """Percentages in columns."""
        head = [f"{self.row_title} \\ {self.column_title}", *self.columns]
        body = [
            [name, *(percent(value) for value in row)]
            for name, row in zip(self.rows, self.values, strict=True)
        ]
        return f"{self.title}\n{_columns([head, *body])}"


@dataclass(frozen=True)
class Curves:
    """Named lines of (x, y) points over a logarithmic x."""

    title: str
    x_title: str
    y_title: str
    lines: dict[str, list[tuple[float, float]]]


@dataclass(frozen=True)
class Report:
    """One evaluation.

    kind, model, settings: what was done; ``settings`` and a seed give the same questions again.
    headline: the result in a line.
    summary, cells: totals, and one dictionary for each cell of the tables.
    samples: one dictionary for each question, with a ``score``.
    """

    kind: str
    model: str
    settings: dict[str, Any]
    headline: str
    summary: dict[str, Any]
    cells: list[dict[str, Any]]
    grids: list[Grid] = field(default_factory=list)
    curves: list[Curves] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def of_questions(
        cls,
        kind: str,
        model: str,
        settings: dict[str, Any],
        samples: Sequence[Sample],
        totals: dict[str, Any],
        score: str = "accuracy",
        **found: Any,
    ) -> Report:
        """One whose result is the mean score of ``samples``, by the name ``score``; ``found`` is
        the rest of the fields."""
        scores = [sample["score"] for sample in samples]
        return cls(
            kind=kind,
            model=model,
            settings=settings,
            headline=accuracy_line(scores),
            summary={score: mean(scores), "questions": len(scores), **totals},
            samples=[dict(sample) for sample in samples],
            **found,
        )

    def to_json(self) -> dict[str, Any]:
        """All but the grids and curves, whose numbers are those of ``cells``."""
        return {k: v for k, v in asdict(self).items() if k not in ("grids", "curves")}

    def text(self) -> str:
        """For a terminal."""
        parts = [f"{self.kind} of {self.model}: {self.headline}"]
        parts += [grid.text() for grid in self.grids]
        if self.curves and self.cells:
            names = list(self.cells[0])
            rows = [[shown(cell[name]) for name in names] for cell in self.cells]
            parts.append(_columns([[name.replace("_", " ") for name in names], *rows]))
        parts += [f"note: {note}" for note in self.notes]
        return "\n\n".join(parts)

    def write(self, folder: Path) -> list[Path]:
        """report.json and report.html, and report.png where matplotlib is installed. Returns what
        was written."""
        folder.mkdir(parents=True, exist_ok=True)
        written = [folder / JSON_FILE, folder / HTML_FILE]
        written[0].write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")
        written[1].write_text(page(self), encoding="utf-8")
        if draw(self, folder / PNG_FILE):
            written.append(folder / PNG_FILE)
        return written


def prepare(folder: Path) -> None:
    """Make the folder of a report, before hours of evaluation. Raises RequestError where files
    cannot be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        for name in (JSON_FILE, HTML_FILE, PNG_FILE):
            if (folder / name).exists():
                with (folder / name).open("ab"):
                    pass
    except OSError as error:
        raise RequestError(
            f"a report cannot be written to {folder} ({error.strerror}: {error.filename}); name "
            "another folder, or one that does not exist yet"
        ) from error


def _columns(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )


def scores_by(samples: Sequence[Sample], *keys: str) -> dict[tuple[Any, ...], list[float]]:
    """The scores of samples at each place, which is what they have under ``keys``."""
    found: dict[tuple[Any, ...], list[float]] = {}
    for sample in samples:
        found.setdefault(tuple(sample[key] for key in keys), []).append(sample["score"])
    return found


def cells_by(
    samples: Sequence[Sample],
    *sides: Side,
    counted: Callable[[Sequence[float]], dict[str, Any]] | None = None,
) -> list[dict[str, Any]]:
    """A dictionary for each place, the last of ``sides`` changing first: where it is, how many
    ``questions`` it has and what is ``counted`` of their scores (None: ``right``, ``accuracy``)."""
    found = scores_by(samples, *(side.key for side in sides))
    cells = []
    for place in product(*(side.values for side in sides)):
        scores = found.get(place, [])
        where = {side.key: value for side, value in zip(sides, place, strict=True)}
        cells.append({**where, "questions": len(scores), **(counted or _right)(scores)})
    return cells


def _right(scores: Sequence[float]) -> dict[str, Any]:
    return {"right": sum(scores), "accuracy": mean(scores)}


def mean(scores: Sequence[float]) -> float | None:
    return sum(scores) / len(scores) if scores else None


def percent(value: float | None) -> str:
    if value is None:
        return "-"
    shown = f"{100 * value:.1f}"
    return shown.removesuffix(".0") + " %"


def interval(scores: Sequence[float], z: float = 1.96) -> tuple[float, float]:
    """Wilson's interval of a mean of right and wrong answers, 95 % unless ``z`` says else."""
    n, p = len(scores), sum(scores) / len(scores)
    middle, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(0.0, (middle - half) / (1 + z * z / n)), min(1.0, (middle + half) / (1 + z * z / n))


def accuracy_line(scores: Sequence[float]) -> str:
    """Accuracy with its interval."""
    low, high = interval(scores)
    count = f"{sum(scores):.10g} of {len(scores)} right"
    return f"{percent(mean(scores))} ({count}; 95 % interval {percent(low)} to {percent(high)})"
