"""The training configuration: a YAML file, checked key by key. No torch here."""

from __future__ import annotations

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

    path: str
    vocab_size: int = 4096
    train_on: list[str] = field(default_factory=list)  # names of sources; empty means all


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
    decay_fraction: float = 0.2  # of all steps, for "wsd"
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


@dataclass(frozen=True)
class TrainSettings:
    """A whole training run."""

    output_dir: str
    model: str | dict[str, Any]  # folder, preset (``random:NAME``) or the fields of a config.json
    tokenizer: TokenizerSettings
    data: DataSettings
    train: OptimSettings
    seed: int = 0
    export_dtype: str = "bfloat16"


def _expect(value: Any, kind: type | tuple[type, ...], where: str) -> Any:
    wrong_bool = isinstance(value, bool) and kind is not bool
    if wrong_bool or not isinstance(value, kind):
        names = kind if isinstance(kind, tuple) else (kind,)
        expected = " or ".join(k.__name__ for k in names)
        raise ConfigError(f"{where} is {value!r}; it must be of type {expected}")
    return value


def _build(cls: type, values: Any, where: str) -> Any:
    """Build a flat settings dataclass from a mapping, naming every unknown or missing key."""
    _expect(values, Mapping, where)
    known = {f.name: f for f in fields(cls)}
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise ConfigError(f"{where}: unknown key {unknown[0]!r}; known are {', '.join(known)}")
    for name, f in known.items():
        required = f.default is MISSING and f.default_factory is MISSING
        if required and name not in values:
            raise ConfigError(f"{where}: the key {name!r} is missing")
    return cls(
        **{name: _coerce(known[name].type, v, f"{where}.{name}") for name, v in values.items()}
    )


def _coerce(annotation: Any, value: Any, where: str) -> Any:
    kinds: dict[str, type | tuple[type, ...]] = {
        "int": int,
        "str": str,
        "bool": bool,
        "list[str]": list,
    }
    if annotation in ("float", "float | None"):
        if value is None and annotation != "float":
            return None
        try:  # YAML 1.1 reads 1e-3 as a string
            return float(_expect(value, (int, float, str), where))
        except ValueError:
            raise ConfigError(f"{where} is {value!r}; it must be a number") from None
    if annotation in kinds:
        return _expect(value, kinds[annotation], where)
    return value


def _check(s: TrainSettings) -> None:
    o = s.train
    choices = {
        "train.optimizer": (o.optimizer, ("adamw", "muon")),
        "train.schedule": (o.schedule, ("cosine", "linear", "constant", "wsd")),
        "train.dtype": (o.dtype, ("float32", "bfloat16")),
        "export_dtype": (s.export_dtype, ("float32", "bfloat16")),
    }
    for name, (value, allowed) in choices.items():
        if value not in allowed:
            raise ConfigError(f"{name} is {value!r}; it must be one of {', '.join(allowed)}")
    positive = {
        "train.steps": o.steps,
        "train.batch_size": o.batch_size,
        "train.accumulate": o.accumulate,
        "train.log_every": o.log_every,
        "train.validate_every": o.validate_every,
        "train.save_every": o.save_every,
        "train.keep": o.keep,
        "train.learning_rate": o.learning_rate,
        "train.retention_chunk_size": o.retention_chunk_size,
        "data.sequence_length": s.data.sequence_length,
    }
    for name, value in positive.items():
        if value <= 0:
            raise ConfigError(f"{name} is {value}; it must be above 0")
    if not s.data.sources:
        raise ConfigError("data.sources is empty; give at least one source")
    for name, source in s.data.sources.items():
        if source.weight <= 0:
            raise ConfigError(f"data.sources.{name}.weight is {source.weight}; it must be above 0")
    for name in s.tokenizer.train_on:
        if name not in s.data.sources:
            raise ConfigError(f"tokenizer.train_on names {name!r}, which is not in data.sources")


def parse_settings(values: Any) -> TrainSettings:
    """Build settings from a YAML file's mapping. Raises ConfigError naming the key at fault."""
    _expect(values, Mapping, "the configuration")
    values = dict(values)
    _expect(values.get("model"), (str, dict), "model")
    if "tokenizer" in values:
        values["tokenizer"] = _build(TokenizerSettings, values["tokenizer"], "tokenizer")
    if "train" in values:
        values["train"] = _build(OptimSettings, values["train"], "train")
    if "data" in values:
        data = dict(_expect(values["data"], Mapping, "data"))
        sources = _expect(data.get("sources"), Mapping, "data.sources")
        data["sources"] = {
            name: _build(SourceSettings, source, f"data.sources.{name}")
            for name, source in sources.items()
        }
        values["data"] = _build(DataSettings, data, "data")
    settings = _build(TrainSettings, values, "the configuration")
    _check(settings)
    return settings


def load_settings(path: str | Path, overrides: list[str] | None = None) -> TrainSettings:
    """Read a YAML file; ``overrides`` are ``section.key=value`` strings, values in YAML."""
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from None
    for override in overrides or []:
        key, equals, text = override.partition("=")
        if not equals:
            raise ConfigError(f"override {override!r} has no '='; write section.key=value")
        *parents, last = key.split(".")
        target = values
        for parent in parents:
            target = _expect(target, dict, key).setdefault(parent, {})
        _expect(target, dict, key)[last] = yaml.safe_load(text)
    return parse_settings(values)
