"""From settings to the device, the tokenizer and the model that a training starts with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryFile

import torch
from tokenizers import Tokenizer
from torch import nn

from yocolm.chat import CONFIG_FILES, TEMPLATE_FILE, TEMPLATE_FOLDERS
from yocolm.config import GemmaConfig, ModelConfig, parse_config
from yocolm.errors import ConfigError, writing
from yocolm.models.registry import ModelSource, build_model, load_config, load_model, resolve
from yocolm.tokenizer import SPECIAL_TOKENS_FILE, TOKENIZER_FILE, read_tokenizer
from yocolm.train.context import with_context
from yocolm.train.data_files import training_documents
from yocolm.train.distributed import Ranks
from yocolm.train.settings import TrainSettings
from yocolm.train.tokenizer import train_tokenizer


def prepare_device(s: TrainSettings, ranks: Ranks) -> torch.device:
    """The device to train on: of several ranks each has its own GPU.

    Raises ConfigError for a GPU that is not there.
    """
    available = torch.cuda.is_available()
    if s.train.device == "cuda" and not available:
        raise ConfigError("train.device is 'cuda', but there is no CUDA device; set auto or cpu")
    if not available or s.train.device == "cpu":
        return torch.device("cpu")
    if ranks.size == 1:
        return torch.device("cuda")
    if ranks.local >= torch.cuda.device_count():
        raise ConfigError(
            f"local rank {ranks.local} has no GPU: there are {torch.cuda.device_count()} here; "
            "start one process for each (torchrun --nproc-per-node), or set train.device to cpu"
        )
    return torch.device("cuda", ranks.local)


def prepare_folders(s: TrainSettings) -> None:
    """Make the folders that a training writes to.

    Raises ConfigError, naming the setting, for one that cannot be made or written to.
    """
    for name, folder in (("output_dir", s.output_dir), ("data.cache_dir", s.data.cache_dir)):
        if folder is None:
            continue
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"{name} is {folder!r}, which cannot be made: {error.strerror}; name a folder "
                "that may be written to"
            ) from None
        remedy = f"name a folder that may be written to as {name}"
        with writing(f"to {name} {folder!r}", remedy, ConfigError), TemporaryFile(dir=folder):
            pass


def prepare_tokenizer(s: TrainSettings) -> Tokenizer:
    """Load the tokenizer that the settings name, or train it on their sources and write it there.

    A model to continue from is used with its own tokenizer, whatever the path says.
    """
    own = _own_tokenizer(s)
    if s.tokenizer.path is None:
        if own is None:
            raise ConfigError(
                f"model {s.model!r} has no {TOKENIZER_FILE}; name the one that it was trained "
                "with as tokenizer.path"
            )
        return read_tokenizer(own)
    path = Path(s.tokenizer.path)
    if path.is_dir():
        path = path / TOKENIZER_FILE
    if path.exists():
        tokenizer = read_tokenizer(path)
        if own is not None and read_tokenizer(own).get_vocab() != tokenizer.get_vocab():
            raise ConfigError(
                f"tokenizer.path {s.tokenizer.path} has another vocabulary than {own}, with which "
                f"model {s.model!r} was trained; leave tokenizer.path out"
            )
        return tokenizer
    if s.continues:
        raise ConfigError(
            f"tokenizer.path {s.tokenizer.path} does not exist, and a new tokenizer would not fit "
            f"model {s.model!r}; leave tokenizer.path out to use the model's own"
        )
    texts = training_documents(s, s.tokenizer.train_on)
    return train_tokenizer(texts, s.tokenizer.vocab_size, path, s.tokenizer.separator)


def _own_tokenizer(s: TrainSettings) -> Path | None:
    """The tokenizer.json of the model to continue from, if there is one."""
    folder = resolve(str(s.model)).folder if s.continues else None
    path = None if folder is None else folder / TOKENIZER_FILE
    return path if path is not None and path.exists() else None


def inherited_files(s: TrainSettings) -> dict[str, bytes]:
    """What tells how to use the tokenizer of the model to continue from, by path in its folder.

    Its BOS and other special tokens, and chat templates. Empty if it has no tokenizer of its own.
    """
    own = _own_tokenizer(s)
    if own is None:
        return {}
    paths = [own.parent / name for name in (*CONFIG_FILES, SPECIAL_TOKENS_FILE, TEMPLATE_FILE)]
    for folder in TEMPLATE_FOLDERS:
        paths += sorted((own.parent / folder).glob("*.jinja"))
    return {str(p.relative_to(own.parent)): p.read_bytes() for p in paths if p.is_file()}


def prepare_model(s: TrainSettings, tokenizer: Tokenizer) -> tuple[nn.Module, ModelConfig]:
    """The model in float32 on the CPU, so that its first weights depend on the seed alone.

    From fields or a preset: seeded weights, and a vocabulary and context that follow tokenizer and
    data. From another model: its weights; its context grows with ``sequence_length``.
    """
    if s.continues:
        model, config = load_model(
            str(s.model), dtype=torch.float32, device="cpu", per_layer_tables="resident"
        )
        config = with_context(config, s.data.sequence_length, s.rope_theta)
        model.config = config  # type: ignore[assignment]
    else:
        config = with_context(_new_config(s, tokenizer), s.data.sequence_length, s.rope_theta)
        model = build_model(config, device="cpu", dtype=torch.float32)
        init = model.init_weights
        assert callable(init)
        init(s.seed)
    size = _vocab_size(tokenizer)
    if config.vocab_size < size:
        raise ConfigError(
            f"the model's vocabulary has {config.vocab_size} tokens, the tokenizer {size}; "
            "they do not belong together"
        )
    return model.train(), config


def _new_config(s: TrainSettings, tokenizer: Tokenizer) -> ModelConfig:
    size, length = _vocab_size(tokenizer), s.data.sequence_length
    end = tokenizer.token_to_id(s.tokenizer.separator)
    if isinstance(s.model, str):
        source: ModelSource = resolve(s.model)
        config = replace(
            load_config(source),
            vocab_size=size,
            max_position_embeddings=length,
            bos_token_id=end,
            eos_token_id=end,
            pad_token_id=None,
        )
        return _fit_tables(config)
    fields = {
        "vocab_size": size,
        "max_position_embeddings": length,
        "bos_token_id": end,
        "eos_token_id": end,
        "pad_token_id": None,
    }
    config = parse_config({**fields, **s.model})
    return config if "vocab_size_per_layer_input" in s.model else _fit_tables(config)


def _fit_tables(config: ModelConfig) -> ModelConfig:
    """For a vocabulary of its own: per-layer inputs of every token, none that stands for media."""
    if not isinstance(config, GemmaConfig):
        return config
    return replace(config, per_layer_vocab_size=config.vocab_size, media_token_ids=())


def _vocab_size(tokenizer: Tokenizer) -> int:
    """One above the largest id; there may be holes below."""
    return max(tokenizer.get_vocab().values()) + 1
