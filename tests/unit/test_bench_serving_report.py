"""The report of `yocolm bench serving`: from made-up runs, without a model."""

import json
import re
from collections.abc import Sequence
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest

from made_up_run import made_up_run
from yocolm.bench.recording import PHASES, Recording
from yocolm.bench.serving_report import report, serving_table
from yocolm.bench.serving_timeline import DETAIL, MAX_BARS, Timeline, detail_of, grouped
from yocolm.eval import charts
from yocolm.eval.charts import Chart, clock, linear, logarithmic, seconds_text

VOID = {"meta", "path", "br"}


class Page(HTMLParser):
    """Checks that what is opened is closed, and gathers texts and what would be fetched."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.titles: list[str] = []
        self.says: list[str] = []
        self.links: list[str] = []
        self.data: list[Any] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name in ("href", "src", "srcset", "data", "action"):
                self.links.append(str(value))
            if name == "aria-label":
                self.says.append(str(value))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in VOID

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["script"] and data.lstrip().startswith("{"):
            self.data.append(json.loads(data))
        elif self.open[-1:] != ["style"]:
            self.texts.append(data.replace("\N{NO-BREAK SPACE}", " "))
        if self.open[-1:] == ["h2"]:
            self.titles.append(data)

    @property
    def text(self) -> str:
        return "\n".join(self.texts)


@pytest.fixture(scope="module")
def long_run() -> dict[str, Any]:
    return made_up_run(20_000, 400)


def test_every_part_is_there_and_nothing_is_fetched() -> None:
    result = made_up_run()
    text = report(result)
    page = Page(text)
    assert page.titles == [
        "Overview",
        "Latency",
        "Three pools",
        "Phases of every step",
        "Queue and rows",
        "Predicted and actual",
        "Fast prefill on and off",
        "Setup",
    ]
    assert all(link.startswith("#") for link in page.links)
    assert not re.search(r"https?:|url\(|@import|<link|//[a-z]", text)
    for words in ("Global KV", "Windows", "Recurrent state", "Swapped out", "kept", "TTFT", "E2E"):
        assert words in page.text
    assert "prefers-color-scheme: dark" in text and "viewport" in text


def test_the_numbers_are_those_of_the_run() -> None:
    result = made_up_run(seed=3)
    page = Page(report(result))
    requests, steps = result["requests"], result["steps"]
    values = {name: requests[name] for name in ("ttft", "tpot", "e2e")} | {"itl": result["gaps"]}
    for found in values.values():
        for share in (0.5, 0.9, 0.99):
            wanted = seconds_text(float(np.quantile(found, share)))
            assert wanted.replace("\N{NO-BREAK SPACE}", " ") in page.texts
    predicted, actual = (
        np.sum([steps[f"{side}.{name}"] for name in PHASES], axis=0)
        for side in ("predicted", "actual")
    )
    off = np.abs(predicted / actual - 1)
    assert f"Mean absolute error {100 * off.mean():.3g} %" in page.text
    assert f"{100 * (off <= 0.1).mean():.3g} % are off by at most 10 %" in page.text
    skipped = 1 - sum(steps["rows"]) / sum(steps["tokens"])
    assert f"{100 * skipped:.1f} %" in page.texts


def test_what_is_said_of_a_group_is_its_mean(long_run: dict[str, Any]) -> None:
    page = Page(report(long_run))
    [pool] = [data for data in page.data if "pages)" in data["lines"][0][2][0]]
    timeline = Timeline(long_run["steps"])
    assert len(pool["x"]) == len(timeline.groups) <= MAX_BARS + 1
    first = timeline.groups[0]
    used = np.mean(long_run["steps"]["pages_used"][: len(first)])
    assert pool["lines"][0][1] == "in use"
    assert pool["lines"][0][2][0].endswith(f"({charts.count_text(round(used, 1))} pages)")


def test_a_pool_that_was_hardly_touched_is_shown_from_near() -> None:
    result = made_up_run(50)
    assert "shown" not in Page(report(result)).text
    most = max(
        map(sum, zip(*(result["steps"][f"pages_{w}"] for w in ("used", "kept")), strict=True))
    )
    result["num_pages"] = 5 * most
    words = f"of which {charts.bytes_text(round(1.5 * most) * 65536)} are shown"
    assert words.replace("\N{NO-BREAK SPACE}", " ") in Page(report(result)).text


def test_a_long_run_makes_no_large_file(long_run: dict[str, Any]) -> None:
    short, long = (len(report(result)) for result in (made_up_run(1000), long_run))
    assert long < 700_000 and long < 1.3 * short


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"predicts": False}, "Nothing was predicted in this run."),
        ({"windows": False}, "This model has no windows."),
        ({"sweep": False}, "Setup"),
        ({"num_steps": 1, "num_requests": 1}, "1 request in"),
        ({"num_steps": 40}, "bars are as wide as the step was long"),
    ],
)
def test_runs_that_lack_something(options: dict[str, Any], words: str) -> None:
    page = Page(report(made_up_run(**options)))
    assert words in page.text
    assert ("Step time" in page.text) == options.get("predicts", True)
    assert ("Fast prefill on and off" in page.titles) == options.get("sweep", True)


def test_a_run_of_nothing() -> None:
    result = made_up_run(1, 1) | Recording().to_json() | {"sweep": []}
    page = Page(report(result))
    assert "No step was run." in page.texts and "No request has ended." in page.texts
    assert "0 of 0 requests" in serving_table(result)


def test_names_cannot_break_out() -> None:
    result = made_up_run(5, 5)
    name = "</script><script>alert(1)</script>$body&amp;"
    result["model"] = result["trace"] = name
    text = report(result)
    assert "<script>alert" not in text
    assert Page(text).text.count(name) >= 3


def test_steps_are_grouped_by_time() -> None:
    at = [0.01 * i for i in range(1000)]
    groups = grouped(at, 10.0, 100)
    assert [i for group in groups for i in group] == list(range(1000))
    assert 100 <= len(groups) <= 102 and max(map(len, groups)) <= 11
    assert grouped(at[:100], 1.0, 100) == [range(i, i + 1) for i in range(100)]
    assert grouped([], 0.0) == []


def test_the_detail_is_where_the_prompts_are() -> None:
    steps = made_up_run(900)["steps"]
    steps["chunks"] = [0] * 600 + [1] * 100 + [0] * 200
    detail = detail_of(Timeline(steps))
    assert detail.steps["number"][0] == 601
    assert len(detail.steps["at"]) == DETAIL == sum(detail.steps["chunks"])


def test_shares_add_up_to_what_was_spent() -> None:
    result = made_up_run(700)
    page, steps = Page(report(result)), result["steps"]
    [shares] = [d for d in page.data if any(name == "idle" for _, name, _ in d["lines"])]
    end = max(a + s for a, s in zip(steps["at"], steps["seconds"], strict=True))
    for _, name, texts in shares["lines"][:-1]:
        spent = sum(steps[f"actual.{name.replace('-', '_')}"])
        mean = np.mean([float(text.split("\N{NO-BREAK SPACE}")[0]) for text in texts]) / 100
        assert mean == pytest.approx(spent / end, rel=0.02, abs=1e-4)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 s"),
        (2.5e-7, "0.25 µs"),
        (0.0009999, "1 ms"),
        (0.0123456, "12.3 ms"),
        (0.9999, "1 s"),
        (119.0, "119 s"),
        (150.0, "2.5 min"),
    ],
)
def test_seconds_have_a_unit(value: float, text: str) -> None:
    assert seconds_text(value) == text.replace(" ", "\N{NO-BREAK SPACE}")


def ticks(axis: charts.Axis) -> list[str]:
    return [text.replace("\N{NO-BREAK SPACE}", " ") for _, text in axis.ticks]


def test_ticks_are_round() -> None:
    assert ticks(linear(0, 10)) == ["0", "2", "4", "6", "8", "10"]
    assert ticks(linear(0, 0)) != []
    assert ticks(logarithmic(1e-3, 2, seconds_text)) == ["1 ms", "10 ms", "100 ms", "1 s"]
    assert ticks(logarithmic(0.01, 0.01, seconds_text)) != []
    assert ticks(clock(12.3, 12.4)) == [f"12.3{i} s" for i in range(0, 10, 2)] + ["12.40 s"]
    assert ticks(clock(0, 600)) == ["0 min", "2 min", "4 min", "6 min", "8 min", "10 min"]


def corners(path: str) -> Sequence[Any]:
    return [tuple(map(int, m)) for m in re.findall(r"M(\d+) (\d+)V(\d+)H(\d+)V(\d+)Z", path)]


def test_areas_and_lines_are_where_the_axes_say() -> None:
    chart = Chart(linear(0, 10), linear(0, 4), "a chart")
    chart.area("c1", [(0, 5, 0, 1), (5, 10, 1, 4), (7, 7, 0, 1)])
    chart.staircase("c2", [(0, 2, 1), (2, 4, 2), (6, 10, 4)])
    chart.dots("c3", [(5, 2), (5, 2), (50, 2)])
    text = chart.html()
    assert corners(text) == [(0, 1000, 750, 1000, 1000), (1000, 750, 0, 2000, 750)]
    assert 'd="M0 750H400V500H800M1200 0H2000"' in text
    assert 'd="M1000 500h0M2000 500h0"' in text
    assert 'aria-label="a chart"' in text
    chart = Chart(linear(0, 10), linear(0, 4), "a chart")
    chart.under("c1", [(0, 1), (5, 3), (10, 4)])
    chart.under("c1", [])
    chart.mark("target", 5, "here", row=1)
    text = chart.html()
    assert 'd="M0 750L1000 250L2000 0L2000 1000L0 1000Z"' in text
    assert 'd="M1000 0V1000"' in text and "left:50.00%;top:16px" in text
    assert text.count('class="area c1"') == 1
