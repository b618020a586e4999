"""The training configuration: a YAML file, checked key by key. No torch here.

docs/training.md describes every key; a test keeps the page and these classes in step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from yocolm.errors import ConfigError


@dataclass(frozen=True)
class SourceSettings:
    """A source of text: glob patterns of ``.txt`` or ``.jsonl`` files, its share of the draws."""

    files: list[str]
    weight: float = 1.0


@dataclass(frozen=True)
class TokenizerSettings:
    """``path`` of a ``tokenizer.json``; if there is none yet, one is trained and written there."""

    path: str | None = None  # None: the one of the model to continue from
    vocab_size: int = 4096  # of a tokenizer to train
    train_on: list[str] = field(default_factory=list)  # names of sources; empty means all
    separator: str = "<|endoftext|>"  # the token before every document


@dataclass(frozen=True)
class DataSettings:
    """Weighted sources and the validation text."""

    sources: dict[str, SourceSettings]
    validation: list[str]
    sequence_length: int = 2048
    text_field: str = "text"  # of jsonl records


@dataclass(frozen=True)
class OptimSettings:
    """Optimiser, schedule and loop."""

    steps: int
    batch_size: int = 4  # sequences a micro-batch
    accumulate: int = 1  # micro-batches a step
    optimizer: str = "adamw"  # or "muon": hidden matrices by Muon, the rest by AdamW
    learning_rate: float = 1e-3
    matrix_learning_rate: float | None = None  # Muon's; None: the same as learning_rate
    warmup_steps: int = 100
    schedule: str = "cosine"  # or "linear", "constant", "wsd"
    decay_fraction: float = 0.2  # of the steps after warmup, for "wsd"
    final_ratio: float = 0.1  # last learning rate over the highest
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    grad_clip: float = 1.0
    dtype: str = "bfloat16"  # of the products; parameters and optimiser state are float32
    gradient_checkpointing: bool = False
    retention_chunk_size: int = 128
    log_every: int = 10
    validate_every: int = 200
    validation_tokens: int = 65536
    save_every: int = 200
    keep: int = 2  # checkpoints kept
    tensorboard: bool = False
    device: str = "auto"  # or "cpu", "cuda"; auto is CUDA where there is one


@dataclass(frozen=True)
class TrainSettings:
    """A whole training run."""

    output_dir: str
    model: str | dict[str, Any]  # the fields of a config.json, ``random:PRESET``, or a model
    data: DataSettings
    train: OptimSettings
    tokenizer: TokenizerSettings = field(default_factory=TokenizerSettings)
    seed: int = 0
    export_dtype: str = "bfloat16"

    @property
    def continues(self) -> bool:
        """Whether training starts from the weights of another model."""
        return isinstance(self.model, str) and not self.model.lower().startswith("random:")


def _expect(value: Any, kind: type | tuple[type, ...], where: str) -> Any:
    if kind is Mapping and not isinstance(value, Mapping):
        names = {list: "a list", type(None): "nothing"}
        found = names.get(type(value), repr(value))
        raise ConfigError(f"{where} must hold keys and values (a mapping), not {found}")
    wrong_bool = isinstance(value, bool) and kind is not bool
    if wrong_bool or not isinstance(value, kind):
        names = kind if isinstance(kind, tuple) else (kind,)
        expected = " or ".join(k.__name__ for k in names)
        raise ConfigError(f"{where} is {value!r}; it must be of type {expected}")
    return value


def _build(cls: type, values: Any, where: str, prefix: str) -> Any:
    """Build a settings dataclass from a mapping, naming every unknown or missing key."""
    _expect(values, Mapping, where)
    known = {f.name: f for f in fields(cls)}
    unknown = sorted(map(str, set(values) - set(known)))
    if unknown:
        raise ConfigError(f"{where}: unknown key {unknown[0]!r}; known are {', '.join(known)}")
    for name, f in known.items():
        required = f.default is MISSING and f.default_factory is MISSING
        if required and name not in values:
            raise ConfigError(f"{where}: the key {name!r} is missing")
    return cls(
        **{name: _coerce(known[name].type, v, f"{prefix}{name}") for name, v in values.items()}
    )


def _sources(value: Any, where: str) -> dict[str, SourceSettings]:
    _expect(value, Mapping, where)
    return {
        str(name): _build(SourceSettings, source, f"{where}.{name}", f"{where}.{name}.")
        for name, source in value.items()
    }


_SECTIONS: dict[str, type] = {
    "TokenizerSettings": TokenizerSettings,
    "DataSettings": DataSettings,
    "OptimSettings": OptimSettings,
}
_KINDS: dict[str, type | tuple[type, ...]] = {
    "int": int,
    "str": str,
    "bool": bool,
    "str | dict[str, Any]": (str, dict),
}


def _coerce(annotation: Any, value: Any, where: str) -> Any:
    """A value of a YAML file as a field wants it, by the field's annotation."""
    if annotation in _SECTIONS:
        return _build(_SECTIONS[annotation], value, where, f"{where}.")
    if annotation == "dict[str, SourceSettings]":
        return _sources(value, where)
    if annotation.endswith(" | None"):
        return None if value is None else _coerce(annotation[: -len(" | None")], value, where)
    if annotation == "float":
        return _number(value, where)
    if annotation == "list[str]":
        _expect(value, list, where)
        if not all(isinstance(item, str) for item in value):
            raise ConfigError(f"{where} is {value!r}; it must be a list of strings")
        return value
    return _expect(value, _KINDS[annotation], where)


def _number(value: Any, where: str) -> float:
    _expect(value, (int, float, str), where)
    try:  # YAML 1.1 reads 1e-3 as a string
        number = float(value)
    except ValueError:
        raise ConfigError(f"{where} is {value!r}; it must be a number") from None
    if not math.isfinite(number):
        raise ConfigError(f"{where} is {value!r}; it must be a finite number")
    return number


def _check_choices(s: TrainSettings) -> None:
    o = s.train
    choices = {
        "train.optimizer": (o.optimizer, ("adamw", "muon")),
        "train.schedule": (o.schedule, ("cosine", "linear", "constant", "wsd")),
        "train.dtype": (o.dtype, ("float32", "bfloat16")),
        "train.device": (o.device, ("auto", "cpu", "cuda")),
        "export_dtype": (s.export_dtype, ("float32", "bfloat16")),
    }
    for name, (value, allowed) in choices.items():
        if value not in allowed:
            raise ConfigError(f"{name} is {value!r}; it must be one of {', '.join(allowed)}")


def _check_ranges(s: TrainSettings) -> None:
    o = s.train
    positive = (
        "steps batch_size accumulate learning_rate matrix_learning_rate eps grad_clip "
        "decay_fraction retention_chunk_size log_every validate_every validation_tokens "
        "save_every keep"
    ).split()
    values = {f"train.{name}": getattr(o, name) for name in positive}
    values["data.sequence_length"] = s.data.sequence_length
    for name, source in s.data.sources.items():
        values[f"data.sources.{name}.weight"] = source.weight
    checks = [(name, v, "above 0", v is None or v > 0) for name, v in values.items()]
    size = s.tokenizer.vocab_size  # 256 bytes and the separator come first
    checks.append(("tokenizer.vocab_size", size, "at least 257", size >= 257))
    for name in ("warmup_steps", "weight_decay"):
        value = getattr(o, name)
        checks.append((f"train.{name}", value, "at least 0", value >= 0))
    for name in ("beta1", "beta2"):
        value = getattr(o, name)
        checks.append((f"train.{name}", value, "at least 0 and below 1", 0 <= value < 1))
    checks += [
        ("train.final_ratio", o.final_ratio, "from 0 to 1", 0 <= o.final_ratio <= 1),
        ("train.decay_fraction", o.decay_fraction, "at most 1", o.decay_fraction <= 1),
        ("seed", s.seed, "at least 0", s.seed >= 0),
    ]
    for name, value, bounds, holds in checks:
        if not holds:
            raise ConfigError(f"{name} is {value}; it must be {bounds}")


def _check_data(s: TrainSettings) -> None:
    if not s.data.sources:
        raise ConfigError("data.sources is empty; give at least one source")
    for name, source in s.data.sources.items():
        if not source.files:
            raise ConfigError(f"data.sources.{name}.files is empty; give at least one file")
    if not s.data.validation:
        raise ConfigError("data.validation is empty; give at least one file")
    for name in s.tokenizer.train_on:
        if name not in s.data.sources:
            raise ConfigError(f"tokenizer.train_on names {name!r}, which is not in data.sources")
    if s.tokenizer.path is None and not s.continues:
        raise ConfigError(
            "tokenizer.path is missing; name a tokenizer.json, to be trained if it does not exist"
        )


def parse_settings(values: Any) -> TrainSettings:
    """Build settings from a YAML file's mapping. Raises ConfigError naming the key at fault."""
    settings = _build(TrainSettings, values, "the configuration", "")
    for check in (_check_choices, _check_ranges, _check_data):
        check(settings)
    return settings


def load_settings(path: str | Path, overrides: list[str] | None = None) -> TrainSettings:
    """Read a YAML file; ``overrides`` are ``section.key=value`` strings, values in YAML."""
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 at byte {error.start}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from None
    _expect(values, Mapping, str(path))
    for override in overrides or []:
        _override(values, override)
    return parse_settings(values)


def _override(values: Any, override: str) -> None:
    """Set one key of nested mappings, opening sections that are not there."""
    key, equals, text = override.partition("=")
    if not equals:
        raise ConfigError(f"override {override!r} has no '='; write section.key=value")
    *parents, last = key.split(".")
    for depth, parent in enumerate(parents, 1):
        values = values.setdefault(parent, {})
        if not isinstance(values, dict):
            above = ".".join(parents[:depth])
            raise ConfigError(f"override {override!r}: {above!r} is {values!r}, not a section")
    try:
        values[last] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(
            f"override {override!r} has a value that is not valid YAML: {error}"
        ) from None
