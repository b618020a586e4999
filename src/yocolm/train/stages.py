"""Stages of one training: windows grow, and each stage goes on from the weights of the one before.

A stage is an ordinary run in a folder of its own, with fresh optimisers. Its model is the float32
export of the stage before, with another base of the rotary embedding where the settings say so.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from yocolm.errors import CheckpointError, ConfigError, writing
from yocolm.fields import write_json
from yocolm.models.weights import TRAINING_FILE
from yocolm.train.data_files import find_sources
from yocolm.train.data_lock import locked
from yocolm.train.distributed import Ranks, join_ranks
from yocolm.train.fingerprint import FREE, check_fingerprint, flat
from yocolm.train.prepare import prepare_folders
from yocolm.train.settings import OptimSettings, StageSettings, TrainSettings
from yocolm.train.trainer import Trainer

DONE = "done.json"
_OF_TRAIN = (
    "batch_size accumulate learning_rate matrix_learning_rate warmup_steps schedule "
    "decay_fraction final_ratio"
).split()


@dataclass(frozen=True)
class Stage:
    """One stage: the settings of its run, where that exports to, and where the model ends up."""

    number: int
    settings: TrainSettings
    exported: Path
    final: Path

    @property
    def folder(self) -> Path:
        return Path(self.settings.output_dir)

    def identity(self) -> dict[str, Any]:
        """Settings that a finished stage may not change, as plain values."""
        s = self.settings
        found = {"data": asdict(s.data), "train": asdict(s.train), "distill": None}
        for place in ("cache_dir", "folder", "validation"):
            del found["data"][place]
        for source in found["data"]["sources"].values():
            del source["files"]
        for name in FREE - {"steps"}:
            del found["train"][name]
        if s.distill is not None:
            found["distill"] = asdict(s.distill)
        if self.number == 0:  # later ones start from a folder, which may have been moved
            found["model"] = s.model
        leaves = {name: value for key in found for name, value in flat(key, found[key])}
        return json.loads(json.dumps({**leaves, "seed": s.seed, "rope_theta": s.rope_theta}))

    def figures(self, before: Sequence[Stage]) -> dict[str, float] | None:
        """Of the last validation, if the stage is finished and its model is where it should be.

        Raises ConfigError if it, or a stage ``before`` it, was finished with other settings.
        """
        done = _read(self.folder / DONE)
        if done is None:
            return None
        check_fingerprint(done["settings"], self.identity(), self.folder)
        # A stage of another length has a folder of its own: nothing there tells of the old one.
        check_fingerprint(done.get("before", {}), _identities(before), self.folder)
        return done["validation"] if done["model"] == _digest(self.final) else None

    def finish(self, before: Sequence[Stage], figures: Mapping[str, float]) -> None:
        """Put the exported model where it belongs, and note that the stage is finished."""
        record = {
            "settings": self.identity(),
            "before": _identities(before),
            "model": _digest(self.exported),
            "validation": dict(figures),
        }
        if self.exported != self.final:
            if self.final.exists():
                shutil.rmtree(self.final)
            self.exported.replace(self.final)
        partial = self.folder / f".{DONE}.partial"
        write_json(partial, record)
        partial.replace(self.folder / DONE)


def _identities(stages: Sequence[Stage]) -> dict[str, Any]:
    return {
        f"stages.{stage.number}: {name}": value
        for stage in stages
        for name, value in stage.identity().items()
    }


def plan_stages(s: TrainSettings) -> list[Stage]:
    """The runs that make up ``s``, in order; their folders are ``OUTPUT_DIR/stage-N-LENGTH``."""
    root = Path(s.output_dir)
    stages: list[Stage] = []
    for i, wanted in enumerate(s.stages):
        folder = root / f"stage-{i}-{wanted.sequence_length}"
        last = i == len(s.stages) - 1
        data = replace(
            s.data,
            sequence_length=wanted.sequence_length,
            cache_dir=s.data.cache_dir or str(root / "cache"),
            weights={**(s.data.weights or {}), **(wanted.weights or {})} or None,
        )
        first_base = s.rope_theta if i == 0 else None  # later ones find it in the model
        settings = replace(
            s,
            output_dir=str(folder),
            model=str(stages[-1].final) if stages else s.model,
            data=data,
            train=_steps_of(wanted, s.train),
            stages=[],
            rope_theta=first_base if wanted.rope_theta is None else wanted.rope_theta,
            seed=s.seed + i,  # windows are drawn anew
            export_dtype=s.export_dtype if last else "float32",
        )
        exported = folder / "final"
        stages.append(Stage(i, settings, exported, root / "final" if last else exported))
    return stages


def _steps_of(wanted: StageSettings, o: OptimSettings) -> OptimSettings:
    given = {name: getattr(wanted, name) for name in _OF_TRAIN}
    o = replace(o, **{name: value for name, value in given.items() if value is not None})
    per_step = o.batch_size * o.accumulate * wanted.sequence_length
    return replace(o, steps=math.ceil(wanted.tokens / per_step))


def train(s: TrainSettings, out: TextIO | None = None) -> dict[str, float]:
    """Train as the settings say, in one run or in stages; return the last validation's figures.

    Takes up where an earlier call stopped, in whatever stage that was. Prints to ``out``, which is
    standard error by default. Of the ranks of ``torchrun`` all call it. Raises as ``Trainer`` does.
    """
    with join_ranks(s.train.device) as ranks, _alone(s, ranks):
        if s.stages:
            return train_stages(s, out, ranks)
        return Trainer(s, out, ranks).run()


@contextmanager
def _alone(s: TrainSettings, ranks: Ranks) -> Iterator[None]:
    """Keep other trainings out of ``output_dir``: each would clear the other's checkpoints away.

    Raises ConfigError if one is there.
    """
    with ExitStack() as stack:
        with ranks.together():
            if ranks.main:
                prepare_folders(s)
                lock = stack.enter_context(locked(Path(s.output_dir) / ".lock", wait=False))
                if not lock.held:
                    raise ConfigError(
                        f"output_dir {s.output_dir} is in use: another training writes there; "
                        "wait for its end, or give another output_dir"
                    )
        yield


def train_stages(s: TrainSettings, out: TextIO | None, ranks: Ranks) -> dict[str, float]:
    """``train`` of settings with stages, on every one of ``ranks``."""

    def say(text: str) -> None:
        if ranks.main:
            print(text, file=sys.stderr if out is None else out, flush=True)

    stages = plan_stages(s)
    finished: list[dict[str, float] | None] = []
    with ranks.together():
        if ranks.main:
            finished = [stage.figures(stages[:i]) for i, stage in enumerate(stages)]
    finished = ranks.from_main(finished)
    # The newest finished stage holds all that those before it did.
    first = max((i + 1 for i, figures in enumerate(finished) if figures is not None), default=0)
    figures = finished[first - 1] if first else None
    with ranks.together():
        if ranks.main:
            _check_sources(stages[first:])
    for stage in stages[first:]:
        say(_headline(stage, len(stages)))
        figures = Trainer(stage.settings, out, ranks).run()
        with ranks.together():  # the others wait for the model that they go on from
            if ranks.main:
                remedy = "make room there and run the same again to finish the stage"
                with writing(f"what ends stages.{stage.number} to {s.output_dir}", remedy):
                    if stage is stages[-1]:
                        _record_stages(s, stages, figures)
                    stage.finish(stages[: stage.number], figures)
    assert figures is not None
    say(f"all {len(stages)} stages are finished: {stages[-1].final}")
    return figures


def _check_sources(stages: Sequence[Stage]) -> None:
    """Raise ConfigError for sources and weights of a stage now, not when its turn comes."""
    for stage in stages:
        try:
            find_sources(stage.settings)
        except ConfigError as error:
            raise ConfigError(f"stages.{stage.number}: {error}") from None


def _headline(stage: Stage, count: int) -> str:
    s = stage.settings
    base = "" if s.rope_theta is None else f", RoPE base {s.rope_theta:g}"
    tokens = s.train.last_step * s.train.batch_size * s.train.accumulate * s.data.sequence_length
    return (
        f"stages.{stage.number} of {count}: {tokens} tokens in windows of "
        f"{s.data.sequence_length}{base}, in {stage.folder}"
    )


def _record_stages(s: TrainSettings, stages: list[Stage], figures: Mapping[str, float]) -> None:
    """Let ``training.json`` of the last model, before it is moved, tell of all stages."""
    earlier = [(_read(stage.folder / DONE) or {}).get("validation") for stage in stages[:-1]]
    path = stages[-1].exported / TRAINING_FILE
    record = _read(path) or {}
    record |= {
        "settings": asdict(s),
        "stages": [
            {"steps": stage.settings.train.steps, "validation": each}
            for stage, each in zip(stages, [*earlier, dict(figures)], strict=True)
        ],
    }
    write_json(path, record)


def _digest(model: Path) -> str | None:
    """Tells one exported model from another; None if there is none."""
    path = model / TRAINING_FILE
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.is_file() else None


def _read(path: Path) -> dict[str, Any] | None:
    """A JSON file of ours, or None if there is none."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise CheckpointError(
            f"cannot read {path}: {error}; delete it to finish that stage again"
        ) from None
