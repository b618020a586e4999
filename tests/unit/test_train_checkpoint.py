"""Checkpoints on the disk: whole or not at all, named when damaged, and no code in them is run."""

import io
import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from training import trainer
from yocolm.errors import CheckpointError
from yocolm.train.checkpoint import (
    KEYS,
    _IndexUnpickler,
    latest,
    load_tensors,
    read_values,
    save_checkpoint,
)
from yocolm.train.distributed import Ranks


class Killed(Exception):
    """Stands for the end of a process."""


def save(folder: Path, step: int, keep: int = 1) -> Path:
    """A checkpoint of one tensor, whose values are the step."""
    values = {**dict.fromkeys(KEYS), "step": step}
    tensors = {"model.x": torch.full((3,), float(step))}
    return save_checkpoint(folder, tensors, values, keep, Ranks())


def step_of(folder: Path) -> int:
    """The step of the newest checkpoint."""
    path = latest(folder)
    assert path is not None
    return read_values(path)["step"]


def loaded(path: Path) -> torch.Tensor:
    x = torch.zeros(3)
    load_tensors(path, {"model.x": x}, Ranks())
    return x


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (3, 20, 100, 1000):
        assert save(tmp_path, step, keep=2).is_dir()
    assert names_in(tmp_path) == ["step-0000100", "step-0001000"]
    newest = latest(tmp_path)
    assert newest is not None and step_of(tmp_path) == 1000
    assert loaded(newest).tolist() == [1000.0] * 3


def test_a_checkpoint_of_the_same_step_takes_the_others_place(tmp_path: Path) -> None:
    save(tmp_path, 3)
    values = {**dict.fromkeys(KEYS), "step": 3}
    path = save_checkpoint(tmp_path, {"model.x": torch.ones(3)}, values, 1, Ranks())
    assert loaded(path).tolist() == [1.0] * 3 and names_in(tmp_path) == ["step-0000003"]


@pytest.mark.parametrize(
    "moment", ["torch.save", "os.fsync", "json.dumps", "pathlib.Path.rename", "shutil.rmtree"]
)
def test_a_checkpoint_cut_off_is_never_picked_up(
    tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(*given: Any, **options: Any) -> None:
        if moment == "torch.save":
            given[1].write(b"half of it")
        raise Killed

    save(tmp_path, 3)
    with monkeypatch.context() as patch:
        patch.setattr(moment, cut)
        with pytest.raises((Killed, CheckpointError)):
            save(tmp_path, 6)
    newest = latest(tmp_path)
    assert newest is not None
    committed = moment == "shutil.rmtree"  # the old one was being removed by then
    assert step_of(tmp_path) == (6 if committed else 3)
    assert loaded(newest).tolist() == [6.0 if committed else 3.0] * 3
    assert any(name.endswith(".partial") for name in names_in(tmp_path))
    save(tmp_path, 9)
    assert names_in(tmp_path) == ["step-0000009"], "what was left behind is cleared away"


def test_what_is_left_of_an_old_checkpoint_goes_at_the_next_start(tmp_path: Path) -> None:
    """Even if that training never saves again."""
    for name in (".step-0000003.old.partial", ".step-0000006.partial"):
        (tmp_path / "run" / name).mkdir(parents=True)
        (tmp_path / "run" / name / "x").write_bytes(b"x")
    trainer(tmp_path)
    assert [name for name in names_in(tmp_path / "run") if "step" in name] == []


@pytest.mark.parametrize("moment", ["torch.save", "pathlib.Path.mkdir", "os.fsync", "json.dumps"])
def test_a_disk_that_is_full_is_named(
    tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    save(tmp_path, 3)
    with monkeypatch.context() as patch:
        patch.setattr(moment, full)
        with pytest.raises(CheckpointError, match="cannot write a checkpoint.*No space left"):
            save(tmp_path, 6)
    assert step_of(tmp_path) == 3


def test_other_files_are_no_checkpoints(tmp_path: Path) -> None:
    assert latest(tmp_path / "absent") is None
    (tmp_path / "step-0000005").mkdir()
    (tmp_path / "step-notes").write_text("x")
    assert latest(tmp_path) is None


@pytest.mark.parametrize("name", ["trainer.json", ".metadata", "__0_0.distcp"])
def test_a_damaged_checkpoint_is_named(tmp_path: Path, name: str) -> None:
    path = save(tmp_path, 3)
    file = path / name
    whole = file.read_bytes()
    for data in (b"", b"garbage", whole[: len(whole) // 2]):
        file.write_bytes(data)
        with pytest.raises(CheckpointError, match="cannot read .*step-0000003.*; delete") as error:
            read_values(path)
            loaded(path)
        assert "weights_only" not in str(error.value), "no advice to load it as code"


def test_checkpoints_of_other_versions_are_refused(tmp_path: Path) -> None:
    path = save(tmp_path, 3)
    (path / "trainer.json").write_text('{"step": 3}')
    with pytest.raises(CheckpointError, match="not written by this version"):
        read_values(path)
    old = tmp_path / "step-0000005"
    old.mkdir()
    torch.save({"step": 5}, old / "trainer.pt")
    assert latest(tmp_path) == old
    with pytest.raises(CheckpointError, match="trainer.pt was written by an older version"):
        read_values(old)


def test_a_checkpoint_that_lacks_a_tensor(tmp_path: Path) -> None:
    path = save(tmp_path, 3)
    for tensors in ({"model.y": torch.zeros(3)}, {"model.x": torch.zeros(4)}):
        with pytest.raises(CheckpointError, match="not of this model"):
            load_tensors(path, tensors, Ranks())


class Call:
    """Unpickling it calls ``function(*arguments)``."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


@pytest.mark.parametrize("function", [os.mkdir, os.makedirs, Path.mkdir, torch.save])
def test_pickled_code_is_not_run(tmp_path: Path, function: Any) -> None:
    file, made = save(tmp_path, 3) / ".metadata", tmp_path / "made"
    arguments = ([1], str(made)) if function is torch.save else (made,)
    evil = pickle.dumps({"x": Call(function, *arguments)})
    pickle.loads(evil)
    assert made.exists(), "it would run"
    made.unlink() if made.is_file() else made.rmdir()
    file.write_bytes(evil)
    with pytest.raises(CheckpointError, match="cannot read .*metadata"):
        loaded(file.parent)
    assert not made.exists()


def test_names_beside_the_classes_of_an_index_are_refused(tmp_path: Path) -> None:
    """Their module also has `dataclass`, which evaluates the names of annotations."""
    file, made = save(tmp_path, 3) / ".metadata", tmp_path / "made"

    code = f'a=__import__("os").mkdir("{made}")):#'
    annotated = {"__annotations__": {code: "InitVar"}, "__module__": "dataclasses"}
    module = b"ctorch.distributed.checkpoint.metadata\n"
    for name in ("StorageMeta", "BytesStorageMetadata"):
        target = module + name.encode() + b"\n"
        state = pickle.dumps((None, annotated), 2)[2:-1]
        file.write_bytes(b"\x80\x02" + module + b"dataclass\n" + target + state + b"b" + b"\x85R.")
        with pytest.raises(CheckpointError, match="cannot read .*metadata"):
            loaded(file.parent)
        assert not made.exists()
    for name in (b"os.mkdir", b"os", b"field"):
        file.write_bytes(b"\x80\x02" + module + name + b"\n.")
        with pytest.raises(pickle.UnpicklingError, match="has no place in a checkpoint's index"):
            _IndexUnpickler(io.BytesIO(file.read_bytes())).load()


def test_bytes_in_place_of_tensors_are_not_unpickled(tmp_path: Path) -> None:
    """The format may hold objects as well, which PyTorch would unpickle."""
    folder = tmp_path / "step-0000003"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model.x": {1, 2}}, checkpoint_id=folder)  # type: ignore[attr-defined]
    with pytest.raises(CheckpointError, match="cannot read .*metadata"):
        loaded(folder)
