"""Jinja's filters and tests that chat templates use, each with a bound on what it makes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from jinja2 import pass_context
from jinja2.filters import FILTERS
from jinja2.runtime import Context
from jinja2.tests import TESTS

from yocolm.template.bounds import (
    MAX_TEXT,
    STEP,
    as_text,
    check_percent,
    compare,
    expect_elements,
    expect_text,
    gather,
    made,
    refuse,
    replaced,
    spend,
    weigh,
)

# By what they take. Of the others, nothing is known to be in use (pprint, urlize, wordwrap, ...).
_FREE = "default d first last length count items abs int float round".split()
_TEXTS = "capitalize lower upper title trim string safe escape e truncate wordcount".split()
_TEXTS += ["center", "indent", "replace", "format"]
_LISTS = "batch slice list map reject rejectattr select selectattr sum".split()
_WEIGHED = "sort dictsort unique groupby min max".split()
_MAX_DIGITS = 1 << 12
_MAX_WIDTH = 64  # of JSON's indent and separators


def bounded_filters() -> dict[str, Callable[..., Any]]:
    """All filters by name; those with an underscore are what `Bounds` writes into a program."""
    filters = {name: _bounded(name, _CHECKS.get(name)) for name in _FREE}
    filters |= {name: _bounded(name, _CHECKS.get(name), as_text) for name in _TEXTS}
    filters |= {name: _bounded(name, _CHECKS.get(name), _listed) for name in _LISTS}
    filters |= {name: _bounded(name, None, _weighed) for name in _WEIGHED}
    filters["reverse"] = _bounded("reverse", None, _reversible)
    filters["join"] = _join
    filters["tojson"] = pass_context(lambda context, *args, **kwargs: to_json(*args, **kwargs))
    filters["_step"] = pass_context(lambda context, value, cost: spend(cost) or True)
    filters["_made"] = pass_context(lambda context, value: made(value))
    filters["_joined"] = pass_context(lambda context, values: _joined(values))
    filters["_compare"] = pass_context(lambda context, *args: compare(*args))
    return filters


def bounded_tests() -> dict[str, Callable[..., Any]]:
    """All tests by name."""
    same = {"==": "eq", "equalto": "eq", "!=": "ne", ">": "gt", "greaterthan": "gt"}
    same |= {"<": "lt", "lessthan": "lt", ">=": "gteq", "<=": "lteq", "ge": "gteq", "le": "lteq"}
    same |= {name: name for name in ("eq", "ne", "gt", "lt", "in")}
    tests = dict(TESTS)
    for name, operator in same.items():
        tests[name] = lambda left, right, operator=operator: compare(left, operator, right)
    return tests


def _bounded(
    name: str,
    check: Callable[..., Any] | None,
    prepare: Callable[[Any], Any] | None = None,
) -> Callable[..., Any]:
    """Jinja's filter of that name, between ``prepare`` for what it is given, ``check`` before it
    runs and a count of what it has made.

    All take the context: Jinja would run others while it compiles, outside any budget.
    """
    plain = FILTERS[name]
    passes = getattr(getattr(plain, "jinja_pass_arg", None), "name", None)

    @pass_context
    def run(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        spend(STEP)
        if prepare is not None:
            value = prepare(value)
        if check is not None:
            check(value, *args, **kwargs)
        if passes is not None:
            sources = {"context": context, "eval_context": context.eval_ctx}
            args = (value, *args)
            value = sources.get(passes, context.environment)
        result = plain(value, *args, **kwargs)
        return result if name in _FREE and not hasattr(result, "__next__") else made(result)

    return run


def _joined(values: list[Any]) -> str:
    """`~`"""
    texts = [as_text(value) for value in values]
    expect_text(sum(map(len, texts)))
    return "".join(texts)


@pass_context
def _join(context: Context, value: Any, d: Any = "", attribute: Any = None) -> str:
    if attribute is not None:
        value = context.environment.filters["map"](context, value, attribute=attribute)
    texts, between = [str(as_text(one)) for one in gather(value)], str(as_text(d))
    expect_text(sum(map(len, texts)) + len(between) * len(texts))
    return between.join(texts)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own, without escapes for HTML."""
    widths = [indent if isinstance(indent, int) else len(indent or ""), *map(len, separators or ())]
    if max(widths) > _MAX_WIDTH:
        raise refuse(f"tojson: an indent or separator of {max(widths)}; the limit is {_MAX_WIDTH}")
    spend(STEP + weigh(value))
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    pieces, length = [], 0
    for piece in encoder.iterencode(value):
        length += len(piece)
        if length > MAX_TEXT:
            expect_text(length)
        pieces.append(piece)
    return made("".join(pieces))


# What is given


def _listed(value: Any) -> Any:
    """Sized values are counted; what comes one by one is when it comes."""
    if hasattr(value, "__len__"):
        expect_elements(len(value))
    return value


def _weighed(value: Any) -> Any:
    """What is compared: containers within are gone through."""
    if not isinstance(value, Mapping):
        value = value if isinstance(value, str) else gather(value)
    spend(weigh(_listed(value)))
    return value


def _reversible(value: Any) -> Any:
    return value if isinstance(value, str) else _listed(value)


# What is about to be made


def _center(value: str, width: int = 80) -> None:
    expect_text(max(width, len(value)))


def _indent(value: str, width: Any = 4, first: bool = False, blank: bool = False) -> None:
    each = len(width) if isinstance(width, str) else max(width, 0)
    expect_text(len(value) + (len(value.splitlines()) + 1) * each)


def _replace(value: str, old: Any, new: Any, count: int | None = None) -> None:
    expect_text(replaced(value, as_text(old), as_text(new)))


def _format(value: str, *args: Any, **kwargs: Any) -> None:
    check_percent(value, kwargs or args)


def _trim(value: str, chars: str | None = None) -> None:
    spend(len(value) * len(chars or "") // STEP)


def _columns(value: Any, count: int, fill_with: Any = None) -> None:
    expect_elements(count)


def _number(value: Any, default: Any = 0, base: int = 10) -> None:
    if isinstance(value, str) and len(value) > _MAX_DIGITS:
        raise refuse(f"it reads a number of {len(value)} digits; the limit is {_MAX_DIGITS}")


def _round(value: Any, precision: int = 0, method: str = "common") -> None:
    if abs(precision) > 64:
        raise refuse(f"it rounds to {precision} digits; the limit is 64")


def _sum(value: Any, attribute: Any = None, start: Any = 0) -> None:
    if not isinstance(start, int | float):
        raise refuse("it sums what are no numbers: add lists with +")


_CHECKS: dict[str, Callable[..., None]] = {
    "center": _center,
    "indent": _indent,
    "replace": _replace,
    "format": _format,
    "trim": _trim,
    "batch": _columns,
    "slice": _columns,
    "int": _number,
    "float": _number,
    "round": _round,
    "sum": _sum,
}
