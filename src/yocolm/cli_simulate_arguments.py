"""The parser of `yocolm simulate`. Loads nothing heavy."""

from __future__ import annotations

import argparse
from pathlib import Path

from yocolm.cli_arguments import DTYPES, add_json, positive, size

Commands = argparse._SubParsersAction  # noqa: SLF001  (argparse has no public name for it)


def add_simulate(commands: Commands) -> None:
    parser = commands.add_parser(
        "simulate",
        help="what a machine would make of a trace of requests",
        description="Run a trace through the engine's own scheduler and pools without a model, on "
        "a machine whose seconds the cost model predicts. Targets that nobody gives are 5 times "
        "(first token) and 2 times (between tokens) what a request takes alone.",
    )
    load = parser.add_argument_group("load")
    load.add_argument(
        "--trace",
        type=Path,
        required=True,
        metavar="FILE",
        help="CSV with arrival (seconds), prompt_tokens, output_tokens; if wanted session, "
        "shared_prefix, priority, ttft_target, tpot_target",
    )
    load.add_argument("--request-rate", type=positive, metavar="R", help="requests a second")
    load.add_argument("--num-prompts", type=size, metavar="N", help="the first N requests only")
    load.add_argument(
        "--length-scale", type=positive, default=1.0, metavar="X", help="multiplies all lengths"
    )
    parser.add_argument(
        "--model", required=True, metavar="MODEL", help="a preset, or a folder with config.json"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of weights and KV")
    parser.add_argument(
        "--hardware",
        default="cpu",
        metavar="NAME",
        help="cpu (this machine as calibrated), h100, h200, or a JSON file (default: cpu)",
    )
    _add_engine(parser.add_argument_group("engine"))
    output = parser.add_argument_group("output")
    add_json(output)
    output.add_argument(
        "--requests", type=Path, metavar="FILE", help="save every request's times as CSV"
    )


def _add_engine(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--policy", choices=("fcfs", "traffic"), default="fcfs", help="who goes next"
    )
    group.add_argument("--ttft-target", type=positive, metavar="S", help="to the first token")
    group.add_argument("--tpot-target", type=positive, metavar="S", help="between tokens")
    group.add_argument(
        "--max-num-batched-tokens", type=size, metavar="N", help="tokens in one step"
    )
    group.add_argument("--max-num-seqs", type=size, metavar="N", help="sequences at once")
    group.add_argument("--max-model-len", type=size, metavar="N", help="prompt and output")
    group.add_argument(
        "--kv-memory",
        metavar="SIZE",
        help="memory for state, such as 2GiB (default: nine tenths of a GPU less the weights; a "
        "quarter of a CPU)",
    )
    group.add_argument("--page-size", type=size, metavar="N", help="tokens a page")
    group.add_argument("--mean-tokens", type=size, metavar="N", help="expected of a request")
    group.add_argument(
        "--swap-space", metavar="SIZE", help="for preempted requests (0: compute them anew)"
    )
    for name, text in (
        ("--prefix-caching", "keep what was computed for prompts that begin alike"),
        ("--fast-prefill", "prompt tokens that need no logits skip the second half"),
    ):
        group.add_argument(name, action=argparse.BooleanOptionalAction, default=True, help=text)
