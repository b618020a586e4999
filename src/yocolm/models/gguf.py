"""GGUF files of Llama-style models as Hugging Face folders, read by transformers."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import torch

from yocolm.config import LlamaConfig, parse_config
from yocolm.errors import (
    CheckpointError,
    ConfigError,
    MissingDependencyError,
    YocolmError,
    writing,
)
from yocolm.fields import read_json, write_json
from yocolm.models.authors import Conversion
from yocolm.models.layouts import weight_layout
from yocolm.models.tensor_files import REMEDY, write_tensors
from yocolm.models.weights import (
    DEFAULT_SHARD_BYTES,
    check_tensors,
    drop_text_files,
    write_configs,
)
from yocolm.tokenizer import TOKENIZER_CONFIG_FILE, TOKENIZER_FILE

SUFFIX = ".gguf"
_MAGIC = b"GGUF"


def convert_gguf(src: str | Path, dst: str | Path, dtype: torch.dtype | None = None) -> Conversion:
    """Writes the Llama-style model of a GGUF file as a Hugging Face folder, with its tokenizer.

    Quantised weights become what they stand for; the quantisation's error stays in them.

    Args:
        dtype: of the written weights; None: float32.

    Raises CheckpointError for a file that is no GGUF, ConfigError for other architectures, and
    MissingDependencyError without transformers and what it reads such files with.
    """
    src, dst = Path(src), Path(dst)
    _check_file(src)
    if dst.exists() and not dst.is_dir():
        raise CheckpointError(f"{dst} is a file; give a folder to write")
    config, model, tokenizer = _read(src, dtype or torch.float32)
    state = model.state_dict()  # transformers itself would not save what was quantised
    check_tensors(config, {name: tuple(state[name].shape) for name in state}, str(src))
    names = [part.name for parts in weight_layout(config).values() for part in parts]
    pieces = [(name, state[name].nbytes, state[name].contiguous) for name in names]
    with writing(f"a model to {dst}", REMEDY):
        dst.mkdir(parents=True, exist_ok=True)
        write_tensors(dst, pieces, DEFAULT_SHARD_BYTES)
        write_configs(dst, config, model.dtype)
        drop_text_files(dst)
        tokenizer.save_pretrained(dst)
        _drop_foreign_tokens(dst, config.vocab_size)
    return Conversion(config, len(names), None)


def _read(src: Path, dtype: torch.dtype) -> tuple[LlamaConfig, Any, Any]:
    """The configuration, and transformers' model and tokenizer."""
    try:
        import accelerate  # noqa: F401  (both: transformers needs them for such files)
        import gguf  # noqa: F401
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig
    except ImportError as error:
        raise MissingDependencyError(
            f"reading {src} needs transformers, gguf and accelerate: "
            "pip install transformers gguf accelerate"
        ) from error
    where = {"pretrained_model_name_or_path": str(src.parent), "gguf_file": src.name}
    try:
        fields = json.loads(AutoConfig.from_pretrained(**where).to_json_string(use_diff=False))
        config = _supported(fields, src)  # or refuse before the work
        model = AutoModelForCausalLM.from_pretrained(
            **where, dtype=dtype, quantization_config=GgufConfig(dequantize=True)
        )
        tokenizer = AutoTokenizer.from_pretrained(**where)
    except YocolmError:
        raise
    except (ValueError, LookupError, NotImplementedError, OSError, struct.error) as error:
        raise CheckpointError(f"transformers cannot read {src}: {error}") from error
    return config, model, tokenizer


def _supported(fields: dict[str, Any], path: Path) -> LlamaConfig:
    kind = fields.get("model_type")
    if kind != LlamaConfig.model_type:
        raise ConfigError(f"{path} is of type {kind}; only Llama-style GGUF files are read")
    config = parse_config(fields)
    assert isinstance(config, LlamaConfig)
    return config


def _drop_foreign_tokens(folder: Path, vocab_size: int) -> None:
    """Special tokens that the file has not, but transformers' tokenizer classes add of their own.

    The model has no embeddings for them.
    """
    tokens = read_json(folder / TOKENIZER_FILE)
    added = tokens.get("added_tokens", [])
    foreign = [token["content"] for token in added if token["id"] >= vocab_size]
    if not foreign:
        return
    tokens["added_tokens"] = [token for token in added if token["content"] not in foreign]
    write_json(folder / TOKENIZER_FILE, tokens)
    fields = read_json(folder / TOKENIZER_CONFIG_FILE)
    kept = {name: value for name, value in fields.items() if value not in foreign}
    write_json(folder / TOKENIZER_CONFIG_FILE, kept)


def _check_file(path: Path) -> None:
    if not path.is_file():
        problem = "is not a file" if path.exists() else "does not exist"
        raise CheckpointError(f"{path} {problem}; give a {SUFFIX} file")
    with path.open("rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise CheckpointError(f"{path} is not a GGUF file: it does not begin with 'GGUF'")
