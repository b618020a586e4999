"""What the parsers of several commands share: kinds of values, and options. Loads nothing heavy."""

from __future__ import annotations

import argparse
import math
from typing import NoReturn

MODEL_HELP = "a folder, `bundled`, a Hugging Face id, or `random:PRESET` for seeded random weights"
DTYPES = ("float32", "bfloat16")
MAX_NUMBER = 2**40


def add_place(parser: argparse.ArgumentParser) -> None:
    """In which dtype and where a model runs."""
    parser.add_argument(
        "--dtype",
        choices=("auto", *DTYPES),
        default="auto",
        help="of weights and KV; auto: as saved",
    )
    parser.add_argument(
        "--device", default="auto", help="auto (a GPU if there is one), cpu or cuda"
    )


def add_model(parser: argparse.ArgumentParser, option: str | None = None) -> None:
    if option is None:
        parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    else:
        parser.add_argument(option, metavar="MODEL", default="bundled", help=MODEL_HELP)


def add_json(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def _bad(value: str, wanted: str) -> NoReturn:
    raise argparse.ArgumentTypeError(f"{value!r} is not {wanted}")


def whole(value: str) -> int:
    """A whole number from 0 to MAX_NUMBER."""
    if not (value.isascii() and value.isdigit()):
        _bad(value, "a whole number")
    return _bounded(value, 1)


def _bounded(digits: str, factor: int) -> int:
    """Python refuses to read thousands of digits, hence the look at their number first."""
    significant = digits.lstrip("0") or "0"
    if len(significant) > 20 or int(significant) * factor > MAX_NUMBER:
        raise argparse.ArgumentTypeError(
            f"{digits[:24]}{'...' * (len(digits) > 24)} is too large; at most {MAX_NUMBER} is"
            f" allowed"
        )
    return int(significant) * factor


def size(value: str) -> int:
    """A whole number from 1 to MAX_NUMBER; K and M count in 1024s."""
    digits, factor = value, 1
    if value[-1:] in "kKmM":
        digits, factor = value[:-1], 1024 if value[-1:] in "kK" else 1024**2
    if not (digits.isascii() and digits.isdigit()) or not digits.strip("0"):
        _bad(value, "a whole number above 0, such as 2048, 32K or 1M")
    return _bounded(digits, factor)


def sizes(value: str) -> list[int]:
    return [size(part.strip()) for part in value.split(",")]


def texts(value: str) -> list[str]:
    return [part.strip() for part in value.split(",") if part.strip()]


def positive(value: str) -> float:
    """A finite number above 0."""
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        _bad(value, "a number above 0")
    return number


def token_ids(value: str) -> list[int]:
    return [whole(part.strip()) for part in value.split(",")]


def bias(value: str) -> tuple[int, float]:
    token, equals, amount = value.partition("=")
    try:
        return whole(token), float(amount if equals else "missing")
    except ValueError:
        _bad(value, "a token id and a number, such as 17=-2.5")


def add_engine(group: argparse._ArgumentGroup, kv_memory: str) -> None:
    """How large an engine is and who goes next; ``kv_memory`` is the help of that option."""
    group.add_argument(
        "--policy", choices=("fcfs", "traffic"), default="fcfs", help="who goes next"
    )
    for name, text, times in (("ttft", "to the first token", 5), ("tpot", "between tokens", 2)):
        text += f" (default: {times} times what a request takes alone)"
        group.add_argument(f"--{name}-target", type=positive, metavar="S", help=text)
    group.add_argument("--max-num-seqs", type=size, metavar="N", help="sequences at once")
    group.add_argument(
        "--max-num-batched-tokens", type=size, metavar="N", help="tokens in one step"
    )
    group.add_argument("--max-model-len", type=size, metavar="N", help="prompt and output")
    group.add_argument("--kv-memory", metavar="SIZE", help=kv_memory)
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
