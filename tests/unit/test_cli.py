"""The command line without a model: parsing, exit codes, and that it starts quickly."""

import argparse
import io
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from yocolm import __version__, cli, cli_arguments
from yocolm.errors import CheckpointError

SOURCES = str(Path(cli.__file__).parents[1])
ENVIRONMENT = {**os.environ, "PYTHONPATH": SOURCES}


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=ENVIRONMENT)


def test_help_is_quick_and_loads_nothing_heavy() -> None:
    code = (
        "import sys; from yocolm.cli import build_parser; build_parser().format_help();"
        "print([m for m in ('torch', 'numpy', 'tokenizers', 'yaml') if m in sys.modules])"
    )
    assert run_python(code).stdout.strip() == "[]"
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        result = run_python("import sys; from yocolm.cli import main; sys.exit(main(['--help']))")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert result.returncode == 0 and "generate" in result.stdout
        # Processor time: that of the wall depends on what else the machine is doing.
        seconds.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    assert min(seconds) < 0.3


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["--version"])
    assert exit_info.value.code == 0
    assert capsys.readouterr().out == f"yocolm {__version__}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nonsense"],
        ["eval"],
        ["generate", "text", "--prompt-file", "file"],
        ["generate", "text", "--logit-bias", "17"],
        ["generate", "text", "--logit-bias", "x=1"],
        ["generate", "text", "--prompt-logprobs", "-1"],
        ["generate", "--prompt-ids", "1,x"],
        ["info", "bundled", "--context", "0"],
        ["info", "bundled", "--context", "1.5K"],
        ["info", "bundled", "--context", "1048577M"],
        ["info", "bundled", "--batch", "9" * 5000],
        ["generate", "text", "--max-tokens", "9" * 5000],
        ["generate", "--prompt-ids", "1,9999999999999"],
        ["info", "bundled", "--kv-dtype", "int3"],
    ],
)
def test_wrong_usage_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        cli.main(arguments)
    assert exit_info.value.code == 2
    assert "error:" in capsys.readouterr().err


def test_values_are_parsed() -> None:
    parse = cli.build_parser().parse_args
    options = parse(
        "generate --prompt-ids 1,2 --max-tokens 0 --logit-bias 7=-2.5 --logit-bias 8=1 "
        "--kv-memory 2GB --max-num-batched-tokens 2K --stop a --stop b --no-stream".split()
    )
    assert options.prompt_ids == [1, 2] and options.max_tokens == 0
    assert options.logit_bias == [(7, -2.5), (8, 1.0)]
    assert options.kv_memory == "2GB" and options.max_num_batched_tokens == 2048
    assert options.stop == ["a", "b"] and options.stream is False and options.model == "bundled"
    assert parse(["info", "m", "--context", "1M"]).context == 1_048_576
    assert parse(["train", "c.yaml", "train.steps=3"]).overrides == ["train.steps=3"]


def raising(error: BaseException) -> Callable[[argparse.Namespace], int]:
    def command(arguments: argparse.Namespace) -> int:
        raise error

    return command


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (CheckpointError("no such\n  model"), 1, "error: no such model\n"),
        (
            FileNotFoundError(2, "No such file", "x.txt"),
            1,
            "error: [Errno 2] No such file: 'x.txt'\n",
        ),
        (KeyboardInterrupt(), 130, "\n"),
    ],
)
def test_errors_are_one_line(
    error: BaseException,
    code: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(cli, "_command", lambda name: raising(error))
    assert cli.main(["info", "bundled"]) == code
    assert capsys.readouterr().err == message


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "_command", lambda name: raising(AssertionError("bug")))
    with pytest.raises(AssertionError):
        cli.main(["info", "bundled"])


def test_a_closed_pipe_is_quiet() -> None:
    code = (
        "import sys; from yocolm import cli;"
        "cli._command = lambda name: lambda arguments: [print('x' * 9999) for _ in range(99)];"
        "sys.exit(cli.main(['info', 'bundled']))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENVIRONMENT,
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read(10)
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 141


def options(*arguments: str) -> argparse.Namespace:
    return cli.build_parser().parse_args(["generate", *arguments])


def test_sampling_options_win_over_the_models_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    from yocolm import cli_generate

    defaults = {"temperature": 0.6, "top_p": 0.9, "max_new_tokens": 7, "top_k": None}
    monkeypatch.setattr(cli_generate, "load_generation_config", lambda model: defaults)
    params = cli_generate._sampling_params(
        options("x", "--top-p", "0.5", "--logit-bias", "3=1", "-n", "2", "--prompt-logprobs", "0")
    )
    assert (params.temperature, params.top_p, params.top_k) == (0.6, 0.5, 0)
    assert (params.max_tokens, params.n, params.prompt_logprobs) == (128, 2, 0)
    assert params.logit_bias == {3: 1.0} and params.ignore_eos is False


def test_the_prompt_comes_from_one_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from yocolm import cli_generate

    (tmp_path / "prompt").write_bytes("two\r\nlines é\n".encode())
    file = options("--prompt-file", str(tmp_path / "prompt"))
    assert cli_generate._prompt(file) == "two\r\nlines é\n"
    assert cli_generate._prompt(options("--prompt-ids", "5,6")) == [5, 6]
    stdin = SimpleNamespace(isatty=lambda: False, buffer=io.BytesIO(b"piped\n\n"))
    monkeypatch.setattr(sys, "stdin", stdin)
    assert cli_generate._prompt(options()) == "piped\n"


def test_sizes_are_bounded(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        cli_arguments.size("1048576M")
        == cli_arguments.MAX_NUMBER
        == cli_arguments.whole(f"{2**40}")
    )
    with pytest.raises(SystemExit):
        cli.main(["info", "bundled", "--context", "999999999999999999999M"])
    assert "999999999999999999999 is too large; at most 1099511627776" in capsys.readouterr().err


def test_defaults_of_the_model_that_are_out_of_range(monkeypatch: pytest.MonkeyPatch) -> None:
    from yocolm import cli_generate

    defaults = {"temperature": "hot"}
    monkeypatch.setattr(cli_generate, "load_generation_config", lambda model: defaults)
    with pytest.raises(CheckpointError, match=r"generation_config\.json of .*'hot'.*the option"):
        cli_generate._sampling_params(options("x", "--model", "some/folder"))
    params = cli_generate._sampling_params(options("x", "--temperature", "0.5"))
    assert params.temperature == 0.5


def test_an_overwhelming_perplexity_is_printed() -> None:
    from yocolm.cli_eval import _table
    from yocolm.eval.perplexity import Perplexity

    assert "perplexity too large to print" in _table("m", Perplexity(900, 800, 1, 1, 8, 4, True))
