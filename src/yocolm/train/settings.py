"""The training configuration: a YAML file, checked key by key. No torch here.

docs/training.md describes every key; a test keeps the page and these classes in step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from yocolm.errors import ConfigError
from yocolm.train.checks import check_settings
from yocolm.train.parsing import build, expect, override


@dataclass(frozen=True)
class SourceSettings:
    """A source of text: glob patterns of ``.txt`` or ``.jsonl`` files, its share of the draws."""

    files: list[str]
    weight: float = 1.0
    whole_documents: bool = False  # True: every window begins with a document


@dataclass(frozen=True)
class TokenizerSettings:
    """``path`` of a ``tokenizer.json``; if there is none yet, one is trained and written there."""

    path: str | None = None  # None: the one of the model to continue from
    vocab_size: int = 4096  # of a tokenizer to train
    train_on: list[str] = field(default_factory=list)  # names of sources; empty means all
    separator: str = "<|endoftext|>"  # the token before every document


@dataclass(frozen=True)
class DataSettings:
    """Weighted sources, or a folder in the layout of YOCO's authors, and the validation text."""

    sources: dict[str, SourceSettings] = field(default_factory=dict)
    folder: str | None = None
    weights: dict[str, float] | None = None  # by name, in place of those above
    validation: list[str] = field(default_factory=list)
    validation_split: float = 0.0  # share of the documents that is held out
    document_boundaries: bool = False  # True: nothing passes from one document to the next
    cache_dir: str | None = None  # None: ``cache`` in output_dir
    sequence_length: int = 2048
    text_field: str = "text"  # of jsonl records


@dataclass(frozen=True)
class OptimSettings:
    """Optimiser, schedule and loop."""

    steps: int | None = None  # None: the stages say
    batch_size: int = 4  # sequences a micro-batch
    accumulate: int = 1  # micro-batches a step
    optimizer: str = "adamw"  # or "muon": hidden matrices by Muon, the rest by AdamW
    learning_rate: float = 1e-3
    matrix_learning_rate: float | None = None  # Muon's; None: the same as learning_rate
    warmup_steps: int = 100
    schedule: str = "cosine"  # or another of checks.SCHEDULES
    power: float = 1.0  # of "polynomial"
    decay_fraction: float = 0.2  # of the steps after warmup, for "wsd"
    final_ratio: float = 0.1  # what the learning rate falls towards, over the highest
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
    wandb: str | None = None  # project of Weights & Biases
    peak_flops: float | None = None  # FLOP/s of one device; None: by the name of the GPU
    device: str = "auto"  # or "cpu", "cuda"; auto is CUDA where there is one

    @property
    def last_step(self) -> int:
        """``steps`` of a run of one stage."""
        assert self.steps is not None, "a list of stages has no steps of its own"
        return self.steps


@dataclass(frozen=True)
class ParallelSettings:
    """How ranks that torchrun starts share a training."""

    strategy: str = "auto"  # or "ddp", "fsdp"; auto is ddp
    shard_size: int | None = None  # ranks that share one copy of the model under fsdp; None: all


@dataclass(frozen=True)
class StageSettings:
    """One of the stages in which the context is extended; None: as ``train`` and ``data`` say."""

    sequence_length: int
    tokens: int
    rope_theta: float | None = None  # None: as before
    batch_size: int | None = None
    accumulate: int | None = None
    learning_rate: float | None = None
    matrix_learning_rate: float | None = None
    warmup_steps: int | None = None
    schedule: str | None = None
    decay_fraction: float | None = None
    final_ratio: float | None = None
    weights: dict[str, float] | None = None  # of sources; those not named keep theirs


@dataclass(frozen=True)
class DistillSettings:
    """A teacher whose distribution of the next token is learned, beside the text or instead."""

    teacher: str
    weight: float = 1.0  # share of the divergence in the loss; the rest is cross-entropy
    temperature: float = 1.0
    hidden_weight: float = 0.0


@dataclass(frozen=True)
class TrainSettings:
    """A whole training run."""

    output_dir: str
    model: str | dict[str, Any]  # the fields of a config.json, ``random:PRESET``, or a model
    data: DataSettings
    train: OptimSettings
    tokenizer: TokenizerSettings = field(default_factory=TokenizerSettings)
    parallel: ParallelSettings = field(default_factory=ParallelSettings)
    stages: list[StageSettings] = field(default_factory=list)
    distill: DistillSettings | None = None
    rope_theta: float | None = None  # base of the rotary embedding; None: the model's
    seed: int = 0
    export_dtype: str = "bfloat16"

    @property
    def continues(self) -> bool:
        """Whether training starts from the weights of another model."""
        return isinstance(self.model, str) and not self.model.lower().startswith("random:")


def parse_settings(values: Any) -> TrainSettings:
    """Build settings from a YAML file's mapping. Raises ConfigError naming the key at fault."""
    settings = build(TrainSettings, values, "the configuration", "")
    check_settings(settings)
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
    expect(values, Mapping, str(path))
    for text in overrides or []:
        override(values, text)
    return parse_settings(values)
