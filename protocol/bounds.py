"""Bounds of settings: said beside each, and checked one by one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import field, fields, is_dataclass
from typing import Any

from atoll.protocol.errors import ConfigError
from atoll.protocol.strict import nearest


def within(low: float, high: float, default: Any, *, open_low: bool = False, open_high: bool = False) -> Any:
    """A setting from `low` to `high`, but for those that are open."""
    return field(default=default, metadata={"range": (low, high, open_low, open_high)})


def one_of(names: Iterable[str], default: str) -> Any:
    """A setting that is one of these."""
    return field(default=default, metadata={"choices": names})


def check_bounds(section: str, settings: Any) -> None:
    """Raises ConfigError, naming the key, for a value out of its bounds, in dataclasses inside too."""
    for item in fields(settings):
        value, key = getattr(settings, item.name), f"{section}.{item.name}"
        if is_dataclass(value):
            check_bounds(item.name, value)
        if "range" in item.metadata:
            low, high, open_low, open_high = item.metadata["range"]
            if not (low <= value <= high) or (open_low and value == low) or (open_high and value == high):
                lower = f"more than {low}" if open_low else f"at least {low}"
                upper = f"less than {high}" if open_high else f"at most {high}"
                raise ConfigError(f"{key} = {value}: must be {lower} and {upper}")
        if value not in (known := item.metadata.get("choices", (value,))):
            raise ConfigError(f'{key} = "{value}"; {nearest(value, known)}')
