"""Options of `yocolm eval harness`, loading nothing heavy."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from yocolm.cli_arguments import add_json, add_model, add_place, size, texts, whole

_Commands = argparse._SubParsersAction  # noqa: SLF001  (argparse has no public name for it)


def add_harness(kinds: _Commands) -> None:
    parser = kinds.add_parser(
        "harness",
        help="tasks of lm-evaluation-harness",
        description="Runs tasks of lm-evaluation-harness (pip install lm-eval) in this process. "
        "`paper` stands for the eight tasks of the YOCO paper: arc_challenge, arc_easy, boolq, "
        "hellaswag, openbookqa, piqa, winogrande and sciq.",
    )
    add_model(parser)
    _add_tasks(parser)
    _add_run(parser.add_argument_group("computation"))
    add_place(parser)
    output = parser.add_argument_group("output")
    output.add_argument(
        "--samples",
        type=Path,
        metavar="FILE",
        help="write every document and answer, as JSON lines",
    )
    add_json(output)


def _add_tasks(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tasks",
        type=texts,
        required=True,
        metavar="LIST",
        help="names of tasks, groups or tags, task files (.yaml), or `paper`",
    )
    parser.add_argument(
        "--include-path",
        type=Path,
        action="append",
        default=[],
        metavar="DIR",
        help="a folder with task files, before lm-eval's own; repeatable",
    )
    parser.add_argument(
        "--num-fewshot", type=whole, metavar="N", help="examples (default: as the task says)"
    )
    parser.add_argument(
        "--limit", type=_limit, metavar="N", help="documents a task, or a share below 1"
    )
    parser.add_argument(
        "--gen-kwargs",
        type=_arguments,
        default={},
        metavar="ARGS",
        help="generation arguments in place of the task's, such as temperature=0.8,do_sample=true",
    )
    parser.add_argument(
        "--apply-chat-template", action="store_true", help="contexts as the model's chats"
    )
    parser.add_argument(
        "--fewshot-as-multiturn",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="in a chat, every example is a turn of its own",
    )
    parser.add_argument("--system-instruction", metavar="TEXT", help="before every context")
    parser.add_argument(
        "--seed", type=whole, default=1234, metavar="S", help="of examples and of drawn texts"
    )


def _add_run(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--batch-size", type=_batch_size, metavar="N", help="sequences at once, or auto (default)"
    )
    group.add_argument(
        "--max-length", type=size, metavar="N", help="tokens of a text (default: the model's limit)"
    )
    group.add_argument(
        "--use-cache", type=Path, metavar="FILE", help="answers to give again; new ones are added"
    )
    group.add_argument(
        "--max-num-batched-tokens", type=size, metavar="N", help="tokens in one step"
    )
    group.add_argument("--kv-memory", metavar="SIZE", help="for state, such as 512MB or 2GiB")
    for name, text in (
        ("--prefix-caching", "compute what texts begin with once"),
        ("--fast-prefill", "tokens that are not scored skip the second half"),
    ):
        group.add_argument(name, action=argparse.BooleanOptionalAction, default=True, help=text)


def _limit(value: str) -> float | int:
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not (0 < number < 1 or (number >= 1 and number.is_integer() and number < 2**40)):
        raise argparse.ArgumentTypeError(
            f"{value!r} is neither a number of documents nor a share below 1, such as 0.1"
        )
    return number if number < 1 else int(number)


def _batch_size(value: str) -> int | None:
    return None if value == "auto" else size(value)


def _arguments(value: str) -> dict[str, Any]:
    """`name=value,name=value`, values as in JSON or else text; or an object of JSON, for texts with
    commas."""
    if value.lstrip().startswith("{"):
        try:
            return json.loads(value)
        except json.JSONDecodeError as error:
            raise argparse.ArgumentTypeError(f"{value!r} is not JSON: {error}") from None
    found: dict[str, Any] = {}
    for part in value.split(","):
        name, equals, text = part.partition("=")
        if not equals or not name.strip():
            raise argparse.ArgumentTypeError(
                f"{part!r} is not a generation argument, such as temperature=0.8"
            )
        try:
            found[name.strip()] = json.loads(text.lower() if text in ("True", "False") else text)
        except json.JSONDecodeError:
            found[name.strip()] = text
    return found
