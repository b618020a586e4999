"""Runs a plan on the model: write, select, read, sample, commit."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Series
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from yocolm.engine.guided import MaskWorker
from yocolm.engine.plan import Plan, Scheduled, StepResult
from yocolm.engine.request import Request, Sequence
from yocolm.engine.state import PagedState
from yocolm.models.base import Batch, CausalLM
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


@dataclass(frozen=True)
class TokenScore:
    """Log-probability and rank of one token, and the likeliest tokens at its position."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass
class EntryOutput:
    """What a step gave for one ``Scheduled``; the lists are empty where nothing was asked for."""

    result: StepResult = field(default_factory=StepResult)
    prompt_scores: list[TokenScore] = field(default_factory=list)
    sample_scores: list[TokenScore] = field(default_factory=list)
    pooled: Tensor | None = None  # sum of the hidden states of the rows, [D] float64 on the CPU


@dataclass
class StepStats:
    """What the two halves of the model have been given so far, and the seconds they took.

    Seconds are the host's: on a GPU, whose kernels run behind it, most of them wait in ``sample``.
    """

    write_tokens: int = 0
    read_rows: int = 0
    read_calls: int = 0
    write_seconds: float = 0.0
    commit_seconds: float = 0.0
    read_seconds: float = 0.0
    sample_seconds: float = 0.0


class Runner:
    """Owns the model and its state."""

    def __init__(
        self,
        model: CausalLM,
        state: PagedState,
        vocab_size: int,
        num_slots: int,
        max_pages: int,
        device: torch.device | str = "cpu",
        fast_prefill: bool = True,
    ) -> None:
        self.model, self.state, self.device = model, state, device
        self.fast_prefill = fast_prefill
        self.logit_rows = max(1, LOGITS_ELEMENTS // vocab_size)
        self.stats = StepStats()
        self._mask_worker = MaskWorker()
        self._block_table = torch.zeros(num_slots, max_pages, dtype=torch.int64, device=device)
        self._tabled: dict[
            int, tuple[tuple[int, int], int]
        ] = {}  # slot -> owner, pages in the table

    @torch.inference_mode()
    def run(self, plan: Plan) -> list[EntryOutput]:
        """Run one step. Results are in the order of ``plan.scheduled``."""
        self.state.discard()  # what an interrupted step may have left
        self._copy(plan)
        if not plan.scheduled:
            return []
        order = sorted(
            range(len(plan.scheduled)),
            key=lambda i: (plan.scheduled[i].num_tokens > 1, plan.scheduled[i].seq.slot),
        )
        entries = [plan.scheduled[i] for i in order]  # singles by slot: states side by side
        masks = self._start_masks(entries)
        try:
            hidden = self._forward(self._prepare(entries))
            begin = time.perf_counter()
            outputs = self._draw(entries, hidden, masks)
            self.stats.sample_seconds += time.perf_counter() - begin
        finally:
            if masks is not None:
                wait([masks])  # whatever happens, nobody reads the guides any more
        placed = dict(zip(order, outputs, strict=True))
        return [placed[i] for i in range(len(entries))]

    def _start_masks(self, entries: list[Scheduled]) -> Future[np.ndarray] | None:
        """Have computed what each entry that draws by a grammar may draw, in their order."""
        guides = [e.seq.guide for e in entries if e.samples and e.seq.guide is not None]
        return self._mask_worker.start(guides) if guides else None

    def _copy(self, plan: Plan) -> None:
        for kind in ("page", "slot"):
            copies = [copy for copy in plan.copies if copy.kind == kind]
            if copies:
                self.state.copy(kind, [c.src for c in copies], [c.dst for c in copies])

    def _prepare(self, entries: list[Scheduled]) -> Batch:
        """Lists become tensors here and nowhere else."""
        fresh = [_slot(entry.seq) for entry in entries if entry.start == 0]
        if fresh:
            self.state.clear_slots(fresh)
        slots = self._ints(_slot(entry.seq) for entry in entries)
        starts = self._ints(entry.start for entry in entries)
        counts = self._ints(entry.num_tokens for entry in entries)
        cu_seqlens = torch.cat((counts.new_zeros(1), counts.cumsum(0)))
        seq_ids = torch.repeat_interleave(counts)
        offsets = torch.arange(len(seq_ids), device=self.device) - cu_seqlens[seq_ids]
        row_counts = self._ints(len(entry.rows) for entry in entries)
        row_offsets = self._ints(row for entry in entries for row in entry.rows)
        return Batch(
            tokens=self._ints(token for entry in entries for token in entry.token_ids),
            positions=starts[seq_ids] + offsets,
            seq_ids=seq_ids,
            cu_seqlens=cu_seqlens,
            rows=row_offsets + torch.repeat_interleave(cu_seqlens[:-1], row_counts),
            slots=slots,
            kv_lens=starts + counts,
            block_table=self._tables(entries, slots),
        )

    def _tables(self, entries: list[Scheduled], slots: Tensor) -> Tensor:
        """Page numbers of every sequence, [S, most pages]; only new pages are written."""
        longest = 0
        for entry in entries:
            seq = entry.seq
            slot, count = _slot(seq), len(seq.pages)
            longest = max(longest, count)
            owner, known = self._tabled.get(slot, (None, 0))
            first = known if owner == seq.order and entry.start > 0 else 0
            if first < count:
                self._block_table[slot, first:count] = self._ints(seq.pages[first:])
                self._tabled[slot] = seq.order, count
        return self._block_table[slots, :longest]

    def _forward(self, batch: Batch) -> Tensor:
        """Both halves: every token writes, needed rows read. Returns hidden states [R, D]."""
        if not self.fast_prefill:
            every = torch.arange(len(batch.tokens), device=self.device)
            return self._halves(replace(batch, rows=every))[batch.rows]
        return self._halves(batch)

    def _halves(self, batch: Batch) -> Tensor:
        stats, begin = self.stats, time.perf_counter()
        stats.write_tokens += len(batch.tokens)
        x, kv = self.model.write(self.model.embed(batch), batch, self.state)
        written = time.perf_counter()
        hidden, rows = batch.select_rows(x)
        if len(hidden):
            stats.read_calls += 1
            stats.read_rows += len(hidden)
            hidden = self.model.read(hidden, kv, rows)
        read = time.perf_counter()
        self.state.commit()
        stats.write_seconds += written - begin
        stats.read_seconds += read - written
        stats.commit_seconds += time.perf_counter() - read
        return hidden

    def _draw(
        self, entries: list[Scheduled], hidden: Tensor, masks: Future[np.ndarray] | None
    ) -> list[EntryOutput]:
        outputs = [EntryOutput() for _ in entries]
        first = 0
        scoring: list[tuple[int, int]] = []  # (row, entry)
        sampling: list[tuple[int, int, int]] = []  # (row, entry, index among its samples)
        for i, entry in enumerate(entries):
            if entry.pools and entry.rows:
                self._pool(outputs[i], hidden[first : first + len(entry.rows)])
            scoring += ((first + j, i) for j in range(entry.num_scored))
            sampling += ((first + len(entry.rows) - 1, i, j) for j in range(entry.samples_n))
            first += len(entry.rows)
        self._score_prompts(entries, outputs, hidden, scoring)
        guided = [i for i, entry in enumerate(entries) if entry.samples and entry.seq.guide]
        allowed = {} if masks is None else dict(zip(guided, masks.result(), strict=True))
        for start in range(0, len(sampling), self.logit_rows):
            block = sampling[start : start + self.logit_rows]
            self._sample(entries, outputs, hidden, block, allowed)
        return outputs

    def _pool(self, output: EntryOutput, hidden: Tensor) -> None:
        output.pooled = hidden.double().sum(0).cpu()
        if not output.pooled.isfinite().all():
            output.result = StepResult(error=_STATES_NOT_FINITE)

    def _score_prompts(
        self,
        entries: list[Scheduled],
        outputs: list[EntryOutput],
        hidden: Tensor,
        scoring: list[tuple[int, int]],
    ) -> None:
        targets = [target for entry in entries for target in entry.targets]
        for start in range(0, len(scoring), self.logit_rows):
            block = scoring[start : start + self.logit_rows]
            logits = self.model.logits(hidden[[row for row, _ in block]])
            wanted = [entries[i].seq.request.params.prompt_logprobs or 0 for _, i in block]
            scores = _scores(logits, self._ints(targets[start : start + len(block)]), wanted)
            finite = finite_rows(logits).tolist()
            for (_, i), score, good in zip(block, scores, finite, strict=True):
                outputs[i].prompt_scores.append(score)
                if not good:
                    outputs[i].result = StepResult(error=_NOT_FINITE)

    def _sample(
        self,
        entries: list[Scheduled],
        outputs: list[EntryOutput],
        hidden: Tensor,
        sampling: list[tuple[int, int, int]],
        allowed: Mapping[int, np.ndarray],
    ) -> None:
        """Draw a block of rows; ``allowed`` has the masks of those entries that have a grammar."""
        logits = self.model.logits(hidden[[row for row, _, _ in sampling]])
        rows = [_sampling_row(entries[i].seq, j, allowed.get(i)) for _, i, j in sampling]
        finite = finite_rows(logits).tolist()
        tokens = sample(logits, SamplingBatch.build(rows, self.device))
        wanted = [entries[i].seq.request.params.logprobs for _, i, _ in sampling]
        scores: Series[TokenScore | None] = [None] * len(sampling)
        if any(top is not None for top in wanted):
            scores = _scores(logits, tokens, [top or 0 for top in wanted])
        drawn = zip(sampling, tokens.tolist(), scores, finite, strict=True)
        for (_, i, _), token, score, good in drawn:
            self._record(outputs[i], token, score, good)

    def _record(
        self, output: EntryOutput, token: int, score: TokenScore | None, finite: bool
    ) -> None:
        """Add one drawn token; one that is not finite spoils its entry for good."""
        before = output.result
        if before.error is not None:
            return
        if not finite:
            output.result = StepResult(error=_NOT_FINITE)
            return
        logprob = 0.0 if score is None else score.logprob
        output.result = StepResult((*before.token_ids, token), (*before.logprobs, logprob))
        if score is not None:
            output.sample_scores.append(score)

    def _ints(self, values: Iterable[int]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int64, device=self.device)


def _slot(seq: Sequence) -> int:
    assert seq.slot is not None
    return seq.slot


def _sampling_row(seq: Sequence, sample_index: int, allowed: np.ndarray | None) -> SamplingRow:
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
