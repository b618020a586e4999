"""`yocolm info --ops`: which form each operation takes, and why."""

import json
import re

import pytest

from yocolm import cli
from yocolm.ops.native import library, report
from yocolm.ops.native.build import SOURCES


def test_every_function_that_is_reported_exists() -> None:
    sources = "".join(path.read_text() for path in SOURCES.glob("*.cpp"))
    defined = set(re.findall(r"^void (yo_\w+)\(", sources, re.MULTILINE))
    named = {name for operation in report.OPERATIONS for name in operation.functions}
    assert named <= defined


def test_forms(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info", "--ops", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    form = "torch" if library.native().handle is None else "native"
    assert len(found["operations"]) == len(report.OPERATIONS)
    for forms in found["operations"].values():
        assert forms == {"float32": form, "bfloat16": form, "float64": "torch"}


def test_the_reason_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    absent = library.Native(None, None, "no C++ compiler (g++); install one, or set CXX")
    monkeypatch.setattr(report, "native", lambda: absent)
    assert cli.main(["info", "--ops"]) == 0
    out = capsys.readouterr().out
    assert "off: no C++ compiler (g++); install one, or set CXX" in out and "native  " not in out


def test_info_of_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info"]) != 0
    assert "info needs a MODEL, or --ops" in capsys.readouterr().err
