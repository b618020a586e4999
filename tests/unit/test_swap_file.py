"""Where swap files lie, and what is said where they cannot."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from yocolm.engine import swap_file
from yocolm.engine.swap_file import SwapFile, find_directory, swap_room
from yocolm.errors import ConfigError

GIB = 1 << 30
Disks = Callable[..., None]


@pytest.fixture
def disks(monkeypatch: pytest.MonkeyPatch) -> Disks:
    """Sets what is free in folders, and which of them lie in memory."""

    def put(free: dict[str, int], in_memory: tuple[str, ...] = ()) -> None:
        def usage(path: str) -> SimpleNamespace:
            if path not in free:
                raise FileNotFoundError(path)
            return SimpleNamespace(free=free[path])

        monkeypatch.delenv("YOCOLM_SWAP_DIR", raising=False)
        monkeypatch.setattr(tempfile, "tempdir", "/tmp")
        monkeypatch.setattr(shutil, "disk_usage", usage)
        monkeypatch.setattr(swap_file, "_in_memory", lambda path: path in in_memory)
        monkeypatch.setattr(os.path, "isdir", lambda path: path in free)
        monkeypatch.setattr(os, "access", lambda path, _: path in free)

    return put


def test_a_file_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "none", tmp_path / "file"):
        with pytest.raises(ConfigError, match=f"in '{folder}' .*YOCOLM_SWAP_DIR.*swap_space=0"):
            SwapFile(10, str(folder))
    with pytest.raises(ConfigError, match="null"):
        SwapFile(10, "a\0b")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="Permission denied"):
        SwapFile(10, str(tmp_path))


def test_more_than_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=GIB))
    with pytest.raises(ConfigError, match=r"needs 2\.00 GiB in .*where 1\.00 GiB are free"):
        SwapFile(2 * GIB, str(tmp_path))
    SwapFile(GIB, str(tmp_path)).close()


def test_the_environment_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("YOCOLM_SWAP_DIR", str(tmp_path / "chosen"))
    assert find_directory(10) == str(tmp_path / "chosen")
    assert find_directory(10, "/other") == "/other"
    with pytest.raises(ConfigError, match="chosen"):
        SwapFile(10)
    (tmp_path / "chosen").mkdir()
    file = SwapFile(10)
    assert file.directory == str(tmp_path / "chosen") and file.directory in file.name
    file.close()


@pytest.mark.parametrize(
    ("free", "in_memory", "found"),
    [
        ({"/tmp": 9, "/var/tmp": 9}, (), "/tmp"),
        ({"/tmp": 1, "/var/tmp": 9}, (), "/var/tmp"),
        ({"/tmp": 9, "/var/tmp": 9}, ("/tmp",), "/var/tmp"),
        ({"/tmp": 9, "/var/tmp": 1}, ("/tmp",), "/tmp"),
        ({"/tmp": 9}, ("/tmp",), "/tmp"),
        ({"/tmp": 1, "/var/tmp": 1}, (), "/tmp"),
    ],
)
def test_a_folder_with_room_on_a_disk(
    free: dict[str, int], in_memory: tuple[str, ...], found: str, disks: Disks
) -> None:
    disks(free, in_memory)
    assert find_directory(5) == found


def test_room_for_what_nobody_asked_for(disks: Disks, monkeypatch: pytest.MonkeyPatch) -> None:
    disks({"/tmp": 8 * GIB})
    assert swap_room(4 * GIB) == 4 * GIB
    assert swap_room(100 * GIB) == 7.5 * GIB
    disks({"/tmp": 8 * GIB}, ("/tmp",))
    assert swap_room(4 * GIB) == 0
    monkeypatch.setattr(tempfile, "gettempdir", lambda: open("/none/none"))
    assert swap_room(4 * GIB) == 0
    with pytest.raises(ConfigError, match="no folder for a swap file"):
        find_directory(10)
    assert swap_room(10, "/none/none") == 0


@pytest.mark.skipif(not Path("/proc/self/mounts").exists(), reason="needs Linux")
def test_folders_in_memory_are_known(tmp_path: Path) -> None:
    assert not swap_file._in_memory("/proc")
    lines = Path("/proc/self/mounts").read_text().splitlines()
    for point in [line.split()[1] for line in lines if " tmpfs " in line][:1]:
        assert swap_file._in_memory(point)
