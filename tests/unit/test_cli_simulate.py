"""`yocolm simulate` from the command line: what it prints, saves and refuses."""

import csv
import json
from pathlib import Path

import pytest

from yocolm.cli import main
from yocolm.engine.hardware import Hardware


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    lines = [f"{0.05 * i},{100 + 10 * i},{1 + i % 7}" for i in range(20)]
    path.write_text("arrival,prompt_tokens,output_tokens\n" + "\n".join(lines) + "\n")
    return path


def simulate(trace: Path, *options: str) -> int:
    return main(["simulate", "--trace", str(trace), "--model", "3B", *options])


def test_it_prints_a_table(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(trace, "--hardware", "h100") == 0
    text = capsys.readouterr().out
    assert "20 requests" in text and "h100 (data sheet), policy fcfs: 20 completed" in text
    for word in ("to the first token", "throughput", "goodput", "pages, at most", "preemptions"):
        assert word in text


def test_it_prints_json_and_saves_every_request(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "requests.csv"
    options = ("--hardware", "h200", "--policy", "traffic", "--json", "--requests", str(saved))
    assert simulate(trace, *options) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["model"], found["policy"], found["completed"]) == ("3B", "traffic", 20)
    assert set(found["ttft"]) == {"count", "mean", "p50", "p90", "p99", "max"}
    rows = list(csv.DictReader(saved.read_text().splitlines()))
    assert [int(row["prompt_tokens"]) for row in rows] == [100 + 10 * i for i in range(20)]
    assert max(float(row["ttft"]) for row in rows) == pytest.approx(found["ttft"]["max"])


def test_lengths_rate_and_count_are_scaled(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--num-prompts", "10", "--length-scale", "0.1", "--request-rate", "2", "--json")
    assert simulate(trace, "--hardware", "h100", *options) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["requests"] == 10
    assert found["seconds"] == pytest.approx(9 / 2, rel=0.05)


def test_settings_reach_the_scheduler(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--max-num-seqs", "2", "--kv-memory", "1GiB", "--page-size", "16", "--json")
    assert simulate(trace, "--hardware", "h100", *options, "--no-prefix-caching") == 0
    peak = json.loads(capsys.readouterr().out)["peak"]
    assert peak["num_slots"] == 2 and peak["slots_kept"] == peak["pages_kept"] == 0


def test_a_folder_a_file_of_hardware_and_a_seeded_model_do_as_well(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.json"
    text = Hardware.load("h100").to_json().replace('"h100"', '"mine"')
    path.write_text(text)
    for model in ("bundled", "random:160M"):
        options = ["--model", model, "--hardware", str(path), "--json"]
        assert main(["simulate", "--trace", str(trace), *options]) == 0
        assert json.loads(capsys.readouterr().out)["hardware"] == "mine"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--hardware", "abacus"], "hardware 'abacus'"),
        (["--hardware", "h100", "--model", "nothing"], "model 'nothing'"),
        (["--hardware", "h100", "--kv-memory", "1KB"], "kv_memory"),
        (["--hardware", "h100", "--requests", "/nowhere/at/all.csv"], "the folder of"),
    ],
)
def test_what_cannot_be_is_said_in_a_line(
    trace: Path, capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    assert simulate(trace, *options) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and said in error and error.count("\n") == 1


def test_a_trace_that_is_not_there_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate(tmp_path / "none.csv", "--hardware", "h100") == 1
    assert "none.csv" in capsys.readouterr().err
