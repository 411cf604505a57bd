"""What is compared before and after: all that an object holds, as plain data."""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import Any

from atoll.protocol.layout import Manifest

PLAIN = frozenset((type(None), bool, int, float, str, bytes))
"""Nearly all that a core holds, and so looked for first: a core is compared thousands of times."""


_slots: dict[type, list[str]] = {}


def _slots_of(cls: type) -> list[str]:
    if cls not in _slots:
        _slots[cls] = [name for base in cls.__mro__ for name in getattr(base, "__slots__", ())]
    return _slots[cls]


def snapshot(value: Any, without: frozenset[str] = frozenset()) -> Any:
    """Plain, comparable data of an object and all that it holds; attributes named in `without` are left out."""
    if type(value) in PLAIN:
        return value
    if isinstance(value, dict):
        return {key: snapshot(item, without) for key, item in value.items()}
    if isinstance(value, list | tuple | deque):
        return [snapshot(item, without) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    if isinstance(value, str | bytes | int | float | Enum | Manifest):
        return value
    names = [*_slots_of(type(value)), *getattr(value, "__dict__", ())]
    return {name: snapshot(getattr(value, name), without) for name in names if name not in without}
