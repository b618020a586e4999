"""What a template may use up, whatever it does.

A value's size is checked before it is made where an operation can make it large from little, and
all that a rendering makes or goes through is counted against one budget.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import chain
from typing import Any

from jinja2.exceptions import TemplateRuntimeError
from jinja2.runtime import Undefined
from jinja2.sandbox import SandboxedEnvironment, SandboxedFormatter

MAX_TEXT = 1 << 24  # characters of a text that a template makes
MAX_ELEMENTS = 1 << 20  # elements of a list that it makes
MAX_WORK = 1 << 27  # characters that one rendering may make in all, with the costs below
MAX_BITS = 1 << 8  # of whole numbers
CALL = 256  # cost of a call
STEP = 64  # cost of a round of a loop, or of a filter
OPERATION = 32  # cost of an operator or an attribute
ELEMENT = 16  # cost of an element of a list
_DIRECTIVE = re.compile(r"%(?:\((.*?)\))?[-+ #0]*(\d+|\*)?(?:\.(\d+|\*)?)?[hlL]?.", re.DOTALL)
_LINES = "\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"
_CONTAINERS = (list, tuple, set, frozenset, type({}.keys()), type({}.values()), type({}.items()))
_spent: ContextVar[list[int] | None] = ContextVar("_spent", default=None)


@contextmanager
def budget() -> Iterator[None]:
    """A fresh budget, for a rendering within."""
    token = _spent.set([0])
    try:
        yield
    finally:
        _spent.reset(token)


def refuse(what: str) -> TemplateRuntimeError:
    return TemplateRuntimeError(what)


def spend(cost: int) -> None:
    """Count work that is about to be done."""
    spent = _spent.get()
    if spent is None:
        return
    spent[0] += cost
    if spent[0] > MAX_WORK:
        raise refuse(f"it makes more than the limit of {MAX_WORK} characters and steps in all")


def expect_text(length: int) -> None:
    """Count a text that is about to be made."""
    if length > MAX_TEXT:
        raise refuse(f"it makes a text of {length} characters; the limit is {MAX_TEXT}")
    spend(length)


def expect_elements(count: int) -> None:
    """Count a list that is about to be made."""
    if count > MAX_ELEMENTS:
        raise refuse(f"it makes a list of {count} elements; the limit is {MAX_ELEMENTS}")
    spend(ELEMENT * count)


def weigh(value: Any) -> int:
    """About how many characters it prints, containers within containers each time they occur."""
    if isinstance(value, str):
        return len(value)
    total, count, todo = 0, 0, [value]
    while todo:
        one, inner = todo.pop(), ()
        total += len(one) + 2 if isinstance(one, str) else 8
        if isinstance(one, Mapping):
            inner = chain(one.keys(), one.values())
            count += 2 * len(one)
        elif isinstance(one, _CONTAINERS):
            inner = one
            count += len(one)
        if total > MAX_TEXT or count > MAX_ELEMENTS:
            raise refuse(
                f"it goes through a value of more than {MAX_TEXT} characters or {MAX_ELEMENTS} "
                "elements"
            )
        todo.extend(inner)
    spend(ELEMENT * count)
    return total


def as_text(value: Any) -> str:
    """What Jinja prints of it; text stays what it is."""
    if isinstance(value, str):
        return value
    if not isinstance(value, bool | int | float | Undefined | None):
        spend(weigh(value))
    return str(value)


def gather(values: Any) -> list[Any]:
    """A list of what can be looped over."""
    if isinstance(values, Collection):
        expect_elements(len(values))
        return list(values)
    return list(counted(values))


def counted(values: Iterable[Any]) -> Iterator[Any]:
    for number, value in enumerate(values):
        spend(ELEMENT)
        if number >= MAX_ELEMENTS:
            raise refuse(f"it makes a list of more than {MAX_ELEMENTS} elements")
        yield value


def made(value: Any) -> Any:
    """A value that was just made, counted."""
    if isinstance(value, str):
        expect_text(len(value))
    elif isinstance(value, (*_CONTAINERS, dict)):
        expect_elements(len(value))
        if isinstance(value, tuple):
            _check_hash(value)
    elif isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise refuse(f"it makes a number of more than {MAX_BITS} bits")
    elif isinstance(value, Iterator):
        return counted(value)
    return value


def _check_hash(value: tuple[Any, ...]) -> None:
    """Tuples within tuples, each of which its hash goes through."""
    todo, total = [value], 0
    while todo:
        one = todo.pop()
        total += len(one)
        if total > MAX_ELEMENTS:
            raise refuse(f"it makes tuples of more than {MAX_ELEMENTS} elements")
        todo.extend(inner for inner in one if isinstance(inner, tuple))
    spend(total)


# Operators


def check_operation(operator: str, left: Any, right: Any) -> None:
    """Count what an arithmetic operator is about to make."""
    spend(OPERATION)
    numbers = isinstance(left, int), isinstance(right, int)
    if all(numbers):
        _check_numbers(operator, left, right)
    elif operator == "**" and not (abs(left) <= MAX_TEXT and abs(right) <= 64):
        raise refuse(f"{left} ** {right} is too large")
    elif operator == "*" and any(numbers):
        one, times = (right, left) if numbers[0] else (left, right)
        if isinstance(one, str | bytes):
            expect_text(len(one) * max(times, 0))
        elif isinstance(one, list | tuple):
            expect_elements(len(one) * max(times, 0))
    elif operator == "+":
        if isinstance(left, str) and isinstance(right, str):
            expect_text(len(left) + len(right))
        elif isinstance(left, list | tuple) and isinstance(right, list | tuple):
            expect_elements(len(left) + len(right))
    elif operator == "%" and isinstance(left, str):
        check_percent(left, right)


def _check_numbers(operator: str, left: int, right: int) -> None:
    bits = left.bit_length(), right.bit_length()
    result = max(bits)
    if operator == "*":
        result = sum(bits)
    elif operator == "**" and abs(left) > 1:
        result = max(result, bits[0] * right)
    if result > MAX_BITS:
        raise refuse(f"{operator} makes a number of more than {MAX_BITS} bits")


def check_percent(form: str, values: Any) -> None:
    """Count what ``form % values`` is about to make."""
    listed = values if isinstance(values, tuple) else (values,)
    named = values if isinstance(values, Mapping) else {}
    sizes = [weigh(value) for value in listed]
    total, used = len(form), 0
    for match in _DIRECTIVE.finditer(form):
        name, *widths = match.groups()
        for width in widths:
            total += _width(width) if width else 0
        if name is not None:
            total += weigh(named[name]) if name in named else 0
        elif used < len(sizes) and not match[0].endswith("%"):
            total += sizes[used]
            used += 1
        if total > MAX_TEXT:
            break
    expect_text(total)


def _width(text: str) -> int:
    if text == "*":
        raise refuse("it takes the width of a format from the arguments: write it out")
    return MAX_TEXT + 1 if len(text) > 9 else int(text)


COMPARE = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "lteq": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "gteq": lambda a, b: a >= b,
    "in": lambda a, b: a in b,
    "notin": lambda a, b: a not in b,
}


def compare(left: Any, operator: str, right: Any) -> bool:
    """A comparison, counted: containers within containers are gone through."""
    spend(OPERATION)
    if operator in ("in", "notin"):
        spend(_search_cost(left, right))
    elif isinstance(left, str) and isinstance(right, str):
        spend(min(len(left), len(right)))
    elif _holds(left) and _holds(right):
        spend(weigh(left) if len(left) <= len(right) else weigh(right))
        spend(max(weigh(left), weigh(right)) // 64)
    return COMPARE[operator](left, right)


def _search_cost(item: Any, inside: Any) -> int:
    if isinstance(inside, str):
        return len(inside)
    if isinstance(inside, _CONTAINERS) and not isinstance(inside, set | frozenset):
        each = len(item) if isinstance(item, str) else weigh(item) if _holds(item) else 1
        if _holds(item):
            weigh(inside)
        return len(inside) * max(each, 1)
    return 0


def _holds(value: Any) -> bool:
    return isinstance(value, (*_CONTAINERS, dict))


# Methods of the types that values have

_TEXT_METHODS = frozenset(
    "capitalize casefold center count endswith expandtabs find format format_map index isalnum "
    "isalpha isascii isdecimal isdigit isidentifier islower isnumeric isprintable isspace istitle "
    "isupper join ljust lower lstrip partition removeprefix removesuffix replace rfind rindex "
    "rjust rpartition rsplit rstrip split splitlines startswith strip swapcase title upper zfill "
    "unescape striptags".split()
)
_METHODS: dict[type, frozenset[str]] = {
    str: _TEXT_METHODS,
    dict: frozenset("get items keys values".split()),
    list: frozenset(("count", "index")),
    tuple: frozenset(("count", "index", "grouper", "list")),
    range: frozenset(("count", "index", "start", "stop", "step")),
}
_QUADRATIC = frozenset("rfind rindex rpartition rsplit strip lstrip rstrip".split())
_CONSTANT = frozenset("startswith endswith removeprefix removesuffix isspace get".split())


def allowed(value: Any, name: str) -> bool:
    """Whether a template may reach an attribute of one of Python's own types."""
    kind = str if isinstance(value, str) else tuple if isinstance(value, tuple) else type(value)
    if kind in _METHODS:
        return name in _METHODS[kind]
    return kind.__module__ != "builtins"


class Method:
    """A method of a text or list that counts what it makes."""

    def __init__(self, owner: Any, name: str, call: Any) -> None:
        self._owner, self._name, self._call = owner, name, call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        owner, given = self._owner, [*args, *kwargs.values()]
        if not isinstance(owner, str):
            for value in given[:1]:
                spend(_search_cost(value, owner))
        elif self._name == "join" and given:
            texts = gather(given[0])
            expect_text(sum(len(t) + len(owner) for t in texts if isinstance(t, str)))
            return self._call(texts)
        elif self._name in ("split", "rsplit"):
            return self._split(*args, **kwargs)
        else:
            _check_method(owner, self._name, given)
        return self._call(*args, **kwargs)

    def _split(self, sep: str | None = None, maxsplit: int = -1) -> list[str]:
        _check_method(self._owner, self._name, [] if sep is None else [sep])
        found = self._call(sep, MAX_ELEMENTS if maxsplit < 0 else min(maxsplit, MAX_ELEMENTS))
        return made(found)


def _check_method(text: str, name: str, given: list[Any]) -> None:
    size = len(text)
    first = next((value for value in given if isinstance(value, int)), None)
    if name in ("center", "ljust", "rjust", "zfill"):
        size = max(size, first or 0)
    elif name == "expandtabs":
        size += text.count("\t") * max(8 if first is None else first, 0)
    elif name == "replace":
        size = replaced(text, *[v for v in given if isinstance(v, str)][:2])
    elif name == "splitlines":
        expect_elements(1 + sum(text.count(end) for end in _LINES))
    elif name in _QUADRATIC:
        size += len(text) * sum(len(value) for value in given if isinstance(value, str)) // 16
        return spend(STEP + size)
    elif name in _CONSTANT:
        return spend(STEP + sum(len(v) for v in given if isinstance(v, str | tuple)))
    spend(STEP)
    expect_text(size)


def replaced(text: str, old: str = "", new: str = "") -> int:
    """Length of ``text.replace(old, new)``, at most."""
    times = text.count(old)
    return len(text) + times * max(len(new) - len(old), 0)


class BoundedFormatter(SandboxedFormatter):
    """`str.format` in the sandbox, counted."""

    def convert_field(self, value: Any, conversion: Any) -> Any:
        spend(weigh(value))
        return super().convert_field(value, conversion)

    def format_field(self, value: Any, format_spec: str) -> str:
        widths = sum(_width(text) for text in re.findall(r"\d+", format_spec))
        expect_text(weigh(value) + widths)
        return super().format_field(value, format_spec)


def format_method(environment: SandboxedEnvironment, text: str, name: str) -> Any:
    """The counted `format` or `format_map` of a text."""

    def call(*args: Any, **kwargs: Any) -> str:
        spend(STEP + len(text))
        if name == "format_map":
            args, kwargs = (), *args
        return made(BoundedFormatter(environment).vformat(text, args, kwargs))

    return call
