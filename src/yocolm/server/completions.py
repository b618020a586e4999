"""``POST /v1/completions``"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fastapi import Request
from starlette.responses import Response

from yocolm.engine.outputs import CompletionOutput, RequestOutput
from yocolm.server.logprobs import CompletionLogprobs, prompt_logprobs
from yocolm.server.loop import Job
from yocolm.server.outputs import Output
from yocolm.server.params import completion_params, form_field, urgency_of
from yocolm.server.protocol import CompletionRequest
from yocolm.server.service import (
    PER_ENTRY,
    PER_PROMPT,
    Service,
    off_loop,
    request_id_of,
    usage,
)
from yocolm.server.stream import (
    DONE,
    EVENTS,
    JSON,
    event,
    prediction,
    stream_answer,
    to_json,
)

MAX_TOKENS = 16  # OpenAI's default


async def completions(service: Service, request: Request) -> Response:
    """Continue prompts."""
    body = await service.read(request, CompletionRequest, generates=True)
    scores = body.logprobs is not None or body.prompt_logprobs is not None
    only_echo = body.max_tokens == 0 and bool(body.echo) and not scores
    asked = body.model_copy(update={"max_tokens": 1}) if only_echo else body
    params = completion_params(asked, service.defaults, service.settings.max_logprobs)
    answer_id = request_id_of(request, "cmpl-")
    prompts = prompts_of(body.prompt)
    renamed = {"structured_outputs": form_field(body)}
    if body.prompt_logprobs is None:
        renamed["prompt_logprobs"] = "logprobs"
    jobs = await service.jobs(
        request,
        answer_id,
        prompts,
        params,
        CompletionRequest.model_fields,
        body.add_special_tokens is not False,
        renamed,
        MAX_TOKENS,
        urgency_of(body),
    )
    writer = CompletionWriter(service, body, jobs, answer_id)
    if only_echo:
        return await _echo(writer, jobs, body)
    if body.stream:
        return await stream_answer(service, request, jobs, writer)
    async with service.answering(request, jobs) as box:
        outputs = await box.take_all()
    kept = [best(output, body.n or 1) for output in outputs] if body.best_of else outputs
    answer = await off_loop(writer.size(kept), lambda: writer.whole(outputs, kept))
    return Response(answer, media_type=JSON, headers=prediction(jobs))


def prompts_of(prompt: Any) -> list[Any]:
    """A list of texts or of lists of token ids."""
    return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt


async def _echo(writer: CompletionWriter, jobs: list[Job], body: CompletionRequest) -> Response:
    """The prompts alone, which needs no engine."""
    samples = [
        CompletionOutput(index, "", [], finish_reason="length") for index in range(body.n or 1)
    ]
    outputs: list[Output] = [
        RequestOutput(job.request_id, job.text, job.ids, None, samples, True) for job in jobs
    ]
    size = writer.size(outputs)
    if not body.stream:
        answer = await off_loop(size, lambda: writer.whole(outputs, outputs))
        return Response(answer, media_type=JSON)
    news = {output.request_id: output for output in outputs}
    text = await off_loop(size, lambda: writer.write(news) + writer.end())
    return Response(text.encode() + DONE, media_type=EVENTS)


def best(output: Output, n: int) -> Output:
    """The ``n`` samples of the highest log-probability per token."""

    def quality(sample: CompletionOutput) -> float:
        return (sample.cumulative_logprob or 0.0) / max(1, len(sample.token_ids))

    ranked = sorted(output.outputs, key=quality, reverse=True)[:n]
    return replace(output, outputs=[replace(s, index=i) for i, s in enumerate(ranked)])


class _Choice:
    """What has been told of one choice so far."""

    def __init__(self, logprobs: CompletionLogprobs) -> None:
        self.logprobs = logprobs
        self.num_tokens = 0


class _Prompt:
    """A prompt as its choices tell of it, each in its first piece: built once for all of them."""

    def __init__(self, text: str, logprobs: CompletionLogprobs) -> None:
        self.text = text
        self.logprobs = logprobs  # which go on with what is drawn
        self.parts: dict[str, list[Any]] = {}
        self.scores: list[Any] | None = None


class CompletionWriter:
    """The answer, whole or in chunks."""

    def __init__(
        self, service: Service, body: CompletionRequest, jobs: list[Job], answer_id: str
    ) -> None:
        self._service, self._body, self._jobs = service, body, jobs
        self._order = {job.request_id: index for index, job in enumerate(jobs)}
        self._choices: dict[int, _Choice] = {}
        self._prompts: dict[int, _Prompt] = {}
        self._n = body.n or 1
        self._head = (
            f'{{"id":{to_json(answer_id)},"object":"text_completion","created":{int(time.time())},'
            f'"model":{to_json(body.model)},'
        )
        options = body.stream_options
        self._usage = bool(options and options.include_usage)
        self._each_usage = bool(options and options.continuous_usage_stats)

    def size(self, kept: list[Output]) -> int:
        """About how much work the whole answer is, in characters."""
        body, size = self._body, 0
        per_token = 1
        if body.logprobs is not None:
            per_token += PER_ENTRY * (1 + body.logprobs)
        per_prompt_token = per_token * bool(body.echo) + bool(body.return_token_ids)
        if body.prompt_logprobs is not None:
            per_prompt_token += PER_ENTRY * (1 + body.prompt_logprobs)
        for job, output in zip(self._jobs, kept, strict=True):
            of_prompt = per_prompt_token * len(job.ids) + len(job.text or "") * bool(body.echo)
            size += sum(
                PER_PROMPT + of_prompt + len(sample.text) + per_token * len(sample.token_ids)
                for sample in output.outputs
            )
        return size

    def whole(self, outputs: list[Output], kept: list[Output]) -> str:
        """JSON of the whole answer. ``kept`` are those of ``outputs`` that are returned."""
        choices = ",".join(  # one by one: other threads run in between
            to_json(self._choice(index, output, sample))
            for index, output in enumerate(kept)
            for sample in output.outputs
        )
        drawn = sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
        total = to_json(usage(self._jobs, drawn))
        return f'{self._head}"choices":[{choices}],"usage":{total}}}'

    def write(self, news: Mapping[str, Output]) -> str:
        return "".join(
            self._chunk(self._order[request_id], output, sample)
            for request_id, output in news.items()
            for sample in output.outputs
        )

    def end(self) -> str:
        if not self._usage:
            return ""
        drawn = sum(choice.num_tokens for choice in self._choices.values())
        return event(self._head, [], usage(self._jobs, drawn), "")

    def _chunk(self, index: int, output: Output, sample: CompletionOutput) -> str:
        begun = (index * self._n + sample.index) in self._choices
        shape = self._choice(index, output, sample)
        told = shape["text"] or shape["logprobs"] or shape["finish_reason"] or "token_ids" in shape
        if begun and not told:
            return ""
        used = None
        if self._each_usage:
            used = usage([self._jobs[index]], self._choices[shape["index"]].num_tokens)
        return event(self._head, [shape], used, ',"usage":null' if self._usage else "")

    def _choice(self, index: int, output: Output, sample: CompletionOutput) -> dict[str, Any]:
        """What is new of one sample, behind the prompt where that is to be echoed."""
        body, job = self._body, self._jobs[index]
        number = index * self._n + sample.index
        prompt = self._prompts.get(index)
        if prompt is None:
            prompt = self._prompts[index] = self._prompt(job, output)
        choice = self._choices.get(number)
        first = choice is None
        if choice is None:
            choice = self._choices[number] = _Choice(prompt.logprobs.copy())
        choice.num_tokens += len(sample.token_ids)
        echoed = bool(body.echo and first)
        text = prompt.text + sample.text if echoed else sample.text
        shape: dict[str, Any] = {"index": number, "text": text, "logprobs": None}
        if body.logprobs is not None and (sample.token_ids or echoed):
            parts = choice.logprobs.build(sample.token_ids, sample.logprobs or [])
            if echoed:
                parts = {name: prompt.parts[name] + values for name, values in parts.items()}
            shape["logprobs"] = parts
        shape["finish_reason"], shape["stop_reason"] = sample.finish_reason, sample.stop_reason
        if first and body.prompt_logprobs is not None:
            shape["prompt_logprobs"] = prompt.scores
        if body.return_token_ids:
            shape["token_ids"] = sample.token_ids
            if first:
                shape["prompt_token_ids"] = job.ids
        return shape

    def _prompt(self, job: Job, output: Output) -> _Prompt:
        """From the first output of a job, which brings the scores of its prompt."""
        body = self._body
        prompt = _Prompt(self._prompt_text(job) if body.echo else "", self._logprobs())
        if body.echo and body.logprobs is not None:
            prompt.parts = prompt.logprobs.build(job.ids, output.prompt_logprobs or [])
        if body.prompt_logprobs is not None:
            prompt.scores = prompt_logprobs(output.prompt_logprobs)
        return prompt

    def _logprobs(self) -> CompletionLogprobs:
        skips = self._body.skip_special_tokens is not False
        as_ids = bool(self._body.return_tokens_as_token_ids)
        return CompletionLogprobs(self._service.engine.tokenizer, as_ids, skips)

    def _prompt_text(self, job: Job) -> str:
        tokenizer = self._service.engine.tokenizer
        if job.text is not None or tokenizer is None:
            return job.text or ""
        return tokenizer.decode(job.ids)
