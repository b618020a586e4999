"""Which settings a training may not change on the way, kept in its checkpoints."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from yocolm.config import ModelConfig
from yocolm.errors import ConfigError
from yocolm.train.data import Sampler
from yocolm.train.settings import TrainSettings

# Keys of ``train`` that leave every update as it is. ``steps`` is here so that a run can be made
# longer or shorter; it stretches the schedule of the steps to come.
FREE = frozenset(
    "steps log_every validate_every validation_tokens save_every keep tensorboard wandb "
    "peak_flops device gradient_checkpointing".split()
)


def fingerprint(
    s: TrainSettings, config: ModelConfig, tokenizer: Tokenizer, sampler: Sampler
) -> dict[str, Any]:
    """Everything that decides the updates, under the names of the settings, as plain values."""
    found: dict[str, Any] = {
        "seed": s.seed,
        "model": _model_name(s),
        "tokenizer": hashlib.sha256(tokenizer.to_str().encode()).hexdigest()[:16],
        "tokenizer.separator": s.tokenizer.separator,
        "data.sequence_length": s.data.sequence_length,
        "data.text_field": s.data.text_field,
        "data.document_boundaries": s.data.document_boundaries,
        "data.validation_split": s.data.validation_split,  # the rest is trained on
        "data.sources": ", ".join(source.name for source in sampler.sources),  # order counts
    }
    if sampler.bos is not None:
        found["tokenizer.bos"] = sampler.bos
    for source in sampler.sources:
        found[f"data.sources.{source.name}.weight"] = source.weight
        found[f"data.sources.{source.name}.files"] = f"text {source.digest}"
        if source.whole_documents:
            found[f"data.sources.{source.name}.whole_documents"] = True
    found |= {f"train.{k}": v for k, v in asdict(s.train).items() if k not in FREE}
    if s.distill is not None:
        found |= {f"distill.{k}": v for k, v in asdict(s.distill).items()}
    found |= dict(flat("model", config.to_hf()))
    return found


def _model_name(s: TrainSettings) -> str:
    """A folder beside the run's is told from there, so that both may be moved together."""
    if not isinstance(s.model, str):
        return "by its fields"
    model, around = Path(s.model).absolute(), Path(s.output_dir).absolute().parent
    if s.continues and model.is_dir() and around in model.parents:
        return os.path.relpath(model, s.output_dir)
    return s.model


def flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The leaves of nested mappings, each under the path of its keys."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from flat(f"{name}.{key}", inner)
    else:
        yield name, value


def check_fingerprint(saved: Mapping[str, Any], current: Mapping[str, Any], folder: Path) -> None:
    """Raise ConfigError, naming every setting that differs, unless a run may continue."""
    changes = [
        f"{name} was {_shown(saved, name)}, is {_shown(current, name)}"
        for name in dict.fromkeys((*current, *saved))
        if saved.get(name) != current.get(name)
    ]
    if changes:
        raise ConfigError(
            f"the checkpoints in {folder} are of a training with other settings: "
            f"{'; '.join(changes)}. Set them back to go on with it, or give another output_dir"
        )


def _shown(values: Mapping[str, Any], name: str) -> str:
    return repr(values[name]) if name in values else "not set"
