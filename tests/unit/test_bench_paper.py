"""`yocolm bench paper`: predictions against what can be had otherwise, measuring, reports."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from yocolm import cli
from yocolm.bench.paper import PARTS, Side, Study, run_study
from yocolm.bench.paper_page import _ratios, html_report, plot
from yocolm.bench.paper_reference import LENGTHS, RATIOS
from yocolm.bench.paper_report import text_report
from yocolm.bench.paper_run import Options, pair_configs, run_paper
from yocolm.bench.simulated import Setup, simulate
from yocolm.engine.hardware import Hardware
from yocolm.engine.settings import EngineSettings
from yocolm.engine.trace import TraceRequest
from yocolm.errors import ConfigError
from yocolm.models.activations import activation_bytes
from yocolm.models.spec import model_spec

K = 1024
FULL = {"weights": 100, "kv": 20, "state": 3, "activations": 7}
OPTIONS = Options(
    pair="3B",
    hardware="h100",
    lengths=(32 * K,),
    check=None,
    check_lengths=(),
    dtype="bfloat16",
    batch=1,
    chunk=2048,
    generate=1024,
    budget=1.0,
    repeats=1,
    threads=1,
)


def study(pair: str = "3B", lengths: tuple[int, ...] = LENGTHS, **changes: Any) -> Study:
    hardware = Hardware.load("h100")
    sides: dict[Side, Hardware] = {"yoco": hardware, "transformer": hardware}
    return replace(Study(pair, pair_configs(pair), sides, lengths), **changes)


def test_memory_is_that_of_the_pools_and_the_formula() -> None:
    row = run_study(study(lengths=(64 * K,), batch=3))["rows"][0]
    for side, config in pair_configs("3B").items():
        spec, parts = model_spec(config), row["models"][side]["memory"]
        pages = 3 * 64 * K // 64 + 1
        assert parts["weights"]["value"] == 2 * spec.num_params
        assert parts["kv"]["value"] == pages * spec.page_bytes(64, 2)
        assert parts["state"]["value"] == 4 * spec.slot_bytes(2)
        assert parts["activations"]["value"] == activation_bytes(config, 2048)
        total = row["models"][side]["total"]["value"]
        assert total == sum(parts[part]["value"] for part in PARTS)


@pytest.mark.parametrize("side", ["yoco", "transformer"])
@pytest.mark.parametrize("batch", [1, 6])
def test_throughput_is_that_of_the_simulated_engine(side: Side, batch: int) -> None:
    found = run_study(study(lengths=(32 * K,), batch=batch))["rows"][0]["models"][side]
    config, spec = pair_configs("3B")[side], model_spec(pair_configs("3B")[side])
    settings = EngineSettings(
        max_num_seqs=batch,
        prefix_caching=False,
        swap_space=0,
        kv_memory=(batch + 2) * spec.bytes(32 * K, 64, 2),
    )
    trace = [TraceRequest(0.0, 31 * K, K) for _ in range(batch)]
    run = simulate(Setup(config, Hardware.load("h100"), settings), trace)
    # In the engine the first sequences decode while the last ones are still prefilled.
    near = 0.001 if batch == 1 else 0.02
    assert found["throughput"]["value"] == pytest.approx(batch * K / run.seconds, rel=near)
    if batch == 1:
        assert found["prefill"]["value"] == pytest.approx(run.requests[0].ttft, rel=1e-6)


def test_the_papers_ratios_are_met_where_one_card_is_enough() -> None:
    result = run_study(study())
    assert result["beside_paper"]
    for row in result["rows"]:
        length, ratios = row["length"], row["ratios"]
        assert row["paper"] == {name: known.get(length) for name, known in RATIOS.items()}
        near = 0.2 if length == LENGTHS[-1] else 0.13
        assert ratios["prefill"]["value"] == pytest.approx(RATIOS["prefill"][length], rel=near)
        near = 0.3 if length == LENGTHS[0] else 0.22
        assert ratios["memory"]["value"] == pytest.approx(RATIOS["memory"][length], rel=near)
        assert ratios["prefill"]["source"] == "predicted"
    last = result["rows"][-1]["models"]
    assert last["yoco"]["fits"] and not last["transformer"]["fits"]
    assert last["transformer"]["most_sequences"] == 0 and last["yoco"]["most_sequences"] == 15
    assert result["rows"][-1]["ratios"]["most_throughput"] is None
    assert [one["paper"] for one in result["headline"]] == [9.38, 30.3, 71.82, 9.56]
    assert not run_study(study("160M"))["headline"]


def test_a_machine_that_cannot_hold_the_weights_holds_no_sequence() -> None:
    tiny = replace(Hardware.load("h100"), memory_bytes=1 << 30)
    row = run_study(study(hardware={"yoco": tiny, "transformer": tiny}))["rows"][0]
    for cell in row["models"].values():
        assert cell["most_sequences"] == 0 and cell["most_throughput"] is None
        assert not cell["fits"]
    assert row["ratios"]["most_throughput"] is None


class Scripted:
    """Answers as a process would; remembers what it was asked."""

    def __init__(self, **failures: str) -> None:
        self.asked: list[tuple[str, Side, int, int]] = []
        self.failures = failures

    def __call__(self, do: str, side: Side, prompt: int, generate: int) -> dict[str, Any]:
        self.asked.append((do, side, prompt, generate))
        if do in self.failures:
            return {"error": self.failures[do]}
        if do == "memory":
            return dict(FULL)
        slow = len(self.asked) * (3.0 if side == "transformer" else 1.0)
        return {"prefill": slow, "whole": slow + generate - 1, "process_peak": 1000 + prompt}


def small(**changes: Any) -> Study:
    return study("160M", (2 * K, 4 * K), budget=1e9, free_memory=1 << 40, **changes)


def test_what_was_measured_stands_instead_of_predictions() -> None:
    measure = Scripted()
    result = run_study(small(repeats=2), measure)
    turns = [("time", "yoco"), ("time", "transformer")] * 2
    both = [*turns, ("memory", "yoco"), ("memory", "transformer")]
    assert [(do, side) for do, side, _, _ in measure.asked] == both * 2
    assert {(prompt, count) for _, _, prompt, count in measure.asked} == {(1984, 64), (3968, 128)}
    row = result["rows"][0]
    ours = row["models"]["yoco"]
    assert ours["prefill"]["measured"] == [1.0, 3.0] and ours["prefill"]["value"] == 2.0
    assert ours["decode"]["value"] == 1.0 and ours["process_peak"] == 1000 + 1984
    assert ours["throughput"]["measured"] == [64 / (1.0 + 63), 64 / (3.0 + 63)]
    assert {part: ours["memory"][part]["value"] for part in PARTS} == FULL
    assert ours["total"]["value"] == 130 and ours["total"]["source"] == "measured"
    assert row["ratios"]["prefill"]["value"] == (6.0 + 12.0) / 2 / 2.0
    assert row["ratios"]["prefill"]["source"] == "measured"
    assert row["ratios"]["most_throughput"]["source"] == "predicted"


def test_only_what_fits_time_and_memory_is_measured() -> None:
    predicted = run_study(small())["rows"][1]["models"]
    whole = {
        side: cell["prefill"]["value"] + 127 * cell["decode"]["value"]
        for side, cell in predicted.items()
    }
    assert whole["yoco"] < whole["transformer"]
    measure = Scripted()
    between = (whole["yoco"] + whole["transformer"]) / 2
    row = run_study(replace(small(), budget=between), measure)["rows"][1]
    assert {side for _, side, prompt, _ in measure.asked if prompt > 2 * K} == {"yoco"}
    sources = {side: cell["prefill"]["source"] for side, cell in row["models"].items()}
    assert sources == {"yoco": "measured", "transformer": "predicted"}
    assert row["ratios"]["memory"]["source"] == "mixed"
    none = Scripted()
    run_study(replace(small(), free_memory=1 << 20), none)
    assert none.asked == []


def test_what_fails_is_said_and_predicted() -> None:
    result = run_study(small(), Scripted(memory="no memory"))
    ours = result["rows"][0]["models"]["yoco"]
    assert ours["errors"] == ["no memory"]
    assert ours["total"]["source"] == "predicted" and ours["prefill"]["source"] == "measured"
    text = text_report({"studies": [result]})
    assert "not measured: YOCO at 2K: no memory" in text
    assert "Not measured: YOCO at 2K: no memory" in html_report({"studies": [result]})


def test_tables_mark_every_number() -> None:
    measured = run_study(small(), Scripted())
    text = text_report({"studies": [run_study(study()), measured]})
    lines = [line.split() for line in text.splitlines()]
    assert ["memory", "at", "1M", "10.4x", "p", "9.38x"] in lines
    assert next(line for line in lines if line[:3] == ["1M", "7.19", "p"])[-1] == "71.82x"
    assert "118 p !" in text and "more than the 80 GB of h100" in text
    assert next(line for line in lines if line[:1] == ["2K"])[1:3] == ["0.0001", "m"]
    assert "Why they differ:" in text and text.count("Predicted less measured") == 1
    page = html_report({"studies": [measured], "machine": {"cpu": "<fast>"}})
    assert page.count("<figure>") == 5 and "&lt;fast&gt;" in page
    assert "http" not in page.replace("http://www.w3.org", "")


def test_the_command_saves_numbers_page_and_plot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    files = {name: tmp_path / f"paper.{name}" for name in ("json", "html", "plot")}
    command = ["bench", "paper", "--no-check", "--lengths", "32K,1M"]
    for name, path in files.items():
        command += [f"--{name}", str(path)]
    assert cli.main(command) == 0
    assert "10.4x p" in capsys.readouterr().out
    found = json.loads(files["json"].read_text())
    assert [row["length"] for row in found["studies"][0]["rows"]] == [32 * K, 1024 * K]
    assert found["studies"][0]["rows"][1]["ratios"]["memory"]["source"] == "predicted"
    assert files["plot"].read_bytes().startswith(b"\x89PNG")
    assert "</html>" in files["html"].read_text()
    plot({"studies": [run_study(small(), Scripted())]}, files["plot"])


def test_a_file_that_cannot_be_written_is_refused_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for option in ("--json", "--html"):
        assert cli.main(["bench", "paper", "--pair", "none", option, str(tmp_path)]) == 1
        assert f"{tmp_path} is a folder; name a file" in capsys.readouterr().err


@pytest.mark.parametrize("more", [["--check"], ["--check-pair", "160M"], ["--check-lengths", "2K"]])
def test_a_check_that_would_not_be_made_is_refused(
    more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["bench", "paper", "--pair", "none", "--hardware", "here"]
    assert cli.main([*command, *more]) == 1
    assert "with --hardware here no pair is measured to check" in capsys.readouterr().err


def test_only_the_papers_own_study_has_its_ratios_beside() -> None:
    own, other = (run_study(study(pair, (32 * K,))) for pair in ("3B", "160M"))
    assert _ratios(own, "memory")[1] == [(32 * K, RATIOS["memory"][32 * K])]
    assert _ratios(other, "memory")[1] == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pair": "llama-3B"}, "has no Transformer twin"),
        ({"hardware": "h1000"}, "neither a file that can be read"),
        ({"lengths": (32,)}, "length 32 is too short"),
        ({"check": "gemma-4-E2B"}, "has no Transformer twin"),
    ],
)
def test_bad_input_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run_paper(replace(OPTIONS, **change), lambda _: None)
