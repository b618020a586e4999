"""The command line: `yocolm generate | serve | chat | train | eval | convert | info | bench | ...`.

Only the parser lives here, so that `yocolm --help` loads nothing heavy; each command imports what
it needs when it runs (`cli_*.py`). docs/cli.md is generated from this parser.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from yocolm import __version__
from yocolm.cli_arguments import (
    DTYPES,
    MODEL_HELP,
    add_json,
    add_model,
    add_place,
    bias,
    size,
    token_ids,
    whole,
)
from yocolm.cli_bench_arguments import add_bench
from yocolm.cli_convert_arguments import add_convert
from yocolm.cli_eval_arguments import add_eval
from yocolm.cli_simulate_arguments import add_simulate
from yocolm.errors import YocolmError
from yocolm.server import settings

# PyTorch's CPU library keeps machine code for each shape of a matrix product, up to 1,024 shapes
# in two caches. Batches of all sizes fill them with a gigabyte; with 64 nothing is slower.
_CODE_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")

# For errors of the file system that nobody below knew more of.
_REMEDIES: dict[int | None, str] = {
    errno.ENOSPC: "; make room on that disk, or write to another",
    errno.EDQUOT: "; make room within your quota, or write to another disk",
    errno.EROFS: "; name a place that may be written to",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status: 0, 1 (an error, said in one line) or 130 (Ctrl-C).

    Wrong usage exits with 2, as argparse does.
    """
    arguments = build_parser().parse_args(argv)
    for name in _CODE_CACHES:
        os.environ.setdefault(name, "64")
    try:
        return _command(arguments.command)(arguments)
    except BrokenPipeError:
        # The reader has gone (`yocolm info MODEL | head`): stay quiet, also at interpreter exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + 13
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except (YocolmError, OSError) as error:
        remedy = _REMEDIES.get(error.errno, "") if isinstance(error, OSError) else ""
        print("error:", " ".join(f"{error}{remedy}".split()), file=sys.stderr)
        return 1


def _command(name: str) -> Callable[[argparse.Namespace], int]:
    """`run` of yocolm.cli_NAME."""
    return importlib.import_module(f"yocolm.cli_{name}").run


def build_parser() -> argparse.ArgumentParser:
    """The whole parser, without importing torch."""
    parser = argparse.ArgumentParser(
        prog="yocolm", description="Train, load and run YOCO (decoder-decoder) language models."
    )
    parser.add_argument("--version", action="version", version=f"yocolm {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_generate(commands)
    _add_serve(commands)
    _add_chat(commands)
    _add_train(commands)
    add_eval(commands)
    add_convert(commands)
    _add_info(commands)
    add_bench(commands)
    add_simulate(commands)
    return parser


_Commands = argparse._SubParsersAction  # noqa: SLF001  (argparse has no public name for it)


def _add_generate(commands: _Commands) -> None:
    parser = commands.add_parser(
        "generate",
        help="continue a prompt",
        description="Continue a prompt. The model's generation_config.json sets sampling defaults.",
    )
    _add_prompt(parser.add_argument_group("prompt (one of these, or standard input)"))
    add_model(parser, "--model")
    add_place(parser)
    _add_sampling(parser.add_argument_group("sampling"))
    _add_output(parser.add_argument_group("output"))
    _add_engine(parser.add_argument_group("engine"))


def _add_prompt(group: argparse._ArgumentGroup) -> None:
    one = group.add_mutually_exclusive_group()
    one.add_argument("prompt", nargs="?", metavar="PROMPT", help="the text to continue")
    one.add_argument("--prompt-file", type=Path, metavar="FILE", help="read the text from a file")
    one.add_argument(
        "--prompt-ids", type=token_ids, metavar="IDS", help="token ids, such as 1,17,42"
    )
    group.add_argument(
        "--chat",
        action="store_true",
        help="the text is a user's message: apply the model's chat template",
    )
    group.add_argument("--system", metavar="TEXT", help="the system message before it (--chat)")


def _add_output(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--echo", action="store_true", help="print the prompt before each continuation"
    )
    group.add_argument(
        "--stream",
        action=argparse.BooleanOptionalAction,
        help="print text as it is drawn; the default on a terminal with one sample",
    )
    group.add_argument(
        "--logprobs", type=whole, metavar="N", help="likeliest N tokens at each step"
    )
    group.add_argument(
        "--prompt-logprobs", type=whole, metavar="N", help="the same for the prompt's tokens"
    )
    group.add_argument(
        "--prompt-logprobs-start", type=whole, default=0, metavar="I", help="score from token I on"
    )
    add_json(group)


def _add_engine(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--max-num-batched-tokens",
        type=size,
        metavar="N",
        help="tokens in one step (prefill chunk)",
    )
    group.add_argument(
        "--kv-memory", metavar="SIZE", help="memory for state, such as 512MB or 2GiB"
    )
    group.add_argument(
        "--fast-prefill",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="prompt tokens that need no logits skip the second half; off to measure that",
    )
    text = "no CUDA graphs on a GPU: every step runs as it is"
    group.add_argument("--eager", "--enforce-eager", action="store_true", help=text)
    group.add_argument(
        "--per-layer-tables",
        choices=("mapped", "resident"),
        default="mapped",
        help="Gemma's per-layer embeddings: left in their file, or loaded",
    )


def _add_sampling(group: argparse._ArgumentGroup) -> None:
    """Options named as the fields of SamplingParams; absent ones stay unset."""
    group.add_argument(
        "--max-tokens", type=whole, default=128, metavar="N", help="at most N new tokens"
    )
    group.add_argument("--min-tokens", type=whole, metavar="N", help="no end before N new tokens")
    group.add_argument("-n", type=size, metavar="N", help="samples; the prompt is computed once")
    _add_distribution(group)
    group.add_argument("--repetition-penalty", type=float, metavar="X", help="above 1 discourages")
    group.add_argument(
        "--presence-penalty", type=float, metavar="X", help="once per token drawn before"
    )
    group.add_argument(
        "--frequency-penalty", type=float, metavar="X", help="per earlier occurrence"
    )
    group.add_argument("--seed", type=int, metavar="S", help="makes the draws repeatable")
    group.add_argument(
        "--stop", action="append", metavar="TEXT", help="end at this text; repeatable"
    )
    group.add_argument(
        "--stop-token-ids", type=token_ids, metavar="IDS", help="end at these tokens, such as 3,4"
    )
    group.add_argument(
        "--ignore-eos", action="store_true", help="go on after the end-of-text token"
    )
    group.add_argument(
        "--logit-bias",
        type=bias,
        action="append",
        metavar="ID=X",
        help="add X to a token's logit; repeatable",
    )


def _add_distribution(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--temperature", type=float, metavar="T", help="0 is greedy")
    group.add_argument("--top-k", type=int, metavar="K", help="only the K likeliest tokens")
    group.add_argument("--top-p", type=float, metavar="P", help="only the likeliest of mass P")
    group.add_argument("--min-p", type=float, metavar="P", help="only above P times the likeliest")


def _add_serve(commands: _Commands) -> None:
    parser = commands.add_parser(
        "serve",
        help="serve a model over HTTP, as OpenAI does",
        description="An OpenAI-compatible server. Every option can also stand in a YAML file "
        "(`max_queue: 64`) or in the environment (`YOCOLM_MAX_QUEUE=64`); options win over the "
        "environment, and that over the file.",
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help=f"{MODEL_HELP}; else `bundled`")
    parser.add_argument("--config", metavar="FILE", help="settings in YAML")
    settings.add_arguments(parser)


def _add_chat(commands: _Commands) -> None:
    parser = commands.add_parser(
        "chat",
        help="talk to a model in the terminal",
        description="A conversation with a server (--url) or with a model in this process. /help "
        "lists the commands in it.",
    )
    parser.add_argument("--url", metavar="URL", help="of an OpenAI-compatible server")
    parser.add_argument(
        "--model", metavar="MODEL", help=f"{MODEL_HELP}; with --url, its name there"
    )
    parser.add_argument("--api-key", metavar="KEY", help="of the server; else OPENAI_API_KEY's")
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    add_place(parser)
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument(
        "--max-tokens", type=size, default=512, metavar="N", help="at most N tokens an answer"
    )
    _add_distribution(sampling)
    sampling.add_argument("--seed", type=int, metavar="S", help="makes the draws repeatable")


def _add_train(commands: _Commands) -> None:
    parser = commands.add_parser(
        "train",
        help="train a model from a YAML configuration",
        description="Train a model; started again with the same configuration, it resumes.",
    )
    parser.add_argument("config", type=Path, metavar="CONFIG", help="a YAML file")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="KEY=VALUE",
        help="change a setting, such as train.steps=100",
    )


def _add_info(commands: _Commands) -> None:
    parser = commands.add_parser(
        "info",
        help="parameters, FLOPs and memory of a model",
        description="Architecture, parameters, FLOPs of each half, and memory per kind of state, "
        "beside a Transformer of the same layout. Reads only the configuration.",
    )
    parser.add_argument("model", metavar="MODEL", nargs="?", help=MODEL_HELP)
    parser.add_argument(
        "--ops",
        action="store_true",
        help="which form each operation takes on this machine (native or torch), and why",
    )
    parser.add_argument(
        "--context", type=size, metavar="N", help="tokens per sequence, such as 32K or 1M (1024s)"
    )
    parser.add_argument("--batch", type=size, default=1, metavar="B", help="sequences at a time")
    parser.add_argument(
        "--kv-dtype",
        choices=DTYPES,
        default="bfloat16",
        help="of weights and KV (default: bfloat16)",
    )
    add_json(parser)


if __name__ == "__main__":
    sys.exit(main())
