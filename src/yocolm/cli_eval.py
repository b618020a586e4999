"""`yocolm eval`: how good a model is."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable

from yocolm.eval.perplexity import Perplexity, perplexity
from yocolm.eval.report import HTML_FILE, PNG_FILE, Report, prepare


def run(arguments: argparse.Namespace) -> int:
    if arguments.kind == "perplexity":
        return _perplexity(arguments)
    if getattr(arguments, "output", None) is not None:
        prepare(arguments.output)
    module = {"harness": "cli_harness", "nll": "cli_eval_nll"}.get(arguments.kind, "cli_eval_long")
    return importlib.import_module(f"yocolm.{module}").run(arguments)


def _perplexity(arguments: argparse.Namespace) -> int:
    result = perplexity(
        arguments.model,
        arguments.file,
        context=arguments.context,
        stride=arguments.stride,
        batch_size=arguments.batch_size,
        dtype=arguments.dtype,
        device=arguments.device,
        progress=counter("windows"),
    )
    if arguments.json:
        print(json.dumps({"model": arguments.model, **result.to_json()}, indent=2))
    else:
        print(_table(arguments.model, result))
    return 0


def counter(what: str) -> Callable[[int, int], None] | None:
    """Shows (done, total) on standard error, if that is a terminal."""
    if not sys.stderr.isatty():
        return None

    def show(done: int, total: int) -> None:
        end = "\r" if done < total else "\r\033[K"
        print(f"{done:,}/{total:,} {what}", end=end, file=sys.stderr, flush=True)

    return show


def show(report: Report, arguments: argparse.Namespace) -> int:
    """Print a report and write its files, as ``--json`` and ``--output`` say."""
    print(json.dumps(report.to_json(), indent=1) if arguments.json else report.text())
    if arguments.output is not None:
        written = report.write(arguments.output)
        print(f"wrote {', '.join(map(str, written))}", file=sys.stderr)
        if arguments.output / PNG_FILE not in written:
            print(
                f"{PNG_FILE} needs matplotlib (pip install matplotlib); {HTML_FILE} has the same",
                file=sys.stderr,
            )
    return 0


def _table(model: str, result: Perplexity) -> str:
    per_token = result.perplexity_per_token
    shown = "too large to print" if per_token is None else f"{per_token:.2f}"
    lines = [
        f"model           {model}",
        f"bits per byte   {result.bits_per_byte:.4f}",
        f"nll per token   {result.nll_per_token:.4f}  (perplexity {shown})",
        f"tokens, bytes   {result.tokens:,}  {result.bytes:,}",
        f"windows         {result.context} tokens, advancing by {result.stride}",
    ]
    if not result.first_token_scored:
        lines.append(
            "note            the first token is not scored: there is no token to start from"
        )
    lines += ["", "by position, over all windows (a token counts in each that holds it)"]
    lines += [f"{'position':>15}{'tokens':>12}{'nll/token':>12}{'bits/byte':>12}"]
    for bucket in result.by_position:
        bits = "-" if bucket.bits_per_byte is None else f"{bucket.bits_per_byte:.4f}"
        span = f"{bucket.start}-{bucket.stop - 1}"
        lines.append(f"{span:>15}{bucket.tokens:>12,}{bucket.nll_per_token:>12.4f}{bits:>12}")
    return "\n".join(lines)
