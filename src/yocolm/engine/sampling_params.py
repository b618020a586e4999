"""How to continue a prompt: vLLM's names and defaults, checked on construction."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from numbers import Integral, Rational, Real

from yocolm.engine.guided import GuidedParams
from yocolm.errors import RequestError

MAX_SEED = 2**64 - 1
MAX_LOGIT_BIAS = 100.0
MAX_SAMPLES = 16_384  # samples of one request
MAX_FACTOR = 1e6  # of temperature and repetition penalty: float32 still tells the tokens apart
MIN_POSITIVE = 1e-6
MAX_DIGITS = 60  # of a number in a message
MAX_COUNT = 2**31 - 1  # more than any vocabulary: what it cuts off changes nothing


class RequestOutputKind(Enum):
    """What an engine's step returns of a request."""

    CUMULATIVE = 0  # all that it has so far
    DELTA = 1  # what is new
    FINAL_ONLY = 2  # nothing before it has ended


@dataclass
class SamplingParams:
    """Parameters of one request.

    ``temperature=0`` is greedy. ``top_k`` of 0 or -1 keeps all tokens. ``max_tokens=None`` goes on
    to the end of the context; ``max_tokens=0`` only scores the prompt. ``logprobs=0`` and
    ``prompt_logprobs=0`` are on, for the token itself alone; ``None`` is off. Prompt tokens are
    scored from position ``prompt_logprobs_start`` on (the first token of all never is).
    ``seed=-1`` means None, as in vLLM. ``stop`` and ``stop_token_ids`` become lists.
    ``structured_outputs`` is a form that the output must have: it may end where that is complete,
    and ends where nothing may follow, whatever ``min_tokens`` and ``ignore_eos`` say.
    ``output_kind`` is for those who step the engine themselves; ``LLM`` returns final outputs.

    Raises RequestError for a value of the wrong type or out of range.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprobs_start: int = 0
    logit_bias: dict[int, float] | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    detokenize: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    structured_outputs: GuidedParams | None = None

    def __post_init__(self) -> None:
        self._check_flags()
        self._check_distribution()
        self._check_counts()
        self._check_stops()
        self._check_logit_bias()
        self._check_together()

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def _check_flags(self) -> None:
        names = ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "detokenize")
        for name in names:
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise RequestError(f"{name}={value!r} must be True or False")
        if not isinstance(self.output_kind, RequestOutputKind):
            raise RequestError(f"output_kind={self.output_kind!r} must be a RequestOutputKind")
        if not isinstance(self.structured_outputs, GuidedParams | None):
            raise RequestError(
                f"structured_outputs={self.structured_outputs!r} must be GuidedParams"
            )

    def _check_distribution(self) -> None:
        self.presence_penalty = _real("presence_penalty", self.presence_penalty, -2.0, 2.0)
        self.frequency_penalty = _real("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        self.repetition_penalty = _real(
            "repetition_penalty", self.repetition_penalty, 0.0, MAX_FACTOR
        )
        self.temperature = _real("temperature", self.temperature, 0.0, MAX_FACTOR)
        self.top_p = _real("top_p", self.top_p, 0.0, 1.0)
        self.min_p = _real("min_p", self.min_p, 0.0, 1.0)
        for name in ("repetition_penalty", "top_p"):
            if getattr(self, name) < MIN_POSITIVE:
                raise RequestError(
                    f"{name}={getattr(self, name)} must be at least {MIN_POSITIVE}; 1 turns it off"
                )

    def _check_counts(self) -> None:
        self.n = _integer("n", self.n, 1, MAX_SAMPLES)
        self.top_k = min(max(_integer("top_k", self.top_k, -1), 0), MAX_COUNT)
        self.min_tokens = _integer("min_tokens", self.min_tokens, 0)
        self.prompt_logprobs_start = _integer(
            "prompt_logprobs_start", self.prompt_logprobs_start, 0
        )
        if self.max_tokens is not None:
            self.max_tokens = _integer("max_tokens", self.max_tokens, 0)
        if self.logprobs is not None:
            self.logprobs = _integer("logprobs", self.logprobs, 0)
        if self.prompt_logprobs is not None:
            self.prompt_logprobs = _integer("prompt_logprobs", self.prompt_logprobs, 0)
        if self.seed is not None:
            seed = _integer("seed", self.seed, -1, MAX_SEED)
            self.seed = None if seed == -1 else seed

    def _check_stops(self) -> None:
        if not isinstance(self.stop, str | list | tuple | None):
            raise RequestError(f"stop={self.stop!r} must be a string or a list of strings")
        self.stop = self.stop_strings
        for string in self.stop:
            if not isinstance(string, str) or not string:
                raise RequestError(f"stop={self.stop!r} must hold non-empty strings only")
        if not isinstance(self.stop_token_ids, list | tuple | None):
            raise RequestError(f"stop_token_ids={self.stop_token_ids!r} must be a list of integers")
        self.stop_token_ids = [
            _integer("each of stop_token_ids", token, 0) for token in self.stop_token_ids or ()
        ]

    def _check_logit_bias(self) -> None:
        if self.logit_bias is None:
            return
        if not isinstance(self.logit_bias, dict):
            raise RequestError(f"logit_bias={self.logit_bias!r} must map token ids to biases")
        self.logit_bias = {
            _integer("each token id in logit_bias", token, 0): _real(
                f"logit_bias[{token!r}]", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS
            )
            for token, bias in self.logit_bias.items()
        }

    def _check_together(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens={_spelled(self.min_tokens)} exceeds max_tokens={self.max_tokens}: "
                "lower it"
            )
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            raise RequestError("max_tokens=0 asks for nothing: set prompt_logprobs, or at least 1")
        if self.max_tokens == 0 and self.n > 1:
            raise RequestError(f"n={self.n} draws no samples with max_tokens=0: leave n at 1")
        if self.prompt_logprobs_start and self.prompt_logprobs is None:
            raise RequestError(
                f"prompt_logprobs_start={self.prompt_logprobs_start} needs prompt_logprobs: "
                "set it (0 scores the prompt's own tokens only)"
            )
        if self.stop and not self.detokenize:
            raise RequestError(
                f"stop={self.stop!r} needs text: set detokenize=True, or use stop_token_ids"
            )


def end_turns(params: SamplingParams, strings: Sequence[str]) -> SamplingParams:
    """The parameters of an answer in a chat, which also ends at ``strings``: the model's own ends
    of a turn. They count as its end-of-text tokens do, so ``ignore_eos`` leaves them out; so do
    token ids without text, and answers of a given form, which end where the form does.
    """
    if not strings or params.ignore_eos or not params.detokenize or params.structured_outputs:
        return params
    return replace(params, stop=list(dict.fromkeys([*params.stop_strings, *strings])))


POOLING_TYPES = ("LAST", "MEAN")


@dataclass
class PoolingParams:
    """Parameters of a request for an embedding: the final hidden state of the last token, or the
    mean over all tokens. ``normalize`` scales it to length 1.

    Raises RequestError for a value of the wrong type or out of range.
    """

    pooling_type: str = "LAST"
    normalize: bool = True

    def __post_init__(self) -> None:
        kind = self.pooling_type.upper() if isinstance(self.pooling_type, str) else None
        if kind not in POOLING_TYPES:
            raise RequestError(
                f"pooling_type={self.pooling_type!r} must be one of {', '.join(POOLING_TYPES)}"
            )
        self.pooling_type = kind
        if not isinstance(self.normalize, bool):
            raise RequestError(f"normalize={self.normalize!r} must be True or False")


def without_draws() -> SamplingParams:
    """What the scheduler sees of a request that draws nothing and scores nothing."""
    params = SamplingParams(max_tokens=1)
    params.max_tokens = 0  # which a user must not ask for: there would be no answer
    return params


def _integer(name: str, value: object, low: int, high: int | None = None) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise RequestError(f"{name}={value!r} must be an integer{_between(low, high)}")
    number = int(value)
    if number < low or (high is not None and number > high):
        raise RequestError(
            f"{name}={_spelled(number)} is out of range: give an integer{_between(low, high)}"
        )
    return number


def _real(name: str, value: object, low: float, high: float | None = None) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise RequestError(f"{name}={value!r} must be a number{_between(low, high)}")
    try:
        number = float(value)
    except OverflowError:  # an integer or a fraction beyond all floats
        number = math.inf
    if not math.isfinite(number) or number < low or (high is not None and number > high):
        raise RequestError(
            f"{name}={_spelled(value)} is out of range: give a number{_between(low, high)}"
        )
    return number


def _spelled(value: object) -> str:
    """A number for a message. Python refuses to write out integers of thousands of digits."""
    if isinstance(value, Rational) and abs(int(math.trunc(value))) >= 10**MAX_DIGITS:
        return f"a number of more than {MAX_DIGITS} digits"
    return str(value)


def _between(low: float, high: float | None) -> str:
    return f" of at least {low:g}" if high is None else f" from {low} to {high}"
