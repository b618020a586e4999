"""Request bodies: OpenAI's fields, and vLLM's where OpenAI has none. Nothing unknown gets through.

Types are strict; ranges that ``SamplingParams`` checks are left to it, so that offline users and
clients read the same messages.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    WithJsonSchema,
    model_validator,
)

from yocolm.engine.settings import MAX_PRIORITY, MAX_SECONDS
from yocolm.server.errors import shown

MAX_N = 128
MAX_STOPS = 64
MAX_STOP_LENGTH = 1000
MAX_STOP_TOKENS = 1024
MAX_BIASES = 1024
MAX_PROMPTS = 2048
MAX_MESSAGES = 10_000
MAX_TOOLS = 128


def _check_prompt(value: Any) -> Any:
    """Text, token ids, or a list of either: looked at once, since lists may be long."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise ValueError("must be text, token ids, or a list of texts or of lists of token ids")
    value = cast(list[Any], value)
    first = type(value[0])
    if first not in (str, int, list):
        raise ValueError(f"must hold texts, token ids or lists of them, not {shown(value[0])}")
    for item in value:
        if type(item) is not first:
            raise ValueError(f"must not mix kinds: {shown(value[0])} and {shown(item)}")
        if isinstance(item, list):
            wrong = next((token for token in item if type(token) is not int), None)
            if wrong is not None:
                raise ValueError(f"holds {shown(wrong)}; token ids are integers")
    if first is not int and len(value) > MAX_PROMPTS:
        raise ValueError(f"has {len(value)} prompts; at most {MAX_PROMPTS} are allowed")
    return value


def _check_ids(value: Any) -> Any:
    if not isinstance(value, list) or any(type(token) is not int for token in value):
        raise ValueError("must be a list of token ids, which are integers")
    return value


def _check_stop(value: Any) -> Any:
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list) or not all(isinstance(s, str) and s for s in listed):
        raise ValueError("must be a text, or a list of texts, not empty")
    if len(listed) > MAX_STOPS or any(len(text) > MAX_STOP_LENGTH for text in listed):
        raise ValueError(
            f"must be at most {MAX_STOPS} texts of at most {MAX_STOP_LENGTH} characters"
        )
    return listed


def _check_bias(value: Any) -> Any:
    """A mapping with token ids as keys; JSON spells them as text."""
    if not isinstance(value, dict) or len(value) > MAX_BIASES:
        raise ValueError(f"must map at most {MAX_BIASES} token ids to biases")
    for key in value:
        if not (isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 10):
            raise ValueError(f"has the key {shown(key)}; token ids are whole numbers")
    return {int(key): bias for key, bias in value.items()}


_TEXT = {"type": "string"}
_IDS = {"type": "array", "items": {"type": "integer"}}
_MANY = [
    _TEXT,
    {"type": "array", "items": _TEXT, "minItems": 1},
    {**_IDS, "minItems": 1},
    {"type": "array", "items": _IDS, "minItems": 1},
]
Prompt = Annotated[Any, AfterValidator(_check_prompt), WithJsonSchema({"anyOf": _MANY})]
TokenIds = Annotated[Any, AfterValidator(_check_ids), WithJsonSchema(_IDS)]
Stop = Annotated[
    Any,
    AfterValidator(_check_stop),
    WithJsonSchema({"anyOf": [_TEXT, {"type": "array", "items": _TEXT}]}),
]
LogitBias = Annotated[
    Any,
    AfterValidator(_check_bias),
    WithJsonSchema({"type": "object", "additionalProperties": {"type": "number"}}),
]
StopTokens = Annotated[list[int], Field(fail_fast=True, max_length=MAX_STOP_TOKENS)]
Choices = Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=1024)]
Pooling = Literal["last", "mean"]
Priority = Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]  # the lowest goes first
Target = Annotated[float, Field(gt=0, le=MAX_SECONDS, allow_inf_nan=False)]  # seconds


class Body(BaseModel):
    """Base of all bodies."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())
    # Fields that we know but cannot serve, with the values that change nothing.
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {}

    @model_validator(mode="after")
    def _only_neutral(self) -> Body:
        for name, allowed in type(self).neutral.items():
            value = getattr(self, name)
            if value is not None and not any(_same(value, other) for other in allowed):
                also = f" (or give {', '.join(map(repr, allowed))})" if allowed else ""
                raise ValueError(f"{name}={shown(value)} is not supported: leave it out{also}")
        return self


def _same(value: Any, other: Any) -> bool:
    return value == other and isinstance(value, bool) == isinstance(other, bool)


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None


class JsonSchema(Body):
    name: str
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema must be given with the type 'json_schema', and only then")
        return self


class StructuredOutputs(Body):
    """vLLM's form of what ``guided_*`` say."""

    json_: dict[str, Any] | bool | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None


class Sampling(Body):
    """What completions and chat share."""

    model: str
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    n: int | None = Field(None, ge=1, le=MAX_N)
    stop: Stop | None = None
    stop_token_ids: StopTokens | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    logit_bias: LogitBias | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | bool | str | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    user: str | None = None  # says who asks; changes nothing
    priority: Priority | None = None
    ttft_target: Target | None = None
    tpot_target: Target | None = None
    spaces_between_special_tokens: Any = None
    use_beam_search: Any = None
    length_penalty: Any = None
    truncate_prompt_tokens: Any = None
    allowed_token_ids: Any = None
    bad_words: Any = None
    logits_processors: Any = None
    guided_decoding_backend: Any = None

    neutral = {
        "spaces_between_special_tokens": (True,),
        "use_beam_search": (False,),
        "length_penalty": (1.0,),
        "truncate_prompt_tokens": (),
        "allowed_token_ids": (),
        "bad_words": ([],),
        "logits_processors": ([],),
        "guided_decoding_backend": (),
    }

    @model_validator(mode="after")
    def _streams_if_told_how(self) -> Sampling:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only with stream=true; leave it out")
        return self


class CompletionRequest(Sampling):
    """``POST /v1/completions``"""

    prompt: Prompt
    best_of: int | None = Field(None, ge=1, le=MAX_N)
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0)
    max_tokens: int | None = Field(None, ge=0)
    add_special_tokens: bool | None = None
    suffix: Any = None

    neutral = {**Sampling.neutral, "suffix": ("",)}


class TextPart(Body):
    type: Literal["text"]
    text: str


class FunctionCall(Body):
    name: str
    arguments: str | dict[str, Any]


class ToolCall(Body):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


def _check_content(value: Any) -> Any:
    """Text, or a list of text parts; other parts are named in the message."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("must be text, or a list of parts {type: 'text', text: ...}")
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text" and isinstance(part.get("text"), str) and len(part) == 2:
            continue
        if isinstance(kind, str) and kind != "text":
            raise ValueError(f"holds a part of type {shown(kind)}; this model takes text only")
        raise ValueError(f"holds {shown(part)}; parts are {{type: 'text', text: ...}}")
    return value


_PARTS = {"type": "array", "items": {"$ref": "#/components/schemas/TextPart"}}
Content = Annotated[
    Any,
    AfterValidator(_check_content),
    WithJsonSchema({"anyOf": [_TEXT, _PARTS, {"type": "null"}]}),
]


class Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    refusal: Any = None
    annotations: Any = None
    audio: Any = None
    function_call: Any = None
    reasoning: Any = None
    reasoning_content: Any = None

    neutral = {
        **dict.fromkeys(
            ("refusal", "audio", "function_call", "reasoning", "reasoning_content"), ()
        ),
        "annotations": ([],),
    }

    @model_validator(mode="after")
    def _says_something(self) -> Message:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError(f"a message of role {self.role!r} needs content")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("tool_calls: only messages of role 'assistant' have them")
        return self


class Function(Body):
    name: str = Field(pattern=r"^[A-Za-z0-9_.:-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


class ChatRequest(Sampling):
    """``POST /v1/chat/completions``"""

    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: int | None = Field(None, ge=0)
    max_completion_tokens: int | None = Field(None, ge=0)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0)
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    safety_identifier: str | None = None  # like user
    prompt_cache_key: str | None = None  # like user
    store: Any = None
    metadata: Any = None
    service_tier: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    web_search_options: Any = None
    functions: Any = None
    function_call: Any = None
    echo: Any = None
    add_special_tokens: Any = None
    documents: Any = None
    chat_template: Any = None

    neutral = {
        **Sampling.neutral,
        "store": (False,),
        "metadata": ({},),
        "service_tier": ("auto", "default"),
        "modalities": (["text"],),
        "functions": (),
        "function_call": (),
        "echo": (False,),
        "add_special_tokens": (False,),
        **dict.fromkeys(("audio", "prediction", "reasoning_effort", "verbosity"), ()),
        **dict.fromkeys(("web_search_options", "documents", "chat_template"), ()),
    }

    @model_validator(mode="after")
    def _fits_together(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError(f"top_logprobs={self.top_logprobs} needs logprobs=true: set it")
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise ValueError(
                f"max_tokens={both[0]} and max_completion_tokens={both[1]} differ: give one of them"
            )
        if self.tool_choice not in (None, "none") and not self.tools:
            raise ValueError(f"tool_choice={shown(self.tool_choice)} needs tools: give them")
        if isinstance(self.tool_choice, NamedTool):
            names = [tool.function.name for tool in self.tools or ()]
            if self.tool_choice.function.name not in names:
                raise ValueError(
                    f"tool_choice={shown(self.tool_choice.function.name)} is none of the tools: "
                    f"{', '.join(names)}"
                )
        return self


class EmbeddingRequest(Body):
    """``POST /v1/embeddings``"""

    model: str
    input: Prompt
    encoding_format: Literal["float", "base64"] | None = None
    pooling: Pooling | None = None
    normalize: bool | None = None
    priority: Priority | None = None
    user: str | None = None
    dimensions: Any = None

    neutral = {"dimensions": ()}


class TokenizeRequest(Body):
    """``POST /tokenize``: a prompt, or messages as a chat request has them."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(fail_fast=True, max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _one_source(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class DetokenizeRequest(Body):
    """``POST /detokenize``"""

    model: str | None = None
    tokens: TokenIds
