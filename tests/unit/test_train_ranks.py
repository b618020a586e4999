"""Ranks of one training share the texts out, and an error of one ends them all."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import ranks as world
from ranks import changed, make
from training import values, write_texts
from yocolm.errors import CheckpointError
from yocolm.train import checkpoint, data_lock
from yocolm.train import trainer as trainer_module
from yocolm.train.data_cache import TokenCache
from yocolm.train.distributed import Ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ranks")
    write_texts(path)
    return path


def hold_the_first(ranks: Ranks, config: dict[str, Any], locks: bool) -> list[str]:
    """The files that a rank tokenises: the first only when all others are busy with theirs."""
    tokenize, done = TokenCache._tokenize, []
    run = Path(config["output_dir"])

    def together(self: TokenCache, folder: Path, file: Path, fields: Any) -> None:
        if locks and not done:
            (run / f"busy-{ranks.rank}").touch()
            while len(list(run.glob("busy-*"))) < ranks.size:
                time.sleep(0.01)
        done.append(file.name)
        tokenize(self, folder, file, fields)

    TokenCache._tokenize = together
    if not locks:
        data_lock.fcntl = None
    make(ranks, config)
    return done


@pytest.mark.parametrize("locks", [True, False])
def test_ranks_share_the_texts_to_tokenise(folder: Path, locks: bool) -> None:
    config = changed(values(folder), f"share-{locks}", strategy="ddp")
    first, second = world.run(2, hold_the_first, config, locks)
    assert sorted(first + second) == ["a.txt", "b.txt", "held_out.txt"]
    assert bool(second) == locks, "without locks the first works alone"


def opens_curves(ranks: Ranks, config: dict[str, Any]) -> str:
    def fails(**given: Any) -> None:
        raise OSError(5, "no network")

    sys.modules["wandb"] = SimpleNamespace(init=fails, errors=SimpleNamespace(Error=KeyError))  # type: ignore[assignment]
    one = make(ranks, config)
    try:
        one.run()
    except (OSError, SystemExit) as error:
        return repr(error)
    return "ran"


def test_curves_that_fail_on_the_first_rank_end_all(folder: Path) -> None:
    config = changed(values(folder, steps=1, wandb="boats"), "curves", strategy="ddp")
    assert world.run(2, opens_curves, config) == ["OSError(5, 'no network')", "SystemExit(1)"]


def fails_to_write(ranks: Ranks, config: dict[str, Any]) -> list[str]:
    """A disk that is full for the first rank's own files: a checkpoint's last, and the model."""
    one, found = make(ranks, config), []

    def full(*given: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    for module, name in ((checkpoint, "_write_synced"), (trainer_module, "save_weights")):
        before = getattr(module, name)
        setattr(module, name, full)
        try:
            one.save() if module is checkpoint else one.export(Path(config["output_dir"]), {})
        except (OSError, CheckpointError, SystemExit) as error:
            found.append(f"{type(error).__name__}: {error}")
        setattr(module, name, before)
    return found


def test_a_full_disk_of_the_first_rank_ends_all(folder: Path) -> None:
    config = changed(values(folder), "full", strategy="fsdp")
    (named, exported), other = world.run(2, fails_to_write, config)
    assert named.startswith("CheckpointError: cannot write a checkpoint") and "No space" in named
    assert "No space left" in exported and other == ["SystemExit: 1"] * 2
