"""`yocolm bench ops`: every form of every operation, checked and then timed beside the ceilings.

The operations are listed in `op_cases.py`. A round times the ceilings and then each form once, so
that a busy machine slows all of them alike; shares of a ceiling are medians over rounds.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from yocolm.bench.ceilings import Ceilings, seconds_of
from yocolm.bench.report import milliseconds, spread, table
from yocolm.errors import ConfigError

Inputs = tuple[Any, ...]
Form = Callable[..., Tensor]
# Of the largest value of the reference: how far a result in this dtype may be away.
TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-4}
COLD_BYTES = 1 << 28  # inputs are taken in turn from copies of this size together: no cache


@dataclass(frozen=True)
class Case:
    """One operation at one size.

    ``make(seed)`` gives the inputs, ``reference`` the right answer from them in float64, ``forms``
    what is timed; ``bytes`` are read and written and ``flops`` computed at least.
    """

    op: str
    size: str
    dtype: torch.dtype
    make: Callable[[int], Inputs]
    reference: Form
    forms: dict[str, Form]
    bytes: int
    flops: int

    @property
    def name(self) -> str:
        return f"{self.op} {self.size}"


def error_of(case: Case, form: Form) -> float:
    """The largest deviation from the reference, relative to the reference's largest value."""
    want = case.reference(*case.make(0)).double()
    got = form(*case.make(0)).double()
    if got.shape != want.shape:
        return float("inf")
    worst = ((got - want).abs().max() / want.abs().max().clamp(min=1e-30)).item()
    return worst if worst == worst else float("inf")


def measure_case(case: Case, ceilings: Ceilings, repeats: int) -> list[dict[str, Any]]:
    """A row for each form; one that is wrong has an ``error`` and no times."""
    rows: list[dict[str, Any]] = []
    timed: list[tuple[dict[str, Any], Callable[[], object]]] = []
    copies = max(1, min(64, COLD_BYTES // max(case.bytes, 1)))
    inputs = [case.make(seed) for seed in range(copies)]
    dtype = str(case.dtype).removeprefix("torch.")
    for name, form in case.forms.items():
        row: dict[str, Any] = {"op": case.op, "size": case.size, "dtype": dtype, "form": name}
        rows.append(row)
        row["deviation"] = error_of(case, form)
        if row["deviation"] > TOLERANCE[case.dtype]:
            row["error"] = f"off by {row['deviation']:.2g}, {TOLERANCE[case.dtype]:g} is allowed"
            continue
        row.update(seconds=[], gb_s=[], gflop_s=[], share=[])
        timed.append((row, partial(_next, form, cycle(inputs))))
    for _ in range(repeats):
        top = ceilings.measure()
        # What the roofline allows: the slower of moving the bytes and computing.
        floor = max(case.bytes / top["read"], case.flops / top[dtype])
        for row, call in timed:
            spent = seconds_of(call)
            row["seconds"].append(spent)
            row["gb_s"].append(case.bytes / spent / 1e9)
            row["gflop_s"].append(case.flops / spent / 1e9)
            row["share"].append(floor / spent)
        for row, _call in timed:
            row.setdefault("ceilings", []).append(top)
    return rows


def _next(form: Form, inputs: Any) -> Tensor:
    return form(*next(inputs))


def measure_ops(
    cases: Sequence[Case],
    threads: int,
    repeats: int,
    only: Iterable[str] | None,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """All cases whose name has one of ``only`` in it. ConfigError if there is none."""
    wanted = list(only or [""])
    chosen = [case for case in cases if any(part in case.name for part in wanted)]
    if not chosen:
        names = ", ".join(sorted({case.op for case in cases}))
        raise ConfigError(f"--only {','.join(wanted)} is part of no operation; there are: {names}")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    rows: list[dict[str, Any]] = []
    try:
        with torch.inference_mode():
            ceilings = Ceilings()
            for case in chosen:
                say(case.name)
                rows += measure_case(case, ceilings, repeats)
    finally:
        torch.set_num_threads(before)
    return {"threads": threads, "rows": rows}


def ops_table(result: dict[str, Any]) -> str:
    """A line for each form, then the ceilings of the same run."""
    head = ["operation", "dtype", "form", "ms (range)", "GB/s", "GFLOP/s", "of ceiling"]
    lines, seen = [], []
    for row in result["rows"]:
        line = [f"{row['op']} {row['size']}", row["dtype"], row["form"]]
        if "error" in row:
            lines.append([*line, f"wrong: {row['error']}", "-", "-", "-"])
            continue
        seen += row["ceilings"]
        numbers = [statistics.median(row[key]) for key in ("gb_s", "gflop_s")]
        share = statistics.median(row["share"])
        lines.append([*line, milliseconds(row["seconds"]), *(f"{n:.1f}" for n in numbers)])
        lines[-1].append(f"{share:.0%}")
    text = table(head, lines)
    for key, label, unit in (
        ("read", "memory reads", "GB/s"),
        ("bfloat16", "bfloat16 products", "GFLOP/s"),
        ("float32", "float32 products", "GFLOP/s"),
    ):
        if seen:
            one = spread([top[key] / 1e9 for top in seen])
            text += f"\n{label}: {one['median']:.1f} ({one['min']:.1f}-{one['max']:.1f}) {unit}"
    return text
