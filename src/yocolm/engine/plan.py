"""One step of the engine, as data: which chunks of which sequences, and which rows of them."""

from __future__ import annotations

from collections.abc import Sequence as Series
from dataclasses import dataclass

from yocolm.engine.pages import Copy
from yocolm.engine.request import Sequence
from yocolm.engine.swap_space import Move


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A chunk of one sequence: the tokens at positions ``start .. start + num_tokens - 1``.

    ``start == 0`` begins a new (or recomputed) sequence: its slot still holds another's state.
    ``rows`` are the offsets in the chunk whose output is needed, ascending: first those that score
    the prompt, then, if ``samples_n > 0``, the chunk's last, from which so many tokens are drawn.
    """

    seq: Sequence
    start: int
    num_tokens: int
    rows: tuple[int, ...]
    samples_n: int

    @property
    def stop(self) -> int:
        return self.start + self.num_tokens

    @property
    def samples(self) -> bool:
        return self.samples_n > 0

    @property
    def token_ids(self) -> list[int]:
        return self.seq.tokens(self.start, self.stop)

    @property
    def num_scored(self) -> int:
        """How many of ``rows``, from the first on, score the prompt."""
        return 0 if self.pools else len(self.rows) - self.samples

    @property
    def pools(self) -> bool:
        """Whether the hidden states of ``rows`` themselves are asked for."""
        return self.seq.request.pooling is not None

    @property
    def targets(self) -> list[int]:
        """The prompt tokens that the scoring rows are to score: row p scores token p + 1."""
        if self.num_scored == 0:
            return []
        first = self.start + self.rows[0] + 1
        return self.seq.tokens(first, first + self.num_scored)


@dataclass(frozen=True, slots=True)
class Plan:
    """One step. ``copies`` come before any write; ``failed`` are sequences given up instead;
    ``moves`` begin with the step and go on beside it and others.

    Entries of a single token (decodes, and chunks cut to one token) precede longer chunks.
    """

    scheduled: tuple[Scheduled, ...]
    copies: tuple[Copy, ...]
    failed: tuple[Sequence, ...] = ()
    moves: tuple[Move, ...] = ()

    @property
    def num_single(self) -> int:
        """How many entries, from the first on, have a single token."""
        return sum(entry.num_tokens == 1 for entry in self.scheduled)

    @property
    def num_tokens(self) -> int:
        return sum(entry.num_tokens for entry in self.scheduled)

    @property
    def num_rows(self) -> int:
        return sum(len(entry.rows) for entry in self.scheduled)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What running one ``Scheduled`` gave: ``samples_n`` tokens with their log-probabilities.

    An ``error`` (say, logits that are not finite) ends the request; the others go on.
    """

    token_ids: Series[int] = ()
    logprobs: Series[float] = ()
    error: str | None = None


def rows_needed(
    start: int, stop: int, scored_until: int, scored_stop: int, samples: bool
) -> tuple[int, ...]:
    """Offsets, in the chunk of tokens ``start .. stop - 1``, of the tokens whose output is needed.

    Prompt rows end before ``scored_stop``; those before ``scored_until`` are delivered or not
    wanted. A chunk that samples needs its last row.
    """
    scoring = range(max(start, scored_until), min(stop, scored_stop))
    sampling = (stop - 1,) if samples else ()
    return tuple(position - start for position in (*scoring, *sampling))


def next_chunk(seq: Sequence, budget: int) -> Scheduled:
    """The next tokens of ``seq``, at most ``budget`` of them, and the rows needed of them."""
    start = seq.num_computed
    if seq.output_token_ids and start + 1 == seq.num_tokens:  # a decode: its row draws a token
        return Scheduled(seq, start, 1, (0,), 1)
    stop = min(start + budget, seq.num_tokens)
    if seq.stops and seq.stops[-1] < stop:
        stop = seq.stops[-1]
    samples_n = seq.samples_n if stop == seq.num_tokens else 0
    scored_stop = seq.request.scored_rows.stop
    rows = rows_needed(start, stop, seq.scored_until, scored_stop, samples_n > 0)
    return Scheduled(seq, start, stop - start, rows, samples_n)
