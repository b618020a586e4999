"""Peak memory of a process and all that it started, anonymous and file-backed apart."""

from __future__ import annotations

import threading
from pathlib import Path

_KINDS = {"Pss_Anon": "anonymous", "Pss_File": "file", "Pss_Shmem": "file"}


class PeakMemory:
    """Samples /proc while its block runs.

    ``bytes`` has the peaks ``anonymous`` and ``file`` (pages that several processes share are
    divided among them, as in the kernel's Pss). It is empty where there is no smaps_rollup.
    """

    def __init__(self, pid: int, interval: float = 0.05) -> None:
        self.bytes: dict[str, int] = {}
        self._pid, self._interval = pid, interval
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            for kind, size in memory_now(self._pid).items():
                self.bytes[kind] = max(size, self.bytes.get(kind, 0))
            if self._done.wait(self._interval):
                return


def memory_now(pid: int) -> dict[str, int]:
    """Bytes of the process and its children, by kind."""
    total: dict[str, int] = {}
    for each in _tree(pid):
        try:
            text = Path(f"/proc/{each}/smaps_rollup").read_text(encoding="ascii")
        except OSError:  # it has ended, or this is no Linux
            continue
        for line in text.splitlines():
            name, _, rest = line.partition(":")
            if name in _KINDS:
                kind = _KINDS[name]
                total[kind] = total.get(kind, 0) + 1024 * int(rest.split()[0])
    return total


def _tree(pid: int) -> list[int]:
    """The process and its children, theirs, and so on."""
    found = [pid]
    for each in found:
        for path in Path(f"/proc/{each}/task").glob("*/children"):
            try:
                found += [int(child) for child in path.read_text(encoding="ascii").split()]
            except OSError:
                continue
    return found
