"""How models write tool calls: the text of one call, or of several, as names and arguments.

| form | example |
| --- | --- |
| JSON | ``{"name": "f", "arguments": {"a": 1}}``, or a list; ``parameters`` is another name |
| Python | ``[f(a=1), g()]``, ``f(a=1)``, one call a line |
| braces | ``call:f{a:1,b:<|"|>text<|"|>,c:{d:[true]}}``: Gemma's; its quotation mark is a token |

Every parser raises ValueError for text that is no call.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

MAX_BODY = 1 << 20  # characters
MAX_DEPTH = 64
_CONSTANTS = {"true": True, "false": False, "null": None, "none": None}


@dataclass(frozen=True)
class Call:
    """A function's name and its arguments as JSON text."""

    name: str
    arguments: str


# Names of the tools that there are, each with those of its parameters in their order.
Tools = Mapping[str, Sequence[str]]
BodyParser = Callable[[str, Tools], list[Call]]


def parse_json(body: str, tools: Tools) -> list[Call]:
    """One object or a list of them; extra text behind is refused."""
    if len(body) > MAX_BODY:
        raise ValueError("too long")
    value = _loads(body)
    listed = value if isinstance(value, list) else [value]
    if not listed:
        raise ValueError("no call")
    return [_json_call(item, tools) for item in listed]


def _json_call(item: Any, tools: Tools) -> Call:
    if isinstance(item, dict) and isinstance(item.get("function"), dict):
        item = item["function"]  # as OpenAI's API writes it
    if not isinstance(item, dict):
        raise ValueError("not an object")
    given = [item[key] for key in ("arguments", "parameters") if item.get(key) is not None]
    arguments = given[0] if given else {}
    if isinstance(arguments, str):
        arguments = _loads(arguments)
    return _call(item.get("name"), arguments, tools)


def _loads(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def parse_python(body: str, tools: Tools) -> list[Call]:
    """Calls as Python writes them, in a list or one a line; values are literals."""
    if len(body) > MAX_BODY:
        raise ValueError("too long")
    try:
        lines = ast.parse(body.strip()).body
        nodes = [node for line in lines for node in _calls_of(line)]
        calls = [_python_call(node, tools) for node in nodes]
    except (SyntaxError, RecursionError, MemoryError, TypeError) as error:
        raise ValueError(f"not Python: {error}") from error
    if not calls:
        raise ValueError("no call")
    return calls


def _calls_of(line: ast.stmt) -> list[ast.expr]:
    if not isinstance(line, ast.Expr):
        raise ValueError("a statement, not a call")
    node = line.value
    return list(node.elts) if isinstance(node, ast.List | ast.Tuple) else [node]


def _python_call(node: ast.expr, tools: Tools) -> Call:
    if not isinstance(node, ast.Call):
        raise ValueError("not a call")
    name = ast.unparse(node.func)
    if name == "print" and name not in tools and len(node.args) == 1:
        return _python_call(node.args[0], tools)  # ``print(f(a=1))`` shows the result of f
    name = name if name in tools else name.rpartition(".")[2]
    names = tools.get(name, ())
    if len(node.args) > len(names):
        raise ValueError("more arguments than parameters")
    pairs = list(zip(names, node.args, strict=False))
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("** is no argument")
        pairs.append((keyword.arg, keyword.value))
    return _call(name, {key: _literal(value) for key, value in pairs}, tools)


def _literal(node: ast.expr) -> Any:
    """A literal's value; JSON's names of constants are as good as Python's."""

    class Constants(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.expr:
            if node.id.lower() not in _CONSTANTS:
                raise ValueError(f"{node.id} is no literal")
            return ast.copy_location(ast.Constant(_CONSTANTS[node.id.lower()]), node)

    return ast.literal_eval(Constants().visit(node))


def braces_parser(quote: str) -> BodyParser:
    """A parser of the braces form whose texts stand between two ``quote``."""

    def parse(body: str, tools: Tools) -> list[Call]:
        return [_Braces(body.strip(), quote).call(tools)]

    return parse


class _Braces:
    """Reads one call; ``at`` is how far."""

    def __init__(self, text: str, quote: str) -> None:
        if len(text) > MAX_BODY:
            raise ValueError("too long")
        self.text, self.quote, self.at = text, quote, 0

    def call(self, tools: Tools) -> Call:
        self._expect("call:")
        name = self._until("{")
        arguments = self._mapping(0)
        if self.at != len(self.text):
            raise ValueError("text behind the call")
        return _call(name, arguments, tools)

    def _value(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise ValueError("nested too deeply")
        self._skip_space()
        if self._take(self.quote):
            return self._quoted()
        if self.text.startswith('"', self.at):
            value, self.at = json.JSONDecoder().raw_decode(self.text, self.at)
            return value
        if self.text.startswith("{", self.at):
            return self._mapping(depth)
        if self._take("["):
            return self._items("]", lambda: self._value(depth + 1))
        return _scalar(self._until(",", "}", "]"))

    def _mapping(self, depth: int) -> dict[str, Any]:
        self._expect("{")
        return dict(self._items("}", lambda: self._pair(depth)))

    def _pair(self, depth: int) -> tuple[str, Any]:
        self._skip_space()
        if self._take(self.quote):
            key = self._quoted()
        else:
            key = self._until(":").strip('"')
        self._skip_space()
        self._expect(":")
        if not key:
            raise ValueError("a key is missing")
        return key, self._value(depth + 1)

    def _items(self, end: str, read: Callable[[], Any]) -> list[Any]:
        items: list[Any] = []
        self._skip_space()
        while not self._take(end):
            if items:
                self._expect(",")
            items.append(read())
            self._skip_space()
        return items

    def _quoted(self) -> str:
        text = self._raw_until(self.quote)
        self._expect(self.quote)
        return text

    def _until(self, *ends: str) -> str:
        return self._raw_until(*ends).strip()

    def _raw_until(self, *ends: str) -> str:
        places = [place for end in ends if (place := self.text.find(end, self.at)) >= 0]
        if not places:
            raise ValueError(f"{ends[0]} is missing")
        begin, self.at = self.at, min(places)
        return self.text[begin : self.at]

    def _take(self, piece: str) -> bool:
        found = self.text.startswith(piece, self.at)
        self.at += len(piece) * found
        return found

    def _expect(self, piece: str) -> None:
        if not self._take(piece):
            raise ValueError(f"{piece} is missing")

    def _skip_space(self) -> None:
        while self.at < len(self.text) and self.text[self.at].isspace():
            self.at += 1


def _scalar(text: str) -> Any:
    """A number or constant; other text without quotation marks is taken as it is."""
    if not text:
        raise ValueError("a value is missing")
    if text.lower() in _CONSTANTS:
        return _CONSTANTS[text.lower()]
    try:
        return _loads(text)
    except ValueError:
        return text


def _call(name: Any, arguments: Any, tools: Tools) -> Call:
    if name not in tools:
        raise ValueError(f"{name!r} is none of the tools")
    if not isinstance(arguments, dict) or not all(isinstance(key, str) for key in arguments):
        raise ValueError("arguments are no object")
    try:
        return Call(name, json.dumps(arguments, ensure_ascii=False, allow_nan=False))
    except (TypeError, RecursionError) as error:
        raise ValueError(f"arguments are not JSON: {error}") from error
