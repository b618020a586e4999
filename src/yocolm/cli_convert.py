"""`yocolm convert`: authors' checkpoints and GGUF files to folders, Transformers to YOCOs."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch

from yocolm.errors import ConfigError, writing
from yocolm.models.authors import Conversion, convert
from yocolm.models.conversion import YocoShape, convert_to_yoco
from yocolm.models.gguf import SUFFIX, convert_gguf
from yocolm.models.registry import DTYPES
from yocolm.models.tensor_files import REMEDY

_SHAPE = ("mixer", "window", "self_layers", "kv_layer", "seed")


def run(arguments: argparse.Namespace) -> int:
    dtype = None if arguments.dtype is None else DTYPES[arguments.dtype]
    chosen = {name: getattr(arguments, name) for name in _SHAPE}
    chosen = {name: value for name, value in chosen.items() if value is not None}
    source, destination = arguments.source, arguments.destination
    from_gguf = source.lower().endswith(SUFFIX)
    if arguments.to == "yoco":
        if "window" in chosen and chosen.get("mixer") != "swa":
            raise ConfigError("--window is of --mixer swa; gated retention has no window")
        to_yoco = _gguf_to_yoco if from_gguf else convert_to_yoco
        result = to_yoco(source, destination, YocoShape(**chosen), dtype)
    elif chosen:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in chosen)
        raise ConfigError(f"{options} chooses a YOCO's shape; give --to yoco as well")
    elif from_gguf:
        result = convert_gguf(source, destination, dtype)
    else:
        result = convert(source, destination, dtype)
    print(f"wrote {result.num_tensors} tensors to {destination}")
    if result.missing_tokenizer is not None:
        print(f"without a tokenizer: {result.missing_tokenizer}")
    return 0


def _gguf_to_yoco(
    source: str, destination: Path, shape: YocoShape, dtype: torch.dtype | None
) -> Conversion:
    """By a folder that is needed no longer than this takes."""
    parent = destination.absolute().parent
    with writing(f"a model to {destination}", REMEDY):
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=parent, prefix=".gguf-") as folder:
            convert_gguf(source, folder)  # in float32: weights are rounded once, at the end
            return convert_to_yoco(folder, destination, shape, dtype)
