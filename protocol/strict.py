"""Dataclasses from untrusted tables (TOML, JSON): every key known, every type right, nothing guessed. Pure."""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from atoll.protocol.errors import ConfigError

T = TypeVar("T")

_KNOWN_TYPES: dict[type, dict[str, Any]] = {}
_TYPE_NAMES = {str: "a string", int: "an integer", float: "a number", bool: "true or false", dict: "a table"}


def nearest(word: str, known: Iterable[str]) -> str:
    """' Did you mean "x"?' for the closest of `known`, else the list of what there is."""
    known = sorted(known)
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    if close:
        return f'did you mean "{close[0]}"?'
    return f"known are {', '.join(known)}"


def field_types(cls: type) -> dict[str, Any]:
    """Names and resolved types of a dataclass's fields, in order."""
    if cls not in _KNOWN_TYPES:
        hints = get_type_hints(cls)
        _KNOWN_TYPES[cls] = {item.name: hints[item.name] for item in dataclasses.fields(cls)}
    return _KNOWN_TYPES[cls]


def check(kind: Any, value: object, where: str, unknown: list[str] | None = None) -> Any:
    """`value` as `kind`: bool, int, float, str, an enum by name, a dataclass of such, tuples of one of these, or one
    of these or None.

    Raises ConfigError, naming `where`, if the types differ. Integers are accepted as floats, nothing else converts.
    `unknown`: as in `build`.
    """
    if get_origin(kind) in (Union, types.UnionType):
        if value is None and type(None) in get_args(kind):
            return None
        (kind,) = (a for a in get_args(kind) if a is not type(None))
    if get_origin(kind) is tuple:
        kinds = get_args(kind)
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{where} must be a list, not {_described(value)}")
        if kinds[-1] is Ellipsis:
            kinds = kinds[:1] * len(value)
        if len(kinds) != len(value):
            raise ConfigError(f"{where} must be a list of {len(kinds)}, not {_described(value)}")
        return tuple(check(kinds[i], item, f"{where}[{i}]", unknown) for i, item in enumerate(value))
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where} must be a table, not {_described(value)}")
        return build(kind, value, where, unknown=unknown)
    if isinstance(kind, type) and issubclass(kind, Enum):
        if value not in list(kind.__members__):
            raise ConfigError(f"{where} must be one of {', '.join(kind.__members__)}, not {_described(value)}")
        return kind[str(value)]
    if kind is float and type(value) is int and abs(value) < 1 << 53:
        return float(value)
    # Exactly, because True is an int; a path is made by nobody but the caller.
    if type(value) is not kind and not (kind is Path and isinstance(value, Path)):
        raise ConfigError(f"{where} must be {_TYPE_NAMES.get(kind, kind.__name__)}, not {_described(value)}")
    if kind is float and not math.isfinite(value):  # type: ignore[arg-type]
        raise ConfigError(f"{where} must be a finite number")
    return value


def _described(value: object) -> str:
    text = repr(value)
    return f"{_TYPE_NAMES.get(type(value), type(value).__name__)} ({text if len(text) <= 40 else text[:37] + '...'})"


def build(cls: type[T], table: Mapping[str, object], where: str, *, unknown: list[str] | None = None) -> T:
    """The dataclass `cls` from a table, nested dataclasses from nested tables; what is left out has its default.

    `where` names the table in errors. Raises ConfigError for a wrong type, a missing key that has no default, or an
    unknown key (naming the nearest one); with `unknown`, those are noted there and passed over.
    """
    kinds = field_types(cls)
    for key in table:
        if key not in kinds and unknown is not None:
            unknown.append(f"{where}.{key}")
        elif key not in kinds:
            raise ConfigError(f'{where}: unknown key "{key}"; {nearest(key, kinds)}')
    values: dict[str, Any] = {}
    required = {
        item.name
        for item in dataclasses.fields(cls)  # type: ignore[arg-type]
        if item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING
    }
    for key, kind in kinds.items():
        if key not in table:
            if key in required:
                raise ConfigError(f'{where}: "{key}" is missing')
            continue
        is_table = isinstance(kind, type) and dataclasses.is_dataclass(kind)
        values[key] = check(kind, table[key], f"{where}.{key}" if is_table else f"{where}: {key}", unknown)
    return cls(**values)
