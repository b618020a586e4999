"""Disks that are full or cannot be written to: errors name the path and the remedy."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

from references import DATA
from training import settings, trainer, values, write_texts
from yocolm import cli_info
from yocolm.cli import main
from yocolm.errors import CheckpointError, ConfigError, writing
from yocolm.models import tensor_files
from yocolm.models.tensor_files import SINGLE_FILE, write_tensors
from yocolm.train import curves, data_cache
from yocolm.train import tokenizer as training_of_tokenizers
from yocolm.train.data import build_data
from yocolm.train.data_lock import locked
from yocolm.train.prepare import prepare_folders, prepare_tokenizer
from yocolm.train.settings import parse_settings

FULL = "No space left on device (os error 28)"  # as libraries in Rust say it
NO_FOLDERS = Path("/proc")  # there is such a folder, but nobody may make files in it
needs_proc = pytest.mark.skipif(not NO_FOLDERS.is_dir(), reason="needs /proc")
PIECE = ("a", 8, lambda: torch.ones(2))


def fill_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let safetensors find a disk that is full after a few bytes."""

    def save_file(tensors: Any, path: Path, metadata: Any) -> None:
        path.write_bytes(b"begun")
        raise SafetensorError(f"Error while serializing: I/O error: {FULL}")

    monkeypatch.setattr(tensor_files, "save_file", save_file)


def no_room(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_what_counts_as_an_error_of_the_disk() -> None:
    for error in (OSError(errno.EROFS, "Read-only file system"), Exception("x (os error 30)")):
        with (
            pytest.raises(ConfigError, match="^cannot write it: Read-only file system; try more$"),
            writing("it", "try more", ConfigError),
        ):
            raise error
    for error in (ValueError("2 is wrong"), CheckpointError("wrong (os error 5)")):
        with pytest.raises(type(error)) as found, writing("it", "try more"):
            raise error
        assert found.value is error


def test_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was there before stays, and nothing half-written does."""
    write_tensors(tmp_path, [PIECE], 100)
    before = (tmp_path / SINGLE_FILE).read_bytes()
    fill_up(monkeypatch)
    with pytest.raises(CheckpointError) as error:
        write_tensors(tmp_path, [PIECE], 100)
    assert str(error.value) == (
        f"cannot write {tmp_path / SINGLE_FILE}: No space left on device; make room there, or "
        "write to another folder"
    )
    assert [path.name for path in tmp_path.iterdir()] == [SINGLE_FILE]
    assert (tmp_path / SINGLE_FILE).read_bytes() == before


@needs_proc
def test_a_conversion_to_where_no_folder_can_be(capsys: pytest.CaptureFixture[str]) -> None:
    source = str(DATA / "llama-tiny")
    assert main(["convert", "--to", "yoco", source, str(NO_FOLDERS / "x")]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: cannot write a model to /proc/x: No such file or directory; ")


def test_an_error_that_no_command_expects_has_a_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", "there/x")

    monkeypatch.setattr(cli_info, "run", run)
    assert main(["info", "bundled"]) == 1
    line = capsys.readouterr().err
    assert line.startswith("error: ") and "'there/x'; name a place that may be written to" in line


def test_a_final_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights, and what is written beside them."""
    trained, final = trainer(tmp_path), tmp_path / "run" / "final"
    with monkeypatch.context() as patched:
        fill_up(patched)
        with pytest.raises(CheckpointError, match="final/model.safetensors: No space left on dev"):
            trained.export(final, {})

    class Full:
        def save(self, path: str) -> None:
            raise Exception(FULL)  # noqa: TRY002  (as the library does)

    trained.tokenizer = Full()  # type: ignore[assignment]
    with pytest.raises(CheckpointError, match=f"cannot write the model to {final}: No space left"):
        trained.export(final, {})


def test_a_new_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def __init__(self, model: object) -> None: ...

        def train_from_iterator(self, texts: object, trainer: object) -> None: ...

        def save(self, path: str) -> None:
            Path(path).write_bytes(b"begun")
            raise Exception(FULL)  # noqa: TRY002

    monkeypatch.setattr(training_of_tokenizers, "Tokenizer", Full)
    path = tmp_path / "there" / "tok.json"
    with pytest.raises(ConfigError, match=f"cannot write the tokenizer to {path}: No space left"):
        training_of_tokenizers.train_tokenizer([], 300, path)
    assert list(path.parent.iterdir()) == []


@needs_proc
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"output_dir": "/proc"}, "output_dir '/proc': No such file.* a folder that may be writ"),
        ({"output_dir": "/proc/x"}, "output_dir is '/proc/x', which cannot be made: No such file"),
        ({"cache_dir": "/proc"}, "data.cache_dir '/proc': No such file or directory; name a fold"),
        ({"path": "/proc/tok.json"}, "tokenizer to /proc/tok.json: No such .* tokenizer.path$"),
    ],
)
def test_settings_that_name_no_place_to_write(
    tmp_path: Path, change: dict[str, str], message: str
) -> None:
    write_texts(tmp_path)
    given = values_with(tmp_path, change)
    with pytest.raises(ConfigError, match=message):
        prepare_folders(parse_settings(given))
        prepare_tokenizer(parse_settings(given))


def values_with(folder: Path, change: dict[str, str]) -> dict[str, Any]:
    found = values(folder)
    for key, value in change.items():
        places = {"output_dir": found, "cache_dir": found["data"], "path": found["tokenizer"]}
        places[key][key] = value
    return found


@pytest.mark.parametrize("name", ["write_json", "_rename"])
def test_a_cache_of_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    s, cache = settings(tmp_path), tmp_path / "cache"
    tokenizer = prepare_tokenizer(s)
    monkeypatch.setattr(data_cache, name, no_room)
    monkeypatch.setattr(data_cache, "SETTLED_NS", -1)
    with pytest.raises(ConfigError) as error:
        build_data(s, tokenizer, cache)
    assert str(error.value) == (
        f"cannot write the tokens of the texts to {cache}: No space left on device; make room "
        "there, or name another folder as data.cache_dir"
    )
    assert [path.name for path in cache.iterdir() if path.suffix != ".json"] == []


def test_a_lock_goes_with_what_failed_in_it(tmp_path: Path) -> None:
    with pytest.raises(OSError), locked(tmp_path / ".lock"):
        no_room()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("fails", ["open", "add_scalar", "close"])
def test_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    class Writer:
        def __init__(self, folder: str, purge_step: int) -> None:
            if fails == "open":
                no_room()

        def __getattr__(self, name: str) -> Callable[..., None]:
            return no_room if name == fails else lambda *_: None

    monkeypatch.setattr(curves, "_summary_writer", lambda: Writer)
    [opened] = curves.open_curves(settings(tmp_path, tensorboard=True))
    with pytest.raises(ConfigError, match="cannot write curves to .*tensorboard: No space left"):
        curve = opened(0)
        curve.add({"loss": 1.0}, 1)
        curve.close()
