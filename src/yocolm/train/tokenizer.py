"""Training a byte-level BPE tokenizer with the ``tokenizers`` library."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"  # starts every document; the only special token


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, path: Path, separator: str = END_OF_TEXT
) -> Tokenizer:
    """Train a lossless byte-level BPE on ``texts`` and write it to ``path``.

    It has at most ``vocab_size`` tokens: ``separator``, the 256 bytes, and merges.
    """
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
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    tokenizer.save(str(partial))
    partial.replace(path)
    return tokenizer
