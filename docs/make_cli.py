"""Write docs/cli.md from the parser of `yocolm.cli`: `make docs`.

The page is made from argparse's actions rather than from `--help`, whose layout changes with the
Python version. tests/unit/test_docs.py fails if the page is not current.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from yocolm.cli import build_parser

PAGE = Path(__file__).with_name("cli.md")
HEADER = """# Command line

Generated from the parser by `make docs`; do not edit.

A command that fails prints one line, `error: ...`, to standard error and exits with 1. Wrong usage
exits with 2, Ctrl-C with 130. Sizes such as 32K and 1M count in 1024s.
"""


def render() -> str:
    """The whole page."""
    parts = [HEADER]
    for path, parser in _commands(build_parser(), "yocolm"):
        parts.append(f"\n## {path}\n\n{parser.description}\n\n```\n{_usage(path, parser)}\n```\n")
        rows = [_row(action) for action in _arguments(parser)]
        parts.append("\n| argument | meaning |\n| --- | --- |\n" + "".join(rows))
    return "".join(parts)


def _commands(
    parser: argparse.ArgumentParser, path: str
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """The parsers of all leaf commands."""
    subcommands = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    if not subcommands:
        yield path, parser
    for action in subcommands:
        for name, child in action.choices.items():
            yield from _commands(child, f"{path} {name}")


def _arguments(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [action for action in parser._actions if action.dest != "help"]


def _usage(path: str, parser: argparse.ArgumentParser) -> str:
    names = {None: "{}", "?": "[{}]", "*": "[{} ...]", "+": "{} ..."}
    positional = [
        names[action.nargs if isinstance(action.nargs, str) else None].format(_name(action))
        for action in _arguments(parser)
        if not action.option_strings
    ]
    return " ".join([path, "[options]", *positional])


def _name(action: argparse.Action) -> str:
    return str(action.metavar or action.dest.upper())


def _row(action: argparse.Action) -> str:
    names = ", ".join(f"`{option}`" for option in action.option_strings) or f"`{_name(action)}`"
    takes_value = action.option_strings and action.nargs != 0
    if action.choices is not None:
        names += " " + " or ".join(f"`{choice}`" for choice in action.choices)
    elif takes_value and action.metavar:
        names += f" {action.metavar}"
    text = action.help or ""
    shown = action.default if action.default not in (None, False, [], argparse.SUPPRESS) else None
    if shown is not None and takes_value and "default" not in text:
        text += f" (default: {shown})"
    return f"| {names} | {text.replace('|', chr(92) + '|')} |\n"


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
