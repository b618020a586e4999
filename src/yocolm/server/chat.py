"""``POST /v1/chat/completions``"""

from __future__ import annotations

import inspect
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fastapi import Request
from pydantic import BaseModel
from starlette.responses import Response

from yocolm.chat import ChatTemplate
from yocolm.engine.outputs import CompletionOutput
from yocolm.engine.sampling_params import end_turns
from yocolm.errors import RequestError
from yocolm.server.errors import ApiError, from_request_error
from yocolm.server.logprobs import chat_logprobs, prompt_logprobs
from yocolm.server.loop import Job
from yocolm.server.outputs import Output
from yocolm.server.params import chat_params, form_field, urgency_of
from yocolm.server.protocol import ChatRequest, Message, Tool
from yocolm.server.service import PER_ENTRY, Service, off_loop, request_id_of, usage
from yocolm.server.stream import JSON, event, prediction, stream_answer, to_json
from yocolm.server.tools import ToolDelta, ToolParser, make_tool_parser

# What a rendering takes besides the template's own variables ("self" is one of them).
RESERVED = frozenset(
    name
    for name, parameter in inspect.signature(ChatTemplate.render).parameters.items()
    if parameter.kind is not parameter.VAR_KEYWORD
)


async def chat_completions(service: Service, request: Request) -> Response:
    """Answer a conversation."""
    body = await service.read(request, ChatRequest, generates=True)
    params = chat_params(body, service.defaults, service.settings.max_logprobs)
    params = end_turns(params, service.turn_ends)
    answer_id = request_id_of(request, "chatcmpl-")
    tools = None if body.tool_choice == "none" else body.tools
    text = await render(
        service,
        body.messages,
        tools,
        add_generation_prompt=body.add_generation_prompt is not False
        and not body.continue_final_message,
        continue_final_message=bool(body.continue_final_message),
        variables=extra_variables(body.chat_template_kwargs),
    )
    renamed = {"prompt": "messages", "structured_outputs": form_field(body)}
    if body.max_completion_tokens is not None:
        renamed["max_tokens"] = "max_completion_tokens"
    parser = tool_parser(service, body)
    if parser is not None and parser.needs_special_tokens:
        params = replace(params, skip_special_tokens=False)
    [job] = await service.jobs(
        request,
        answer_id,
        [text],
        params,
        ChatRequest.model_fields,
        False,
        renamed,
        urgency=urgency_of(body),
    )
    writer = ChatWriter(service, body, job, answer_id)
    if body.stream:
        return await stream_answer(service, request, [job], writer)
    async with service.answering(request, [job]) as box:
        [output] = await box.take_all()
    answer = await off_loop(writer.size(output), lambda: writer.whole(output))
    return Response(answer, media_type=JSON, headers=prediction([job]))


async def render(
    service: Service,
    messages: Sequence[Message],
    tools: Sequence[Tool] | None,
    *,
    add_generation_prompt: bool,
    continue_final_message: bool = False,
    variables: Mapping[str, Any],
) -> str:
    """The prompt of a conversation. Raises ApiError for what the template refuses.

    ``variables`` are further ones of the template, from `extra_variables`.
    """
    shaped, described = plain(messages), plain(tools or ())

    def work() -> str:
        try:
            return service.template.render(
                shaped,
                tools=described or None,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **variables,
            )
        except RequestError as error:
            raise from_request_error(
                error, ("messages", "tools", "chat_template_kwargs")
            ) from error

    size = sum(len(str(message.get("content"))) for message in shaped)
    return await off_loop(size + 500 * len(described), work)


def extra_variables(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """What a client gives the template besides messages; our own names are not among it."""
    taken = sorted(RESERVED & set(given or ()))
    if taken:
        raise ApiError(
            f"chat_template_kwargs holds {taken[0]!r}, which is not for clients to give: leave it "
            "out",
            param="chat_template_kwargs",
        )
    return dict(given or {})


def plain(models: Sequence[BaseModel]) -> list[dict[str, Any]]:
    """Messages and tools as the dictionaries that templates take."""
    return [model.model_dump(exclude_none=True, by_alias=True) for model in models]


def tool_parser(service: Service, body: ChatRequest) -> ToolParser | None:
    """What finds tool calls in an answer, if there may be any."""
    if not body.tools or body.tool_choice == "none":
        return None
    choice = body.tool_choice
    return make_tool_parser(
        service.settings.tool_parser,
        service.template,
        plain(body.tools),
        choice.model_dump() if isinstance(choice, BaseModel) else choice,
        body.parallel_tool_calls is not False,
    )


class _Choice:
    """What has been told of one choice so far."""

    def __init__(self, parser: ToolParser | None) -> None:
        self.parser = parser
        self.num_tokens = 0
        self.has_calls = False

    def split(self, sample: CompletionOutput) -> ToolDelta:
        """What is new, as text and tool calls."""
        if self.parser is None:
            return ToolDelta(sample.text, [])
        parts = [self.parser.push(sample.text)]
        if sample.finish_reason is not None:
            parts.append(self.parser.finish())
        calls = [call for part in parts for call in part.calls]
        self.has_calls |= bool(calls)
        return ToolDelta("".join(part.content for part in parts), calls)

    def finish_reason(self, sample: CompletionOutput) -> str | None:
        if sample.finish_reason == "stop" and self.has_calls:
            return "tool_calls"
        return sample.finish_reason


class ChatWriter:
    """The answer, whole or in chunks."""

    def __init__(self, service: Service, body: ChatRequest, job: Job, answer_id: str) -> None:
        self._service, self._body, self._job = service, body, job
        self._choices: dict[int, _Choice] = {}
        self._begin = (
            f'{{"id":{to_json(answer_id)},"object":"chat.completion%s",'
            f'"created":{int(time.time())},'
            f'"model":{to_json(body.model).replace("%", "%%")},'
        )
        self._head = self._begin % ".chunk"
        options = body.stream_options
        self._usage = bool(options and options.include_usage)
        self._each_usage = bool(options and options.continuous_usage_stats)
        self._prompt_told = False

    def size(self, output: Output) -> int:
        """About how much work the whole answer is, in characters."""
        body = self._body
        entries = sum(len(sample.token_ids) for sample in output.outputs)
        size = sum(len(sample.text) for sample in output.outputs)
        size += PER_ENTRY * entries * (1 + (body.top_logprobs or 0)) * bool(body.logprobs)
        if body.prompt_logprobs is not None:
            size += PER_ENTRY * len(self._job.ids) * (1 + body.prompt_logprobs)
        return size + len(self._job.ids) * bool(body.return_token_ids)

    def whole(self, output: Output) -> str:
        """JSON of the whole answer."""
        # One by one: other threads run in between.
        choices = ",".join(to_json(self._whole_choice(sample)) for sample in output.outputs)
        total, about_prompt = to_json(self._total()), self._about_prompt(output)
        return f'{self._begin % ""}"choices":[{choices}],"usage":{total}{about_prompt}}}'

    def _about_prompt(self, output: Output) -> str:
        """Further fields of the answer, or of its first chunk."""
        extra = ""
        if self._body.prompt_logprobs is not None:
            extra += f',"prompt_logprobs":{to_json(prompt_logprobs(output.prompt_logprobs))}'
        if self._body.return_token_ids:
            extra += f',"prompt_token_ids":{to_json(self._job.ids)}'
        return extra

    def write(self, news: Mapping[str, Output]) -> str:
        return "".join(
            self._chunks(output, sample) for output in news.values() for sample in output.outputs
        )

    def end(self) -> str:
        return event(self._head, [], self._total(), "") if self._usage else ""

    def _choice(self, index: int) -> _Choice:
        choice = self._choices.get(index)
        if choice is None:
            choice = self._choices[index] = _Choice(tool_parser(self._service, self._body))
        return choice

    def _whole_choice(self, sample: CompletionOutput) -> dict[str, Any]:
        choice = self._choice(sample.index)
        choice.num_tokens += len(sample.token_ids)
        delta = choice.split(sample)
        message: dict[str, Any] = {"role": "assistant", "content": delta.content, "refusal": None}
        message["annotations"] = []
        if delta.calls:
            message["content"] = delta.content or None
            message["tool_calls"] = _joined_calls(delta)
        shape: dict[str, Any] = {
            "index": sample.index,
            "message": message,
            "logprobs": self._logprobs(sample),
            "finish_reason": choice.finish_reason(sample),
            "stop_reason": sample.stop_reason,
        }
        if self._body.return_token_ids:
            shape["token_ids"] = sample.token_ids
        return shape

    def _chunks(self, output: Output, sample: CompletionOutput) -> str:
        first = sample.index not in self._choices
        choice = self._choice(sample.index)
        choice.num_tokens += len(sample.token_ids)
        delta = choice.split(sample)
        chunks = ""
        if first:
            about_prompt = "" if self._prompt_told else self._about_prompt(output)
            self._prompt_told = True
            opening = {"role": "assistant", "content": ""}
            chunks += self._event(sample.index, opening, more=about_prompt)
        logprobs = self._logprobs(sample) if sample.token_ids else None
        ids = sample.token_ids if self._body.return_token_ids else None
        if delta.content or logprobs or ids:
            chunks += self._event(sample.index, {"content": delta.content}, logprobs, ids)
        for call in delta.calls:
            chunks += self._event(sample.index, {"tool_calls": [_call_delta(call)]})
        if sample.finish_reason is not None:
            reason = choice.finish_reason(sample)
            chunks += self._event(sample.index, {}, None, None, reason, sample.stop_reason)
        return chunks

    def _event(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        token_ids: list[int] | None = None,
        reason: str | None = None,
        stop_reason: int | str | None = None,
        more: str = "",
    ) -> str:
        shape = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        if reason is not None:
            shape["stop_reason"] = stop_reason
        if token_ids is not None:
            shape["token_ids"] = token_ids
        used = None
        if self._each_usage:
            used = usage([self._job], self._choices[index].num_tokens)
        return event(self._head, [shape], used, ',"usage":null' * self._usage, more)

    def _logprobs(self, sample: CompletionOutput) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        return chat_logprobs(
            self._service.engine.tokenizer,
            sample.token_ids,
            sample.logprobs or [],
            self._body.top_logprobs or 0,
            bool(self._body.return_tokens_as_token_ids),
        )

    def _total(self) -> dict[str, Any]:
        drawn = sum(choice.num_tokens for choice in self._choices.values())
        return usage([self._job], drawn)


def _call_delta(call: Any) -> dict[str, Any]:
    function: dict[str, Any] = {"arguments": call.arguments}
    shape: dict[str, Any] = {"index": call.index, "function": function}
    if call.id is not None:
        function["name"] = call.name
        shape |= {"id": call.id, "type": "function"}
    return shape


def _joined_calls(delta: ToolDelta) -> list[dict[str, Any]]:
    """The pieces of each call put together."""
    calls: dict[int, dict[str, Any]] = {}
    for piece in delta.calls:
        call = calls.setdefault(
            piece.index,
            {"id": piece.id, "type": "function", "function": {"name": piece.name, "arguments": ""}},
        )
        call["function"]["arguments"] += piece.arguments
    return list(calls.values())
