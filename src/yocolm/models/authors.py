"""The paper authors' checkpoints: `params.json` beside `checkpoint.pth`, a plain state dict.

Facts of their code (github.com/microsoft/unilm, YOCO): half of the layers belong to each decoder,
RoPE is interleaved with inclusive frequencies everywhere, gates are divided by 16, and the
feed-forward's `fc1` goes through the activation while `gate` does not.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from yocolm.config import (
    CrossConfig,
    LlamaConfig,
    RetentionConfig,
    RopeConfig,
    WindowConfig,
    YocoConfig,
)
from yocolm.errors import CheckpointError, ConfigError, MissingDependencyError, writing
from yocolm.fields import Fields, parse_integer, read_json, write_json
from yocolm.models.layouts import weight_layout
from yocolm.models.presets import BOS_ID, CL100K_VOCAB_SIZE, EOS_ID, PAD_ID
from yocolm.models.tensor_files import REMEDY, write_tensors
from yocolm.models.weights import (
    DEFAULT_SHARD_BYTES,
    check_tensors,
    fill_weights,
    write_configs,
)
from yocolm.tokenizer import TOKENIZER_FILE, AuthorsTokenizer, cl100k_to_json, load_cl100k_ranks

PARAMS_FILE = "params.json"
CHECKPOINT_FILE = "checkpoint.pth"
# They state no limit of their own in params.json; RoPE has none.
DEFAULT_CONTEXT = 1_048_576

_REQUIRED = ("dim", "n_layers", "hidden_dim", "n_self_heads", "n_attn_heads", "vocab_size")
_OPTIONAL = ("n_attn_kv_heads", "rope_theta", "norm_eps", "sliding_window", "max_seq_len")
# How their run was set up, not what it computes.
_RUNTIME = ("max_batch_size", "model_parallel_size", "load_checkpoint")

# Hugging Face prefix or part of a name -> theirs, applied in this order.
_RENAMES = (
    ("lm_head.", "output_projection."),
    ("model.embeddings.", "embed_tokens."),
    ("model.norm.", "layer_norm."),
    ("model.shared_kv_builder.kv_norm.", "cross_decoder.kv_layer_norm."),
    ("model.shared_kv_builder.", "cross_decoder."),
    ("model.self_layers.", "self_decoder.layers."),
    ("model.cross_layers.", "cross_decoder.layers."),
    (".attn_norm.", ".mixer_layer_norm."),
    (".mlp_norm.", ".final_layer_norm."),
    (".attn.gk_proj.", ".mixer.gt_proj."),
    (".attn.o_proj.", ".mixer.out_proj."),
    (".attn.", ".mixer."),
    (".mlp.gate_proj.", ".ffn.fc1."),
    (".mlp.up_proj.", ".ffn.gate."),
    (".mlp.down_proj.", ".ffn.fc2."),
)


@dataclass(frozen=True)
class Conversion:
    """What a conversion wrote; `missing_tokenizer` says why there is none in the folder, if so."""

    config: YocoConfig | LlamaConfig
    num_tensors: int
    missing_tokenizer: str | None


def is_authors_folder(folder: Path) -> bool:
    """Whether a folder holds a checkpoint in the authors' form."""
    return (folder / PARAMS_FILE).exists()


def load_authors_config(folder: str | Path) -> YocoConfig:
    """The configuration; reads the checkpoint's header as well, to see if embeddings are tied."""
    folder = Path(folder)
    config = parse_params(read_json(folder / PARAMS_FILE))
    return _with_tying(config, load_state(folder / CHECKPOINT_FILE))


def parse_params(params: Mapping[str, Any]) -> YocoConfig:
    """`params.json` as a configuration.

    Raises ConfigError naming fields that are missing, not known or not numbers.
    """
    if missing := [name for name in _REQUIRED if name not in params]:
        raise ConfigError(f"{PARAMS_FILE} lacks {', '.join(missing)}")
    if unknown := sorted(params.keys() - {*_REQUIRED, *_OPTIONAL, *_RUNTIME}):
        raise ConfigError(
            f"{PARAMS_FILE}: unknown field {', '.join(unknown)} could change what the model "
            f"computes; known fields: {', '.join((*_REQUIRED, *_OPTIONAL, *_RUNTIME))}"
        )
    fields = Fields(PARAMS_FILE, params)
    dim, heads, self_heads, layers, width, vocab = (
        parse_integer(f"{PARAMS_FILE}: {name}", params[name])
        for name in ("dim", "n_attn_heads", "n_self_heads", "n_layers", "hidden_dim", "vocab_size")
    )
    for name, count in (("n_attn_heads", heads), ("n_self_heads", self_heads)):
        if count < 1 or dim % count:
            raise ConfigError(f"{PARAMS_FILE}: {name} {count} does not divide dim {dim}")
    rope = RopeConfig(fields.number("rope_theta", 10000.0), interleaved=True, inclusive=True)
    mixer: RetentionConfig | WindowConfig = RetentionConfig(self_heads, dim // self_heads, rope)
    if window := parse_integer("sliding_window", params.get("sliding_window") or 0):
        mixer = WindowConfig(self_heads, self_heads, dim // self_heads, window, rope)
    context = fields.integer("max_seq_len", 0)
    return YocoConfig(
        vocab_size=vocab,
        hidden_size=dim,
        intermediate_size=width,
        # Their two decoders have n_layers // 2 each, so an odd count loses one.
        num_layers=layers // 2 * 2,
        num_self_layers=layers // 2,
        mixer=mixer,
        cross=CrossConfig(heads, fields.integer("n_attn_kv_heads", 0) or heads, dim // heads, rope),
        norm_eps=fields.number("norm_eps", 1e-5),
        max_position_embeddings=context if context > 0 else DEFAULT_CONTEXT,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
    )


def authors_name(name: str) -> str:
    """The authors' name of a tensor, from the Hugging Face one."""
    for ours, theirs in _RENAMES:
        name = name.replace(ours, theirs)
    return name


def load_state(path: Path) -> dict[str, Tensor]:
    """A plain state dict, memory-mapped where the file allows it, read without running its code.

    Raises CheckpointError if the file is absent, or holds anything but tensors by name.
    """
    if not path.exists():
        raise CheckpointError(f"{path} does not exist")
    try:
        state = _torch_load(path)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} holds more than tensors and could run code when loaded, so it is refused; "
            f"save it again as a plain state dict ({str(error).splitlines()[0]})"
        ) from error
    except (RuntimeError, EOFError, OSError, LookupError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path} is not a readable checkpoint: {error}") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} holds a {type(state).__name__}, not a state dict")
    if strange := [str(name) for name, value in state.items() if not _is_weight(value)]:
        raise CheckpointError(
            f"{path} is not a plain state dict: {', '.join(strange[:8])} is not a tensor of floats"
        )
    return state


def load_authors_weights(model: nn.Module, folder: str | Path, config: YocoConfig) -> None:
    """Fills an allocated model from `checkpoint.pth`; errors as in `weights.fill_weights`."""
    path = Path(folder) / CHECKPOINT_FILE
    state = _renamed(load_state(path), config)
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}

    def copy(name: str, target: Tensor) -> None:
        target.copy_(state[name])

    fill_weights(model, config, shapes, copy, str(path), authors_name)


def load_authors_tokenizer(folder: str | Path, config: YocoConfig) -> AuthorsTokenizer | None:
    """Their tokenizer, or None if the vocabulary is not the one that it belongs to."""
    if config.vocab_size != CL100K_VOCAB_SIZE:
        return None
    return AuthorsTokenizer.from_folder(Path(folder))


def convert(
    src: str | Path,
    dst: str | Path,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> Conversion:
    """Writes an authors' checkpoint as a native folder, tensor by tensor.

    Args:
        dtype: of the written weights; None keeps each tensor as it is, so that nothing is lost.

    The tokenizer becomes a `tokenizer.json`, if the vocabulary is theirs and its ranks can be had.
    Raises CheckpointError as `load_authors_weights` does.
    """
    src, dst = Path(src), Path(dst)
    if not src.is_dir():
        problem = "is not a folder" if src.exists() else "does not exist"
        raise CheckpointError(f"{src} {problem}; give the folder that holds {PARAMS_FILE}")
    if not is_authors_folder(src):
        raise CheckpointError(
            f"{src} has no {PARAMS_FILE}; convert reads the YOCO authors' checkpoints "
            f"({PARAMS_FILE} and {CHECKPOINT_FILE}), anything else loads as it is"
        )
    raw = load_state(src / CHECKPOINT_FILE)
    config = _with_tying(parse_params(read_json(src / PARAMS_FILE)), raw)
    state = _renamed(raw, config)
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    check_tensors(config, shapes, str(src / CHECKPOINT_FILE), authors_name)
    parts = [part for parts in weight_layout(config).values() for part in parts]
    tensors = [(part.name, state[part.name]) for part in parts]
    pieces = [
        (name, _bytes(tensor, dtype), partial(_cast, tensor, dtype)) for name, tensor in tensors
    ]
    with writing(f"a model to {dst}", REMEDY):
        dst.mkdir(parents=True, exist_ok=True)
        write_tensors(dst, pieces, max_shard_bytes)
        write_configs(dst, config, dtype or state["model.embeddings.weight"].dtype)
        missing = _convert_tokenizer(src, dst, config)
    return Conversion(config, len(parts), missing)


def _convert_tokenizer(src: Path, dst: Path, config: YocoConfig) -> str | None:
    if config.vocab_size != CL100K_VOCAB_SIZE:
        return f"vocab_size {config.vocab_size} is not the {CL100K_VOCAB_SIZE} of cl100k_base"
    try:
        ranks = load_cl100k_ranks(src)
    except (CheckpointError, MissingDependencyError) as error:
        return str(error)
    cl100k_to_json(ranks).save(str(dst / TOKENIZER_FILE))
    names = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    fields = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    write_json(dst / "tokenizer_config.json", {**fields, "clean_up_tokenization_spaces": False})
    return None


def _is_weight(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _renamed(state: Mapping[str, Tensor], config: YocoConfig) -> dict[str, Tensor]:
    """Under Hugging Face names; what has none keeps its own, to be reported as surplus."""
    wanted = [part.name for parts in weight_layout(config).values() for part in parts]
    names = {authors_name(name): name for name in [*wanted, "lm_head.weight"]}
    return {names.get(name, name): tensor for name, tensor in state.items()}


def _with_tying(config: YocoConfig, state: Mapping[str, Tensor]) -> YocoConfig:
    """Shared embeddings are not in params.json: the two names then hold the same memory."""
    embeddings, head = state.get("embed_tokens.weight"), state.get("output_projection.weight")
    if embeddings is None or head is None:
        return config
    tied = embeddings.data_ptr() == head.data_ptr() and embeddings.shape == head.shape
    return replace(config, tie_word_embeddings=tied)


def _bytes(tensor: Tensor, dtype: torch.dtype | None) -> int:
    return tensor.numel() * (dtype or tensor.dtype).itemsize


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(dtype or tensor.dtype, copy=True).contiguous()


def _torch_load(path: Path) -> Any:
    with path.open("rb") as file:
        zipped = file.read(4) == b"PK\x03\x04"
    # Files older than the zip format cannot be mapped into memory.
    return torch.load(path, map_location="cpu", mmap=zipped, weights_only=True)
