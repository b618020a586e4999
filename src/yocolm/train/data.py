"""Windows of text to train and validate on, drawn in an order that a seed and counters decide."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from yocolm.errors import ConfigError
from yocolm.tokenizer import JsonTokenizer
from yocolm.train.data_cache import TokenCache
from yocolm.train.data_files import find_sources, find_validation
from yocolm.train.data_tokens import Tokens, joined
from yocolm.train.settings import TrainSettings


class Windows(NamedTuple):
    """Packed windows: ``inputs`` and ``targets`` [T] int64, and the ``lengths`` of the sequences.

    A target is negative where nothing is to be predicted. Lengths sum to T. A sequence is a window,
    or a piece of one where documents do not see each other.
    """

    inputs: np.ndarray
    targets: np.ndarray
    lengths: list[int]


@dataclass(frozen=True)
class Shape:
    """How windows are cut: their ``length``, the ``bos`` in place of each one's first input.

    With ``boundaries`` a new sequence begins where a document does.
    """

    length: int
    bos: int | None = None
    boundaries: bool = False

    def windows(self, places: Sequence[tuple[Tokens, int, int]]) -> Windows:
        """The windows of (stream, first token, number of tokens), one after another.

        A target is the token behind its input, so that a stream has to hold one more.
        """
        inputs, targets, lengths = [], [], []
        for tokens, start, count in places:
            ids = tokens.read(start, start + count + 1)
            assert len(ids) == count + 1
            prompt = ids < 0
            ids[prompt] = ~ids[prompt]
            targets.append(np.where(prompt[1:], -1, ids[1:]))
            if self.bos is not None:  # the token that gives way was a target of another window
                ids[0] = self.bos
            inputs.append(ids[:-1])
            edges = tokens.starts(start + 1, start + count) - start if self.boundaries else []
            lengths += np.diff([0, *edges, count]).tolist()
        return Windows(np.concatenate(inputs), np.concatenate(targets), lengths)


@dataclass
class Source:
    """Tokens of one source, drawn in windows without repetition until an epoch is through.

    With ``whole_documents`` every window begins with a document: with the first that the one before
    does not hold whole, however long it is. Documents at the very end that fill no window are left.
    """

    name: str
    tokens: Tokens
    weight: float
    digest: str  # of the text
    whole_documents: bool = False
    _epoch: tuple[Any, int, np.ndarray] | None = field(init=False, repr=False, default=None)
    _begins: tuple[int, np.ndarray] | None = field(init=False, repr=False, default=None)

    def place(self, draw: int, length: int, seed: int) -> int:
        """Where the ``draw``-th window of ``length + 1`` tokens begins.

        Every epoch windows are shifted, unless documents stay whole, and change their order.
        """
        if self.whole_documents:
            begins = self._documents(length)
            epoch, index = divmod(draw, len(begins))
            return int(begins[self._order(epoch, len(begins), length, seed)[1][index]])
        per_epoch = max(1, (len(self.tokens) - 1) // length - 1)
        epoch, index = divmod(draw, per_epoch)
        shift, order = self._order(epoch, per_epoch, length, seed)
        return shift + int(order[index]) * length

    def _order(self, epoch: int, per_epoch: int, length: int, seed: int) -> tuple[int, np.ndarray]:
        """An epoch's shift and the order of its windows."""
        key = (epoch, length, seed)
        if self._epoch is None or self._epoch[0] != key:
            name_seed = int.from_bytes(hashlib.sha256(self.name.encode()).digest()[:4], "big")
            rng = np.random.default_rng([seed, name_seed, epoch])
            shift = int(rng.integers(0, max(1, len(self.tokens) - per_epoch * length)))
            self._epoch = key, shift, rng.permutation(per_epoch)
        return self._epoch[1:]

    def _documents(self, length: int) -> np.ndarray:
        """Where windows begin that begin with documents."""
        if self._begins is None or self._begins[0] != length:
            starts = self.tokens.starts(0, len(self.tokens))
            found, index = [], 0
            while index < len(starts) and starts[index] + length < len(self.tokens):
                found.append(int(starts[index]))
                cut = int(np.searchsorted(starts, found[-1] + length + 1, side="right")) - 1
                index = max(index + 1, cut)
            self._begins = length, np.asarray(found)
        return self._begins[1]


class Sampler:
    """Draws the windows of a training; its state is one counter a source.

    The order is the same for every number of ranks: each takes its share of a batch that all count
    through.
    """

    def __init__(
        self, sources: list[Source], shape: Shape, seed: int, held_out: float = 0.0
    ) -> None:
        """``held_out`` is the share of the documents that sources lack, for errors."""
        weights = [source.weight for source in sources]
        if not any(weights):
            raise ConfigError("the weights of all sources are 0; give one above 0")
        for source in sources:
            if source.weight and len(source.tokens) < shape.length + 2:
                beside = f" beside what data.validation_split {held_out} holds out"
                raise ConfigError(
                    f"source {source.name!r} has {len(source.tokens)} tokens"
                    f"{beside if held_out else ''}; sequence_length {shape.length} needs at least "
                    f"{shape.length + 2}: {'lower one of them' if held_out else 'lower it'}, or "
                    "add texts"
                )
        self.sources, self.shape, self.seed = sources, shape, seed
        self.draws = [0] * len(sources)
        if math.isinf(sum(weights)):
            weights = [weight / max(weights) for weight in weights]
        self.shares = [weight / sum(weights) for weight in weights]

    @property
    def bos(self) -> int | None:
        """The token that begins every window; None where windows begin as they are."""
        return self.shape.bos

    def batch(self, size: int, rank: int = 0, ranks: int = 1) -> Windows:
        """The next ``size`` windows of the training: of these, the share of ``rank``.

        ``ranks`` divides ``size``; together, in their order, all ranks get what one would get.
        """
        if size % ranks:
            raise ValueError(f"{size} windows cannot be shared by {ranks} ranks")
        share = size // ranks
        places = []
        for index in range(size):
            rng = np.random.default_rng([self.seed, sum(self.draws)])
            chosen = int(rng.choice(len(self.sources), p=self.shares))
            if index // share == rank:
                source = self.sources[chosen]
                start = source.place(self.draws[chosen], self.shape.length, self.seed)
                places.append((source.tokens, start, self.shape.length))
            self.draws[chosen] += 1
        return self.shape.windows(places)

    def state_dict(self) -> dict[str, Any]:
        return {"draws": dict(zip((s.name for s in self.sources), self.draws, strict=True))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.draws = [state["draws"][source.name] for source in self.sources]


@dataclass(frozen=True)
class Validation:
    """The text to validate on, in windows that each start without context.

    ``spread``: a part of the text is spread evenly over it, not its beginning.
    """

    tokens: Tokens
    shape: Shape
    spread: bool = False

    @property
    def num_targets(self) -> int:
        """How many tokens follow another: all but the first, prompts too."""
        return len(self.tokens) - 1

    @property
    def num_bytes(self) -> int:
        """Of the text to be predicted, in UTF-8."""
        return self.tokens.num_bytes

    @property
    def tokens_per_byte(self) -> float:
        """Tokens to be predicted over the bytes of their text, in UTF-8; prompts do not count."""
        return (self.num_targets - self.tokens.num_prompts) / self.num_bytes

    def count(self, max_tokens: int) -> int:
        """How many targets ``windows`` has, with those of prompts."""
        return min(max_tokens, self.num_targets)

    def windows(self, max_tokens: int, size: int) -> Iterator[Windows]:
        """Windows of ``count(max_tokens)`` targets in all, ``size`` windows at a time.

        All are of the full length but the last.
        """
        for index in range(self.batches(max_tokens, size)):
            yield self.batch(max_tokens, size, index)

    def batches(self, max_tokens: int, size: int) -> int:
        """How many batches ``windows`` gives."""
        return -(-self._chosen(max_tokens) // size)

    def batch(self, max_tokens: int, size: int, index: int) -> Windows:
        """The ``index``-th of the batches of ``windows``; no other is read."""
        length, count, chosen = self.shape.length, self.count(max_tokens), self._chosen(max_tokens)
        all_windows = -(-self.num_targets // length)
        places = []
        for i in range(index * size, min((index + 1) * size, chosen)):
            place = i * all_windows // chosen if self.spread else i
            places.append((self.tokens, place * length, min(length, count - i * length)))
        return self.shape.windows(places)

    def _chosen(self, max_tokens: int) -> int:
        return -(-self.count(max_tokens) // self.shape.length)


def cache_folder(s: TrainSettings) -> Path:
    """Where the tokens of a training are kept."""
    return Path(s.data.cache_dir) if s.data.cache_dir else Path(s.output_dir) / "cache"


def build_data(s: TrainSettings, tokenizer: Tokenizer, cache: Path) -> tuple[Sampler, Validation]:
    """Tokenise the texts that are not in ``cache`` yet, to train and to validate on.

    All ranks may call this at once. Raises ConfigError for texts that cannot be read, are too
    short or empty.
    """
    separator, share = s.tokenizer.separator, s.data.validation_split
    bos = next(iter(JsonTokenizer(tokenizer).opening()), None)
    shape = Shape(s.data.sequence_length, bos, s.data.document_boundaries)
    found = TokenCache(cache, tokenizer, separator, share).load(find_sources(s))
    sources = [
        Source(c.source.name, c.training, c.source.weight, c.digest, c.source.whole_documents)
        for c in found
    ]
    sampler = Sampler(sources, shape, s.seed, share)
    if share:
        text = joined(c.held_out for c in found)
        if not text.num_bytes:
            raise ConfigError(
                f"data.validation_split {share} holds out no document with text; raise it, or "
                "name files as data.validation"
            )
    else:
        files = find_validation(s)
        text = joined(c.training for c in TokenCache(cache, tokenizer, separator).load(files))
        if not text.num_bytes:
            names = ", ".join(str(file) for source in files for file in source.files)
            raise ConfigError(f"data.validation is empty: {names}")
    return sampler, Validation(text, shape, spread=not s.data.validation)
