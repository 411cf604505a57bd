"""What is compared before and after: all that an object holds, as plain data."""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import Any

from atoll.protocol.layout import Manifest


def snapshot(value: Any, without: frozenset[str] = frozenset()) -> Any:
    """Plain, comparable data of an object and all that it holds; attributes named in `without` are left out."""
    if isinstance(value, dict):
        return {key: snapshot(item, without) for key, item in value.items()}
    if isinstance(value, list | tuple | deque):
        return [snapshot(item, without) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    if value is None or isinstance(value, str | bytes | int | float | Enum | Manifest):
        return value
    slots = [name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ())]
    names = [*slots, *getattr(value, "__dict__", ())]
    return {name: snapshot(getattr(value, name), without) for name in names if name not in without}
