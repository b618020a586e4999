"""Tokens of many files as one stream, mapped from the disk, and where documents begin in it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

OPEN_SHARDS = 32  # files mapped at once by a stream


@dataclass(frozen=True)
class Shard:
    """A file's tokens, ``length`` of them.

    ``load`` gives them, [length] int32, and where documents begin, ascending int64.
    """

    length: int
    load: Callable[[], tuple[np.ndarray, np.ndarray]]


class Tokens:
    """The tokens of many files one after another; only some of the files are open at a time."""

    def __init__(self, shards: Sequence[Shard], num_bytes: int = 0, num_prompts: int = 0) -> None:
        self.shards = list(shards)
        self.num_bytes = num_bytes  # of the documents' text but for prompts, in UTF-8
        self.num_prompts = num_prompts  # tokens of prompts
        self._edges = np.cumsum([0, *(shard.length for shard in self.shards)])
        self._open: OrderedDict[int, tuple[np.ndarray, np.ndarray]] = OrderedDict()

    @classmethod
    def of(cls, ids: np.ndarray, starts: Iterable[int] = ()) -> Tokens:
        """Tokens in memory: ``ids`` [N], documents beginning at ``starts``."""
        loaded = ids, np.asarray(list(starts), dtype=np.int64)
        return cls([Shard(len(ids), lambda: loaded)])

    def __len__(self) -> int:
        return int(self._edges[-1])

    def read(self, start: int, stop: int) -> np.ndarray:
        """A copy of tokens ``start`` to ``stop``, int64; fewer at the end of the stream.

        A token of a prompt, which is not to be predicted, comes as its complement: ``~token``.
        """
        spans = [ids[a:b] for _, (ids, _), a, b in self._spans(start, stop)]
        return np.concatenate([np.zeros(0, np.int64), *spans], dtype=np.int64)

    def starts(self, start: int, stop: int) -> np.ndarray:
        """The places from ``start`` up to before ``stop`` where a document begins."""
        found = [np.zeros(0, np.int64)]
        for edge, (_, starts), a, b in self._spans(start, stop):
            low, high = np.searchsorted(starts, [a, b])
            found.append(starts[low:high] + edge)
        return np.concatenate(found)

    def _spans(
        self, start: int, stop: int
    ) -> Iterator[tuple[int, tuple[np.ndarray, np.ndarray], int, int]]:
        """Each shard's first place in the stream, what it holds, and the span of it asked for."""
        assert start >= 0
        index = int(np.searchsorted(self._edges, start, side="right")) - 1
        while start < min(stop, len(self)):
            edge, end = int(self._edges[index]), int(self._edges[index + 1])
            if start < end:
                yield edge, self._load(index), start - edge, min(stop, end) - edge
                start = end
            index += 1

    def _load(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        if index not in self._open:
            self._open[index] = self.shards[index].load()
            if len(self._open) > OPEN_SHARDS:
                self._open.popitem(last=False)
        self._open.move_to_end(index)
        return self._open[index]


def joined(streams: Iterable[Tokens]) -> Tokens:
    """Several streams as one."""
    streams = list(streams)
    shards = [shard for stream in streams for shard in stream.shards]
    num_bytes, num_prompts = (
        sum(getattr(stream, name) for stream in streams) for name in ("num_bytes", "num_prompts")
    )
    return Tokens(shards, num_bytes, num_prompts)
