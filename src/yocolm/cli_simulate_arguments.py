"""The parser of `yocolm simulate`. Loads nothing heavy."""

from __future__ import annotations

import argparse
from pathlib import Path

from yocolm.cli_arguments import DTYPES, add_engine, add_json, positive, size

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
    add_engine(
        parser.add_argument_group("engine"),
        "memory for state, such as 2GiB (default: nine tenths of a GPU less the weights; a quarter "
        "of a CPU)",
    )
    output = parser.add_argument_group("output")
    add_json(output)
    output.add_argument(
        "--requests", type=Path, metavar="FILE", help="save every request's times as CSV"
    )
