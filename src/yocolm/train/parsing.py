"""Dataclasses from mappings of a YAML file, checked key by key. No torch here."""

from __future__ import annotations

import math
import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import yaml

from yocolm.errors import ConfigError

_T = TypeVar("_T")


def expect(value: Any, kind: type | tuple[type, ...], where: str) -> Any:
    """``value`` if it is of ``kind`` (True is no int); else ConfigError, naming ``where``."""
    if kind is Mapping and not isinstance(value, Mapping):
        names = {list: "a list", type(None): "nothing"}
        found = names.get(type(value), repr(value))
        raise ConfigError(f"{where} must hold keys and values (a mapping), not {found}")
    wrong_bool = isinstance(value, bool) and kind is not bool
    if wrong_bool or not isinstance(value, kind):
        names = kind if isinstance(kind, tuple) else (kind,)
        expected = " or ".join(k.__name__ for k in names)
        raise ConfigError(f"{where} is {value!r}; it must be of type {expected}")
    return value


def build(cls: type[_T], values: Any, where: str, prefix: str) -> _T:
    """Build a dataclass from a mapping, naming every unknown or missing key.

    ``where`` names the mapping in errors, ``prefix`` comes before its keys. Values are coerced by
    the annotations of the fields.
    """
    expect(values, Mapping, where)
    known = {f.name: f for f in fields(cls)}  # type: ignore[arg-type]
    unknown = sorted(map(str, set(values) - set(known)))
    if unknown:
        raise ConfigError(f"{where}: unknown key {unknown[0]!r}; known are {', '.join(known)}")
    for name, f in known.items():
        required = f.default is MISSING and f.default_factory is MISSING
        if required and name not in values:
            raise ConfigError(f"{where}: the key {name!r} is missing")
    kinds = get_type_hints(cls)
    return cls(**{name: _coerce(kinds[name], v, f"{prefix}{name}") for name, v in values.items()})


def _coerce(kind: Any, value: Any, where: str) -> Any:
    """A value of a YAML file as a field of type ``kind`` wants it."""
    if is_dataclass(kind):
        assert isinstance(kind, type)
        return build(kind, value, where, f"{where}.")
    origin, inner = get_origin(kind), get_args(kind)
    if origin is types.UnionType:
        return _coerce_union(inner, value, where)
    if origin is dict:
        expect(value, Mapping, where)
        if inner[1] is Any:
            return expect(value, dict, where)
        return {str(name): _coerce(inner[1], v, f"{where}.{name}") for name, v in value.items()}
    if origin is list:
        expect(value, list, where)
        if inner == (str,) and not all(isinstance(item, str) for item in value):
            raise ConfigError(f"{where} is {value!r}; it must be a list of strings")
        return [_coerce(inner[0], item, f"{where}.{i}") for i, item in enumerate(value)]
    if kind is float:
        return _number(value, where)
    if kind is int:
        return _whole_number(value, where)
    return expect(value, kind, where)


def _coerce_union(kinds: tuple[Any, ...], value: Any, where: str) -> Any:
    rest = tuple(kind for kind in kinds if kind is not types.NoneType)
    if value is None and len(rest) < len(kinds):
        return None
    if len(rest) == 1:
        return _coerce(rest[0], value, where)
    return expect(value, tuple(get_origin(kind) or kind for kind in rest), where)


def _number(value: Any, where: str) -> float:
    expect(value, (int, float, str), where)
    try:  # YAML 1.1 reads 1e-3 as a string
        number = float(value)
    except ValueError:
        raise ConfigError(f"{where} is {value!r}; it must be a number") from None
    except OverflowError:  # of an int
        number = math.inf
    if not math.isfinite(number):
        raise ConfigError(f"{where} is {value!r}; it must be a finite number")
    return number


def _whole_number(value: Any, where: str) -> int:
    """An int, or a whole number written as 6e9 (a string in YAML 1.1) or 6.0e9."""
    if isinstance(value, (float, str)):
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if number.is_integer():
            return int(number)
    return expect(value, int, where)


def override(values: Any, text: str) -> None:
    """Set one key of nested mappings and lists as ``section.key=value`` says, value in YAML.

    Opens sections that are not there; members of lists are counted from 0.
    """
    key, equals, new = text.partition("=")
    if not equals:
        raise ConfigError(f"override {text!r} has no '='; write section.key=value")
    *parents, last = key.split(".")
    for depth, parent in enumerate(parents, 1):
        if isinstance(values, list):
            values = values[_index(values, parent, text)]
        else:
            values = values.setdefault(parent, {})
        if not isinstance(values, (dict, list)):
            above = ".".join(parents[:depth])
            raise ConfigError(f"override {text!r}: {above!r} is {values!r}, not a section")
    try:
        value = yaml.safe_load(new)
    except yaml.YAMLError as error:
        raise ConfigError(
            f"override {text!r} has a value that is not valid YAML: {error}"
        ) from None
    if isinstance(values, list):
        values[_index(values, last, text)] = value
    else:
        values[last] = value


def _index(values: list[Any], name: str, text: str) -> int:
    if not name.isdecimal() or int(name) >= len(values):
        raise ConfigError(
            f"override {text!r}: {name!r} names no member of a list of {len(values)}; "
            "they are counted from 0"
        )
    return int(name)
