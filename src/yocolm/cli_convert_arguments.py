"""The parser of `yocolm convert`. Loads nothing heavy."""

from __future__ import annotations

import argparse
from pathlib import Path

from yocolm.cli_arguments import DTYPES, size, whole

_Commands = argparse._SubParsersAction  # noqa: SLF001  (argparse has no public name for it)


def add_convert(commands: _Commands) -> None:
    parser = commands.add_parser(
        "convert",
        help="authors' checkpoints and GGUF to the native form, a Transformer to a YOCO",
        description="Write a Hugging Face folder: of an authors' checkpoint (params.json + "
        "checkpoint.pth) without loss, of a Llama-style GGUF file, or, with --to yoco, of a YOCO "
        "that starts from the weights of a Llama-style Transformer, to be trained further.",
    )
    parser.add_argument(
        "source",
        metavar="SRC",
        help="folder or .gguf file to read; with --to yoco also a Hugging Face id",
    )
    parser.add_argument("destination", type=Path, metavar="DST", help="folder to write")
    parser.add_argument(
        "--to", choices=("native", "yoco"), default="native", help="form or architecture to write"
    )
    parser.add_argument("--dtype", choices=DTYPES, help="cast the weights (default: as they are)")
    _add_shape(parser.add_argument_group("with --to yoco"))


def _add_shape(group: argparse._ArgumentGroup) -> None:
    """Options named as the fields of YocoShape; absent ones stay unset."""
    group.add_argument(
        "--mixer",
        choices=("gated_retention", "swa"),
        help="of the self-decoder: gated retention (default) or sliding-window attention",
    )
    group.add_argument(
        "--window", type=size, metavar="N", help="tokens that swa sees (default: 1024)"
    )
    group.add_argument(
        "--self-layers",
        type=size,
        metavar="N",
        help="layers that become the self-decoder (default: half of them)",
    )
    group.add_argument(
        "--kv-layer",
        type=_layer,
        metavar="N",
        help="layer, from 0, whose keys and values are shared, or `mean` of the cross-decoder's "
        "(default: the first of the cross-decoder)",
    )
    group.add_argument(
        "--seed", type=whole, metavar="N", help="of gates and decays, which are random (default: 0)"
    )


def _layer(value: str) -> int | str:
    return value if value == "mean" else whole(value)
