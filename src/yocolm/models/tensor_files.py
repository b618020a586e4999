"""Safetensors files of a model folder: read in bounded pieces, mapped, written in shards."""

from __future__ import annotations

import json
import mmap
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from yocolm.errors import CheckpointError, writing
from yocolm.fields import read_json, write_json
from yocolm.models.layouts import Shape

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
REMEDY = "make room there, or write to another folder"
_PIECE_BYTES = 64 * 2**20  # at most, and at most a 32nd of all
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}

Piece = tuple[str, int, Callable[[], Tensor]]  # name in the file, bytes, and how to get it


@dataclass(frozen=True)
class Stored:
    """Where a tensor is: its file, its name there, its shape and the format's name of its dtype."""

    path: Path
    name: str
    shape: Shape
    dtype: str

    @property
    def nbytes(self) -> int:
        dtype = _DTYPES.get(self.dtype)
        return prod(self.shape) * (1 if dtype is None else dtype.itemsize)


class TensorFiles:
    """The tensors of a folder by name, copied without their files staying in memory.

    Files are mapped, and each page that was read counts as the process's until its mapping ends.
    So a file is opened anew whenever a piece of it has been read.
    """

    def __init__(self, tensors: Mapping[str, Stored]) -> None:
        self.tensors = dict(tensors)
        total = sum(stored.nbytes for stored in self.tensors.values())
        self._piece = min(_PIECE_BYTES, max(2**20, total // 32))
        self._open: tuple[Path, Any] | None = None
        self._read = 0

    def copy(
        self, name: str, target: Tensor, seen: Callable[[int], object] = lambda _: None
    ) -> None:
        """Copies a tensor into ``target`` of its shape, casting; ``seen`` is told bytes read."""
        stored = self.tensors[name]
        rows = max(1, self._piece * stored.shape[0] // max(1, stored.nbytes))
        for start in range(0, stored.shape[0], rows):
            piece = self._handle(stored.path).get_slice(stored.name)[start : start + rows]
            target[start : start + rows].copy_(piece)
            self._read += piece.nbytes
            seen(piece.nbytes)

    def mapped(self, name: str) -> tuple[Tensor, Callable[[], None]]:
        """A tensor in its file's dtype, of which only those pages are read that are used.

        Pages that were used count as the process's until the second result, a function, is called.
        """
        stored = self.tensors[name]
        with open(stored.path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")  # of the header, which follows
            first, end = json.loads(file.read(length))[stored.name]["data_offsets"]
            first, end = 8 + length + first, 8 + length + end
            start = first - first % mmap.ALLOCATIONGRANULARITY
            pages = mmap.mmap(file.fileno(), end - start, access=mmap.ACCESS_READ, offset=start)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is not writable: nobody writes
            flat = torch.frombuffer(
                pages,
                dtype=_DTYPES[stored.dtype],
                count=prod(stored.shape),
                offset=first - start,
            )
        if not hasattr(pages, "madvise"):  # not on this system: it decides by itself
            return flat.view(stored.shape), lambda: None
        pages.madvise(mmap.MADV_RANDOM)  # rows are small and anywhere: reading ahead is waste
        return flat.view(stored.shape), lambda: pages.madvise(mmap.MADV_DONTNEED)

    def check_floats(self, names: Iterable[str], where: str) -> None:
        """Raises CheckpointError naming a tensor that holds no plain floating-point numbers."""
        for name in names:
            if (stored := self.tensors[name]).dtype not in _DTYPES:
                raise CheckpointError(
                    f"{where}: tensor {stored.name} is {stored.dtype}; weights must be floating "
                    f"point, one of {', '.join(_DTYPES)} (quantised checkpoints are not supported)"
                )

    def _handle(self, path: Path) -> Any:
        if self._open is None or self._open[0] != path or self._read >= self._piece:
            self._open = None  # first of all: two mappings would count twice
            self._open, self._read = (path, _open_file(path)), 0
        return self._open[1]


def open_folder(folder: Path) -> TensorFiles:
    """The tensors of `model.safetensors`, or of the shards that its index names.

    Raises CheckpointError for files that are absent or damaged, and what only the index has.
    """
    if (folder / SINGLE_FILE).exists():
        return TensorFiles(_contents(folder / SINGLE_FILE))
    if not (folder / INDEX_FILE).exists():
        pickled = sorted(path.name for path in folder.glob("*.bin"))
        hint = ""
        if pickled:
            hint = f"; {', '.join(pickled)} is pickled and not read: save it as safetensors"
        raise CheckpointError(f"{folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}{hint}")
    index = read_json(folder / INDEX_FILE).get("weight_map")
    if not isinstance(index, dict):
        raise CheckpointError(f"{folder / INDEX_FILE} has no weight_map")
    files = sorted(set(index.values()))
    if absent := [file for file in files if not (folder / file).exists()]:
        raise CheckpointError(
            f"{folder}: missing shard {', '.join(absent)}, named in {INDEX_FILE}; copy it there"
        )
    # The shards themselves say what they hold; a tensor that only the index knows is missing.
    tensors = {name: stored for file in files for name, stored in _contents(folder / file).items()}
    if unkept := index.keys() - tensors.keys():
        raise CheckpointError(
            f"{folder}: tensors named in {INDEX_FILE} but absent from its shards: {listing(unkept)}"
        )
    return TensorFiles(tensors)


def write_tensors(folder: Path, pieces: Sequence[Piece], max_shard_bytes: int) -> None:
    """Writes tensors as one safetensors file or as indexed shards, one of them in memory.

    Raises CheckpointError, leaving what was there before, where the file system takes them not.
    """
    shards: list[list[tuple[str, Callable[[], Tensor]]]] = []
    room = 0
    for name, size, get in pieces:
        if not shards or size > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append((name, get))
        room -= size
    names = [SINGLE_FILE]
    if len(shards) > 1:
        names = [
            f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, 1 + len(shards))
        ]
    try:
        for file, shard in zip(names, shards, strict=True):
            tensors = {name: get() for name, get in shard}
            with writing(folder / file, REMEDY):
                save_file(tensors, _partial(folder / file), metadata={"format": "pt"})
        # Only now, with everything on the disk: an earlier save's files would be read back.
        with writing(f"the weights to {folder}", REMEDY):
            _rename(folder, names)
    finally:
        for file in names:
            _partial(folder / file).unlink(missing_ok=True)
    if len(shards) > 1:
        total = sum(size for _, size, _ in pieces)
        files = {name: file for file, shard in zip(names, shards, strict=True) for name, _ in shard}
        index = {"metadata": {"total_size": total}, "weight_map": files}
        with writing(folder / INDEX_FILE, REMEDY):
            write_json(folder / INDEX_FILE, index)


def _rename(folder: Path, names: Sequence[str]) -> None:
    """Put the new files, complete by now, in place of an earlier save's."""
    for stale in (*folder.glob("model-*-of-*.safetensors"), folder / SINGLE_FILE):
        stale.unlink(missing_ok=True)
    (folder / INDEX_FILE).unlink(missing_ok=True)
    for file in names:
        os.replace(_partial(folder / file), folder / file)


def listing(names: Iterable[str], limit: int = 8) -> str:
    """Names for an error message, in order, the first few of many."""
    ordered = sorted(names)
    more = f" and {len(ordered) - limit} more" if len(ordered) > limit else ""
    return ", ".join(ordered[:limit]) + more


def _contents(path: Path) -> dict[str, Stored]:
    handle = _open_file(path)
    slices = {name: handle.get_slice(name) for name in handle.keys()}
    return {
        name: Stored(path, name, tuple(piece.get_shape()), piece.get_dtype())
        for name, piece in slices.items()
    }


def _open_file(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not a readable safetensors file: {error}") from error


def _partial(path: Path) -> Path:
    return path.with_name(path.name + ".partial")
