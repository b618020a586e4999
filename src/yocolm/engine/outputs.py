"""What a request is answered with. Names and shapes follow vLLM, so that scripts port."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's log-probability at one position, and its rank there (1 is the likeliest)."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


SampleLogprobs = list[dict[int, Logprob]]
PromptLogprobs = list[dict[int, Logprob] | None]


@dataclass(slots=True)
class CompletionOutput:
    """One of the ``n`` samples of a request.

    ``logprobs`` holds one dict of token id to Logprob for each output token. ``stop_reason`` is
    the stop string or stop token id that ended the sample; None for the model's own end token.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: SampleLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times of a request in seconds of ``time.monotonic``, None where it has not come so far.

    ``num_cached_tokens``: those that the prefix cache spared; ``predicted_ttft``: seconds to the
    first token as expected at its arrival, None where nobody asked.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    predicted_ttft: float | None = None


@dataclass(slots=True)
class EmbeddingOutput:
    """A text's vector, float32 values."""

    embedding: list[float]


@dataclass(slots=True)
class EmbeddingRequestOutput:
    """The answer of ``LLM.embed``; ``outputs`` is None where a request has failed (``error``)."""

    request_id: str
    outputs: EmbeddingOutput | None
    prompt_token_ids: list[int]
    finished: bool
    error: str | None = None


@dataclass(slots=True)
class RequestOutput:
    """The state of a request: final, or as far as it has come when streamed.

    Of a request with ``output_kind`` DELTA, each output holds only the samples that went on, and
    of them only the text, tokens and logprobs that are new; the first has the prompt's logprobs.

    ``prompt_logprobs`` has one entry for each prompt token: None for the first and for those
    before ``prompt_logprobs_start``, then a dict of token id to Logprob. ``embedding`` is what
    a request with PoolingParams ends with; it has no samples.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: PromptLogprobs | None
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    error: str | None = None
    metrics: RequestMetrics | None = None
    embedding: list[float] | None = None
