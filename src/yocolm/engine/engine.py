"""The engine: requests in, outputs out, one step at a time."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Series
from dataclasses import replace
from numbers import Integral
from typing import Any

import torch

from yocolm.config import ModelConfig
from yocolm.engine.answers import Answer
from yocolm.engine.assembly import assemble
from yocolm.engine.calibrate import calibrated, calibration_path, remember
from yocolm.engine.cost import CostModel
from yocolm.engine.drawing import EntryOutput
from yocolm.engine.guided import GuideFactory
from yocolm.engine.hardware import Hardware
from yocolm.engine.interrupts import Held
from yocolm.engine.meter import Pools
from yocolm.engine.outputs import RequestOutput
from yocolm.engine.plan import Plan, StepResult
from yocolm.engine.request import Request, Sequence
from yocolm.engine.sampling_params import PoolingParams, SamplingParams, without_draws
from yocolm.engine.settings import EngineSettings, check_urgency
from yocolm.engine.watch import Watch
from yocolm.errors import ConfigError, RequestError
from yocolm.models.base import CausalLM
from yocolm.models.spec import model_spec
from yocolm.tokenizer import Tokenizer

log = logging.getLogger("yocolm.engine")
IDLE_WAIT = 0.02  # seconds to wait for a move at a time, when there is nothing else to do
STEP_FAILED = "the step failed"  # how the error of a request begins whose step raised
Prompt = str | Series[int] | Mapping[str, Any]


class Engine:
    """Continuous batching over one model.

    Args:
        model, config: as ``models.registry.load_model`` returns them.
        tokenizer: for text prompts and text output; None serves token ids only.
        settings: limits, see ``EngineSettings``.
        eos_token_ids: tokens that end a sequence unless a request ignores them.
        cost: what steps cost on this machine; general figures if None.
    """

    def __init__(
        self,
        model: CausalLM,
        config: ModelConfig,
        tokenizer: Tokenizer | None = None,
        settings: EngineSettings | None = None,
        eos_token_ids: Series[int] = (),
        cost: CostModel | None = None,
    ) -> None:
        self.config, self.tokenizer = config, tokenizer
        self.settings = settings or EngineSettings()
        # Files name ends that a model cannot draw, of a larger vocabulary or as -1.
        self.eos_token_ids = frozenset(t for t in eos_token_ids if 0 <= t < config.vocab_size)
        self.spec = model_spec(config)
        self.max_model_len = self.settings.max_model_len or config.max_position_embeddings
        weight: torch.Tensor = next(iter(model.parameters()))
        device = weight.device.type
        self.cost = cost or CostModel(
            self.spec,
            weight.element_size(),
            Hardware.generic(device),
            self.settings.fast_prefill,
        )
        self.scheduler, self.runner, self.swapper = assemble(
            model, self.spec, config.vocab_size, self.settings, self.max_model_len, self.cost
        )
        self.watch = Watch(self.scheduler, self.runner.stats, self.cost)
        self.watch.learns = self.settings.policy == "traffic"
        self.guides = GuideFactory(tokenizer, config.vocab_size, self.eos_token_ids)
        self._answers: dict[str, Answer] = {}
        self._interrupted = False
        self._owed: list[RequestOutput] = []  # by a step that was interrupted at its end

    # Requests

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | PoolingParams | None = None,
        arrival_time: float | None = None,
        priority: int = 0,
        ttft_target: float | None = None,
        tpot_target: float | None = None,
    ) -> None:
        """Queue a request. Raises RequestError, and changes nothing, if it cannot be served.

        Args:
            prompt: text, token ids, ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``.
            params: defaults if None; without a seed, a random one is drawn. PoolingParams ask for
                an embedding.
            arrival_time: in seconds, now if None.
            priority: lower goes first; a level counts like ``priority_aging`` seconds of arrival.
            ttft_target, tpot_target: seconds to the first token, and between tokens, for the policy
                "traffic"; the engine's if None.
        """
        params = SamplingParams() if params is None else params
        kinds = (SamplingParams, PoolingParams)
        if not isinstance(request_id, str) or not isinstance(params, kinds):
            raise RequestError(
                f"request_id={request_id!r} must be text and params={params!r} SamplingParams"
            )
        text = self._text(prompt)
        ids = self.validate(prompt, params)
        check_urgency(priority, ttft_target, tpot_target)
        urgency = priority, ttft_target, tpot_target
        self.enqueue(request_id, ids, params, text, arrival_time, *urgency)

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
        priority: int = 0,
        ttft_target: float | None = None,
        tpot_target: float | None = None,
    ) -> float | None:
        """Queue a request that ``validate`` and ``check_urgency`` have passed.

        Returns the seconds to its first token that are expected, where the engine predicts. Raises
        RequestError if its id is in use.
        """
        if isinstance(params, SamplingParams) and params.seed is None:
            params = replace(params, seed=secrets.randbits(63))
        else:
            params = replace(params)  # a copy: the caller's may change
        request = self._request(request_id, ids, params)
        request.prompt = text
        now = time.monotonic()
        request.arrival = now if arrival_time is None else arrival_time
        request.priority = priority
        request.ttft_target, request.tpot_target = ttft_target, tpot_target
        with Held():
            self.scheduler.add(request)
            self._answers[request_id] = Answer(request, self.tokenizer)
            request.predicted_ttft = self.watch.predict_ttft(request, now)
        return request.predicted_ttft

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
        with Held():
            for seq in self.scheduler.abort(request_id):
                self._end(answer, seq)
            return next(self._deliver([request_id]))

    def calibrate(self, refresh: bool = False) -> None:
        """Have the cost model know this machine: remembered, or measured in some seconds.

        Nothing may be running. ``refresh`` measures anew.
        """
        scheduler = self.scheduler
        pools = Pools(
            scheduler.page_pool.size,
            scheduler.slot_pool.size,
            scheduler.page_pool.page_size,
            scheduler.max_num_batched_tokens,
            self.max_model_len,
        )
        self.cost.adopt(calibrated(self.runner, self.spec, pools, refresh=refresh))

    def close(self) -> None:
        """Give back the swap space, and remember what was learned of a machine since it was
        measured."""
        self.swapper.close()
        if self.cost.has_learned:
            remember(self.cost.refined(), calibration_path(self.runner, self.spec))

    def has_unfinished_requests(self) -> bool:
        """Whether to step: also where an interrupted step has still to deliver, or moves of what
        was aborted have still to end."""
        scheduler, owed = self.scheduler, self._interrupted and bool(self._answers)
        return scheduler.has_unfinished or scheduler.awaits_moves or owed or bool(self._owed)

    def step(self) -> list[RequestOutput]:
        """Advance every scheduled sequence once. Returns the requests that have something new
        (of those that want their final output only, the ones that have ended).

        An interrupt leaves the engine fit to go on: it waits while queues and pools change, and
        cuts the model short. Since the state that was written then is not what the scheduler knows
        of, everybody recomputes.
        """
        with Held() as held:
            try:
                changed = self._advance(held)
            except BaseException:
                self.scheduler.preempt_all()
                self._interrupted = True
                raise
            touched = dict.fromkeys(seq.request.request_id for seq in changed)
            if self._interrupted:  # what ended in the step that was cut short
                touched.update((i, None) for i, a in self._answers.items() if a.request.finished)
                self._interrupted = False
            self._owed += self._deliver(touched)
            if held.noted:  # it will raise: the next step delivers
                return []
            outputs, self._owed = self._owed, []
        return outputs

    def _advance(self, held: Held) -> list[Sequence]:
        watch, scheduler = self.watch, self.scheduler
        now = time.monotonic()
        for ticket, error in self.swapper.poll(scheduler.memory.tickets):
            scheduler.moved(ticket, error)
        plan = scheduler.schedule(now)
        self.swapper.start(plan.moves)
        if not plan.scheduled and scheduler.awaits_moves:
            self.swapper.wait(IDLE_WAIT)
        watch.begin(plan, now)
        outputs = self._run(plan, held)
        failed = self._keep_prompt_scores(plan, outputs)
        results = [output.result for output in outputs]
        changed = scheduler.update(plan, results, time.monotonic())
        failed += self._keep_samples(plan, outputs, changed)
        watch.end(changed)
        return changed + failed

    def _run(self, plan: Plan, held: Held) -> list[EntryOutput]:
        """Run the plan; what it raises (out of memory, most of all) fails the requests in the step.

        All others recompute their state: the step may owe them copies.
        """
        try:
            with held.released():
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
        known = {
            i for i, a in self._answers.items() if not self._interrupted or not a.request.finished
        }
        assert known == set(self.scheduler.requests), "answers differ from requests"


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
