"""Which values the settings of a training may have. No torch here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from yocolm.errors import ConfigError

if TYPE_CHECKING:
    from yocolm.train.settings import TrainSettings

SCHEDULES = ("cosine", "linear", "polynomial", "constant", "wsd")
_Check = tuple[str, Any, str, bool]  # name of a setting, its value, its bounds, whether they hold


def check_settings(s: TrainSettings) -> None:
    """Raise ConfigError, naming the setting, its value and what is allowed."""
    _check_choices(s)
    for part in (_train_ranges, _data_ranges, _stage_ranges, _other_ranges):
        for name, value, bounds, holds in part(s):
            if not holds:
                raise ConfigError(f"{name} is {value}; it must be {bounds}")
    for check in (_check_data, _check_weights, _check_length):
        check(s)


def _check_choices(s: TrainSettings) -> None:
    o = s.train
    choices = {
        "train.optimizer": (o.optimizer, ("adamw", "muon")),
        "train.schedule": (o.schedule, SCHEDULES),
        "train.dtype": (o.dtype, ("float32", "bfloat16")),
        "train.device": (o.device, ("auto", "cpu", "cuda")),
        "export_dtype": (s.export_dtype, ("float32", "bfloat16")),
        "parallel.strategy": (s.parallel.strategy, ("auto", "ddp", "fsdp")),
    }
    for i, stage in enumerate(s.stages):
        if stage.schedule is not None:
            choices[f"stages.{i}.schedule"] = (stage.schedule, SCHEDULES)
    for name, (value, allowed) in choices.items():
        if value not in allowed:
            raise ConfigError(f"{name} is {value!r}; it must be one of {', '.join(allowed)}")


def _above_0(name: str, value: Any) -> _Check:
    return name, value, "above 0", value is None or value > 0


def _at_least_0(name: str, value: Any) -> _Check:
    return name, value, "at least 0", value is None or value >= 0


def _decay(where: str, fraction: float | None, ratio: float | None) -> Iterator[_Check]:
    yield f"{where}.final_ratio", ratio, "from 0 to 1", ratio is None or 0 <= ratio <= 1
    yield f"{where}.decay_fraction", fraction, "at most 1", fraction is None or fraction <= 1


def _train_ranges(s: TrainSettings) -> Iterator[_Check]:
    o = s.train
    positive = (
        "steps batch_size accumulate learning_rate matrix_learning_rate eps grad_clip power "
        "decay_fraction retention_chunk_size log_every validate_every validation_tokens "
        "save_every keep peak_flops"
    ).split()
    for name in positive:
        yield _above_0(f"train.{name}", getattr(o, name))
    for name in ("warmup_steps", "weight_decay"):
        yield _at_least_0(f"train.{name}", getattr(o, name))
    for name in ("beta1", "beta2"):
        value = getattr(o, name)
        yield f"train.{name}", value, "at least 0 and below 1", 0 <= value < 1
    yield from _decay("train", o.decay_fraction, o.final_ratio)


def _data_ranges(s: TrainSettings) -> Iterator[_Check]:
    yield _above_0("data.sequence_length", s.data.sequence_length)
    for name, source in s.data.sources.items():
        yield _at_least_0(f"data.sources.{name}.weight", source.weight)
    for name, weight in (s.data.weights or {}).items():
        yield _at_least_0(f"data.weights.{name}", weight)
    split = s.data.validation_split
    yield "data.validation_split", split, "at least 0 and below 1", 0 <= split < 1
    size = s.tokenizer.vocab_size  # 256 bytes and the separator come first
    yield "tokenizer.vocab_size", size, "at least 257", size >= 257


def _stage_ranges(s: TrainSettings) -> Iterator[_Check]:
    positive = (
        "sequence_length tokens rope_theta batch_size accumulate learning_rate "
        "matrix_learning_rate decay_fraction"
    ).split()
    for i, stage in enumerate(s.stages):
        for name in positive:
            yield _above_0(f"stages.{i}.{name}", getattr(stage, name))
        yield _at_least_0(f"stages.{i}.warmup_steps", stage.warmup_steps)
        yield from _decay(f"stages.{i}", stage.decay_fraction, stage.final_ratio)
        for name, weight in (stage.weights or {}).items():
            yield _at_least_0(f"stages.{i}.weights.{name}", weight)


def _other_ranges(s: TrainSettings) -> Iterator[_Check]:
    yield _at_least_0("seed", s.seed)
    yield _above_0("rope_theta", s.rope_theta)
    yield _above_0("parallel.shard_size", s.parallel.shard_size)
    if s.distill is not None:
        d = s.distill
        yield "distill.weight", d.weight, "from 0 to 1", 0 <= d.weight <= 1
        yield _above_0("distill.temperature", d.temperature)
        yield _at_least_0("distill.hidden_weight", d.hidden_weight)


def _check_data(s: TrainSettings) -> None:
    d = s.data
    if not d.sources and d.folder is None:
        raise ConfigError("data.sources is empty; give at least one source, or data.folder")
    if d.sources and d.folder is not None:
        raise ConfigError(
            f"data.folder is {d.folder!r}, but data.sources are given too; leave one of them out"
        )
    for name, source in d.sources.items():
        if not source.files:
            raise ConfigError(f"data.sources.{name}.files is empty; give at least one file")
    if d.validation and d.validation_split:
        raise ConfigError(
            f"data.validation_split is {d.validation_split}, but data.validation names files; "
            "leave one of them out"
        )
    if not d.validation and not d.validation_split and d.folder is None:
        raise ConfigError(
            "data.validation is empty; give at least one file, or data.validation_split"
        )
    for name in s.tokenizer.train_on:
        if d.folder is None and name not in d.sources:
            raise ConfigError(f"tokenizer.train_on names {name!r}, which is not in data.sources")
    if s.tokenizer.path is None and not s.continues:
        raise ConfigError(
            "tokenizer.path is missing; name a tokenizer.json, to be trained if it does not exist"
        )


def _check_length(s: TrainSettings) -> None:
    if s.train.steps is None and not s.stages:
        raise ConfigError("train: the key 'steps' is missing; give it, or a list of stages")
    if s.train.steps is not None and s.stages:
        raise ConfigError(
            f"train.steps is {s.train.steps}, but the tokens of the stages say how long each is; "
            "leave train.steps out"
        )


def _check_weights(s: TrainSettings) -> None:
    """Names and sums of weights; those of a folder are checked where its sources are found."""
    if s.data.folder is not None:
        return
    stages = {f"stages.{i}.weights": stage.weights for i, stage in enumerate(s.stages)}
    common = {"data.weights": s.data.weights}
    for where, weights in {**common, **stages}.items():
        for name in weights or {}:
            if name not in s.data.sources:
                raise ConfigError(f"{where} names {name!r}, which is not in data.sources")
    own = {name: source.weight for name, source in s.data.sources.items()}
    for where, weights in (stages or common).items():  # what a run is made of
        if any({**own, **(s.data.weights or {}), **(weights or {})}.values()):
            continue
        if not weights and not s.data.weights:
            raise ConfigError("data.sources: every weight is 0; give one source a weight above 0")
        where = where if weights else "data.weights"
        raise ConfigError(f"{where} is 0 for every source; give one a weight above 0")
