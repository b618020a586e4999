"""Training checkpoints: written whole or not at all, for any number of ranks to go on from.

A checkpoint is a folder ``step-N``: tensors in the format of ``torch.distributed.checkpoint``, to
which every rank writes what it holds, and plain values in ``trainer.json``. It is written under
another name and renamed when all ranks are done and all bytes are on the disk.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from yocolm.errors import CheckpointError, writing
from yocolm.train.distributed import Ranks

Tensors = dict[str, Tensor]

_VALUES = "trainer.json"
_METADATA = ".metadata"
_OLD_STATE = "trainer.pt"  # of versions that trained in one process only
_REMEDY = "make room there and run the same again to go on from the checkpoint before it"
_NAME = re.compile(r"step-(\d+)")
_MODEL, _OPTIMIZER = "model.", "optimizer."
KEYS = frozenset({"step", "fingerprint", "device", "ranks", "sampler"})

# What a checkpoint's index is made of; it is a pickle, and may hold nothing else.
# By name alone: a module also exposes what it imports, such as `dataclass`, which evaluates text.
_METADATA_CLASSES = (
    "ChunkStorageMetadata Metadata MetadataIndex StorageMeta TensorProperties "
    "TensorStorageMetadata _MEM_FORMAT_ENCODING"
).split()
_INDEX_NAMES = frozenset(
    {
        *(("torch.distributed.checkpoint.metadata", name) for name in _METADATA_CLASSES),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("pathlib", "PosixPath"),
        ("pathlib", "WindowsPath"),
    }
)


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if dtype or (module, name) in _INDEX_NAMES:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a checkpoint's index")


class _Reader(FileSystemReader):
    """Reads tensors alone, and no code that a checkpoint may hold."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with open(Path(self.path) / _METADATA, "rb") as file:
            metadata = _IndexUnpickler(file).load()
        entries = metadata.state_dict_metadata.values()
        if not all(isinstance(entry, TensorStorageMetadata) for entry in entries):
            raise pickle.UnpicklingError("a checkpoint holds nothing but tensors")
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def _steps(folder: Path) -> list[tuple[int, Path]]:
    found = []
    for path in folder.glob("step-*") if folder.is_dir() else []:
        match = _NAME.fullmatch(path.name)
        if match and ((path / _VALUES).is_file() or (path / _OLD_STATE).is_file()):
            found.append((int(match.group(1)), path))
    return sorted(found)


def latest(folder: Path) -> Path | None:
    """The newest whole checkpoint in ``folder``, or None."""
    steps = _steps(folder)
    return steps[-1][1] if steps else None


def training_tensors(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> Tensors:
    """Parameters and the state that the optimisers keep of each, under the parameters' names.

    Those of the training itself: loading into them changes it. Optimisers that have not made a step
    get the state they would begin with.
    """
    tensors = {f"{_MODEL}{name}": p.detach() for name, p in model.named_parameters()}
    names = {id(p): name for name, p in model.named_parameters()}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if not optimizer.state.get(parameter):
                    _begin(optimizer, group, parameter)
                for key, value in optimizer.state[parameter].items():
                    assert isinstance(value, Tensor)
                    tensors[f"{_OPTIMIZER}{names[id(parameter)]}.{key}"] = value
    return tensors


def _begin(optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: Tensor) -> None:
    """Let an optimiser make its state of one parameter, which stays as it is: a step of nothing."""
    assert parameter.grad is None
    rate, group["lr"] = group["lr"], 0.0
    parameter.grad = torch.zeros_like(parameter)
    others = optimizer.param_groups
    optimizer.param_groups = [{**group, "params": [parameter]}]
    optimizer.step()
    optimizer.param_groups = others
    parameter.grad, group["lr"] = None, rate
    for value in optimizer.state[parameter].values():
        value.zero_()


def save_checkpoint(
    folder: Path, tensors: Tensors, values: Mapping[str, Any], keep: int, ranks: Ranks
) -> Path:
    """Write ``folder/step-N`` through a rename, all ranks together; N is ``values["step"]``.

    ``values`` (their keys are ``KEYS``) are plain, as JSON has them. Only then drops all but the
    ``keep`` newest, and what killed processes left half-written.
    """
    assert values.keys() == KEYS
    target = folder / f"step-{values['step']:07d}"
    partial = folder / f".{target.name}.partial"
    what = f"a checkpoint to {partial}"
    with ranks.together(), writing(what, _REMEDY):
        if ranks.main:
            drop_partial(folder)
            partial.mkdir(parents=True)
    writer = FileSystemWriter(partial, sync_files=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*save in a single process")
        try:
            save(
                tensors,
                storage_writer=writer,
                process_group=ranks.control,
                no_dist=ranks.size == 1,
            )
        except CheckpointException as error:
            reason, _ = next(iter(error.failures.values()))
            raise CheckpointError(f"cannot write {what}: {reason}; {_REMEDY}") from error
    with ranks.together(), writing(what, _REMEDY):
        if ranks.main:
            _commit(partial, target, values)
            for _, old in _steps(folder)[:-keep]:
                _drop(old)
    return target


def _commit(partial: Path, target: Path, values: Mapping[str, Any]) -> None:
    """Complete a checkpoint and give it its name, with all bytes on the disk by then."""
    _write_synced(partial / _VALUES, json.dumps(values, indent=1))
    _sync(partial)
    if target.exists():
        _drop(target)
    partial.rename(target)
    _sync(target.parent)


def drop_partial(folder: Path) -> None:
    """Remove what killed processes left half-written or half-removed."""
    for stale in folder.glob(".step-*.partial"):
        shutil.rmtree(stale)


def _drop(folder: Path) -> None:
    """Remove a checkpoint; under a name that is none first, as it may take a while."""
    waste = folder.with_name(f".{folder.name}.old.partial")
    folder.rename(waste)
    shutil.rmtree(waste)


def _write_synced(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Have the names in a folder on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_values(path: Path) -> dict[str, Any]:
    """The plain values of the checkpoint ``path``.

    Raises CheckpointError naming the file if it is damaged or of another version.
    """
    if (path / _OLD_STATE).exists():
        raise CheckpointError(
            f"{path / _OLD_STATE} was written by an older version of yocolm, which trained in one "
            "process only; finish that training there, or give another output_dir"
        )
    try:
        values = json.loads((path / _VALUES).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _damaged(path / _VALUES, path) from error
    if not isinstance(values, dict) or values.keys() != KEYS:
        raise CheckpointError(
            f"{path / _VALUES} was not written by this version of yocolm; give another output_dir"
        )
    return values


def load_tensors(path: Path, tensors: Tensors, ranks: Ranks) -> None:
    """Fill ``tensors`` from the checkpoint ``path``, whatever ranks wrote it; all ranks together.

    Raises CheckpointError if it is damaged, or lacks one of them.
    """
    reader = _Reader(path)
    try:
        reader.read_metadata()
    except (OSError, EOFError, AttributeError, ValueError, pickle.UnpicklingError) as error:
        raise _damaged(path / _METADATA, path) from error
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*load in a single process")
            load(
                tensors,
                storage_reader=reader,
                process_group=ranks.control,
                no_dist=ranks.size == 1,
            )
    except CheckpointException as error:
        raise _damaged(path, path) from error


def _damaged(file: Path, checkpoint: Path) -> CheckpointError:
    return CheckpointError(
        f"cannot read {file}: it is damaged, or not of this model; "
        f"delete {checkpoint} to resume from the checkpoint before it"
    )
