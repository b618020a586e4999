"""Options of `yocolm eval`, loading nothing heavy."""

from __future__ import annotations

import argparse
from pathlib import Path

from yocolm.cli_arguments import (
    DTYPES,
    add_json,
    add_model,
    add_place,
    size,
    sizes,
    whole,
)
from yocolm.cli_harness_arguments import add_harness
from yocolm.eval.words import KEY_LISTS, TEMPLATES

HEADER = "==> {path} <=="  # before each file of a folder, as `head` writes it
_Commands = argparse._SubParsersAction  # noqa: SLF001  (argparse has no public name for it)


def add_eval(commands: _Commands) -> None:
    parser = commands.add_parser("eval", help="evaluate a model", description="Evaluate a model.")
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    _add_perplexity(kinds)
    _add_nll(kinds)
    _add_needle(kinds)
    _add_multi_hop(kinds)
    _add_multi_turn(kinds)
    add_harness(kinds)


def _add_perplexity(kinds: _Commands) -> None:
    text = kinds.add_parser(
        "perplexity",
        help="bits per byte of a text, also by position",
        description="Bits per byte of a UTF-8 text, in sliding windows. The total counts each "
        "token once. The rows by position cover all windows, so that a token counts in each that "
        "holds it (at most two, with the default stride). Where the tokenizer adds BOS, every "
        "window begins with it; where it does not, the text alone is begun with BOS, or else EOS, "
        "which its first token is predicted from.",
    )
    add_model(text)
    text.add_argument("file", type=Path, metavar="FILE", help="a UTF-8 text")
    text.add_argument(
        "--context", type=size, metavar="N", help="window (default: the model's, at most 2048)"
    )
    text.add_argument(
        "--stride", type=size, metavar="N", help="advance of the window (default: half of it)"
    )
    text.add_argument("--batch-size", type=size, default=8, metavar="N", help="windows at a time")
    text.add_argument("--dtype", choices=DTYPES, default="float32", help="of the computation")
    text.add_argument("--device", default="auto", help="auto (a GPU if there is one), cpu or cuda")
    add_json(text)


def _add_nll(kinds: _Commands) -> None:
    nll = kinds.add_parser(
        "nll",
        help="negative log-likelihood by position in a long text",
        description="Negative log-likelihood of long documents in one pass, cumulative and by "
        "position, in memory that a chunk bounds: state is carried from chunk to chunk. Each PATH "
        "is a document: a file, or a folder, whose files are joined in order, each behind a line "
        "with its path. The first token is predicted from BOS, or else EOS, whether or not the "
        "tokenizer adds one.",
    )
    add_model(nll)
    _add_documents(nll)
    _add_scoring(nll)
    _add_report(nll)


def _add_documents(nll: argparse.ArgumentParser) -> None:
    nll.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="UTF-8 files or folders")
    nll.add_argument(
        "--glob",
        action="append",
        metavar="PATTERN",
        help="files of a folder, such as '*.c'; repeatable (default: all that are UTF-8)",
    )
    nll.add_argument(
        "--shuffle", type=int, metavar="SEED", help="a folder's files in a seeded random order"
    )
    nll.add_argument(
        "--header",
        default=HEADER,
        metavar="TEXT",
        help="line before each file of a folder (default: '%(default)s')",
    )
    nll.add_argument(
        "--length", type=size, default=1024**2, metavar="N", help="tokens a document (default: 1M)"
    )


def _add_scoring(nll: argparse.ArgumentParser) -> None:
    nll.add_argument(
        "--chunk", type=size, default=2048, metavar="N", help="tokens at a time (default: 2048)"
    )
    nll.add_argument(
        "--share",
        type=float,
        default=1.0,
        metavar="X",
        help="score only this share of each chunk, a piece at a seeded place: the second half of "
        "the model runs for it alone",
    )
    nll.add_argument("--seed", type=int, default=0, metavar="S", help="of those places")
    nll.add_argument("--dtype", choices=DTYPES, default="float32", help="of the computation")
    nll.add_argument("--device", default="auto", help="auto (a GPU if there is one), cpu or cuda")


def _add_needle(kinds: _Commands) -> None:
    needle = kinds.add_parser(
        "needle",
        help="find facts hidden in a long text",
        description="Hides sentences with random numbers (needles) in real text and asks for them, "
        "over depth and length. Right is the exact number. With several needles the one that is "
        "asked for lies at the depth of its cell and the others anywhere.",
    )
    _add_context(needle)
    needle.add_argument(
        "--depths",
        type=_depths,
        default=_depths("11"),
        metavar="N",
        help="so many depths, evenly from start to end, or percentages such as 0,50,100, a single "
        "one with its sign (default: 11)",
    )
    needle.add_argument(
        "--needles",
        type=sizes,
        default=[1],
        metavar="N",
        help="in one text, such as 1,2,4,8 (default: 1)",
    )
    needle.add_argument(
        "--ask",
        type=_ask,
        default=1,
        metavar="N",
        help="for how many of them, or `all`: each in a question of its own (default: 1)",
    )
    needle.add_argument(
        "--jointly", action="store_true", help="ask for them in one question; right is a share"
    )
    _add_words(needle)


def _add_multi_hop(kinds: _Commands) -> None:
    hop = kinds.add_parser(
        "multi-hop",
        help="follow chains of facts through a long text",
        description="Chains whose links are hidden all over a text. `retrieval`: the number of one "
        "key is said to be that of another, and so on; right is the exact number at the end. "
        "`variables`: assignments of variables to variables (variable tracking); the score is the "
        "share of the variables with a value that are named.",
    )
    _add_context(hop)
    hop.add_argument(
        "--task",
        choices=("retrieval", "variables", "all"),
        default="all",
        help="kind of chain (default: all)",
    )
    hop.add_argument(
        "--hops", type=_counts, default=[0, 1, 2, 4], metavar="N", help="links (default: 0,1,2,4)"
    )
    hop.add_argument(
        "--chains", type=size, default=3, metavar="N", help="in one text; one is asked for"
    )
    hop.add_argument(
        "--shuffle", action="store_true", help="links in any order (default: as they follow)"
    )
    hop.add_argument(
        "--link", metavar="TEXT", help="a link of your own: {key} has the number of {other}"
    )
    _add_words(hop)


def _add_multi_turn(kinds: _Commands) -> None:
    turn = kinds.add_parser(
        "multi-turn",
        help="several questions over one long text",
        description="Hides several needles and asks for each in turn; questions and the model's "
        "own answers stay in the context. The score is given by turn.",
    )
    _add_context(turn)
    turn.add_argument(
        "--turns", type=size, default=8, metavar="N", help="needles and questions (default: 8)"
    )
    turn.add_argument(
        "--true-answers",
        action="store_true",
        help="keep the true answers in the context instead of the model's",
    )
    _add_words(turn)


def _add_context(parser: argparse.ArgumentParser) -> None:
    """The model, the text to hide things in, and how often and how long."""
    add_model(parser)
    parser.add_argument(
        "files", nargs="+", type=Path, metavar="FILE", help="UTF-8 texts to hide needles in"
    )
    parser.add_argument(
        "--lengths",
        type=sizes,
        metavar="N",
        help="tokens of prompt and answer, such as 4K,32K,1M (default: powers of two from 1K to "
        "the model's context)",
    )
    parser.add_argument(
        "--runs", type=size, default=10, metavar="N", help="texts a cell (default: 10)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of all that is drawn")
    add_place(parser)
    parser.add_argument("--kv-memory", metavar="SIZE", help="for state, such as 512MB or 2GiB")
    parser.add_argument(
        "--max-num-batched-tokens", type=size, metavar="N", help="tokens in one step"
    )
    parser.add_argument(
        "--fast-prefill",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="prompt tokens that need no logits skip the second half",
    )
    _add_report(parser)


def _add_words(parser: argparse.ArgumentParser) -> None:
    """What needles and questions say."""
    words = parser.add_argument_group("words")
    words.add_argument(
        "--template", choices=TEMPLATES, default="magic", help="of needle, question and cue"
    )
    words.add_argument("--needle", metavar="TEXT", help="a needle of your own: {key} and {value}")
    words.add_argument("--question", metavar="TEXT", help="a question of your own: {key}")
    words.add_argument("--cue", metavar="TEXT", help="how the answer begins: {key}")
    words.add_argument(
        "--keys",
        default="cities",
        metavar="KEYS",
        help=f"{', '.join(KEY_LISTS)}, or a file with one a line (default: cities)",
    )
    words.add_argument(
        "--digits", type=size, default=7, metavar="N", help="of a number (default: 7)"
    )
    words.add_argument("--preamble", default="", metavar="TEXT", help="before the text")
    words.add_argument(
        "--chat", action="store_true", help="as a user's message, with the chat template, uncued"
    )
    words.add_argument(
        "--max-tokens",
        type=size,
        metavar="N",
        help="of an answer (default: 16, or 8 more than --digits; in a chat 64; as many times as "
        "answers are asked jointly)",
    )


def _add_report(parser: argparse.ArgumentParser) -> None:
    output = parser.add_argument_group("output")
    output.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="write report.json, report.html and (with matplotlib) report.png there",
    )
    add_json(output)


def _depths(value: str) -> list[float]:
    """Fractions: `11` is so many of them, `0,50,100` and `50%` are percentages."""
    if value.isascii() and value.isdigit() and value.strip("0"):
        count = size(value)
        return [i / (count - 1) for i in range(count)] if count > 1 else [0.5]
    try:
        percent = [float(part.strip().removesuffix("%")) for part in value.split(",")]
    except ValueError:
        percent = [-1.0]
    alone = len(percent) == 1 and "%" not in value  # a number of depths, were it one
    if alone or not all(0 <= depth <= 100 for depth in percent):
        raise argparse.ArgumentTypeError(
            f"{value!r} is neither a number of depths nor percentages from 0 to 100, such as "
            "0,50,100 or 50%"
        )
    return [depth / 100 for depth in percent]


def _ask(value: str) -> int | None:
    """None for all."""
    return None if value == "all" else size(value)


def _counts(value: str) -> list[int]:
    return [whole(part.strip()) for part in value.split(",")]
