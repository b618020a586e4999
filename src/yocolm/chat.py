"""Messages to a prompt, by the chat template that comes with a model.

Text only: images and other parts of a message are refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from yocolm.errors import CheckpointError, RequestError
from yocolm.fields import read_json
from yocolm.template.sandbox import Template, TemplateError, compile_template
from yocolm.tokenizer import Tokenizer

TEMPLATE_FILE = "chat_template.jinja"
TEMPLATE_FOLDERS = ("chat_templates", "additional_chat_templates")
CONFIG_FILES = ("tokenizer_config.json", "chat_template.json")  # the second: of processors, once
_MEDIA = frozenset("image_url input_audio file video_url audio_url image audio video".split())
_REASONING = ("reasoning_content", "thinking", "reasoning")
_END = "\ue000end of the message to go on with "  # the space tells whether the template trims

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class ChatTemplate:
    """The named templates of a model ("default", "tool_use", ...) and the tokens they may write.

    ``source`` is where they come from, for messages. Without templates, only a rendering that
    brings its own works.
    """

    templates: Mapping[str, str] = field(default_factory=dict)
    special_tokens: Mapping[str, Any] = field(default_factory=dict)
    source: str = "the model's folder"

    def __post_init__(self) -> None:
        for name, text in self.templates.items():
            try:
                compile_template(text)
            except TemplateError as error:
                which = "" if name == "default" else f" {name!r}"
                raise CheckpointError(
                    f"{self.source}: the chat template{which} is not valid: {error}; "
                    "correct the file"
                ) from error

    def render(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt's text, special tokens written out; encode it with `encode_chat`.

        Args:
            messages: dictionaries with a role, and content that is text or a list of text parts.
            tools: JSON descriptions of functions, as OpenAI's API takes them.
            add_generation_prompt: end with the beginning of an answer.
            continue_final_message: leave the last message open, for the model to go on with.
            chat_template: a template, or the name of one of the model's; by default "tool_use"
                where there is one and tools are given, else "default".
            documents, kwargs: further variables of the template, such as ``enable_thinking``.

        Raises RequestError for messages that are malformed, not text, or refused by the template.
        """
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt exclude each other: set "
                "add_generation_prompt to false"
            )
        template, where = self._select(chat_template, tools is not None)
        ready = _ready(messages, template)
        final = _open_last(ready) if continue_final_message else ""
        variables = {
            **self.special_tokens,
            **_plain("chat_template_kwargs", kwargs),
            "messages": ready,
            "tools": None if tools is None else _dictionaries("tools", tools),
            "documents": None if documents is None else _dictionaries("documents", documents),
            "add_generation_prompt": bool(add_generation_prompt),
        }
        try:
            text = template.run(variables)
        except TemplateError as error:
            raise RequestError(f"{where} {error}") from error
        return _cut_open(text, final) if continue_final_message else text

    def _select(self, given: str | None, with_tools: bool) -> tuple[Template, str]:
        """The template to use, and what messages call it."""
        name = given
        if name is None:
            name = "tool_use" if with_tools and "tool_use" in self.templates else "default"
        if name in self.templates:
            return compile_template(self.templates[name]), f"the chat template of {self.source}"
        if given is None:
            raise RequestError(self._missing())
        if not isinstance(given, str) or not given.strip():
            raise RequestError(f"chat_template={given!r} must be the text of a Jinja template")
        try:
            return compile_template(given), "the chat template that was given"
        except TemplateError as error:
            raise RequestError(f"chat_template is not valid: {error}") from error

    def _missing(self) -> str:
        if self.templates:
            names = ", ".join(self.templates)
            return f"no default chat template: {self.source} has {names}; name one as chat_template"
        return (
            f"no chat template: {self.source} has neither {TEMPLATE_FILE} nor a chat_template in "
            "tokenizer_config.json; add one there, or give one as chat_template"
        )


def load_chat_template(folder: Path | None) -> ChatTemplate:
    """The chat template of a model's folder; an empty one if there is none.

    ``chat_template.jinja`` (with ``chat_templates/NAME.jinja`` beside it) goes before
    tokenizer_config.json's ``chat_template``, a text or a list of named ones.
    Raises CheckpointError naming the file that cannot be read or parsed.
    """
    if folder is None:
        return ChatTemplate(source="a model without a folder")
    files = {"default": folder / TEMPLATE_FILE}
    for inner in TEMPLATE_FOLDERS:
        files.update((path.stem, path) for path in sorted((folder / inner).glob("*.jinja")))
    tokens = _special_tokens(folder)
    found = {name: _read(path) for name, path in files.items() if path.exists()}
    if found:
        where = next(path for path in files.values() if path.exists())
        return ChatTemplate(found, tokens, str(where))
    for path in (folder / name for name in CONFIG_FILES):
        value = read_json(path).get("chat_template") if path.exists() else None
        if value is not None:
            return ChatTemplate(_named(path, value), tokens, str(path))
    return ChatTemplate({}, tokens, str(folder))


def encode_chat(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of a rendered chat. The template has written every special token that the model
    was trained with, BOS among them, so that none is added."""
    return tokenizer.encode(text, add_special_tokens=False)


# Files


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not UTF-8 at byte {error.start}") from error


def _named(path: Path, value: Any) -> dict[str, str]:
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list) and all(isinstance(item, Mapping) for item in value):
        named = {item.get("name"): item.get("template") for item in value}
        if all(isinstance(part, str) for pair in named.items() for part in pair):
            return named
    raise CheckpointError(
        f"{path}: chat_template must be a text, or a list of objects with a name and a template"
    )


def _special_tokens(folder: Path) -> dict[str, Any]:
    """What a tokenizer's files name: bos_token, eos_token, image_token, ..., as text."""
    tokens: dict[str, Any] = {}
    for path in (folder / "special_tokens_map.json", folder / "tokenizer_config.json"):
        fields = read_json(path) if path.exists() else {}
        extra = fields.get("extra_special_tokens")
        extra = extra if isinstance(extra, Mapping) else {}
        named = {name: value for name, value in fields.items() if name.endswith("_token")}
        for name, value in {**extra, **named}.items():
            text = value.get("content") if isinstance(value, Mapping) else value
            if isinstance(text, str):
                tokens[name] = text
    return tokens


# Messages


def _ready(messages: Messages, template: Template) -> list[dict[str, Any]]:
    """Checked copies, in the form that a template reads."""
    ready = [_message(index, one) for index, one in enumerate(_listed("messages", messages))]
    if not ready:
        raise RequestError("messages is empty: give at least one message")
    for one in ready:
        _fit_content(one, template)
    return ready


def _message(index: int, message: Any) -> dict[str, Any]:
    """A checked copy. Fields that are null are left out, as templates expect."""
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise RequestError(
            f"{where} is {_short(message)}; it must be an object with role and content"
        )
    plain = {k: v for k, v in _plain(where, message).items() if v is not None}
    if not isinstance(plain.get("role"), str):
        raise RequestError(
            f"{where}.role is {plain.get('role')!r}; it must be text, such as 'user'"
        )
    content = plain.get("content")
    if isinstance(content, list):
        for number, part in enumerate(content):
            _check_part(f"{where}.content[{number}]", part)
    elif content is not None and not isinstance(content, str):
        raise RequestError(
            f"{where}.content is {_short(content)}; it must be text or a list of parts"
        )
    reasoning = next((plain[name] for name in _REASONING if name in plain), None)
    if reasoning is not None:
        plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
    if "tool_calls" in plain:
        _parse_arguments(where, plain["tool_calls"])
    return plain


def _check_part(where: str, part: Any) -> None:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in _MEDIA:
        raise RequestError(f"{where} is of type {kind!r}; only text is supported")
    if kind != "text" or not isinstance(part.get("text"), str):
        raise RequestError(
            f"{where} is {_short(part)}; only text is supported: "
            'give {"type": "text", "text": "..."}'
        )


def _parse_arguments(where: str, calls: Any) -> None:
    """OpenAI's API gives the arguments of a call as JSON text; templates want the object."""
    if not isinstance(calls, list):
        raise RequestError(f"{where}.tool_calls is {_short(calls)}; it must be a list")
    for number, call in enumerate(calls):
        inner = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
            raise RequestError(
                f"{where}.tool_calls[{number}] is {_short(call)}; it must be an object with a "
                "function, which has a name and arguments"
            )
        arguments = inner.get("arguments")
        if isinstance(arguments, str):
            try:
                inner["arguments"] = json.loads(arguments) if arguments.strip() else {}
            except (ValueError, RecursionError):
                pass  # what a model wrote, as it wrote it


def _fit_content(message: dict[str, Any], template: Template) -> None:
    """Parts become text for a template that knows no parts, and text a part for one that knows
    nothing else; both would print nonsense otherwise."""
    content = message.get("content")
    if isinstance(content, list) and not template.reads_parts:
        message["content"] = "\n".join(part["text"] for part in content)
    elif isinstance(content, str) and template.reads_parts and not template.reads_text:
        message["content"] = [{"type": "text", "text": content}]


def _open_last(messages: list[dict[str, Any]]) -> str:
    """Mark the end of the last message's text; returns that text."""
    last = messages[-1]
    content = last.get("content")
    if isinstance(content, list) and content:
        text = content[-1]["text"]
        content[-1]["text"] = text + _END
        return text
    if not isinstance(content, str):
        raise RequestError("continue_final_message: the last message has no text to go on with")
    last["content"] = content + _END
    return content


def _cut_open(text: str, final: str) -> str:
    at = text.rfind(_END.strip())
    if at < 0 or final.strip() not in text:
        raise RequestError(
            "continue_final_message: the chat template drops or changes the last message's text, "
            "so that there is nothing to go on with"
        )
    return text[:at] if text.startswith(_END, at) else text[:at].rstrip()


def _dictionaries(name: str, values: Any) -> list[dict[str, Any]]:
    for index, value in enumerate(_listed(name, values)):
        if not isinstance(value, Mapping):
            raise RequestError(f"{name}[{index}] is {_short(value)}; it must be an object")
    return _plain(name, values)


def _listed(name: str, values: Any) -> Sequence[Any]:
    if isinstance(values, str | bytes) or not isinstance(values, Sequence):
        raise RequestError(f"{name} is {_short(values)}; it must be a list of objects")
    return values


def _plain(where: str, value: Any) -> Any:
    """A copy in JSON's own types: a template must not reach methods of anything else."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise RequestError(f"{where} is {_short(value)}; the keys of an object must be text")
        return {str(key): _plain(where, item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(where, item) for item in value]
    raise RequestError(f"{where} holds {_short(value)}; give text, numbers, lists and objects only")


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:80] + "..."
