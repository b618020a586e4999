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
from yocolm.train.settings import DataSettings
from yocolm.train.tokenizer import END_OF_TEXT


def expand(patterns: list[str], where: str) -> list[Path]:
    """Files that the glob ``patterns`` match, in name order. A pattern must match something."""
    files: list[Path] = []
    for pattern in patterns:
        matches = sorted(glob.glob(pattern, recursive=True))
        if not matches:
            raise ConfigError(f"{where}: no file matches {pattern!r}")
        files.extend(Path(match) for match in matches)
    return files


def read_documents(path: Path, text_field: str) -> Iterator[str]:
    """Documents of one file: each record of a ``.jsonl``, else the whole file."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 at byte {error.start}") from None
    if path.suffix != ".jsonl":
        yield text
        return
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            document = json.loads(line)[text_field]
        except (json.JSONDecodeError, KeyError, TypeError):
            raise ConfigError(f"{path}:{number} is no JSON record with {text_field!r}") from None
        yield document


def tokenize(files: list[Path], tokenizer: Tokenizer, text_field: str, cache: Path) -> np.ndarray:
    """All documents as one int32 array, end-of-text before each; memory-mapped from ``cache``."""
    digest = hashlib.sha256(tokenizer.to_str().encode())
    for path in files:
        digest.update(str(path).encode() + hashlib.sha256(path.read_bytes()).digest())
    target = cache / f"{digest.hexdigest()[:16]}.npy"
    if not target.exists():
        start = tokenizer.token_to_id(END_OF_TEXT)
        prefix = [] if start is None else [start]
        ids: list[int] = []
        for path in files:
            for document in read_documents(path, text_field):
                ids.extend(prefix)
                ids.extend(tokenizer.encode(document, add_special_tokens=False).ids)
        cache.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(".partial.npy")
        np.save(partial, np.asarray(ids, dtype=np.int32))
        partial.replace(target)
    return np.load(target, mmap_mode="r")


@dataclass
class Source:
    """Tokens of one source, drawn in windows without repetition until an epoch is through."""

    name: str
    ids: np.ndarray  # [N] int32
    weight: float

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
    """Draws training sequences; its state is one counter a source."""

    def __init__(self, sources: list[Source], length: int, seed: int) -> None:
        for source in sources:
            if len(source.ids) < length + 2:
                raise ConfigError(
                    f"source {source.name!r} has {len(source.ids)} tokens; "
                    f"sequence_length {length} needs at least {length + 2}"
                )
        self.sources, self.length, self.seed = sources, length, seed
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
        return stacked[:, :-1], stacked[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {"draws": dict(zip((s.name for s in self.sources), self.draws, strict=True))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        names = [source.name for source in self.sources]
        if sorted(state["draws"]) != sorted(names):
            raise ConfigError(
                f"the checkpoint was trained on sources {sorted(state['draws'])}, "
                f"the configuration has {sorted(names)}"
            )
        self.draws = [state["draws"][name] for name in names]


def build_sampler(data: DataSettings, tokenizer: Tokenizer, cache: Path, seed: int) -> Sampler:
    """Tokenise the sources and return their sampler."""
    sources = [
        Source(
            name,
            tokenize(
                expand(source.files, f"data.sources.{name}"), tokenizer, data.text_field, cache
            ),
            source.weight,
        )
        for name, source in data.sources.items()
    ]
    return Sampler(sources, data.sequence_length, seed)
