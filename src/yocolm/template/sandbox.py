"""Jinja programs that come with models, run in a sandbox.

Whoever published a model wrote its chat template, so it runs in jinja2's immutable sandbox, with
the settings and helpers that Hugging Face templates are written for, and with bounds on what it may
make, print and go through: see `bounds`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property, lru_cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.ext import loopcontrols as LoopControls
from jinja2.parser import Parser
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from yocolm.template.bounds import (
    CALL,
    OPERATION,
    Method,
    allowed,
    as_text,
    budget,
    check_operation,
    format_method,
    made,
    refuse,
    spend,
)
from yocolm.template.filters import bounded_filters, bounded_tests
from yocolm.template.program import bound

MAX_OUTPUT = 1 << 24  # characters that a template may print
MAX_COUNT = 1_000_000  # numbers that `range` may hand out in one rendering
MAX_REFUSAL = 2_000  # characters of what `raise_exception` says
MAX_DATE = 1_000  # characters of a form for dates


class TemplateError(Exception):
    """A template is not valid or cannot be rendered; the message follows "the template ..."."""


@dataclass(frozen=True)
class Template:
    """A compiled template. Make one with `compile_template`."""

    text: str
    compiled: jinja2.Template

    def run(self, variables: Mapping[str, Any]) -> str:
        """What it prints. Raises TemplateError for whatever goes wrong."""
        pieces: list[str] = []
        length = 0
        try:
            with budget():
                for piece in self.compiled.generate(variables, range=_bounded_range()):
                    pieces.append(piece)
                    length += len(piece)
                    if length > MAX_OUTPUT:
                        raise refuse(f"it prints beyond {MAX_OUTPUT} characters")
        except _Refusal as error:
            raise TemplateError(f"refuses the messages: {error.message}") from error
        except Exception as error:  # whatever the program does
            raise TemplateError(
                f"cannot render the messages ({type(error).__name__}: {error})"
            ) from error
        return "".join(pieces)

    @cached_property
    def reads_parts(self) -> bool:
        """Whether it loops over a message's content."""
        names = {"content"}
        for assigned in self._tree.find_all(nodes.Assign):
            if isinstance(assigned.target, nodes.Name) and _mentions(assigned.node, names):
                names.add(assigned.target.name)
        loops = self._tree.find_all(nodes.For)
        # A call gives something else: the lines of a text, most likely.
        return any(
            _mentions(loop.iter, names) for loop in loops if not isinstance(loop.iter, nodes.Call)
        )

    @cached_property
    def reads_text(self) -> bool:
        """Whether it asks if something is a text."""
        return any(test.name == "string" for test in self._tree.find_all(nodes.Test))

    @cached_property
    def _tree(self) -> nodes.Template:
        return _ENVIRONMENT.parse(self.text)


@lru_cache(maxsize=64)
def compile_template(text: str) -> Template:
    """Raises TemplateError, with the line, for what is no template."""
    try:
        return Template(text, _ENVIRONMENT.from_string(bound(_ENVIRONMENT.parse(text))))
    except jinja2.TemplateSyntaxError as error:
        raise TemplateError(f"{error.message} in line {error.lineno}") from error
    except Exception as error:  # what jinja2 leaves to Python's compiler: nesting, long numbers
        raise TemplateError(f"{type(error).__name__}: {error}") from error


def _mentions(node: nodes.Node, names: set[str]) -> bool:
    """Whether an expression reads a variable of these names, or `content` of something."""
    for one in (node, *node.find_all((nodes.Name, nodes.Getattr, nodes.Getitem))):
        if isinstance(one, nodes.Name) and one.name in names:
            return True
        if isinstance(one, nodes.Getattr) and one.attr == "content":
            return True
        if isinstance(one, nodes.Getitem) and isinstance(one.arg, nodes.Const):
            if one.arg.value == "content":
                return True
    return False


class _Refusal(jinja2.TemplateError):
    """A template's own `raise_exception`."""


class _Generation(Extension):
    """`{% generation %}` marks what an assistant wrote, for training; here it only prints."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with bounds on what operators and methods make, and no further methods."""

    intercepted_binops = frozenset(["+", "-", "*", "/", "//", "%", "**"])

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        check_operation(operator, left, right)
        result = super().call_binop(context, operator, left, right)
        return made(result) if isinstance(result, tuple) else result

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: B902, N805
        spend(CALL)
        return super().call(__context, __obj, *args, **kwargs)

    def getattr(self, obj: Any, attribute: str) -> Any:
        spend(OPERATION)
        return self._counted(obj, attribute, super().getattr(obj, attribute))

    def getitem(self, obj: Any, argument: Any) -> Any:
        spend(OPERATION)
        return self._counted(obj, argument, super().getitem(obj, argument))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        # `loop.changed` would compare without a count.
        changed = isinstance(obj, LoopContext) and attr == "changed"
        return not changed and allowed(obj, attr) and super().is_safe_attribute(obj, attr, value)

    def _counted(self, obj: Any, name: Any, value: Any) -> Any:
        if not isinstance(obj, str | list | tuple) or not isinstance(name, str):
            return value
        if not callable(value) or isinstance(value, jinja2.Undefined):
            return value
        if name in ("format", "format_map"):
            return format_method(self, str(obj), name)
        return Method(obj, name, value)


class _Namespace(Namespace):
    def __setitem__(self, name: str, value: Any) -> None:
        _check_public(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"  # what it holds may hold others, twice each


def _namespace(*args: Any, **kwargs: Any) -> _Namespace:
    for name in dict(*args, **kwargs):
        _check_public(name)
    return _Namespace(*args, **kwargs)


def _check_public(name: Any) -> None:
    if str(name).startswith("_"):
        raise jinja2.TemplateRuntimeError(f"a namespace must not hold the private name {name}")


def _refuse(message: Any) -> None:
    raise _Refusal(as_text(message)[:MAX_REFUSAL])


def _strftime_now(form: str) -> str:
    if len(form) > MAX_DATE:
        raise refuse(f"it gives a form for dates of {len(form)} characters, above {MAX_DATE}")
    return datetime.now().strftime(form)


@jinja2.pass_context
def _printed(context: Any, value: Any) -> str:
    """Every value that is printed; taking the context keeps Jinja from doing so as it compiles."""
    text = as_text(value)
    spend(len(text))
    return text


def _bounded_range() -> Callable[..., range]:
    """`range`, for one rendering."""
    left = MAX_COUNT

    def bounded(*arguments: int) -> range:
        nonlocal left
        numbers = range(*arguments)
        left -= len(numbers)
        if left < 0:
            raise refuse(f"it counts beyond {MAX_COUNT}")
        return numbers

    return bounded


def _environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, LoopControls],
        optimized=False,  # Jinja's optimizer runs what is constant as it compiles
        finalize=_printed,
    )
    environment.filters = bounded_filters()
    environment.tests = bounded_tests()
    del environment.globals["lipsum"]
    environment.globals.update(
        raise_exception=_refuse,
        strftime_now=_strftime_now,
        namespace=_namespace,
        dict=lambda *args, **kwargs: dict(*args, **kwargs),
    )
    return environment


_ENVIRONMENT = _environment()
