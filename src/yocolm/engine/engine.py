"""The engine: requests in, outputs out, one step at a time."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Series
from dataclasses import replace
from math import ceil
from numbers import Integral
from typing import Any

import torch

from yocolm.config import ModelConfig
from yocolm.engine.answers import Answer
from yocolm.engine.compiled import compiled_halves
from yocolm.engine.drawing import EntryOutput
from yocolm.engine.guided import GuideFactory
from yocolm.engine.outputs import RequestOutput
from yocolm.engine.pages import PagePool, SlotPool
from yocolm.engine.plan import Plan, StepResult
from yocolm.engine.request import Request, Sequence
from yocolm.engine.runner import Runner
from yocolm.engine.sampling_params import PoolingParams, SamplingParams, without_draws
from yocolm.engine.scheduler import Scheduler
from yocolm.engine.settings import EngineSettings, available_memory, size_pools
from yocolm.engine.state import PagedState
from yocolm.errors import ConfigError, RequestError
from yocolm.models.base import CausalLM
from yocolm.models.spec import model_spec
from yocolm.tokenizer import Tokenizer

log = logging.getLogger("yocolm.engine")
STEP_FAILED = "the step failed"  # how the error of a request begins whose step raised
Prompt = str | Series[int] | Mapping[str, Any]


class Engine:
    """Continuous batching over one model.

    Args:
        model, config: as ``models.registry.load_model`` returns them.
        tokenizer: for text prompts and text output; None serves token ids only.
        settings: limits, see ``EngineSettings``.
        eos_token_ids: tokens that end a sequence unless a request ignores them.
    """

    def __init__(
        self,
        model: CausalLM,
        config: ModelConfig,
        tokenizer: Tokenizer | None = None,
        settings: EngineSettings | None = None,
        eos_token_ids: Series[int] = (),
    ) -> None:
        self.config, self.tokenizer = config, tokenizer
        self.settings = settings or EngineSettings()
        # Files name ends that a model cannot draw, of a larger vocabulary or as -1.
        self.eos_token_ids = frozenset(t for t in eos_token_ids if 0 <= t < config.vocab_size)
        self.spec = model_spec(config)
        weight: torch.Tensor = next(iter(model.parameters()))
        self.max_model_len = self.settings.max_model_len or config.max_position_embeddings
        page_size = self.settings.page_size
        on_gpu = weight.device.type == "cuda"
        free = torch.cuda.mem_get_info(weight.device)[0] if on_gpu else available_memory()
        sizes = size_pools(
            self.settings, self.spec, weight.element_size(), self.max_model_len, free
        )
        try:
            state = PagedState(
                self.spec, sizes.num_pages, page_size, sizes.num_slots, weight.dtype, weight.device
            )
        except RuntimeError as error:
            raise ConfigError(
                f"no memory for {sizes.num_pages} pages and {sizes.num_slots} slots: {error}; "
                "lower kv_memory or max_num_seqs"
            ) from error
        self.scheduler = Scheduler(
            PagePool(sizes.num_pages, page_size),
            SlotPool(sizes.num_slots),
            self.settings.max_num_batched_tokens,
            sizes.max_num_seqs,
            self.max_model_len,
        )
        max_pages = min(ceil(self.max_model_len / page_size), sizes.num_pages)
        halves = compiled_halves(
            model,
            state,
            self.settings.compile,
            max_seqs=sizes.max_num_seqs,
            max_pages=max_pages,
            max_tokens=self.settings.max_num_batched_tokens,
            device=weight.device,
        )
        self.runner = Runner(
            model,
            state,
            config.vocab_size,
            sizes.num_slots,
            max_pages,
            weight.device,
            self.settings.fast_prefill,
            halves,
        )
        self.guides = GuideFactory(tokenizer, config.vocab_size, self.eos_token_ids)
        self._answers: dict[str, Answer] = {}
        self._interrupted = False

    # Requests

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | PoolingParams | None = None,
        arrival_time: float | None = None,
    ) -> None:
        """Queue a request. Raises RequestError, and changes nothing, if it cannot be served.

        Args:
            prompt: text, token ids, ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``.
            params: defaults if None; without a seed, a random one is drawn. PoolingParams ask for
                an embedding.
            arrival_time: in seconds, now if None.
        """
        params = SamplingParams() if params is None else params
        kinds = (SamplingParams, PoolingParams)
        if not isinstance(request_id, str) or not isinstance(params, kinds):
            raise RequestError(
                f"request_id={request_id!r} must be text and params={params!r} SamplingParams"
            )
        text = self._text(prompt)
        self.enqueue(request_id, self.validate(prompt, params), params, text, arrival_time)

    def validate(self, prompt: Prompt, params: SamplingParams | PoolingParams) -> list[int]:
        """The token ids of ``prompt``, if it can be served with ``params``; else RequestError.

        Reads only what never changes, so any thread may call it while a step runs.
        """
        ids = self._tokenize(prompt)
        self._check_ids("prompt token id", ids)
        self._check_media(ids)
        if isinstance(params, SamplingParams):
            self._check(params)
        self.scheduler.check_servable(self._request("", ids, params))
        return ids

    def enqueue(
        self,
        request_id: str,
        ids: list[int],
        params: SamplingParams | PoolingParams,
        text: str | None = None,
        arrival_time: float | None = None,
    ) -> None:
        """Queue a request that ``validate`` has passed. RequestError if its id is in use."""
        if isinstance(params, SamplingParams) and params.seed is None:
            params = replace(params, seed=secrets.randbits(63))
        else:
            params = replace(params)  # a copy: the caller's may change
        request = self._request(request_id, ids, params)
        request.prompt = text
        request.arrival = time.monotonic() if arrival_time is None else arrival_time
        self.scheduler.add(request)
        self._answers[request_id] = Answer(request, self.tokenizer)

    def _request(
        self, request_id: str, ids: list[int], params: SamplingParams | PoolingParams
    ) -> Request:
        if isinstance(params, PoolingParams):
            return Request(request_id, ids, without_draws(), pooling=params)
        form = params.structured_outputs
        guide = None if form is None else self.guides.start(form)  # compiled while it is in use
        return Request(request_id, ids, params, eos_token_ids=self.eos_token_ids, guide=guide)

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request; what it has so far comes back, of deltas what was not yet delivered.

        None if it is unknown or done.
        """
        answer = self._answers.get(request_id)
        if answer is None:
            return None
        for seq in self.scheduler.abort(request_id):
            self._end(answer, seq)
        return next(self._deliver([request_id]))

    def has_unfinished_requests(self) -> bool:
        return self.scheduler.has_unfinished

    def step(self) -> list[RequestOutput]:
        """Advance every scheduled sequence once. Returns the requests that have something new
        (of those that want their final output only, the ones that have ended).

        An interrupt leaves the engine fit to go on: since the state that a step has written is not
        what the scheduler knows of, everybody recomputes.
        """
        try:
            changed = self._advance()
        except BaseException:
            self.scheduler.preempt_all()
            self._interrupted = True
            raise
        touched = dict.fromkeys(seq.request.request_id for seq in changed)
        if self._interrupted:  # what ended in the step that was cut short
            touched.update((i, None) for i, a in self._answers.items() if a.request.finished)
            self._interrupted = False
        return list(self._deliver(touched))

    def _advance(self) -> list[Sequence]:
        plan = self.scheduler.schedule(time.monotonic())
        outputs = self._run(plan)
        failed = self._keep_prompt_scores(plan, outputs)
        changed = self.scheduler.update(plan, [output.result for output in outputs])
        failed += self._keep_samples(plan, outputs, changed)
        return changed + failed

    def _run(self, plan: Plan) -> list[EntryOutput]:
        """Run the plan; what it raises (out of memory, most of all) fails the requests in the step.

        All others recompute their state: the step may owe them copies.
        """
        try:
            return self.runner.run(plan)
        except Exception as error:  # whatever it is, the engine and the other requests go on
            self.scheduler.preempt_all()
            reason = f"{STEP_FAILED}: {error}"
            return [EntryOutput(StepResult(error=reason)) for _ in plan.scheduled]

    # Prompts

    def _text(self, prompt: Prompt) -> str | None:
        """The text that a prompt gives, if any."""
        text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
        return text if isinstance(text, str) else None

    def _tokenize(self, prompt: Prompt) -> list[int]:
        text: Any = prompt
        ids: Any = None if isinstance(prompt, str) else prompt
        if isinstance(prompt, Mapping):
            unknown = set(prompt) - {"prompt", "prompt_token_ids"}
            if unknown or not prompt:
                raise RequestError(
                    f"prompt has the keys {sorted(prompt)}; give 'prompt' or 'prompt_token_ids'"
                )
            text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        if ids is not None:
            return self._token_ids(ids)
        if not isinstance(text, str):
            raise RequestError(f"prompt is {text!r}; it must be text or a list of token ids")
        if self.tokenizer is None:
            raise RequestError("this engine has no tokenizer: give the prompt as token ids")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"prompt is not valid text: {text[error.start]!r} at character {error.start} is "
                "half a character, as from bytes that are not UTF-8; give UTF-8"
            ) from None
        return self.tokenizer.encode(text)

    def _token_ids(self, ids: Any) -> list[int]:
        if isinstance(ids, str | bytes) or not isinstance(ids, Series):
            raise RequestError(f"prompt is {ids!r}; it must be text or a list of token ids")
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, Integral):
                raise RequestError(f"prompt holds {token!r}; token ids are integers")
        return [int(token) for token in ids]

    def _check_ids(self, what: str, ids: Iterable[int]) -> None:
        vocab = self.config.vocab_size
        for token in ids:
            if not 0 <= token < vocab:
                raise RequestError(
                    f"{what} {token} is outside the vocabulary: give 0 to {vocab - 1}"
                )

    def _check_media(self, ids: list[int]) -> None:
        for what, token in self.config.media_token_ids:
            if token in ids:
                raise RequestError(
                    f"prompt token id {token} at place {ids.index(token)} stands for {what} input, "
                    "and only text is supported: leave it out"
                )

    def _check(self, params: SamplingParams) -> None:
        vocab = self.config.vocab_size
        self._check_ids("stop_token_ids", params.stop_token_ids or ())
        self._check_ids("logit_bias token id", params.logit_bias or ())
        for what in ("logprobs", "prompt_logprobs"):
            value = getattr(params, what)
            if value is not None and value > vocab:
                raise RequestError(f"{what}={value} exceeds the vocabulary of {vocab}: lower it")
        if params.prompt_logprobs is not None and self.settings.prompt_logprobs == "reject":
            raise RequestError(
                f"prompt_logprobs={params.prompt_logprobs}: this engine is set to refuse prompt "
                "logprobs; leave it out, or start the engine with prompt_logprobs='exact'"
            )
        if params.stop and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer: use stop_token_ids")

    # Results

    def _keep_prompt_scores(self, plan: Plan, outputs: list[EntryOutput]) -> list[Sequence]:
        """Returns the sequences whose request failed of it."""
        failed: list[Sequence] = []
        for entry, output in zip(plan.scheduled, outputs, strict=True):
            nothing = not output.prompt_scores and output.pooled is None
            if nothing or output.result.error is not None:
                continue
            answer = self._answers[entry.seq.request.request_id]
            try:
                if output.prompt_scores:
                    positions = [entry.start + row + 1 for row in entry.rows[: entry.num_scored]]
                    answer.keep_prompt_scores(positions, output.prompt_scores)
                if output.pooled is not None:
                    answer.keep_pooled(entry.start + entry.rows[0], output.pooled)
            except Exception as error:  # of the tokenizer, say: the other requests go on
                failed += self._fail(answer, error)
        return failed

    def _keep_samples(
        self, plan: Plan, outputs: list[EntryOutput], changed: list[Sequence]
    ) -> list[Sequence]:
        """Add the tokens drawn in this step to texts and logprobs, and look for stop strings.

        Returns the sequences whose request failed of it.
        """
        failed: list[Sequence] = []
        scores = {
            (entry.seq.request.request_id, entry.seq.index + i): score
            for entry, output in zip(plan.scheduled, outputs, strict=True)
            for i, score in enumerate(output.sample_scores)
        }
        now = time.monotonic()
        for seq in changed:
            request = seq.request
            answer = self._answers[request.request_id]
            if seq.finish_reason == "error" or not seq.num_output:
                self._end(answer, seq)
                continue
            if request.first_token is None:
                request.first_token = now
            try:
                stop = answer.extend(seq, scores.get((request.request_id, seq.index)))
            except Exception as error:
                failed += self._fail(answer, error)
                continue
            if stop is not None:
                self.scheduler.finish(seq, "stop", stop)
        return failed

    def _end(self, answer: Answer, seq: Sequence) -> None:
        try:
            answer.end(seq)
        except Exception as error:
            self._fail(answer, error)

    def _fail(self, answer: Answer, error: Exception) -> list[Sequence]:
        """End a request whose answer cannot be told; returns its sequences."""
        request = answer.request
        log.error("the answer to request %s failed", request.request_id, exc_info=error)
        self.scheduler.fail(request, request.error or f"the answer failed: {error}")
        return request.sequences

    def _deliver(self, request_ids: Iterable[str]) -> Iterator[RequestOutput]:
        for request_id in request_ids:
            answer = self._answers.get(request_id)
            if answer is None or answer.waits:
                continue
            if answer.request.finished:
                answer.request.ended = time.monotonic()
                del self._answers[request_id]
            try:
                output = answer.output()
            except Exception as error:
                self._fail(answer, error)
                self._answers.pop(request_id, None)
                answer.request.ended = time.monotonic()
                output = answer.failure()
            if output is not None:
                yield output

    def check(self) -> None:
        """Assert that queues and pools agree (for tests, after every step)."""
        self.scheduler.check()
        assert set(self._answers) == set(self.scheduler.requests), "answers differ from requests"


def require_device(device: str) -> torch.device:
    """A usable device: "auto" is CUDA where there is one, else the CPU. Raises ConfigError."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        raise ConfigError(f"device={device!r} is unknown; give auto, cpu or cuda") from None
    if found.type not in ("cpu", "cuda"):
        raise ConfigError(f"device={device!r} is not supported; give auto, cpu or cuda")
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device={device!r}: no CUDA device is available; give auto or cpu")
    return found
