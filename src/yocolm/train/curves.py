"""Where the curves of a training are drawn: TensorBoard, Weights & Biases."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from yocolm.errors import ConfigError, MissingDependencyError, writing
from yocolm.train.settings import TrainSettings


class Curves(Protocol):
    """Values over steps."""

    def add(self, figures: Mapping[str, float], step: int) -> None: ...

    def close(self) -> None: ...


Opener = Callable[[int], Curves]  # takes the step that a run begins at


def open_curves(s: TrainSettings) -> list[Opener]:
    """What opens the curves that the settings ask for.

    Raises MissingDependencyError at once, not when they are opened.
    """
    openers: list[Opener] = []
    if s.train.tensorboard:
        writer = _summary_writer()
        folder = str(Path(s.output_dir) / "tensorboard")
        openers.append(lambda step: _TensorBoard(writer, folder, step))
    if s.train.wandb is not None:
        module, project = _wandb_module(), s.train.wandb
        openers.append(lambda step: _WandB(module, s, project))
    return openers


class _TensorBoard:
    """Raises ConfigError where the file system does not take the curves."""

    def __init__(self, writer: Callable[..., Any], folder: str, step: int) -> None:
        self._folder = folder
        with self._writing():
            self._writer = writer(folder, purge_step=step + 1)

    def add(self, figures: Mapping[str, float], step: int) -> None:
        with self._writing():
            for tag, value in figures.items():
                self._writer.add_scalar(tag, value, step)

    def close(self) -> None:
        with self._writing():
            self._writer.close()

    def _writing(self) -> AbstractContextManager[None]:
        remedy = "make room there, or set train.tensorboard to false"
        return writing(f"curves to {self._folder}", remedy, ConfigError)


class _WandB:
    """A run of Weights & Biases, the same one whenever a training is resumed.

    Its steps are an axis of their own: Weights & Biases drops what is logged at a step of its own
    count that it has passed, as after a resumption from an older checkpoint.
    """

    def __init__(self, module: Any, s: TrainSettings, project: str) -> None:
        folder = Path(s.output_dir).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._run = module.init(
                project=project,
                name=folder.name,
                id=hashlib.sha256(str(folder).encode()).hexdigest()[:16],
                resume="allow",
                dir=str(folder),
                config=asdict(s),
            )
        except module.errors.Error as error:
            raise ConfigError(
                f"train.wandb is {project!r}, but Weights & Biases cannot start: {error}. Run "
                "`wandb login`, or set WANDB_MODE=offline, or set train.wandb to null"
            ) from error
        self._run.define_metric("*", step_metric="step")

    def add(self, figures: Mapping[str, float], step: int) -> None:
        self._run.log({**figures, "step": step})

    def close(self) -> None:
        self._run.finish()


def _summary_writer() -> Callable[..., Any]:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise MissingDependencyError(
            "train.tensorboard is true, but TensorBoard is not installed; "
            "run: pip install tensorboard"
        ) from None
    return SummaryWriter


def _wandb_module() -> Any:
    try:
        return importlib.import_module("wandb")
    except ImportError:
        raise MissingDependencyError(
            "train.wandb is set, but Weights & Biases is not installed; run: pip install wandb"
        ) from None
