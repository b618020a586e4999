"""What all routes share: the model's names and limits, bodies to jobs, jobs to mailboxes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar
from uuid import uuid4

from fastapi import Request
from pydantic import BaseModel, ValidationError

from yocolm.chat import ChatTemplate
from yocolm.engine.engine import Engine
from yocolm.engine.sampling_params import SamplingParams
from yocolm.errors import RequestError
from yocolm.server.errors import (
    ApiError,
    ClientGone,
    from_request_error,
    from_validation_error,
    shown,
)
from yocolm.server.live import Live
from yocolm.server.loop import EngineLoop, Job, Mailbox, Urgency
from yocolm.server.settings import ServerSettings
from yocolm.server.telemetry import Telemetry

SHORT = 4096  # characters or bytes that are worked on without a change of thread
PER_PROMPT = 100  # the work on a prompt beside its characters, counted in them
PER_ENTRY = 50  # the same for a log-probability, told of one token
BODY_FLOOR = 4 * 2**20
BYTES_PER_TOKEN = 64  # of a body, per token of the context

Model = TypeVar("Model", bound=BaseModel)
Result = TypeVar("Result")


@dataclass
class Service:
    """One engine as routes see it."""

    engine: Engine
    loop: EngineLoop
    telemetry: Telemetry
    live: Live
    template: ChatTemplate
    settings: ServerSettings
    model_names: tuple[str, ...]
    defaults: Mapping[str, Any]
    turn_ends: Sequence[str] = ()  # texts at which an answer in a chat ends
    usual_tokens: int | None = None  # the most of an answer that asks for no number; None: the room
    started: int = field(default_factory=lambda: int(time.time()))

    @property
    def max_body(self) -> int:
        if self.settings.max_body is not None:
            return self.settings.max_body
        return max(BODY_FLOOR, BYTES_PER_TOKEN * self.engine.max_model_len)

    @property
    def most_tokens(self) -> int:
        """Prompt and output of the longest sequence: the context, or what the pages hold."""
        pages = self.engine.scheduler.page_pool
        return min(self.engine.max_model_len, pages.capacity * pages.page_size + 1)

    # Bodies

    async def read(self, request: Request, model: type[Model], generates: bool = False) -> Model:
        """The body of a request. Raises ApiError naming the field that is wrong.

        ``generates``: its jobs need the engine, so that a server that could not take one is not
        to spend more work on it.
        """
        _check_headers(request)
        body = await request.body()
        request.state.arrival = time.monotonic()
        if generates:
            self.loop.check_open()
        parsed = await off_loop(len(body), lambda: _parse(model, body))
        self.check_model(getattr(parsed, "model", None))
        return parsed

    def check_model(self, name: str | None) -> None:
        if name is not None and name not in self.model_names:
            raise ApiError(
                f"model={shown(name)} does not exist here; this server has: "
                f"{', '.join(self.model_names)}",
                404,
                param="model",
                code="model_not_found",
                kind="invalid_request_error",
            )

    # Jobs

    async def jobs(
        self,
        request: Request,
        answer_id: str,
        prompts: Sequence[str | list[int]],
        params: Any,
        fields: Mapping[str, Any],
        special_tokens: bool = True,
        renamed: Mapping[str, str] | None = None,
        max_tokens: int | None = None,
        urgency: Urgency | None = None,
    ) -> list[Job]:
        """Tokenise and check the prompts of a request; where they are long, in another thread.

        Args:
            answer_id: what the ids of the jobs begin with.
            params: SamplingParams, whose ``max_tokens`` of None becomes ``max_tokens``, what the
                model's configuration has or, if all are None, what there is room for.
            fields: those of the body, which messages may name.
            special_tokens: whether the tokenizer adds BOS to a text.
            urgency: of all the jobs.
        """
        self.loop.check_open(len(prompts) * samples_of(params))
        names = unique_ids(answer_id, len(prompts))
        arrival: float = request.state.arrival

        def job(name: str, prompt: str | list[int]) -> Job:
            ids = self._encode(prompt, special_tokens)
            bounded = params
            if isinstance(ids, list) and isinstance(params, SamplingParams):
                usual = self.usual_tokens if max_tokens is None else max_tokens
                bounded = self._bounded(params, len(ids), renamed or {}, usual)
            checked = self.engine.validate(ids, bounded)
            text = prompt if isinstance(prompt, str) else None
            samples = samples_of(bounded)
            return Job(name, checked, bounded, text, samples, arrival, urgency or Urgency())

        def work() -> list[Job]:
            return [job(name, prompt) for name, prompt in zip(names, prompts, strict=True)]

        try:
            return await off_loop(_effort(prompts, params), work)
        except RequestError as error:
            raise from_request_error(error, fields, renamed) from error

    def _encode(self, prompt: str | list[int], special_tokens: bool) -> str | list[int]:
        """Token ids; a text that cannot fit, however it is cut, is refused before."""
        tokenizer = self.engine.tokenizer
        if not isinstance(prompt, str) or tokenizer is None:
            return prompt
        fewest, limit = tokenizer.fewest_tokens(prompt), self.engine.max_model_len
        if fewest > limit:
            raise RequestError(
                f"a prompt of {len(prompt)} characters, which are at least {fewest} tokens, "
                f"exceeds max_model_len={limit}: shorten it"
            )
        return tokenizer.encode(prompt, add_special_tokens=special_tokens)

    def _bounded(
        self, params: SamplingParams, length: int, renamed: Mapping[str, str], default: int | None
    ) -> SamplingParams:
        """``max_tokens`` within the context: chosen where it is open, refused where it is not."""
        room = self.most_tokens - length
        if params.max_tokens is None:
            if params.min_tokens > room > 0:
                raise ApiError(
                    f"min_tokens={shown(params.min_tokens)} and a prompt of {length} tokens exceed "
                    f"the {self.most_tokens} tokens that a sequence may have: lower min_tokens, or "
                    "shorten the prompt",
                    param="min_tokens",
                    code="context_length_exceeded",
                )
            chosen = room if default is None else min(room, default)
            return replace(params, max_tokens=max(1, chosen, params.min_tokens))
        if length <= self.engine.max_model_len < length + params.max_tokens:
            name = renamed.get("max_tokens", "max_tokens")
            raise ApiError(
                f"{name}={shown(params.max_tokens)} and a prompt of {length} tokens exceed the "
                f"context of {self.engine.max_model_len} tokens: lower {name}, or shorten the "
                "prompt",
                param=name,
                code="context_length_exceeded",
            )
        return params

    # Mailboxes

    @contextlib.asynccontextmanager
    async def answering(self, request: Request, jobs: list[Job]) -> AsyncIterator[Mailbox]:
        """Queue jobs and watch their client: if it goes, or the block ends, they are aborted."""
        box = self.loop.open(jobs)
        watcher = asyncio.create_task(self._watch(request, box))
        timer = None
        limit = self.settings.request_timeout
        if limit:
            late = ApiError(
                f"the request took longer than {limit:g} s", 504, code="timeout", kind="timeout"
            )
            timer = asyncio.get_running_loop().call_later(limit, self._give_up, box, late)
        try:
            yield box
        finally:
            if timer is not None:
                timer.cancel()
            watcher.cancel()
            self.loop.close(box)

    async def _watch(self, request: Request, box: Mailbox) -> None:
        """The body has been read: the next message is that the client has gone."""
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self._give_up(box, ClientGone())

    def _give_up(self, box: Mailbox, error: Exception) -> None:
        box.fail(error)
        self.loop.close(box)


def _check_headers(request: Request) -> None:
    """Refuse a body that is not plain JSON.

    Commands such as curl name another type unless told; of a browser's page that is how it would
    get past the preflight of another site.
    """
    coding = request.headers.get("content-encoding", "identity")
    if coding.lower() != "identity":
        raise ApiError(f"content-encoding {shown(coding)} is not supported: send plain JSON", 415)
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    is_json = kind == "application/json" or kind.endswith("+json")
    if not is_json and "origin" in request.headers:
        raise ApiError(f"content-type {shown(kind)} is not supported: send application/json", 415)


def _parse(model: type[Model], body: bytes) -> Model:
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise from_validation_error(error) from None


async def off_loop(size: int, work: Callable[[], Result]) -> Result:
    """Do ``work``: here if it is short, else in another thread."""
    if size <= SHORT:
        return work()
    return await asyncio.to_thread(work)


def _effort(prompts: Sequence[str | list[int]], params: Any) -> int:
    """Of making jobs, in characters; a schema or grammar is compiled, which takes long."""
    guided = getattr(params, "structured_outputs", None) is not None
    return sum(map(len, prompts)) + PER_PROMPT * len(prompts) + SHORT * guided


def request_id_of(request: Request, prefix: str) -> str:
    """An id for an answer and its log lines, from the request's."""
    return f"{prefix}{request.state.request_id}"


def samples_of(params: Any) -> int:
    return params.n if isinstance(params, SamplingParams) else 1


def usage(jobs: Sequence[Job], completion_tokens: int) -> dict[str, Any]:
    """Tokens of an answer; of the prompts', how many the prefix cache had."""
    prompt_tokens = sum(len(job.ids) for job in jobs)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(job.num_cached for job in jobs)},
    }


def unique_ids(base: str, count: int) -> Sequence[str]:
    """Ids for the engine, unlike those of any other request, also one of the same X-Request-Id."""
    mark = uuid4().hex[:8]
    return [f"{base}-{mark}-{index}" for index in range(count)]
