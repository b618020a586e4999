"""`yocolm bench peers` with scripted peers: interleaving, failures, the table, the plot."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from yocolm import cli, cli_bench
from yocolm.bench.memory import memory_now
from yocolm.bench.peers import HERE, PeerSpec, Workload, measure_peers, peers_table
from yocolm.bench.report import pyplot, ratio, table
from yocolm.errors import ConfigError, MissingDependencyError

WORK = Workload((3, 5), (1, 2), decode=4, repeats=2, threads=1, timeout=60)
# Each writes what it is asked into a common file, and reports made-up times.
PEER = """
import json, os
from pathlib import Path

class Peer:
    def __init__(self, options):
        self.options = options
        print("libraries print here")
        if options.get("fails") == "load":
            raise ValueError("no such\\nmodel")

    def run(self, prompts, new_tokens):
        with open(self.options["log"], "a") as file:
            line = [self.options["me"], [len(p) for p in prompts], new_tokens, prompts]
            print(json.dumps(line), file=file)
        if self.options.get("fails") == "run" and len(prompts[0]) == 5:
            raise MemoryError("too long")
        if self.options.get("fails") == "exit":
            os._exit(7)
        each = self.options["pace"] if new_tokens > 1 else None
        return {"first": self.options["pace"] * len(prompts[0]), "each": each}
"""


def scripted(tmp_path: Path, name: str, pace: float = 1.0, **options: Any) -> PeerSpec:
    path = tmp_path / "peer.py"
    path.write_text(PEER)
    options = {"me": name, "pace": pace, "log": str(tmp_path / "log"), **options}
    return PeerSpec(name, (sys.executable, str(HERE / "peer_main.py"), str(path)), options)


def measure(specs: list[PeerSpec], work: Workload = WORK) -> dict[str, Any]:
    return measure_peers(specs, "checkpoint", 100, work, lambda _: None)


def asked(tmp_path: Path) -> list[list[Any]]:
    return [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]


def test_rounds_go_over_all_peers_with_the_same_prompts(tmp_path: Path) -> None:
    result = measure([scripted(tmp_path, "yocolm"), scripted(tmp_path, "b", 2.0)])
    log = asked(tmp_path)
    cells = log[2:-2]  # before them each peer's first token, after them its memory
    assert [line[0] for line in cells] == ["yocolm", "b"] * (len(cells) // 2)
    assert all(a[1:] == b[1:] for a, b in zip(cells[::2], cells[1::2], strict=True))
    # Of each length and batch a short pass that is not counted, then the rounds.
    assert [(*line[1], line[2]) for line in cells[::2]] == [
        (*[length] * batch, decode) for batch in (1, 2) for length in (3, 5) for decode in (2, 4, 4)
    ]
    times = result["cells"][1]["times"]
    assert result["cells"][1]["prompt"] == 5 and result["cells"][1]["batch"] == 1
    assert times["b"] == {"ttft": [10.0, 10.0], "tpot": [2.0, 2.0]}
    assert set(result["peers"]["b"]) == {"start_s", "memory"}


def test_ratios_are_ours_to_theirs(tmp_path: Path) -> None:
    text = peers_table(measure([scripted(tmp_path, "yocolm"), scripted(tmp_path, "b", 4.0)]))
    line = next(line for line in text.splitlines() if line.startswith("3 x 1") and " b " in line)
    assert line.split() == "3 x 1 b 12,000 (12,000-12,000) 0.25 4,000 (4,000-4,000) 0.25".split()


@pytest.mark.parametrize(
    ("fails", "error", "cells"),
    [
        ("load", "ValueError: no such model", 0),
        ("run", "MemoryError: too long", 1),
        ("exit", "the process ended with status 7", 0),
    ],
)
def test_a_peer_that_fails_says_why_and_the_others_go_on(
    tmp_path: Path, fails: str, error: str, cells: int
) -> None:
    result = measure([scripted(tmp_path, "bad", fails=fails), scripted(tmp_path, "good")])
    assert result["peers"]["bad"]["error"] == error
    assert sum("bad" in cell["times"] for cell in result["cells"]) == cells
    assert all(cell["times"]["good"]["ttft"] for cell in result["cells"])
    assert f"bad: failed: {error}" in peers_table(result)


def test_an_interpreter_that_does_not_exist(tmp_path: Path) -> None:
    missing = PeerSpec("gone", ("/nowhere/python",))
    result = measure([missing, scripted(tmp_path, "good")])
    assert "/nowhere/python cannot be started" in result["peers"]["gone"]["error"]


def test_a_peer_that_does_not_answer_is_given_up(tmp_path: Path) -> None:
    (tmp_path / "mute.py").write_text("import time\ntime.sleep(600)")
    mute = PeerSpec("mute", (sys.executable, str(tmp_path / "mute.py")))
    result = measure([mute], Workload((3,), (1,), 1, 1, 1, timeout=0.2))
    assert "no answer within 0.2 s" in result["peers"]["mute"]["error"]
    assert result["cells"][0]["times"] == {}


def test_one_new_token_has_no_time_per_token(tmp_path: Path) -> None:
    result = measure([scripted(tmp_path, "yocolm")], Workload((3,), (1,), 1, 1, 1))
    assert result["cells"][0]["times"]["yocolm"] == {"ttft": [3.0], "tpot": []}
    assert peers_table(result).splitlines()[2].split()[-2:] == ["-", "-"]


def test_ours_as_a_peer_beside_a_scripted_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(HERE.parents[1]))
    out = tmp_path / "out.json"
    bundled = HERE.parent / "bundled"
    command = f"bench peers --checkpoint {bundled} --prompt-lengths 8 --decode 3 --repeats 1"
    assert cli.main([*command.split(), "--threads", "1", "--json", str(out)]) == 0
    result = json.loads(out.read_text())
    assert "error" not in result["peers"]["yocolm"], result["peers"]
    assert all(x > 0 for x in result["cells"][0]["times"]["yocolm"]["tpot"])
    assert result["workload"]["prompt_lengths"] == [8] and result["machine"]["cores"]
    assert "8 x 1" in capsys.readouterr().out


def arguments(text: str) -> argparse.Namespace:
    return cli.build_parser().parse_args(["bench", "peers", "--checkpoint", "x", *text.split()])


def test_the_peers_that_are_named_are_run() -> None:
    specs = cli_bench._specs(
        arguments("--transformers T --vllm V --vllm-modes fast,eager-off --llama-cpp L --gguf G")
    )
    assert [(spec.name, spec.command[0]) for spec in specs] == [
        ("yocolm", sys.executable),
        ("transformers", "T"),
        ("vllm fast", "V"),
        ("vllm eager-off", "V"),
        ("llama.cpp", sys.executable),
    ]
    assert specs[3].options == {"fast_prefill": False, "eager": True}
    assert all(Path(spec.command[2]).is_file() for spec in specs)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("--vllm V --vllm-modes slow", "'slow'; allowed: fast, off"),
        ("--gguf G", "give both or neither"),
    ],
)
def test_wrong_options(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        cli_bench._specs(arguments(text))


def test_a_missing_folder_is_found_before_measuring() -> None:
    with pytest.raises(ConfigError, match="does not exist; create it"):
        cli_bench.run(arguments("--json /nowhere/out.json"))


def test_peers_in_other_interpreters_import_nothing_of_yocolm() -> None:
    for name in ("main", "transformers", "vllm", "llama_cpp"):
        source = (HERE / f"peer_{name}.py").read_text()
        assert "import yocolm" not in source and "from yocolm" not in source


def test_llama_cpp_without_its_tool_says_which_file_is_missing(tmp_path: Path) -> None:
    options = {"binaries": str(tmp_path), "gguf": "x.gguf"}
    command = (sys.executable, str(HERE / "peer_main.py"), str(HERE / "peer_llama_cpp.py"))
    result = measure([PeerSpec("llama.cpp", command, options)])
    assert f"{tmp_path}/llama-batched-bench does not exist" in result["peers"]["llama.cpp"]["error"]


LLAMA = """#!/bin/sh
echo "$@" > "$0.args"
echo noise
echo '{"t_pp": 2.0, "t_tg": 0.9}'
"""


def test_llama_cpp_times_are_its_own_figures(tmp_path: Path) -> None:
    tool = tmp_path / "llama-batched-bench"
    tool.write_text(LLAMA)
    tool.chmod(0o755)
    (tmp_path / "x.gguf").touch()
    options = {"binaries": str(tmp_path), "gguf": str(tmp_path / "x.gguf")}
    command = (sys.executable, str(HERE / "peer_main.py"), str(HERE / "peer_llama_cpp.py"))
    work = Workload((300,), (2,), decode=10, repeats=1, threads=3, timeout=60)
    result = measure([PeerSpec("llama.cpp", command, options)], work)
    assert result["cells"][0]["times"]["llama.cpp"]["ttft"] == [2.0]
    assert result["cells"][0]["times"]["llama.cpp"]["tpot"] == pytest.approx([0.1])
    # The memory pass, with one prompt, comes last: a part of the context is 512 tokens.
    assert "-t 3 -c 512 -npp 300 -ntg 7 -npl 1" in Path(f"{tool}.args").read_text()


def test_memory_of_this_process_is_seen() -> None:
    if not Path("/proc/self/smaps_rollup").exists():
        pytest.skip("no smaps_rollup here")
    assert memory_now(os.getpid())["anonymous"] > 1 << 20


def test_a_plot_needs_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingDependencyError, match="yocolm\\[bench\\]"):
        pyplot()


def test_ratio_is_of_rounds_and_tables_align() -> None:
    assert ratio([1.0, 10.0, 3.0], [2.0, 20.0, 1.0]) == 0.5
    assert table(["a", "bb"], [["long", "1"]]) == "a     bb\n----  --\nlong   1"
