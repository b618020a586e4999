"""Steps, summed second by second."""

from typing import Any

import pytest

from yocolm.engine.cost import StepCost, StepLoad
from yocolm.engine.steps import PoolUsage, StepRecord
from yocolm.server.history import COLUMNS, History


def record(at: float, seconds: float, **more: Any) -> StepRecord:
    """A step of 8 tokens and 2 rows, half of it in the first half of the model."""
    usage = PoolUsage(100, 10, more.pop("pages", 3), more.pop("kept", 5), 2, 1)
    load = StepLoad(tokens=8, rows=2, draws=1)
    actual = StepCost(self_prefill=seconds / 2, cross_decode=seconds / 4, overhead=seconds / 4)
    queue = {"running": 2, "waiting": 1, **more}
    return StepRecord(at, seconds, load, actual, StepCost(self_prefill=0.1), usage, **queue)


def table(history: History, now: float, seconds: int = 300) -> dict[int, dict[str, float]]:
    rows = history.rows(now, seconds)
    assert all(len(row) == len(COLUMNS) for row in rows)
    return {int(row[0]): dict(zip(COLUMNS, row, strict=True)) for row in rows}


def test_steps_of_a_second_are_summed() -> None:
    history = History()
    for at in (7.0, 7.2, 7.9, 9.5):
        history.add(record(at, 0.08))
    rows = table(history, 10.1, 4)
    assert list(rows) == [6, 7, 8, 9]
    assert rows[7]["steps"] == 3 and rows[7]["tokens"] == 24 and rows[7]["rows"] == 6
    assert rows[7]["self_prefill"] == pytest.approx(0.12) and rows[7]["draws"] == 3
    assert rows[7]["overhead"] == pytest.approx(0.06) and rows[7]["kv_finalize"] == 0
    assert rows[7]["predicted"] == pytest.approx(0.3)
    assert rows[7]["running"] == 2 and rows[7]["waiting"] == 1 and rows[7]["pages_used"] == 3
    assert rows[9]["steps"] == 1 and rows[6]["steps"] == 0


def test_a_long_step_is_spread_over_its_seconds() -> None:
    history = History()
    history.add(record(5.5, 2.0))
    rows = table(history, 8.0, 4)
    assert [rows[second]["tokens"] for second in (4, 5, 6, 7)] == pytest.approx([0, 2, 4, 2])
    phases = ("self_prefill", "kv_finalize", "cross_decode", "sample", "overhead")
    busy = [sum(row[phase] for phase in phases) for row in rows.values()]
    assert busy == pytest.approx([0, 0.5, 1.0, 0.5])
    assert [row["running"] for row in rows.values()] == [0, 2, 2, 2]


def test_what_is_kept_stays_while_nothing_runs() -> None:
    history = History(seconds=10)
    history.add(record(5.0, 0.1, kept=4))
    history.add(record(7.0, 0.1, kept=6))
    rows = table(history, 12.0)
    kept = {second: row["pages_kept"] for second, row in rows.items()}
    assert kept == {3: 0, 4: 0, 5: 4, 6: 4, 7: 6, 8: 6, 9: 6, 10: 6, 11: 6}
    assert rows[8]["pages_used"] == rows[8]["running"] == 0
    history.add(record(15.0, 0.1, kept=7))  # where second 5 was
    rows = table(history, 16.0)
    assert [row["pages_kept"] for row in rows.values()] == [6, 6, 6, 6, 6, 6, 6, 6, 7]


def test_only_whole_seconds_and_no_old_ones_are_told() -> None:
    history = History(seconds=10)
    history.add(record(100.0, 0.1))
    assert 100 not in table(history, 100.9) and 100 in table(history, 101.0)
    rows = table(history, 200.0)
    assert list(rows) == list(range(191, 200)) and not any(row["steps"] for row in rows.values())
    assert history.rows(200.0, 0) == []


def test_a_step_of_ages_costs_no_more_than_the_history_holds() -> None:
    history = History(seconds=10)
    history.add(record(5.0, 1e9))
    rows = table(history, 1e9 + 5)
    assert [row["overhead"] for row in rows.values()] == pytest.approx([0.25] * 9)
