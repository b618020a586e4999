"""Training checkpoints: written whole or not at all, resumed bit for bit."""

from __future__ import annotations

import os
import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import torch

from yocolm.errors import CheckpointError

_STATE = "trainer.pt"
_NAME = re.compile(r"step-(\d+)")
KEYS = frozenset({"step", "fingerprint", "device", "model", "optimizers", "sampler"})


def _steps(folder: Path) -> list[tuple[int, Path]]:
    found = []
    for path in folder.glob("step-*") if folder.is_dir() else []:
        match = _NAME.fullmatch(path.name)
        if match and (path / _STATE).is_file():
            found.append((int(match.group(1)), path))
    return sorted(found)


def save_checkpoint(folder: Path, step: int, state: dict[str, Any], keep: int) -> Path:
    """Write ``state`` (its keys are ``KEYS``) as ``folder/step-N`` through a rename.

    Only then drops all but the ``keep`` newest, and what killed processes left half-written.
    """
    assert state.keys() == KEYS
    target = folder / f"step-{step:07d}"
    for stale in folder.glob(".step-*.partial"):
        shutil.rmtree(stale)
    partial = folder / f".{target.name}.partial"
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
    """State of the newest whole checkpoint in ``folder``, or None. Weights-only loading.

    Raises CheckpointError naming the file if it is damaged or of another version.
    """
    steps = _steps(folder)
    if not steps:
        return None
    path = steps[-1][1] / _STATE
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, ValueError, EOFError, KeyError, pickle.UnpicklingError) as error:
        raise CheckpointError(
            f"cannot read {path}: it is damaged, or holds more than tensors and plain values; "
            f"delete {path.parent} to resume from the checkpoint before it"
        ) from error
    if not isinstance(state, dict) or state.keys() != KEYS:
        raise CheckpointError(
            f"{path} was not written by this version of yocolm; give another output_dir"
        )
    return state
