"""Tool calls in what a model writes: found as the text streams, and demanded by a grammar.

Whatever is not a call of one of the tools that there are remains content, byte for byte. A call is
given out once its text is complete. Split the text as you like: contents and calls stay the same.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from yocolm.chat import ChatTemplate
from yocolm.engine.guided import GuidedParams
from yocolm.errors import ConfigError, RequestError
from yocolm.server.tool_formats import (
    BodyParser,
    Call,
    Tools,
    braces_parser,
    parse_json,
    parse_python,
)


@dataclass(frozen=True)
class _Block:
    """A call between two marks."""

    begin: str
    end: str
    parse: BodyParser


@dataclass(frozen=True)
class _Format:
    """Blocks anywhere in the text, and ``bare`` forms that are the whole of it, from ``{`` or
    ``[`` on. ``special``: its marks are special tokens, which a text shows only if asked to."""

    blocks: tuple[_Block, ...] = ()
    bare: tuple[BodyParser, ...] = ()
    special: bool = False


def _parse_either(body: str, tools: Tools) -> list[Call]:
    try:
        return parse_json(body, tools)
    except ValueError:
        return parse_python(body, tools)


_HERMES = _Block("<tool_call>", "</tool_call>", parse_json)
_FENCES = tuple(
    _Block(f"```{name}\n", "```", _parse_either) for name in ("tool_code", "tool_call", "json")
)
_FORMATS = {
    "hermes": _Format((_HERMES,)),
    "json": _Format(bare=(parse_json,)),
    "pythonic": _Format(_FENCES, (parse_python,)),
    "gemma4": _Format(
        (_Block("<|tool_call>", "<tool_call|>", braces_parser('<|"|>')),), special=True
    ),
    "functiongemma": _Format(
        (_Block("<start_function_call>", "<end_function_call>", braces_parser("<escape>")),),
        special=True,
    ),
}
_ANY = _Format((_HERMES, *_FENCES), (parse_json, parse_python))
TOOL_PARSERS = ("auto", *_FORMATS)


@dataclass(frozen=True)
class ToolCallDelta:
    """A call of the answer's ``index``-th tool, complete; arguments are JSON text."""

    index: int
    id: str | None
    name: str | None
    arguments: str


@dataclass
class ToolDelta:
    """What a piece of text has brought."""

    content: str = ""
    calls: list[ToolCallDelta] = field(default_factory=list)


class ToolParser:
    """One answer's text, pushed in pieces. Make it with `make_tool_parser`.

    With ``parallel`` False only the first call counts.
    """

    def __init__(self, form: _Format, tools: Tools, parallel: bool = True) -> None:
        self.needs_special_tokens = form.special
        self.num_calls = 0
        self._form, self._tools, self._parallel = form, tools, parallel
        self._text = ""  # not yet given out
        self._open: _Block | None = None  # with which it begins
        self._searched = 0  # characters of it that do not hold that block's end
        self._bare = _Bare() if form.bare else None
        self._space = ""  # white space behind the content, which a call may swallow
        self._after_call = False
        self._delta = ToolDelta()

    def push(self, text: str) -> ToolDelta:
        """More text; returns what is certain by now."""
        self._text += text
        return self._run(final=False)

    def finish(self) -> ToolDelta:
        """No more text; returns the rest."""
        delta = self._run(final=True)
        if not self._after_call:
            delta.content += self._space
        self._space = ""
        return delta

    def _run(self, final: bool) -> ToolDelta:
        self._delta = ToolDelta()
        while self._text and (self._step_bare(final) if self._bare else self._step(final)):
            pass
        return self._delta

    def _step(self, final: bool) -> bool:
        """Give out text up to the next block, or the block. False if more text is needed."""
        block = self._open or self._find_begin()
        if block is None:
            keep = 0 if final else self._possible_begin()
            self._content(self._text[: len(self._text) - keep])
            self._text = self._text[len(self._text) - keep :]
            return False
        self._open = block
        begin = len(block.begin)
        end = self._text.find(block.end, max(begin, self._searched - len(block.end)))
        if end < 0 and not final:
            self._searched = len(self._text)
            return False
        stop = len(self._text) if end < 0 else end + len(block.end)
        body = self._text[begin:] if end < 0 else self._text[begin:end]
        self._take(stop, body, (block.parse,))
        return True

    def _find_begin(self) -> _Block | None:
        """Give out the text before the first block, which is returned."""
        found = {block: self._text.find(block.begin) for block in self._form.blocks}
        found = {block: at for block, at in found.items() if at >= 0}
        if not found:
            return None
        block = min(found, key=lambda block: found[block])
        self._content(self._text[: found[block]])
        self._text = self._text[found[block] :]
        return block

    def _step_bare(self, final: bool) -> bool:
        """The same for calls without marks: all of a bracket from the beginning on."""
        assert self._bare is not None
        lead = len(self._text) - len(self._text.lstrip())
        if lead == len(self._text):
            if final:
                self._content(self._text)
                self._text = ""
            return False
        if self._text[lead] == ";" and self.num_calls:  # so some models part calls
            self._text = self._text[lead + 1 :]
            return True
        if self._text[lead] not in "{[":
            self._bare = None
            return True
        end = self._bare.find_end(self._text, lead)
        if end is None and not final:
            return False
        stop = len(self._text) if end is None else end
        found = self._take(stop, self._text[lead:stop], self._form.bare)
        self._bare = _Bare() if found else None
        return True

    def _take(self, stop: int, body: str, parsers: Sequence[BodyParser]) -> bool:
        """Take the text before ``stop``: as calls if ``body`` is that, else as content."""
        taken, self._text = self._text[:stop], self._text[stop:]
        self._open, self._searched = None, 0
        for parse in parsers:
            try:
                calls = parse(body, self._tools)
            except ValueError:
                continue
            self._add(calls)
            return True
        self._content(taken)
        return False

    def _add(self, calls: list[Call]) -> None:
        self._space, self._after_call = "", True
        for call in calls:
            if self._parallel or self.num_calls == 0:
                call_id = f"call_{secrets.token_hex(12)}"
                delta = ToolCallDelta(self.num_calls, call_id, call.name, call.arguments)
                self._delta.calls.append(delta)
            self.num_calls += 1

    def _content(self, text: str) -> None:
        """Give out text but the white space at its end; none right behind a call."""
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if self._after_call:
            shown = shown.lstrip()
            self._space = "" if not shown else self._space
        if shown:
            self._after_call = False
            self._delta.content += shown

    def _possible_begin(self) -> int:
        """How many characters at the end of the text may begin a block."""
        longest = max((len(block.begin) for block in self._form.blocks), default=1)
        for length in range(min(longest - 1, len(self._text)), 0, -1):
            if any(b.begin.startswith(self._text[-length:]) for b in self._form.blocks):
                return length
        return 0


class _Bare:
    """Looks for the end of a bracket, each character once."""

    def __init__(self) -> None:
        self._at: int | None = None
        self._depth = 0
        self._quote = ""
        self._escaped = False

    def find_end(self, text: str, begin: int) -> int | None:
        """Where the bracket that opens at ``begin`` is closed again; text may have grown."""
        start = begin if self._at is None else self._at
        for at in range(start, len(text)):
            char = text[at]
            if self._quote:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == self._quote:
                    self._quote = ""
            elif char in "\"'":
                self._quote = char
            elif char in "([{":
                self._depth += 1
            elif char in ")]}":
                self._depth -= 1
                if self._depth == 0:
                    return at + 1
        self._at = len(text)
        return None


def make_tool_parser(
    name: str,
    template: ChatTemplate,
    tools: Sequence[Mapping[str, Any]],
    tool_choice: str | Mapping[str, Any] | None = None,
    parallel: bool = True,
) -> ToolParser:
    """A parser for one answer.

    Args:
        name: one of ``TOOL_PARSERS``; "auto" takes the form that the chat template writes calls
            in, or else any that can be told from ordinary text.
        tools: as OpenAI's API takes them.
        tool_choice: "none" leaves all text content; "required" and a function's name expect what
            the grammar of ``guided_for_tool_choice`` makes models write.

    If its ``needs_special_tokens`` is set, push text that shows special tokens
    (``skip_special_tokens=False``). Raises ConfigError for an unknown name.
    """
    if name not in TOOL_PARSERS:
        raise ConfigError(
            f"tool call parser {name!r} is unknown; give one of {', '.join(TOOL_PARSERS)}"
        )
    known = {} if tool_choice == "none" else {name: list(s) for name, s in _parameters(tools)}
    if not known:
        return ToolParser(_Format(), known)
    if tool_choice not in (None, "auto"):
        return ToolParser(_FORMATS["json"], known, parallel)
    form = _form_of(template) if name == "auto" else _FORMATS[name]
    return ToolParser(form, known, parallel)


def guided_for_tool_choice(
    tools: Sequence[Mapping[str, Any]],
    tool_choice: str | Mapping[str, Any] | None,
    parallel: bool = True,
) -> GuidedParams | None:
    """The grammar that makes a model call a tool; None where it may answer as it likes.

    Args:
        tool_choice: None, "auto", "none", "required", or
            ``{"type": "function", "function": {"name": ...}}``.

    Raises RequestError for another value, or a function that is not among the tools.
    """
    if tool_choice in (None, "auto", "none"):
        return None
    schemas = dict(_parameters(tools))
    if isinstance(tool_choice, Mapping):
        function = tool_choice.get("function")
        wanted = function.get("name") if isinstance(function, Mapping) else None
        if tool_choice.get("type") != "function" or wanted not in schemas:
            raise RequestError(
                f"tool_choice={dict(tool_choice)!r} names none of the tools: {', '.join(schemas)}"
            )
        call, definitions = _call_schema(wanted, _schema_of(tools, wanted))
        return GuidedParams(json={**call, "$defs": definitions})
    if tool_choice != "required" or not schemas:
        raise RequestError(
            f"tool_choice={tool_choice!r} must be 'none', 'auto', 'required' (with tools), or an "
            "object that names a function"
        )
    calls = [_call_schema(name, _schema_of(tools, name)) for name in schemas]
    schema: dict[str, Any] = {"type": "array", "items": {"anyOf": [call for call, _ in calls]}}
    schema |= {"minItems": 1} if parallel else {"minItems": 1, "maxItems": 1}
    schema["$defs"] = {key: value for _, definitions in calls for key, value in definitions.items()}
    return GuidedParams(json=schema)


def _call_schema(name: str, parameters: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The schema of a call, and the definitions that it refers to, under names of their own."""
    places = {"$defs": f"{name}-$defs-", "definitions": f"{name}-definitions-"}
    own = _with_refs({k: v for k, v in parameters.items() if k not in places}, places)
    definitions = {
        prefix + key: _with_refs(value, places)
        for place, prefix in places.items()
        for key, value in (parameters.get(place) or {}).items()
    }
    schema = {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": own},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
    return schema, definitions


def _with_refs(schema: Any, places: Mapping[str, str]) -> Any:
    """A copy whose references lead to where the definitions are moved."""
    if isinstance(schema, list):
        return [_with_refs(item, places) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    copy = {key: _with_refs(value, places) for key, value in schema.items()}
    reference = copy.get("$ref")
    if isinstance(reference, str):
        for place, prefix in places.items():
            if reference.startswith(f"#/{place}/"):
                copy["$ref"] = f"#/$defs/{prefix}" + reference.removeprefix(f"#/{place}/")
    return copy


def _parameters(tools: Sequence[Mapping[str, Any]]) -> list[tuple[str, Mapping[str, Any]]]:
    """Names of the tools, each with its parameters by name. RequestError for what is no tool."""
    found: list[tuple[str, Mapping[str, Any]]] = []
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
            raise RequestError(
                f"tools[{index}] must be an object with type 'function' and a function, which "
                "has a name, and may have a description and parameters (a JSON schema)"
            )
        parameters = function.get("parameters")
        if parameters is not None and not isinstance(parameters, Mapping):
            raise RequestError(f"tools[{index}].function.parameters must be a JSON schema")
        properties = (parameters or {}).get("properties")
        found.append((name, properties if isinstance(properties, Mapping) else {}))
    return found


def _schema_of(tools: Sequence[Mapping[str, Any]], name: str) -> Mapping[str, Any]:
    """A tool's parameters; one that states none takes none."""
    functions = (tool["function"] for tool in tools)
    parameters = next(f.get("parameters") for f in functions if f["name"] == name)
    if parameters:
        return parameters
    return {"type": "object", "properties": {}, "additionalProperties": False}


def _form_of(template: ChatTemplate) -> _Format:
    """The form whose marks a chat template writes, other than what is told from any text."""
    texts = template.templates.values()
    for form in _FORMATS.values():
        if form.special and any(b.begin in text for b in form.blocks for text in texts):
            return form
    if any(_HERMES.begin in text for text in texts):
        return _FORMATS["hermes"]
    return _ANY
