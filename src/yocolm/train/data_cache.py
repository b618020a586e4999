"""Texts as tokens, worked out once and kept in a folder for each file.

A file's folder is named by a hash of all that decides its tokens, so that a changed file is
tokenised again, alone. It appears whole, by a rename, or not at all. Ranks that start together
share the files out among themselves. Nothing here holds more of a corpus than its longest document.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from yocolm.errors import ConfigError, writing
from yocolm.fields import write_json
from yocolm.tokenizer import JsonTokenizer
from yocolm.train.data_files import (
    Document,
    SourceFiles,
    is_held_out,
    kind,
    parts_of,
    read_documents,
    text_of,
)
from yocolm.train.data_lock import locked
from yocolm.train.data_tokens import Shard, Tokens

PARTS = ("training", "held_out")
COUNTS = "counts.json"
STREAMS = {"ids": np.dtype("<i4"), "starts": np.dtype("<i8")}  # files of a part
PIECE = 1 << 18  # characters of a document that are tokenised at once
BATCH = 1 << 20  # characters that are tokenised side by side
CUTS = re.compile(r"(?<=\S)[ \n]")  # where a document may be cut, if its tokens show no difference
CONTEXT = 64  # characters on both sides of a cut that are looked at
TRIES = 16
SETTLED_NS = 2_000_000_000  # what was changed later than this before it was read may change unseen


class Opening(NamedTuple):
    """What stands before every document, and how many of these belong to the one before it."""

    tokens: list[int]
    fresh: int


def opening(tokenizer: Tokenizer, separator: str) -> Opening:
    """The ``separator``, then what the tokenizer puts before every text (BOS); once if they agree.

    Raises ConfigError if there is no such token.
    """
    start = tokenizer.token_to_id(separator)
    if start is None:
        raise ConfigError(
            f"the tokenizer has no token {separator!r} to put before every document; "
            "name one of its special tokens as tokenizer.separator"
        )
    first = JsonTokenizer(tokenizer).opening()
    if start in first:
        return Opening(first, 0)
    return Opening([start, *first], 1 if first else 0)


@dataclass(frozen=True)
class Cached:
    """A source's tokens to train on and those held out; ``digest`` is of its texts."""

    source: SourceFiles
    training: Tokens
    held_out: Tokens
    digest: str


class TokenCache:
    """Tokens of sources in ``folder``; ``share`` of the documents is held out of the training."""

    def __init__(
        self, folder: Path, tokenizer: Tokenizer, separator: str, share: float = 0.0
    ) -> None:
        self.folder, self.share = folder, share
        self.before = opening(tokenizer, separator)
        self.tokenizer = Tokenizer.from_str(tokenizer.to_str())
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self._key = [tokenizer.to_str(), separator, self.before, share]

    def load(self, sources: Sequence[SourceFiles]) -> list[Cached]:
        """Tokenise what is not in the cache yet, and open all of it.

        Files that another process works on come last, and are waited for. Raises ConfigError for
        texts that cannot be read, and where the file system does not take their tokens.
        """
        with writing_cache(self.folder):
            return self._load(sources)

    def _load(self, sources: Sequence[SourceFiles]) -> list[Cached]:
        self.folder.mkdir(parents=True, exist_ok=True)
        digests: dict[Path, str] = {}
        for wait in (False, True):
            for file in dict.fromkeys(file for source in sources for file in source.files):
                found = None if file in digests else _digest(file, self.folder, wait)
                if found is not None:
                    digests[file] = found
        entries = {
            (file, source.fields): self._entry(file, digests[file], source.fields)
            for source in sources
            for file in source.files
        }
        for wait in (False, True):
            for (file, fields), entry in entries.items():
                if not entry.exists():
                    self._build(entry, file, fields, wait)
        return [
            self._open(source, [entries[file, source.fields] for file in source.files], digests)
            for source in sources
        ]

    def _open(self, source: SourceFiles, entries: list[Path], digests: dict[Path, str]) -> Cached:
        training, held_out = (_stream(entries, part) for part in PARTS)
        return Cached(source, training, held_out, digest_files(source.files, digests))

    def _entry(self, file: Path, digest: str, fields: Sequence[str]) -> Path:
        key = json.dumps([*self._key, digest, kind(file), fields])
        return self.folder / hashlib.sha256(key.encode()).hexdigest()[:24]

    def _build(self, entry: Path, file: Path, fields: Sequence[str], wait: bool) -> None:
        with locked(entry.with_suffix(".lock"), wait) as lock:
            if not lock.held or entry.exists():
                return
            if lock.alone:  # what killed processes left half-written
                for stale in self.folder.glob(f".{entry.name}.*"):
                    shutil.rmtree(stale)
            partial = self.folder / f".{entry.name}.{uuid.uuid4().hex}"
            try:
                self._tokenize(partial, file, fields)
                _rename(partial, entry)
            finally:
                shutil.rmtree(partial, ignore_errors=True)

    def _tokenize(self, folder: Path, file: Path, fields: Sequence[str]) -> None:
        folder.mkdir()
        with ExitStack() as stack:
            writers = [stack.enter_context(_Writer(folder, part, self.before)) for part in PARTS]
            for batch in self._batches(read_documents(file, fields)):
                texts = [piece.text for piece in batch]
                found = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
                for piece, encoding in zip(batch, found, strict=True):
                    writers[piece.part].add(piece, encoding.ids)
                for writer in writers:
                    writer.flush()
        write_json(folder / COUNTS, {w.part: w.counts for w in writers})

    def _batches(self, documents: Iterator[Document]) -> Iterator[list[_Piece]]:
        """Pieces of documents to be tokenised side by side, of a bounded number of characters."""
        batch, size = [], 0
        for document in documents:
            part = int(is_held_out(text_of(document), self.share))
            pieces = (
                (text, learnt) for whole, learnt in parts_of(document) for text in self._cut(whole)
            )
            first = True
            for text, learnt in pieces:
                batch.append(_Piece(text, part, first, learnt))
                first, size = False, size + len(text) + CONTEXT
                if size >= BATCH:
                    yield batch
                    batch, size = [], 0
        yield batch

    def _cut(self, document: str) -> Iterator[str]:
        """Pieces of about ``PIECE`` characters whose tokens are those of the document.

        It is cut before a space or an end of line that no token spans. A tokenizer that treats the
        beginning of a text in a way of its own gets the document whole.
        """
        start = 0
        while len(document) - start > PIECE:
            places = islice(CUTS.finditer(document, start + PIECE), TRIES)
            cut = next((m.start() for m in places if self._may_cut(document, m.start())), None)
            if cut is None:
                break
            yield document[start:cut]
            start = cut
        yield document[start:]

    def _may_cut(self, document: str, cut: int) -> bool:
        left, right = document[max(0, cut - CONTEXT) : cut], document[cut : cut + CONTEXT]
        before, after, together = (
            self.tokenizer.encode(text, add_special_tokens=False).ids
            for text in (left, right, left + right)
        )
        return before + after == together


def writing_cache(folder: Path) -> AbstractContextManager[None]:
    """Errors of the file system become a ConfigError that names ``folder`` and the setting."""
    remedy = "make room there, or name another folder as data.cache_dir"
    return writing(f"the tokens of the texts to {folder}", remedy, ConfigError)


class _Piece(NamedTuple):
    text: str
    part: int  # index into PARTS
    first: bool  # of its document
    learnt: bool  # no prompt


class _Writer:
    """Writes the tokens of one part and where documents begin; holds those of one batch."""

    def __init__(self, folder: Path, part: str, before: Opening) -> None:
        self.folder, self.part, self.before = folder, part, before
        self.pending: dict[str, list[int]] = {name: [] for name in STREAMS}
        self.counts = {"tokens": 0, "prompts": 0, "documents": 0, "bytes": 0}

    def __enter__(self) -> _Writer:
        self.files = {name: open(_file(self.folder, self.part, name), "wb") for name in STREAMS}
        return self

    def __exit__(self, *_: object) -> None:
        with ExitStack() as stack:  # each is closed, even if one cannot be written
            for file in self.files.values():
                stack.enter_context(file)
            for file in self.files.values():
                file.flush()
                os.fsync(file.fileno())

    def add(self, piece: _Piece, ids: list[int]) -> None:
        found = ids if piece.learnt else [~token for token in ids]  # see Tokens.read
        if piece.first:
            self.pending["starts"].append(self.counts["tokens"] + self.before.fresh)
            self.counts["documents"] += 1
            found = [*self.before.tokens, *found]
        self.pending["ids"] += found
        self.counts["tokens"] += len(found)
        if piece.learnt:
            self.counts["bytes"] += len(piece.text.encode())
        else:
            self.counts["prompts"] += len(ids)

    def flush(self) -> None:
        for name, file in self.files.items():
            file.write(np.asarray(self.pending[name], dtype=STREAMS[name]).tobytes())
            self.pending[name] = []


def _file(folder: Path, part: str, name: str) -> Path:
    return folder / f"{part}.{name}"


def _rename(partial: Path, entry: Path) -> None:
    try:
        partial.rename(entry)
    except OSError:
        if not entry.exists():  # another process was first, where there are no locks
            raise


def _stream(entries: Sequence[Path], part: str) -> Tokens:
    shards, num_bytes, num_prompts = [], 0, 0
    for entry in entries:
        try:
            counts: dict[str, Any] = json.loads((entry / COUNTS).read_bytes())[part]
            length, documents = int(counts["tokens"]), int(counts["documents"])
            num_bytes += int(counts["bytes"])
            num_prompts += int(counts.get("prompts", 0))  # older entries have none
            sizes = [_file(entry, part, name).stat().st_size for name in STREAMS]
        except (OSError, ValueError, KeyError, TypeError):
            raise _damaged(entry) from None
        if sizes != [length * STREAMS["ids"].itemsize, documents * STREAMS["starts"].itemsize]:
            raise _damaged(entry)
        if length:  # nothing cannot be mapped
            shards.append(Shard(length, lambda entry=entry: _map(entry, part)))
    return Tokens(shards, num_bytes, num_prompts)


def _damaged(entry: Path) -> ConfigError:
    return ConfigError(f"the tokens in {entry} are damaged; delete this folder to have them redone")


def _map(entry: Path, part: str) -> tuple[np.ndarray, np.ndarray]:
    ids, starts = (
        np.memmap(_file(entry, part, name), dtype, mode="r") for name, dtype in STREAMS.items()
    )
    return ids, starts


def digest_files(files: Sequence[Path], digests: dict[Path, str]) -> str:
    """A hash of the files' contents, kinds and order; their names do not count."""
    digest = hashlib.sha256()
    for path in files:
        digest.update(bytes.fromhex(digests[path]))
        digest.update(kind(path).encode())
    return digest.hexdigest()[:16]


def _digest(file: Path, folder: Path, wait: bool) -> str | None:
    """SHA-256 of a file, remembered in ``folder`` as long as the file is not touched.

    None if another process works on it and ``wait`` is off.
    """
    note = folder / f"{hashlib.sha256(os.fsencode(file.resolve())).hexdigest()[:24]}.json"
    known = _known_digest(note, _mark(file))
    if known is not None:
        return known
    with locked(note.with_suffix(".lock"), wait) as lock:
        if not lock.held:
            return None
        mark, now = _mark(file), time.time_ns()
        known = _known_digest(note, mark)
        if known is not None:
            return known
        digest = hashlib.sha256()
        try:
            with open(file, "rb") as content:
                while block := content.read(1 << 20):
                    digest.update(block)
        except OSError as error:
            raise ConfigError(f"cannot read {file}: {error.strerror}") from None
        if now - max(mark[1:3]) > SETTLED_NS:
            partial = note.with_name(f".{note.stem}.{uuid.uuid4().hex}.json")
            try:
                write_json(partial, {"mark": mark, "sha256": digest.hexdigest()})
                partial.replace(note)
            finally:
                partial.unlink(missing_ok=True)
    return digest.hexdigest()


def _mark(file: Path) -> list[int]:
    """What changes when a file is touched: its size, two times in ns, and where it lies."""
    try:
        found = file.stat()
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from None
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev]


def _known_digest(note: Path, mark: list[int]) -> str | None:
    try:
        known = json.loads(note.read_bytes())
        return known["sha256"] if known["mark"] == mark else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
