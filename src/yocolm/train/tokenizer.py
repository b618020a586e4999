"""Training a byte-level BPE tokenizer with the ``tokenizers`` library."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from yocolm.errors import ConfigError, writing
from yocolm.tokenizer import read_tokenizer
from yocolm.train.data_lock import locked

END_OF_TEXT = "<|endoftext|>"  # starts every document; the only special token


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, path: Path, separator: str = END_OF_TEXT
) -> Tokenizer:
    """Train a lossless byte-level BPE on ``texts`` and write it to ``path``.

    It has at most ``vocab_size`` tokens: ``separator``, the 256 bytes, and merges. Of several
    processes that ask for ``path`` at once one trains, and the others read what it wrote. Raises
    ConfigError where it cannot be written, leaving nothing behind.
    """
    remedy = "make room there, or name another tokenizer.path"
    with writing(f"the tokenizer to {path}", remedy, ConfigError):
        path.parent.mkdir(parents=True, exist_ok=True)
        before = path.stat().st_mtime_ns if path.exists() else None
        with locked(path.with_name(f".{path.name}.lock")):
            if path.exists() and path.stat().st_mtime_ns != before:
                return read_tokenizer(path)
            return _train(texts, vocab_size, path, separator)


def _train(texts: Iterable[str], vocab_size: int, path: Path, separator: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[separator],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        tokenizer.save(str(partial))
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return tokenizer
