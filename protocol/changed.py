"""Settings that an operator changes while the run goes on. A commit carries all that are changed by then, so a site
that has its record knows with which settings it was made, whenever the site came. Pure."""

from __future__ import annotations

import json
from dataclasses import is_dataclass, replace
from functools import lru_cache
from typing import Any

from atoll.protocol.errors import ConfigError, InvalidMessage
from atoll.protocol.outer_settings import OuterSettings
from atoll.protocol.settings import RunSettings, validate
from atoll.protocol.strict import check, field_types, nearest

CHANGEABLE = (
    "run.steps", "run.tokens", "outer.learning_rate", "outer.momentum", "outer.warmup", "outer.decay",
    "outer.momentum_warmup", "outer.momentum_decay",
)  # fmt: skip
"""What the coordinator decides by itself, or a commit; all else is laid out on disks, or built into workers."""


def with_change(settings: RunSettings, changed_json: str, name: str, value: str) -> str:
    """What is changed once `name` has that value as well; `changed_json` is what was until now.

    Raises ConfigError if it cannot be changed, or not to that.
    """
    if name not in (known := _names()):
        raise ConfigError(f'"{name}" is no setting of the run; {nearest(name, known)}')
    if name not in CHANGEABLE:
        raise ConfigError(f"{name} stays as it is for the whole run; what can be set is {', '.join(CHANGEABLE)}")
    if name in ("run.steps", "run.tokens") and not _value(settings, name):
        raise ConfigError(f"{name} = {value}: the length of this run is not in {name.removeprefix('run.')}")
    if settings.sync.strategy != "diloco" and name.startswith("outer."):
        raise ConfigError(
            f'{name} = {value} with sync.strategy = "{settings.sync.strategy}": the rates are those that the training '
            "script gives its optimizer; change them there"
        )
    try:
        number = json.loads(value)
    except (ValueError, RecursionError):
        raise ConfigError(f"{name} = {value}: a number is expected") from None
    text = json.dumps({**_read(changed_json), name: number}, sort_keys=True)
    _folded(settings, text)
    found = {key: value for key, value in _read(text).items() if value != _value(settings, key)}
    return json.dumps(found, sort_keys=True) if found else ""


@lru_cache(maxsize=16)
def settings_with(settings: RunSettings, changed_json: str) -> RunSettings:
    """As they are with what is changed, as a commit says it. Raises InvalidMessage if that cannot be."""
    try:
        return _folded(settings, changed_json)
    except (ConfigError, ValueError, RecursionError) as error:
        raise InvalidMessage(f"the settings that are changed cannot be so: {error}") from error


def run_length(settings: RunSettings, changed_json: str) -> int:
    """In steps or tokens, as the settings have it; 0 if it is as they say."""
    now = settings_with(settings, changed_json)
    return 0 if (now.steps, now.tokens) == (settings.steps, settings.tokens) else now.steps or now.tokens


def in_words(settings: RunSettings, changed_json: str) -> str:
    """`outer.learning_rate = 0.4 (0.7 as the run began)`, of each; empty if nothing is changed."""
    return ", ".join(
        f"{name} = {value} ({_value(settings, name)} as the run began)" for name, value in _read(changed_json).items()
    )


def _folded(settings: RunSettings, changed_json: str) -> RunSettings:
    if not changed_json:
        return settings
    parts: dict[str, dict[str, Any]] = {"run": {}, "outer": {}}
    for name, value in _read(changed_json).items():
        if name not in CHANGEABLE:
            raise ConfigError(f"{name[:64]!r} is none of {', '.join(CHANGEABLE)}")
        part, _, key = name.partition(".")
        kinds = field_types(OuterSettings if part == "outer" else RunSettings)
        parts[part][key] = check(kinds[key], value, name)
    found = replace(settings, **parts["run"], outer=replace(settings.outer, **parts["outer"]))
    validate(found)
    return found


def _names() -> list[str]:
    """Of all settings, as people write them."""
    parts = {"run": RunSettings, **field_types(RunSettings)}
    tables = {part: kind for part, kind in parts.items() if isinstance(kind, type) and is_dataclass(kind)}
    return [f"{part}.{key}" for part, table in tables.items() for key in field_types(table)]


def _read(changed_json: str) -> dict[str, Any]:
    found = json.loads(changed_json) if changed_json else {}
    if not isinstance(found, dict):
        raise ConfigError(f"{changed_json[:64]!r} is no JSON object")
    return found


def _value(settings: RunSettings, name: str) -> float:
    """As the run began."""
    part, _, key = name.partition(".")
    value: float = getattr(settings.outer if part == "outer" else settings, key)
    return value
