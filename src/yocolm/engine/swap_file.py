"""A bounded file without a name, for what is swapped out: nothing of it survives a crash."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Sequence
from typing import Any

from yocolm.errors import ConfigError

VARIABLE = "YOCOLM_SWAP_DIR"
MOST_PIECES = 1024  # of memory in one call: IOV_MAX of Linux and macOS
RESERVE = 16  # a default swap space leaves one part in so many of the free disk to others
_ANOTHER = f"give another folder ({VARIABLE} or TMPDIR), or do without (swap_space=0)"


class SwapFile:
    """Bytes ``0 .. num_bytes - 1`` on disk, written and read by one thread.

    Args:
        num_bytes: the most that are ever written. Disk is taken as they are.
        directory: where the file lies; None: see ``find_directory``.

    Raises:
        ConfigError: no file can be made there, or there is less room than that.
    """

    def __init__(self, num_bytes: int, directory: str | None = None) -> None:
        self.directory = directory = find_directory(num_bytes, directory)
        try:
            self._file: Any = tempfile.TemporaryFile(dir=directory, buffering=0)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"no swap file can be made in {directory!r} ({reason}); {_ANOTHER}"
            ) from error
        free = shutil.disk_usage(directory).free
        if free < num_bytes:
            self.close()
            raise ConfigError(
                f"swap_space needs {_gib(num_bytes)} in {directory!r}, where {_gib(free)} are "
                f"free; give less swap_space, or {_ANOTHER}"
            )

    @property
    def name(self) -> str:
        return f"the swap file in {self.directory!r}"

    def write(self, offset: int, pieces: Sequence[Any]) -> None:
        """Write ``pieces`` (contiguous arrays of bytes) one behind the other from ``offset`` on.

        Raises:
            OSError: not all could be written.
        """
        self._transfer(True, offset, pieces)

    def read(self, offset: int, pieces: Sequence[Any]) -> None:
        """Fill ``pieces`` with the bytes from ``offset`` on. Raises OSError."""
        self._transfer(False, offset, pieces)

    def close(self) -> None:
        self._file.close()

    def _transfer(self, out: bool, offset: int, pieces: Sequence[Any]) -> None:
        left = [memoryview(piece) for piece in pieces]
        while left:
            count = self._call(out, offset, left[:MOST_PIECES])
            if not count:
                raise OSError(errno.EIO, "bytes were not taken" if out else "the file is too short")
            offset += count
            left = _behind(left, count)

    def _call(self, out: bool, offset: int, pieces: list[memoryview]) -> int:
        """One call of the system, which may move less than it was given: bytes moved."""
        if hasattr(os, "pwritev"):
            call = os.pwritev if out else os.preadv
            return call(self._file.fileno(), pieces, offset)
        self._file.seek(offset)
        return (self._file.write if out else self._file.readinto)(pieces[0])


def find_directory(num_bytes: int, directory: str | None = None) -> str:
    """``directory``, else the environment's YOCOLM_SWAP_DIR, else the first of the system's folders
    for temporary files that has the room and does not lie in memory itself, if one does.

    Raises:
        ConfigError: there is no folder for temporary files.
    """
    chosen = directory or os.environ.get(VARIABLE)
    if chosen:
        return chosen
    try:
        usual = tempfile.gettempdir()
    except OSError as error:
        raise ConfigError(f"no folder for a swap file: {error}; {_ANOTHER}") from error
    found = [usual]
    if os.path.isdir("/var/tmp") and os.access("/var/tmp", os.W_OK):
        found.append("/var/tmp")
    roomy = [path for path in found if shutil.disk_usage(path).free >= num_bytes]
    on_disk = [path for path in roomy if not _in_memory(path)]
    return (on_disk or roomy or found)[0]


def swap_room(num_bytes: int, directory: str | None = None) -> int:
    """How many of ``num_bytes`` a swap space may take that nobody asked for: so many as leave some
    of the disk to others. 0 where there is no folder, or only one that lies in memory."""
    try:
        found = find_directory(num_bytes, directory)
        free = shutil.disk_usage(found).free
    except (ConfigError, OSError):
        return 0
    return 0 if _in_memory(found) else min(num_bytes, free - free // RESERVE)


def _behind(pieces: list[memoryview], count: int) -> list[memoryview]:
    """``pieces`` without their first ``count`` bytes."""
    first = 0
    while first < len(pieces) and count >= pieces[first].nbytes:
        count -= pieces[first].nbytes
        first += 1
    left = pieces[first:]
    if count:
        left[0] = left[0][count:]
    return left


def _in_memory(path: str) -> bool:
    """Whether ``path`` is on a file system that keeps its files in memory."""
    try:
        with open("/proc/self/mounts", encoding="utf-8", errors="replace") as file:
            mounts = [line.split() for line in file]
    except OSError:
        return False
    path = os.path.join(os.path.realpath(path), "")
    kinds = {fields[1]: fields[2] for fields in mounts if len(fields) > 2}
    above = [point for point in kinds if path.startswith(os.path.join(point, ""))]
    return bool(above) and kinds[max(above, key=len)] in ("tmpfs", "ramfs")


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
