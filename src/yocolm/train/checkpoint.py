"""Training checkpoints: written whole or not at all, resumed bit for bit."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch

from yocolm.errors import CheckpointError

_STATE = "trainer.pt"
_NAME = re.compile(r"step-(\d+)")


def _steps(folder: Path) -> list[tuple[int, Path]]:
    found = []
    for path in folder.glob("step-*") if folder.is_dir() else []:
        match = _NAME.fullmatch(path.name)
        if match and (path / _STATE).is_file():
            found.append((int(match.group(1)), path))
    return sorted(found)


def save_checkpoint(folder: Path, step: int, state: dict[str, Any], keep: int) -> Path:
    """Write ``state`` as ``folder/step-N`` through a rename; drop all but the ``keep`` newest."""
    target = folder / f"step-{step:07d}"
    partial = folder / f".{target.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    with open(partial / _STATE, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)
    for _, old in _steps(folder)[:-keep]:
        shutil.rmtree(old)
    return target


def load_latest(folder: Path) -> dict[str, Any] | None:
    """State of the newest whole checkpoint in ``folder``, or None. Weights-only loading."""
    steps = _steps(folder)
    if not steps:
        return None
    path = steps[-1][1] / _STATE
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(f"cannot read {path}: {error}; delete its folder to go on") from error
