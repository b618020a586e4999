"""What a request is answered with, gathered step by step: texts, logprobs, and what is new."""

from __future__ import annotations

from collections.abc import Sequence as Series
from dataclasses import dataclass, field

import torch
from torch import Tensor

from yocolm.engine.drawing import TokenScore
from yocolm.engine.outputs import (
    CompletionOutput,
    Logprob,
    PromptLogprobs,
    RequestMetrics,
    RequestOutput,
    SampleLogprobs,
)
from yocolm.engine.request import Request, Sequence
from yocolm.engine.sampling_params import RequestOutputKind
from yocolm.engine.text import SequenceText
from yocolm.tokenizer import Tokenizer


@dataclass
class _Sample:
    """What belongs to one sequence. ``sent`` tokens of it have been delivered (as deltas)."""

    text: SequenceText | None
    logprobs: SampleLogprobs = field(default_factory=list)
    sent: int = 0
    ended: bool = False  # that it has ended is delivered as well


class Answer:
    """The answer to one request as it grows. Deltas cost what they hold, whatever came before."""

    def __init__(self, request: Request, tokenizer: Tokenizer | None) -> None:
        self.request = request
        self._tokenizer = tokenizer
        self._prompt_logprobs: PromptLogprobs | None = None
        if request.params.prompt_logprobs is not None:
            self._prompt_logprobs = [None for _ in request.prompt_token_ids]
        self._samples: dict[int, _Sample] = {}
        self._pooled: dict[int, Tensor] = {}

    def keep_prompt_scores(self, positions: Series[int], scores: Series[TokenScore]) -> None:
        """Scores of the prompt's tokens at ``positions``."""
        kept = self._prompt_logprobs
        assert kept is not None
        for position, score in zip(positions, scores, strict=True):
            kept[position] = self._logprobs(score)

    def keep_pooled(self, position: int, hidden: Tensor) -> None:
        """The sum of hidden states [D] of the rows from ``position`` on.

        After a step that was cut short, the same rows come again from the same position on.
        """
        self._pooled[position] = hidden

    def extend(self, seq: Sequence, score: TokenScore | None) -> str | None:
        """Add the token that ``seq`` drew. Returns the stop string that ends it, if one does."""
        sample, params = self._sample(seq.index), seq.request.params
        if score is not None:
            sample.logprobs.append(self._logprobs(score))
        if sample.text is None:
            return None
        may_stop = seq.num_output > params.min_tokens
        stop = None
        ended = seq.finish_reason == "stop" and seq.drew_end
        if not ended or params.include_stop_str_in_output:
            stop = sample.text.push(seq.output_token_ids[-1], may_stop)
        if stop is None and seq.finished:
            stop = sample.text.end(may_stop and seq.finish_reason == "length")
        return stop

    def end(self, seq: Sequence) -> None:
        """No token of ``seq`` follows: what was held back of its text may be shown."""
        sample = self._samples.get(seq.index)
        if sample is not None and sample.text is not None:
            sample.text.end()

    @property
    def waits(self) -> bool:
        """Whether nothing is to be delivered before its end."""
        request = self.request
        return request.params.output_kind is RequestOutputKind.FINAL_ONLY and not request.finished

    def output(self) -> RequestOutput | None:
        """What is to be delivered after a step; None if nothing is, yet."""
        request = self.request
        kind = request.params.output_kind
        if self.waits:
            return None
        prompt_logprobs = self._prompt_logprobs
        if kind is RequestOutputKind.DELTA:
            samples = [self._delta(seq) for seq in request.sequences if self._has_news(seq)]
            self._prompt_logprobs = None
        else:
            pooled = request.pooling is not None
            samples = [] if pooled else [self._whole(seq) for seq in request.sequences]
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            prompt_logprobs=prompt_logprobs,
            outputs=samples,
            finished=request.finished,
            error=request.error,
            embedding=self._embedding(),
            metrics=self._metrics(),
            num_cached_tokens=self.request.sequences[0].num_cached,
        )

    def failure(self) -> RequestOutput:
        """The end of a request for which ``output`` raised: its error, and nothing of its samples.

        FINAL_ONLY or not, this is the last that is delivered.
        """
        request = self.request
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            prompt_logprobs=None,
            outputs=[],
            finished=True,
            error=request.error,
            metrics=self._metrics(),
            num_cached_tokens=self.request.sequences[0].num_cached,
        )

    def _metrics(self) -> RequestMetrics:
        request = self.request
        return RequestMetrics(
            arrival_time=request.arrival,
            first_scheduled_time=request.first_scheduled,
            first_token_time=request.first_token,
            finished_time=request.ended,
            num_preemptions=request.num_preemptions,
            num_cached_tokens=request.sequences[0].num_cached,
            predicted_ttft=request.predicted_ttft,
        )

    def _embedding(self) -> list[float] | None:
        request = self.request
        if request.pooling is None or not request.finished or not request.served:
            return None
        total = torch.stack(list(self._pooled.values())).sum(0)
        mean = total / len(request.scored_rows)
        if request.pooling.normalize:
            mean = mean / mean.norm().clamp(min=1e-12)
        return mean.float().tolist()

    def _sample(self, index: int) -> _Sample:
        sample = self._samples.get(index)
        if sample is None:
            params, text = self.request.params, None
            if self._tokenizer is not None and params.detokenize:
                text = SequenceText(self._tokenizer, params)
            sample = self._samples[index] = _Sample(text)
        return sample

    def _has_news(self, seq: Sequence) -> bool:
        sample = self._sample(seq.index)
        return seq.num_output > sample.sent or (seq.finished and not sample.ended)

    def _delta(self, seq: Sequence) -> CompletionOutput:
        sample = self._sample(seq.index)
        text = "" if sample.text is None else sample.text.take()
        output = self._completion(seq, text, seq.output_token_ids[sample.sent :], sample.logprobs)
        sample.sent, sample.logprobs, sample.ended = seq.num_output, [], seq.finished
        return output

    def _whole(self, seq: Sequence) -> CompletionOutput:
        sample = self._sample(seq.index)
        text = "" if sample.text is None else sample.text.visible
        return self._completion(seq, text, list(seq.output_token_ids), list(sample.logprobs))

    def _completion(
        self, seq: Sequence, text: str, token_ids: list[int], logprobs: SampleLogprobs
    ) -> CompletionOutput:
        wants_logprobs = seq.request.params.logprobs is not None
        return CompletionOutput(
            index=seq.index,
            text=text,
            token_ids=token_ids,
            cumulative_logprob=seq.cumulative_logprob if wants_logprobs else None,
            logprobs=logprobs if wants_logprobs else None,
            finish_reason=seq.finish_reason,
            stop_reason=seq.stop_reason,
        )

    def _logprobs(self, score: TokenScore) -> dict[int, Logprob]:
        """The token itself first, then the likeliest ones."""
        entries = {score.token_id: (score.logprob, score.rank)}
        for rank, (token, logprob) in enumerate(score.top, 1):
            entries.setdefault(token, (logprob, rank))
        return {
            token: Logprob(logprob, rank, self._decoded(token))
            for token, (logprob, rank) in entries.items()
        }

    def _decoded(self, token: int) -> str | None:
        if self._tokenizer is None:
            return None
        return self._tokenizer.decode([token], skip_special_tokens=False)
