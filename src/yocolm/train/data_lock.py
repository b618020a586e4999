"""One process at a time, over all ranks of a machine or of a shared file system."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

try:
    import fcntl
except ImportError:  # Windows, where training runs in one process
    fcntl = None


class Lock(NamedTuple):
    """``held`` says whether to go on; ``alone``, whether nobody else does."""

    held: bool
    alone: bool


@contextmanager
def locked(path: Path, wait: bool = True) -> Iterator[Lock]:
    """Hold the lock file ``path``; not held where another process has it and ``wait`` is off.

    The system lets go of it when its holder ends, however it ends. Where there are no such locks
    everyone goes on, but not alone.
    """
    if fcntl is None:
        yield Lock(True, False)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            lock = _take(descriptor, wait)
            if lock.alone and not _same_file(descriptor, path):
                continue  # its holder has removed it meanwhile
            try:
                yield lock
            finally:
                if lock.alone:
                    path.unlink(missing_ok=True)
            return
        finally:
            os.close(descriptor)


def has_locks(folder: Path) -> bool:
    """Whether processes that use ``folder`` can keep each other out."""
    with locked(folder / ".probe.lock") as lock:
        return lock.alone


def _take(descriptor: int, wait: bool) -> Lock:
    assert fcntl is not None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return Lock(False, False)
    except OSError:  # a file system without locks
        return Lock(True, False)
    return Lock(True, True)


def _same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False
