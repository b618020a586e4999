"""From the name of a model to the model: a folder, `bundled`, `random:PRESET` or a hub id."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from yocolm.config import (
    Gemma3nConfig,
    Gemma4Config,
    LlamaConfig,
    ModelConfig,
    YocoConfig,
    parse_config,
)
from yocolm.errors import CheckpointError, ConfigError, MissingDependencyError
from yocolm.fields import parse_token_ids, read_json
from yocolm.models.authors import (
    CHECKPOINT_FILE,
    PARAMS_FILE,
    is_authors_folder,
    load_authors_config,
    load_authors_tokenizer,
    load_authors_weights,
)
from yocolm.models.gemma import LookupTable
from yocolm.models.gemma3n import Gemma3n
from yocolm.models.gemma4 import Gemma4
from yocolm.models.layers import Linear, pack_weights
from yocolm.models.llama import Llama
from yocolm.models.loading_line import LoadingLine
from yocolm.models.presets import PRESETS, preset
from yocolm.models.weights import load_weights
from yocolm.models.yoco import Yoco
from yocolm.ops.native.memory import Slabs, empty_huge
from yocolm.tokenizer import TOKENIZER_FILE, JsonTokenizer, Tokenizer

BUNDLED = Path(__file__).resolve().parent.parent / "bundled"
CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
PER_LAYER_TABLES = ("mapped", "resident")
_RANDOM = "random:"
_MODULES: dict[type, Callable[[Any], nn.Module]] = {
    YocoConfig: Yoco,
    LlamaConfig: Llama,
    Gemma3nConfig: Gemma3n,
    Gemma4Config: Gemma4,
}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
}


@dataclass(frozen=True)
class ModelSource:
    """Where a model comes from: a folder in native or authors' form, or a configuration alone."""

    name: str
    kind: Literal["native", "authors", "random"]
    folder: Path | None = None
    random_config: ModelConfig | None = None


def resolve(model: str | Path) -> ModelSource:
    """Finds the model that a name means; downloads it if it is a hub id.

    Raises CheckpointError saying what was tried, ConfigError for an unknown preset.
    """
    name = str(model)
    if not name.strip():
        raise CheckpointError(
            "model is empty: give a folder, a Hugging Face id (OWNER/NAME), 'bundled' or "
            "'random:PRESET'"
        )
    if name == "bundled":
        return _folder_source(name, BUNDLED)
    if name.lower().startswith(_RANDOM):
        return ModelSource(name, "random", random_config=_random_config(name[len(_RANDOM) :]))
    folder = Path(os.path.expanduser(name))
    if folder.is_dir():
        return _folder_source(name, folder)
    if _HUB_ID.fullmatch(name) and not folder.exists():
        return _folder_source(name, _download(name))
    raise CheckpointError(
        f"model {name!r} is neither a folder nor a Hugging Face id (OWNER/NAME); "
        f"'bundled' and 'random:PRESET' work too, with PRESET one of {', '.join(PRESETS)}"
    )


def load_config(model: str | Path | ModelSource) -> ModelConfig:
    """The configuration of a model."""
    source = _source(model)
    if source.random_config is not None:
        return source.random_config
    folder = _folder(source)
    if source.kind == "authors":
        return load_authors_config(folder)
    return _parse_file(folder / CONFIG_FILE)


def build_model(
    config: ModelConfig,
    device: torch.device | str,
    dtype: torch.dtype,
    *,
    allocate_tables: bool = True,
) -> nn.Module:
    """The module of a configuration, allocated on `device` but not initialised.

    Without `allocate_tables`, tables that are only looked up stay on the meta device.
    """
    with torch.device("meta"):
        model = _MODULES[type(config)](config)
    model.to(dtype)
    linears = Slabs()  # apart from what stays, as packing gives these weights back
    for module in model.modules():
        if allocate_tables or not isinstance(module, LookupTable):
            module.to_empty(device=device, recurse=False)
            empty = linears.empty if isinstance(module, Linear) else empty_huge
            for parameter in module.parameters(recurse=False):
                if parameter.is_cpu and parameter.dim() > 1:
                    parameter.data = empty(parameter.shape, dtype)
    return model


def load_model(
    model: str | Path | ModelSource,
    dtype: torch.dtype | str = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    *,
    per_layer_tables: str = "mapped",
    packed: bool = False,
    show_progress: bool = False,
) -> tuple[nn.Module, ModelConfig]:
    """The module with its weights, in evaluation mode, and its configuration.

    Args:
        dtype: a torch dtype, its name, or "auto" for the one that the files were saved in.
        seed: of the random weights of `random:PRESET`; no other model uses it.
        per_layer_tables: "mapped" leaves Gemma's tables of per-layer inputs in their file, in its
            dtype, and reads from there what is looked up (they cannot be trained then);
            "resident" loads them like all other weights.
        packed: for serving only: matrices are kept in the form of the native kernels, where there
            are any, and in no other; they cannot be trained.
        show_progress: on stderr, if that is a terminal.
    """
    if per_layer_tables not in PER_LAYER_TABLES:
        raise ConfigError(
            f"per_layer_tables={per_layer_tables!r} must be one of {', '.join(PER_LAYER_TABLES)}"
        )
    source = _source(model)
    config = load_config(source)
    dtype = parse_dtype(dtype, source)
    mapped = per_layer_tables == "mapped" and source.kind == "native"
    module = build_model(config, device, dtype, allocate_tables=not mapped)
    if source.random_config is not None:
        init = module.init_weights
        assert callable(init)
        init(seed)
    else:
        _load_files(module, source, config, device, dtype, show_progress)
    if packed:
        pack_weights(module)
    return module.eval(), config


def _load_files(
    module: nn.Module,
    source: ModelSource,
    config: ModelConfig,
    device: torch.device | str,
    dtype: torch.dtype,
    show_progress: bool,
) -> None:
    """Fill an allocated module from the files of its folder."""
    folder = _folder(source)
    if source.kind == "authors":
        assert isinstance(config, YocoConfig)
        load_authors_weights(module, folder, config)
        return
    with LoadingLine(source.name, sys.stderr if show_progress else None) as line:
        load_weights(module, folder, config, dtype, device, line)


def load_tokenizer(model: str | Path | ModelSource) -> Tokenizer | None:
    """The tokenizer of a model, or None if it has none (random weights, token-id models).

    Raises CheckpointError if it has more tokens than the model has embeddings.
    """
    source = _source(model)
    if source.folder is None:
        return None
    config = load_config(source)
    if (source.folder / TOKENIZER_FILE).exists():
        fields = {**config.to_hf(), **load_generation_config(source)}
        tokenizer: Tokenizer | None = JsonTokenizer.from_folder(source.folder, fields)
    elif isinstance(config, YocoConfig) and source.kind == "authors":
        tokenizer = load_authors_tokenizer(source.folder, config)
    else:
        tokenizer = None
    if tokenizer is not None and tokenizer.vocab_size > config.vocab_size:
        raise CheckpointError(
            f"the tokenizer in {source.folder} has {tokenizer.vocab_size} tokens, the model only "
            f"{config.vocab_size} embeddings; they do not belong together"
        )
    return tokenizer


def load_generation_config(model: str | Path | ModelSource) -> dict[str, Any]:
    """generation_config.json, or an empty dictionary.

    ``stop_strings``, at which a chat's turn ends, come as a list.
    Raises CheckpointError naming the file if it is damaged, its token ids are no numbers or its
    stop strings no texts.
    """
    source = _source(model)
    path = None if source.folder is None else source.folder / GENERATION_FILE
    if path is None or not path.exists():
        return {}
    fields = read_json(path)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        try:
            parse_token_ids(name, fields.get(name))
        except ConfigError as error:
            raise CheckpointError(f"{path}: {error}, a list of them, or null") from error
    strings = fields.get("stop_strings")
    if strings is not None:
        listed = [strings] if isinstance(strings, str) else strings
        if not isinstance(listed, list) or not all(isinstance(s, str) and s for s in listed):
            raise CheckpointError(
                f"{path}: stop_strings is {strings!r}; it must be a text that is not empty, a list "
                "of them, or null"
            )
        fields["stop_strings"] = listed
    return fields


def eos_token_ids(
    config: ModelConfig, generation: dict[str, Any], tokenizer: Tokenizer | None
) -> tuple[int, ...]:
    """Every id that ends a text: generation_config.json's, or else the configuration's, and the
    tokenizer's."""
    stated = parse_token_ids("eos_token_id", generation.get("eos_token_id", config.eos_token_id))
    ids: list[int] = [stated] if isinstance(stated, int) else list(stated or ())
    if tokenizer is not None:
        ids.extend(tokenizer.eos_token_ids)
    return tuple(dict.fromkeys(ids))


def parse_dtype(dtype: torch.dtype | str, model: str | Path | ModelSource) -> torch.dtype:
    """A dtype by name; "auto" is the one that config.json names.

    Of torch's other dtypes (float16) and where none is named, that is float32; a name that torch
    does not know is a ConfigError, as is a `dtype` that is not supported.
    """
    if isinstance(dtype, torch.dtype):
        if dtype not in DTYPES.values():
            raise ConfigError(f"dtype {dtype} is not supported; allowed: {', '.join(DTYPES)}, auto")
        return dtype
    if dtype == "auto":
        source = _source(model)
        if source.kind != "native":
            return torch.float32
        return _saved_dtype(_folder(source) / CONFIG_FILE)
    if dtype not in DTYPES:
        raise ConfigError(f"dtype {dtype!r} is not supported; allowed: {', '.join(DTYPES)}, auto")
    return DTYPES[dtype]


def _saved_dtype(path: Path) -> torch.dtype:
    """The dtype that a config.json names in either spelling of transformers."""
    fields = read_json(path)
    inner = fields.get("text_config")  # of a multimodal model, which may say it there alone
    fields = {**(inner if isinstance(inner, dict) else {}), **fields}
    given = [name for name in ("dtype", "torch_dtype") if fields.get(name) is not None]
    if not given:
        return torch.float32
    saved = fields[given[0]]
    name = saved.removeprefix("torch.") if isinstance(saved, str) else ""
    if name not in DTYPES and not isinstance(getattr(torch, name, None), torch.dtype):
        raise ConfigError(
            f"{path}: {given[0]} is {saved!r}, which is no dtype of torch; allowed: "
            f"{', '.join(DTYPES)}, float16 (loaded as float32), or null"
        )
    return DTYPES.get(name, torch.float32)


def _parse_file(path: Path) -> ModelConfig:
    try:
        return parse_config(read_json(path))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _source(model: str | Path | ModelSource) -> ModelSource:
    return model if isinstance(model, ModelSource) else resolve(model)


def _folder(source: ModelSource) -> Path:
    assert source.folder is not None
    return source.folder


def _folder_source(name: str, folder: Path) -> ModelSource:
    if (folder / CONFIG_FILE).exists():
        return ModelSource(name, "native", folder)
    if is_authors_folder(folder):
        return ModelSource(name, "authors", folder)
    raise CheckpointError(f"{folder} holds neither {CONFIG_FILE} nor {PARAMS_FILE}: not a model")


def _random_config(what: str) -> ModelConfig:
    path = Path(os.path.expanduser(what))
    if what and path.is_dir():
        path = path / CONFIG_FILE
    if path.suffix == ".json":
        return _parse_file(path)
    return preset(what)


def _download(name: str) -> Path:
    try:
        import huggingface_hub
        from huggingface_hub.errors import (
            HfHubHTTPError,
            HFValidationError,
            LocalEntryNotFoundError,
        )
    except ImportError as error:
        raise MissingDependencyError(
            f"model {name!r} is not a folder here, and fetching it from the Hugging Face hub needs "
            "huggingface_hub: pip install huggingface_hub"
        ) from error
    wanted = ["*.json", "*.jinja", "*.safetensors", "*.tiktoken"]
    try:
        folder = Path(huggingface_hub.snapshot_download(name, allow_patterns=wanted))
        if not (folder / CONFIG_FILE).exists() and is_authors_folder(folder):
            huggingface_hub.snapshot_download(name, allow_patterns=[*wanted, CHECKPOINT_FILE])
    except (HfHubHTTPError, LocalEntryNotFoundError, HFValidationError, OSError) as error:
        raise CheckpointError(
            f"model {name!r} is not a folder here and could not be fetched from the Hugging Face "
            f"hub: {error}. Without network, download it elsewhere and pass the folder"
        ) from error
    return folder
