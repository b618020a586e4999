"""A request body to sampling parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from yocolm.engine.sampling_params import GuidedParams, RequestOutputKind, SamplingParams
from yocolm.errors import RequestError
from yocolm.server.errors import ApiError, from_request_error
from yocolm.server.loop import Urgency
from yocolm.server.protocol import ChatRequest, CompletionRequest, NamedTool, Sampling
from yocolm.server.tools import guided_for_tool_choice

# What a model's generation_config.json may set.
DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_SAME = (
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "temperature", "top_p"),
    *("top_k", "min_p", "seed", "stop", "stop_token_ids", "include_stop_str_in_output"),
    *("ignore_eos", "min_tokens", "logit_bias", "skip_special_tokens", "prompt_logprobs"),
)


def completion_params(
    body: CompletionRequest, defaults: Mapping[str, Any], max_logprobs: int
) -> SamplingParams:
    """Parameters of a completion; ``echo`` with ``logprobs`` scores the prompt. Raises ApiError."""
    n = body.n or 1
    samples = n if body.best_of is None else body.best_of
    if samples < n:
        raise ApiError(f"best_of={samples} is below n={n}: raise it", param="best_of")
    if samples > n and body.stream:
        raise ApiError(f"best_of={samples} cannot be streamed: leave out stream", param="best_of")
    extra: dict[str, Any] = {"logprobs": body.logprobs}
    if samples > n and body.logprobs is None:
        extra["logprobs"] = 0  # the best are chosen by their logprobs
    renamed = {}
    if body.echo and body.logprobs is not None and body.prompt_logprobs is None:
        extra["prompt_logprobs"] = body.logprobs
        renamed = {"prompt_logprobs": "logprobs"}
    guided = _guided(body)
    return _build(body, defaults, max_logprobs, samples, body.max_tokens, guided, extra, renamed)


def chat_params(
    body: ChatRequest, defaults: Mapping[str, Any], max_logprobs: int
) -> SamplingParams:
    """Parameters of a chat answer, which goes on to the end of the context unless limited."""
    extra = {"logprobs": (body.top_logprobs or 0) if body.logprobs else None}
    renamed = {"logprobs": "top_logprobs"}
    max_tokens = body.max_tokens
    if body.max_completion_tokens is not None:
        max_tokens = body.max_completion_tokens
        renamed["max_tokens"] = "max_completion_tokens"
    guided = _guided(body)
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
    choice: Any = body.tool_choice
    if isinstance(choice, NamedTool):
        choice = choice.model_dump()
    chosen = None
    if tools:
        try:
            chosen = guided_for_tool_choice(tools, choice, body.parallel_tool_calls is not False)
        except RequestError as error:
            raise ApiError(f"tools: {error}", param="tools") from error
    if chosen is not None and guided is not None:
        raise ApiError(
            "tool_choice asks for a tool call and response_format for an answer of another form: "
            "give one of them",
            param="tool_choice",
        )
    guided = chosen or guided
    return _build(body, defaults, max_logprobs, body.n or 1, max_tokens, guided, extra, renamed)


def _build(
    body: Sampling,
    defaults: Mapping[str, Any],
    max_logprobs: int,
    samples: int,
    max_tokens: int | None,
    guided: GuidedParams | None,
    extra: Mapping[str, Any],
    renamed: Mapping[str, str],
) -> SamplingParams:
    values: dict[str, Any] = dict(defaults)
    values.update((name, getattr(body, name)) for name in _SAME if getattr(body, name) is not None)
    values.update((name, value) for name, value in extra.items() if value is not None)
    for name in ("logprobs", "prompt_logprobs"):
        field = renamed.get(name, name)
        if (values.get(name) or 0) > max_logprobs:
            raise ApiError(
                f"{field}={values[name]} exceeds this server's limit of {max_logprobs}: lower it",
                param=field,
            )
    try:
        return SamplingParams(
            n=samples,
            max_tokens=max_tokens,
            structured_outputs=guided,
            output_kind=RequestOutputKind.DELTA,
            **values,
        )
    except RequestError as error:
        raise from_request_error(error, type(body).model_fields, renamed) from error


def _guided(body: Sampling) -> GuidedParams | None:
    """The one form that the answer must have, of all the ways to ask for it."""
    asked: dict[str, dict[str, Any]] = {}
    for kind in ("json", "regex", "choice", "grammar"):
        value = getattr(body, f"guided_{kind}")
        if value is not None:
            asked[f"guided_{kind}"] = {kind: value}
    form = body.response_format
    if form is not None and form.type == "json_object":
        asked["response_format"] = {"json_object": True}
    elif form is not None and form.json_schema is not None:
        schema = form.json_schema.schema_
        asked["response_format"] = {"json": True if schema is None else schema}
    spec = body.structured_outputs
    if spec is not None:
        given = spec.model_dump(by_alias=True, exclude_none=True)
        if len(given) != 1:
            raise ApiError(
                f"structured_outputs has {len(given)} forms; give exactly one of json, regex, "
                "choice, grammar and json_object",
                param="structured_outputs",
            )
        asked["structured_outputs"] = given
    if len(asked) > 1:
        raise ApiError(
            f"{' and '.join(asked)} each give the answer a form: give one of them",
            param=next(iter(asked)),
        )
    for name, values in asked.items():
        try:
            return GuidedParams(**values)
        except RequestError as error:
            raise ApiError(f"{name}: {error}", param=name) from error
    return None


def urgency_of(body: Sampling) -> Urgency:
    """When an answer is to be given, as far as the body says so."""
    return Urgency(body.priority or 0, body.ttft_target, body.tpot_target)


def form_field(body: Sampling) -> str:
    """The field that gives the answer a form."""
    names = ("response_format", "structured_outputs")
    names += tuple(f"guided_{kind}" for kind in ("json", "regex", "choice", "grammar"))
    return next((name for name in names if getattr(body, name) is not None), "tool_choice")
