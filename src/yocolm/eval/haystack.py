"""Text to hide sentences in: tokenised once, cut at the ends of sentences, exact in length.

A passage is a run of whole sentences from some sentence on, around the end of the text if need be.
Its last sentences are chosen, from anywhere in the text, so that it has exactly as many tokens as
asked for: nothing is cut in the middle, and passages that begin alike stay alike for as long as
possible, which the engine's prefix cache can use.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from yocolm.errors import RequestError
from yocolm.eval.perplexity import read_text
from yocolm.tokenizer import StreamDecoder, Tokenizer

# The white space at the end of a sentence, whose next begins in no lower case, or of a paragraph.
_END = re.compile(r"(?:[.!?][\"'”’)\]_*]*(?=\s+[^\sa-z])|(?=\s*\n\s*\n))(\s+)")
_NOT_AN_END = re.compile(r"\b(?:Mrs?|Ms|Dr|St|Col|Capt|Gen|Lt|Sr|Jr|Prof|Rev|No|vol|[A-Z])\.$")
_MOST_DROPPED = 200  # sentences given up at the end of a passage to find some that fit


@dataclass(frozen=True)
class Passage:
    """Tokens of whole sentences; ``ends`` counts the tokens before each place between two of them,
    from 0 to all of them."""

    token_ids: list[int]
    ends: list[int]

    def cut(self, depth: float) -> int:
        """The place between two sentences nearest to ``depth`` (0 to 1) of the tokens."""
        wanted = depth * len(self.token_ids)
        at = bisect_left(self.ends, wanted)
        near = self.ends[max(at - 1, 0) : at + 1]
        return min(near, key=lambda end: abs(end - wanted))

    def insert(self, pieces: Iterable[tuple[int, Sequence[int]]]) -> list[int]:
        """The passage with token ids put in at the given places, those of one place in order."""
        ids, done = [], 0
        for place, piece in sorted(pieces, key=lambda pair: pair[0]):
            ids += self.token_ids[done:place]
            ids += piece
            done = place
        return ids + self.token_ids[done:]


class Haystack:
    """A tokenised text and its sentences.

    Args:
        token_ids: of the text, without special tokens.
        starts: of the sentences, ascending from 0.
        numbers: runs of digits in the text, which no needle may have.
    """

    def __init__(
        self, token_ids: Sequence[int], starts: Sequence[int], numbers: frozenset[str] = frozenset()
    ) -> None:
        self.token_ids, self.numbers = list(token_ids), numbers
        self.starts = list(starts)
        stops = [*self.starts[1:], len(self.token_ids)]
        self._sizes = [stop - start for start, stop in zip(self.starts, stops, strict=True)]
        self._of_size: dict[int, list[int]] = {}
        for sentence, size in enumerate(self._sizes):
            self._of_size.setdefault(size, []).append(sentence)

    @classmethod
    def from_files(cls, files: Sequence[Path], tokenizer: Tokenizer) -> Haystack:
        """UTF-8 files in their order, a blank line before each. Raises RequestError if they hold no
        text."""
        ids: list[int] = []
        starts: list[int] = []
        numbers: set[str] = set()
        for file in files:
            text = read_text(file)
            new = continuation(tokenizer, f"\n\n{text.strip()}") if text.strip() else []
            starts += [len(ids) + start for start in sentence_starts(tokenizer, new)]
            ids += new
            numbers.update(re.findall(r"\d+", text))
        if not ids:
            raise RequestError(f"{', '.join(map(str, files))} hold no text to hide needles in")
        return cls(ids, starts, frozenset(numbers))

    @property
    def num_sentences(self) -> int:
        return len(self.starts)

    def passage(self, first: int, tokens: int) -> Passage:
        """Sentences from number ``first`` on with exactly so many ``tokens``.

        Of a text that has none to fit, the first one lacks its beginning.
        """
        if tokens <= 0:
            return Passage([], [0])
        chosen: list[int] = []
        total, at = 0, first
        while total < tokens:
            chosen.append(at % len(self.starts))
            total += self._sizes[chosen[-1]]
            at += 1
        whole, surplus = list(chosen), total - tokens
        for _ in range(_MOST_DROPPED):
            fitting = [] if total == tokens else self._fitting(tokens - total, first)
            if fitting is not None:
                return self._join([*chosen, *fitting])
            if not chosen:
                break
            total -= self._sizes[chosen.pop()]
        passage = self._join(whole)
        ends = [end - surplus for end in passage.ends if end >= surplus]
        return Passage(passage.token_ids[surplus:], ends if ends[0] == 0 else [0, *ends])

    def _fitting(self, tokens: int, seed: int) -> list[int] | None:
        """One or two sentences with so many tokens, from anywhere."""
        if tokens in self._of_size:
            return [self._one_of(tokens, seed)]
        for size in self._of_size:
            if tokens - size in self._of_size:
                return [self._one_of(size, seed), self._one_of(tokens - size, seed + 1)]
        return None

    def _one_of(self, size: int, seed: int) -> int:
        sentences = self._of_size[size]
        return sentences[seed % len(sentences)]

    def _join(self, sentences: Sequence[int]) -> Passage:
        ids: list[int] = []
        for sentence in sentences:
            start = self.starts[sentence]
            ids += self.token_ids[start : start + self._sizes[sentence]]
        return Passage(ids, [0, *accumulate(self._sizes[sentence] for sentence in sentences)])


def sentence_starts(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[int]:
    """The tokens with which sentences begin, 0 first.

    A sentence ends where a token does: at the end of its last character, or in the white space
    behind it.
    """
    decoder = StreamDecoder(tokenizer, skip_special_tokens=False)
    pieces = [decoder.push(token) for token in token_ids]
    offsets = [0, *accumulate(map(len, pieces))]
    text, starts = "".join(pieces), [0] if token_ids else []
    for match in _END.finditer(text):
        if _NOT_AN_END.search(text, max(0, match.start() - 8), match.start() + 1):
            continue
        index = bisect_left(offsets, match.start(1), starts[-1])
        while index < len(token_ids) and not pieces[index]:  # inside a character
            index += 1
        if starts[-1] < index < len(token_ids) and offsets[index] <= match.end(1):
            starts.append(index)
    return starts


def continuation(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of a text that follows other text: without BOS, and without what some tokenizers
    put before a text's first word."""
    anchor = tokenizer.encode(".", add_special_tokens=False)
    whole = tokenizer.encode("." + text, add_special_tokens=False)
    if len(whole) > len(anchor) and whole[: len(anchor)] == anchor:
        return whole[len(anchor) :]
    return tokenizer.encode(text, add_special_tokens=False)
