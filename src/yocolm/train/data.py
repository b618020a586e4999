"""Weighted sources of text, tokenised once, drawn in an order that a seed and counters decide."""

from __future__ import annotations

import glob
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from yocolm.errors import ConfigError
from yocolm.tokenizer import JsonTokenizer
from yocolm.train.settings import TrainSettings


def expand(patterns: list[str], where: str) -> list[Path]:
    """Files that the glob ``patterns`` match, each once, in name order within a pattern.

    Raises ConfigError for a pattern without a match.
    """
    files: list[Path] = []
    for pattern in patterns:
        matches = [Path(name) for name in sorted(glob.glob(pattern, recursive=True))]
        found = [path for path in matches if path.is_file()]
        if not found:
            raise ConfigError(f"{where}: no file matches {pattern!r}")
        files.extend(found)
    return list(dict.fromkeys(files))


def read_documents(path: Path, text_field: str) -> Iterator[str]:
    """Documents of one file: each record of a ``.jsonl``, else the whole file, byte for byte."""
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 at byte {error.start}") from None
    if path.suffix != ".jsonl":
        yield text
        return
    for number, line in enumerate(text.split("\n"), 1):  # text may hold other line separators
        if not line.strip():
            continue
        try:
            document = json.loads(line)[text_field]
        except (json.JSONDecodeError, KeyError, TypeError):
            document = None
        if not isinstance(document, str):
            raise ConfigError(
                f"{path}:{number} is no JSON record with a string in {text_field!r}; "
                "mend it, or name another field as data.text_field"
            )
        yield document


def count_bytes(files: list[Path], text_field: str) -> int:
    """UTF-8 bytes of all documents."""
    return sum(len(text.encode()) for path in files for text in read_documents(path, text_field))


def digest_files(files: list[Path]) -> str:
    """A hash of the files' contents and order; their names do not count."""
    digest = hashlib.sha256()
    for path in files:
        digest.update(hashlib.sha256(path.read_bytes()).digest())
        digest.update(b"records" if path.suffix == ".jsonl" else b"text")
    return digest.hexdigest()[:16]


def tokenize(
    files: list[Path], tokenizer: Tokenizer, text_field: str, cache: Path, separator: str
) -> np.ndarray:
    """All documents as one int32 array, each behind the ``separator`` token.

    Then comes what the tokenizer puts before every text (BOS), unless that is the separator.
    Memory-mapped from ``cache``, where it is kept under a hash of everything that decides it.
    """
    start = tokenizer.token_to_id(separator)
    if start is None:
        raise ConfigError(
            f"the tokenizer has no token {separator!r} to put before every document; "
            "name one of its special tokens as tokenizer.separator"
        )
    opening = _opening(tokenizer)
    before = opening if start in opening else [start, *opening]
    key = json.dumps([tokenizer.to_str(), digest_files(files), text_field, separator, *opening])
    target = cache / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.npy"
    if not target.exists():
        pieces = [np.zeros(0, np.int32)]
        for path in files:
            for document in read_documents(path, text_field):
                ids = tokenizer.encode(document, add_special_tokens=False).ids
                pieces.append(np.asarray([*before, *ids], dtype=np.int32))
        cache.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(".partial.npy")
        np.save(partial, np.concatenate(pieces))
        partial.replace(target)
    return np.load(target, mmap_mode="r")


def _opening(tokenizer: Tokenizer) -> list[int]:
    return JsonTokenizer(tokenizer).opening()


def window_start(tokenizer: Tokenizer) -> int | None:
    """The token that begins every window: BOS if the tokenizer puts it before every text."""
    return next(iter(_opening(tokenizer)), None)


@dataclass
class Source:
    """Tokens of one source, drawn in windows without repetition until an epoch is through."""

    name: str
    ids: np.ndarray  # [N] int32
    weight: float
    digest: str  # of the text

    def window(self, draw: int, length: int, seed: int) -> np.ndarray:
        """The ``draw``-th window of ``length + 1`` tokens; they shift and reorder every epoch."""
        per_epoch = max(1, (len(self.ids) - 1) // length - 1)
        epoch, index = divmod(draw, per_epoch)
        name_seed = int.from_bytes(hashlib.sha256(self.name.encode()).digest()[:4], "big")
        rng = np.random.default_rng([seed, name_seed, epoch])
        shift = int(rng.integers(0, max(1, len(self.ids) - per_epoch * length)))
        start = shift + int(rng.permutation(per_epoch)[index]) * length
        return np.asarray(self.ids[start : start + length + 1], dtype=np.int64)


class Sampler:
    """Draws training sequences; its state is one counter a source.

    ``bos`` stands in place of the first input of each; None changes nothing.
    """

    def __init__(
        self, sources: list[Source], length: int, seed: int, bos: int | None = None
    ) -> None:
        for source in sources:
            if len(source.ids) < length + 2:
                raise ConfigError(
                    f"source {source.name!r} has {len(source.ids)} tokens; "
                    f"sequence_length {length} needs at least {length + 2}"
                )
        self.sources, self.length, self.seed, self.bos = sources, length, seed, bos
        self.draws = [0] * len(sources)
        total = sum(source.weight for source in sources)
        self.shares = [source.weight / total for source in sources]

    def batch(self, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets, [size, length] int64 each."""
        windows = []
        for _ in range(size):
            rng = np.random.default_rng([self.seed, sum(self.draws)])
            chosen = int(rng.choice(len(self.sources), p=self.shares))
            source = self.sources[chosen]
            windows.append(source.window(self.draws[chosen], self.length, self.seed))
            self.draws[chosen] += 1
        stacked = np.stack(windows)
        if self.bos is not None:  # the token that gives way was a target of another window
            stacked[:, 0] = self.bos
        return stacked[:, :-1], stacked[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {"draws": dict(zip((s.name for s in self.sources), self.draws, strict=True))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.draws = [state["draws"][source.name] for source in self.sources]


def build_sampler(s: TrainSettings, tokenizer: Tokenizer, cache: Path) -> Sampler:
    """Tokenise the sources and return their sampler."""
    sources = []
    for name, source in s.data.sources.items():
        files = expand(source.files, f"data.sources.{name}.files")
        ids = tokenize(files, tokenizer, s.data.text_field, cache, s.tokenizer.separator)
        sources.append(Source(name, ids, source.weight, digest_files(files)))
    return Sampler(sources, s.data.sequence_length, s.seed, window_start(tokenizer))
