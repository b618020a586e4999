"""`yocolm bench ops` and `offline`: what is wrong is not timed, what is timed is what was asked."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from yocolm import cli
from yocolm.bench import op_cases
from yocolm.bench.ceilings import Ceilings, seconds_of
from yocolm.bench.offline import measure_offline, offline_table
from yocolm.bench.ops import Case, error_of, measure_case, measure_ops, ops_table
from yocolm.errors import ConfigError

TINY = Ceilings(read_bytes=1 << 16, matrix=16)
SMALL = [
    op_cases.norm_case(3, 70, torch.bfloat16),
    op_cases.norm_case(3, 70, torch.float32),
    op_cases.linear_case(2, 70, 33),
    op_cases.decode_case((4, 2, 64), 128),
    op_cases.prefill_case((4, 2, 64), 50, 0),
    op_cases.prefill_case((4, 2, 64), 50, 8),
    op_cases.step_case(2, 3, 64),
    op_cases.chunk_case(150, 2, 64),
]


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_every_form_of_every_operation_is_right(case: Case) -> None:
    with torch.inference_mode():
        rows = measure_case(case, TINY, repeats=1)
    assert [row["form"] for row in rows] == list(case.forms)
    assert all("error" not in row and len(row["seconds"]) == 1 for row in rows), rows


def square(forms: dict[str, Any]) -> Case:
    return Case(
        "square",
        "4",
        torch.float32,
        lambda seed: (torch.arange(4.0) + seed,),
        lambda x: x.double() ** 2,
        forms,
        bytes=32,
        flops=4,
    )


def test_a_wrong_form_is_reported_and_never_timed() -> None:
    calls = Counter[str]()

    def wrong(x: Tensor) -> Tensor:
        calls["wrong"] += 1
        return x**2 + 0.01

    rows = measure_case(square({"right": lambda x: x * x, "wrong": wrong}), TINY, 2)
    assert calls["wrong"] == 1
    assert "error" in rows[1] and "seconds" not in rows[1]
    assert len(rows[0]["seconds"]) == len(rows[0]["ceilings"]) == 2
    text = ops_table({"rows": rows})
    assert "wrong: off by 0.0011" in text and "memory reads" in text


@pytest.mark.parametrize(
    "form", [lambda x: x[:3] ** 2, lambda x: x * float("nan")], ids=["shape", "nan"]
)
def test_results_of_another_shape_or_nan_are_wrong(form: Any) -> None:
    assert error_of(square({}), form) == float("inf")


def test_rates_follow_from_bytes_flops_and_seconds() -> None:
    row = measure_case(square({"right": lambda x: x * x}), TINY, 1)[0]
    assert row["gb_s"][0] == pytest.approx(32 / row["seconds"][0] / 1e9)
    top = row["ceilings"][0]
    floor = max(32 / top["read"], 4 / top["float32"])
    assert row["share"][0] == pytest.approx(floor / row["seconds"][0])


def test_all_cases_have_distinct_names_and_only_chooses_among_them() -> None:
    cases = op_cases.all_cases()
    names = Counter((case.name, case.dtype) for case in cases)
    assert max(names.values()) == 1
    with pytest.raises(ConfigError, match="--only fft is part of no operation; there are: deco"):
        measure_ops(cases, 1, 1, ["fft"], lambda _: None)


def test_threads_are_as_before_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr("yocolm.bench.ops.Ceilings", lambda: TINY)
    case = square({"right": lambda x: (seen.append(torch.get_num_threads()), x * x)[1]})
    before = torch.get_num_threads()
    result = measure_ops([case], before + 1, 1, None, lambda _: None)
    assert set(seen) == {before + 1} and torch.get_num_threads() == before
    assert result["threads"] == before + 1


def test_seconds_of_takes_at_least_one_call() -> None:
    calls = []
    assert seconds_of(lambda: calls.append(1), least=0.0) > 0
    assert calls == [1]


def test_offline_measures_both_sides_of_every_workload(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = "bench offline bundled --prompt-lengths 5,9 --batch 1,2 --decode 3 --repeats 2"
    assert cli.main([*command.split(), "--threads", "1", "--json", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [(r["prompt"], r["batch"]) for r in rows] == [(5, 1), (9, 1), (5, 2), (9, 2)]
    for row in rows:
        for side in ("on", "off"):
            assert {len(row["sides"][side][key]) for key in ("ttft", "tpot", "throughput")} == {2}
        assert 0 < row["predicted"] < 1


def test_offline_with_one_new_token_has_no_time_per_token() -> None:
    result = measure_offline(
        "bundled",
        "auto",
        threads=1,
        prompt_lengths=[4],
        batches=[1],
        decode=1,
        repeats=1,
        say=lambda _: None,
    )
    assert result["rows"][0]["sides"]["on"]["tpot"] == []
    # "4 x 1", the side, the time to the first token with its range, then none per token.
    assert offline_table(result).splitlines()[2].split()[6] == "-"


def test_offline_refuses_prompts_beyond_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "offline", "bundled", "--prompt-lengths", "1M"]) == 1
    assert "lower --prompt-lengths or --decode" in capsys.readouterr().err
