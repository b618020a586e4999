"""What a step's hidden states are for: tokens to draw, prompts to score, vectors to pool."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Series
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from yocolm.engine.plan import Scheduled, StepResult
from yocolm.engine.request import Request, Sequence
from yocolm.models.base import CausalLM
from yocolm.ops.sampling import (
    SamplingBatch,
    SamplingRow,
    finite_rows,
    gather_logprobs,
    sample,
)

LOGITS_ELEMENTS = 1 << 24  # logits that exist at once: 64 MiB in float32
_GOLDEN = 0x9E3779B97F4A7C15  # spreads the seeds of a request's samples
_NOT_FINITE = "the model's logits are not finite (NaN or infinity); the request was stopped"
_STATES_NOT_FINITE = _NOT_FINITE.replace("logits", "hidden states")


@dataclass(frozen=True, slots=True)
class TokenScore:
    """Log-probability and rank of one token, and the likeliest tokens at its position."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


_NO_RESULT = StepResult()


@dataclass(slots=True)
class EntryOutput:
    """What a step gave for one ``Scheduled``; the lists are empty where nothing was asked for."""

    result: StepResult = _NO_RESULT
    prompt_scores: list[TokenScore] = field(default_factory=list)
    sample_scores: list[TokenScore] = field(default_factory=list)
    pooled: Tensor | None = None  # sum of the hidden states of the rows, [D] float64 on the CPU


Masks = Mapping[int, np.ndarray]  # by entry: what its grammar allows


class _Draw(NamedTuple):
    """One token to be drawn from a row of the hidden states."""

    row: int
    entry: int
    sample: int  # among the samples that are drawn from this row


class Drawer:
    """Turns hidden states into tokens and scores, in blocks of rows."""

    def __init__(self, model: CausalLM, vocab_size: int, device: torch.device | str) -> None:
        self.model, self.device = model, device
        self.logit_rows = max(1, LOGITS_ELEMENTS // vocab_size)
        self._steady: tuple[list[Sequence], list[int], SamplingBatch] | None = None

    def draw(self, entries: Series[Scheduled], hidden: Tensor, masks: Masks) -> list[EntryOutput]:
        """Results of ``entries``, whose rows are those of ``hidden`` [R, D], one after another."""
        outputs = [EntryOutput() for _ in entries]
        first = 0
        scoring: list[tuple[int, int]] = []  # (row, entry)
        draws: list[_Draw] = []
        for i, entry in enumerate(entries):
            count = len(entry.rows)
            if count > 1 or not entry.samples_n:  # else there is one row, and it is drawn from
                if entry.pools and count:
                    self._pool(outputs[i], hidden[first : first + count])
                scoring += ((first + j, i) for j in range(entry.num_scored))
            for j in range(entry.samples_n):
                draws.append(_Draw(first + count - 1, i, j))
            first += count
        self._score_prompts(entries, outputs, hidden, scoring)
        for start in range(0, len(draws), self.logit_rows):
            self._sample(entries, outputs, hidden, draws[start : start + self.logit_rows], masks)
        return outputs

    def _pool(self, output: EntryOutput, hidden: Tensor) -> None:
        output.pooled = hidden.double().sum(0).cpu()
        if not output.pooled.isfinite().all():
            output.result = StepResult(error=_STATES_NOT_FINITE)

    def _score_prompts(
        self,
        entries: Series[Scheduled],
        outputs: list[EntryOutput],
        hidden: Tensor,
        scoring: list[tuple[int, int]],
    ) -> None:
        if not scoring:
            return
        targets = [target for entry in entries for target in entry.targets]
        for start in range(0, len(scoring), self.logit_rows):
            block = scoring[start : start + self.logit_rows]
            logits = self.model.logits(hidden[[row for row, _ in block]])
            wanted = [entries[i].seq.request.params.prompt_logprobs or 0 for _, i in block]
            scored = torch.tensor(targets[start : start + len(block)], device=self.device)
            finite = finite_rows(logits).tolist()
            scores = _scores(logits, scored, wanted)
            for (_, i), score, good in zip(block, scores, finite, strict=True):
                outputs[i].prompt_scores.append(score)
                if not good:
                    outputs[i].result = StepResult(error=_NOT_FINITE)

    def _sample(
        self,
        entries: Series[Scheduled],
        outputs: list[EntryOutput],
        hidden: Tensor,
        draws: list[_Draw],
        masks: Masks,
    ) -> None:
        """Draw a block of rows."""
        rows = [draw.row for draw in draws]
        every = rows == list(range(len(hidden)))
        logits = self.model.logits(hidden if every else hidden[rows])
        tokens = sample(logits, self._parameters(entries, draws, masks))
        drawn = tokens.tolist()
        wanted = [entries[draw.entry].seq.request.params.logprobs for draw in draws]
        scores: Series[TokenScore | None] = [None] * len(draws)
        if any(top is not None for top in wanted):
            scores = _scores(logits, tokens.clamp(min=0), [top or 0 for top in wanted])
        for draw, token, score in zip(draws, drawn, scores, strict=True):
            _record(outputs[draw.entry], token, score)

    def _parameters(
        self, entries: Series[Scheduled], draws: list[_Draw], masks: Masks
    ) -> SamplingBatch:
        """What the draws ask for; of the same steady sequences it is last step's, one further."""
        seqs = [entries[draw.entry].seq for draw in draws]
        samples = [draw.sample for draw in draws]
        steady = not masks and all(map(_is_steady, seqs))
        if steady and self._steady is not None and self._steady[:2] == (seqs, samples):
            batch = self._steady[2]
            if batch.all_greedy:
                return batch
            indices = torch.tensor([seq.num_output for seq in seqs], device=self.device)
            return replace(batch, indices=indices)
        rows = [_row(entries[d.entry].seq, d.sample, masks.get(d.entry)) for d in draws]
        batch = SamplingBatch.build(rows, self.device)
        self._steady = (seqs, samples, batch) if steady else None
        return batch


def _is_steady(seq: Sequence) -> bool:
    """Whether what its draws ask for does not depend on what it has drawn so far."""
    params = seq.request.params
    return (
        seq.guide is None
        and params.repetition_penalty == 1.0
        and params.presence_penalty == 0.0
        and params.frequency_penalty == 0.0
        and len(seq.output_token_ids) >= params.min_tokens
    )


def _record(output: EntryOutput, token: int, score: TokenScore | None) -> None:
    """Add one drawn token; one of logits that are not finite spoils its entry for good."""
    before = output.result
    if before.error is not None:
        return
    if token < 0:
        output.result = StepResult(error=_NOT_FINITE)
        return
    logprob = 0.0 if score is None else score.logprob
    if before is _NO_RESULT:
        output.result = StepResult((token,), (logprob,))
    else:
        output.result = StepResult((*before.token_ids, token), (*before.logprobs, logprob))
    if score is not None:
        output.sample_scores.append(score)


def _row(seq: Sequence, sample_index: int, allowed: np.ndarray | None) -> SamplingRow:
    """What one draw asks for; ``sample_index`` counts the samples drawn from a shared first row."""
    request, params = seq.request, seq.request.params
    index = seq.index + sample_index
    banned: tuple[int, ...] = ()
    if seq.num_output < params.min_tokens:
        ends = () if params.ignore_eos else tuple(request.eos_token_ids)
        banned = (*ends, *(params.stop_token_ids or ()))
    if allowed is not None:
        banned = _bans_within(allowed, banned, request)
    assert params.seed is not None
    return SamplingRow(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        seed=params.seed + index * _GOLDEN,
        index=seq.num_output,
        logit_bias=params.logit_bias or {},
        banned=banned,
        allowed=allowed,
        prompt=request.prompt_array,
        output=seq.output_token_ids,
    )


def _bans_within(allowed: np.ndarray, banned: tuple[int, ...], request: Request) -> tuple[int, ...]:
    """Which tokens to ban beside a grammar: ends too if they are to be ignored, but not all that it
    allows: where it is complete, it has to end."""
    if request.params.ignore_eos:
        banned = (*banned, *request.eos_token_ids)
    if not banned:
        return ()
    left = allowed.copy()
    for token in banned:
        left[token // 32] &= ~np.int32(1 << token % 32 if token % 32 < 31 else -(1 << 31))
    return banned if left.any() else ()


def _scores(logits: Tensor, tokens: Tensor, wanted: list[int]) -> list[TokenScore]:
    """Scores of ``tokens`` [R] with as many of the likeliest as each row wants."""
    logprobs, ranks, top_ids, top_logprobs = gather_logprobs(logits, tokens, max(wanted))
    return [
        TokenScore(token, logprob, rank, tuple(zip(ids[:n], values[:n], strict=True)))
        for token, logprob, rank, ids, values, n in zip(
            tokens.tolist(),
            logprobs.tolist(),
            ranks.tolist(),
            top_ids.tolist(),
            top_logprobs.tolist(),
            wanted,
            strict=True,
        )
    ]
