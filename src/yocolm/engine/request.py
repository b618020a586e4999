"""What the scheduler moves about: requests, and the sequences that answer them.

A request asks for ``n`` samples of one prompt; each sample is a Sequence. The first sequence
computes (and scores) the prompt; the others are forked from it when it draws its first token.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from yocolm.engine.guided import Guide
from yocolm.engine.outputs import FinishReason
from yocolm.engine.sampling_params import PoolingParams, SamplingParams

if TYPE_CHECKING:
    from yocolm.engine.prefix import Cursor


class Status(Enum):
    WAITING = auto()  # owns tokens only: new, preempted, swapped, or forked without room
    RUNNING = auto()  # owns a slot and pages as well
    FINISHED = auto()


@dataclass(eq=False)
class Request:
    """One user request. ``number`` is its place in the order of arrival, given by the scheduler.

    Times (arrival, first_scheduled, first_token, ended) are in seconds, None until then. A lower
    ``priority`` goes first. Targets are in seconds: to the first token, and between tokens; None
    leaves them to the policy. ``predicted_ttft`` was expected at its arrival.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival: float = 0.0
    eos_token_ids: frozenset[int] = frozenset()
    prompt: str | None = None
    pooling: PoolingParams | None = None  # asks for a hidden state; params then ask for nothing
    guide: Guide | None = None  # at the beginning of the grammar that outputs must follow
    priority: int = 0
    ttft_target: float | None = None
    tpot_target: float | None = None
    predicted_ttft: float | None = None
    number: int = -1
    due: float = 0.0  # its place in the queue, as a time
    first_scheduled: float | None = None
    first_token: float | None = None
    ended: float | None = None
    num_preemptions: int = 0
    error: str | None = None
    sequences: list[Sequence] = field(init=False)

    def __post_init__(self) -> None:
        self.sequences = [self._sequence(0, self.scored_rows.start)]

    @property
    def num_prompt(self) -> int:
        return len(self.prompt_token_ids)

    @cached_property
    def prompt_array(self) -> np.ndarray:
        """The prompt as int64, converted once: penalties look at it in every step."""
        return np.asarray(self.prompt_token_ids, dtype=np.int64)

    @cached_property
    def scored_rows(self) -> range:
        """The prompt rows to score. Row p gives the log-probabilities of prompt token p + 1.

        Of a request for an embedding: the rows that are pooled, the last one among them.
        """
        if self.pooling is not None:
            last = self.pooling.pooling_type == "LAST"
            return range(self.num_prompt - 1 if last else 0, self.num_prompt)
        end = self.num_prompt - 1
        if self.params.prompt_logprobs is None:
            return range(end, end)
        return range(min(max(self.params.prompt_logprobs_start, 1) - 1, end), end)

    @property
    def finished(self) -> bool:
        return all([seq.status is Status.FINISHED for seq in self.sequences])

    @property
    def served(self) -> bool:
        """Whether all its sequences have come to an end of their own."""
        return all(seq.finish_reason in ("stop", "length") for seq in self.sequences)

    def max_length(self, max_model_len: int) -> int:
        """The length, prompt included, at which its sequences end."""
        if self.params.max_tokens is None:
            return max_model_len
        return min(self.num_prompt + self.params.max_tokens, max_model_len)

    def max_computed(self, max_model_len: int) -> int:
        """The most tokens a sequence ever computes: the last token drawn is never computed."""
        return max(self.num_prompt, self.max_length(max_model_len) - 1)

    def fork(self) -> list[Sequence]:
        """Create the sequences that the request still lacks of its ``n``.

        That is when the first one draws its first token, having computed the whole prompt.
        """
        if len(self.sequences) == self.params.n:
            return []
        indices = range(len(self.sequences), self.params.n)
        siblings = [self._sequence(index, self.scored_rows.stop) for index in indices]
        self.sequences += siblings
        return siblings

    def _sequence(self, index: int, scored_until: int) -> Sequence:
        guide = None if self.guide is None else self.guide.copy()
        return Sequence(self, index, scored_until, guide)


@dataclass(eq=False, slots=True)
class Sequence:
    """One sample: the request's prompt, shared with its siblings, and its own output.

    ``num_computed`` tokens have their state written, in ``slot`` and in ``pages``; prompt rows
    before ``scored_until`` are delivered (or not wanted), and stay so through a preemption.
    """

    request: Request = field(repr=False)
    index: int
    scored_until: int
    guide: Guide | None = field(default=None, repr=False)
    output_token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    status: Status = Status.WAITING
    num_computed: int = 0
    slot: int | None = None
    pages: list[int] = field(default_factory=list)
    page_version: int = 0  # changes whenever pages that it had are others than before
    num_cached: int = 0  # tokens that the prefix cache has spared it
    cursor: Cursor | None = field(default=None, repr=False)  # its last shared page in the cache
    num_shared: int = 0  # so many of its pages are in the cache
    caching: bool = False  # whether further full pages and states may go to the cache
    stops: list[int] = field(default_factory=list)  # where chunks end, last one first
    is_swapped: bool = False  # what it had is in the swap space, or on the way to or from there
    ticket: int | None = None  # of a move under way
    first_token_at: float | None = None
    skipped: int = 0  # steps in a row in which the policy has left it out
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def order(self) -> tuple[float, int, int]:
        """Its place in the queue: when it is due, then first come first served, then the index."""
        return self.request.due, self.request.number, self.index

    @property
    def token_ids(self) -> list[int]:
        """Prompt and output (a new list: on a hot path take ``tokens`` of what is needed)."""
        return self.request.prompt_token_ids + self.output_token_ids

    @property
    def num_tokens(self) -> int:
        """The length of prompt and output: all to be computed before the next token is drawn."""
        return self.request.num_prompt + len(self.output_token_ids)

    @property
    def num_output(self) -> int:
        return len(self.output_token_ids)

    @property
    def finished(self) -> bool:
        return self.status is Status.FINISHED

    @property
    def decoding(self) -> bool:
        """Whether all is computed but the token drawn last."""
        return self.num_output > 0 and self.num_computed == self.num_tokens - 1

    @property
    def samples_n(self) -> int:
        """How many tokens its last row draws: the first draw is for all samples of the request."""
        if self.request.params.max_tokens == 0:
            return 0
        return 1 if self.output_token_ids else self.request.params.n

    def tokens(self, start: int, stop: int) -> list[int]:
        """The token ids at positions ``start .. stop - 1``."""
        first, last = (max(p - self.request.num_prompt, 0) for p in (start, stop))
        return self.request.prompt_token_ids[start:stop] + self.output_token_ids[first:last]

    def array(self, start: int, stop: int) -> np.ndarray:
        """The token ids at positions ``start .. stop - 1``, int64."""
        prompt = self.request.prompt_array
        if stop <= len(prompt):
            return prompt[start:stop]
        output = self.tokens(max(start, len(prompt)), stop)
        return np.concatenate((prompt[start:stop], np.array(output, np.int64)))

    def forget_memory(self) -> None:
        """It holds nothing any more."""
        self.slot, self.pages, self.num_computed = None, [], 0
        self.cursor, self.num_shared, self.caching, self.stops = None, 0, False, []
        self.page_version += 1

    def token(self, position: int) -> int:
        """The token id at ``position``."""
        prompt = self.request.prompt_token_ids
        if position < len(prompt):
            return prompt[position]
        return self.output_token_ids[position - len(prompt)]

    def restart_guide(self) -> None:
        """Bring the guide to where the output is, from the beginning on."""
        if self.request.guide is not None:
            guide = self.request.guide.copy()
            for token_id in self.output_token_ids:
                guide.advance(token_id)
            self.guide = guide

    def append(self, token_id: int, logprob: float) -> None:
        if self.guide is not None:
            self.guide.advance(token_id)
        self.output_token_ids.append(token_id)
        self.cumulative_logprob += logprob

    @property
    def drew_end(self) -> bool:
        """Whether the last token is one that ends a sequence, and so no text."""
        token_id, request = self.output_token_ids[-1], self.request
        return token_id in request.eos_token_ids or token_id in (
            request.params.stop_token_ids or ()
        )

    def ending(self, max_model_len: int) -> tuple[FinishReason, int | None] | None:
        """The finish and stop reasons if the last token ends the sequence (stop strings aside)."""
        params, token_id = self.request.params, self.output_token_ids[-1]
        if self.num_output >= params.min_tokens:
            if token_id in self.request.eos_token_ids and not params.ignore_eos:
                return "stop", None
            if token_id in (params.stop_token_ids or ()):
                return "stop", token_id
        if self.guide is not None and self.guide.complete:
            return "stop", None
        if self.num_tokens >= self.request.max_length(max_model_len):
            return "length", None
        return None
