"""run.toml and flags -> the run's settings and the coordinator's configuration. Flags win over the file."""

from __future__ import annotations

import dataclasses
import json
import logging
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from atoll.coordinator.config import CoordinatorConfig
from atoll.coordinator.tracking.config import TrackConfig
from atoll.protocol.errors import ConfigError
from atoll.protocol.outer_settings import AUTO
from atoll.protocol.presets import PRESETS, against_preset, with_preset
from atoll.protocol.settings import WITHDRAWN, RunSettings, validate
from atoll.protocol.strict import build, field_types, nearest

log = logging.getLogger(__name__)

Tables = dict[str, dict[str, Any]]

_FILE_TYPES = (str, int, float, bool)
PARTS: dict[str, type] = {key: kind for key, kind in field_types(RunSettings).items() if kind not in _FILE_TYPES}
SECTIONS: dict[str, type] = {
    "run": RunSettings,
    **PARTS,
    "coordinator": CoordinatorConfig,
    "track": TrackConfig,
}
MAX_FILE_BYTES = 1 << 20
OPTIONS = {"sync.every": "--sync-every", "sync.codec": "--codec"}
"""Of `atoll init` and `atoll demo`, that say otherwise than a preset."""


def sections() -> dict[str, list[str]]:
    """Name of each section of run.toml -> its keys. Paths and the like of the coordinator are no keys: they come from
    flags."""
    return {
        name: [key for key, kind in field_types(cls).items() if kind in _FILE_TYPES] for name, cls in SECTIONS.items()
    }


def load_run(
    path: Path,
    *,
    coordinator_flags: Mapping[str, str] | None = None,
    track_flags: Mapping[str, str] | None = None,
    store_path: Path,
) -> tuple[RunSettings, CoordinatorConfig]:
    """Everything that `atoll coordinator` needs. Raises ConfigError: what, where, what to do."""
    tables = read_tables(path)
    track = build(TrackConfig, tables.get("track", {}) | dict(track_flags or {}), f"{path} [track]")
    coordinator = tables.get("coordinator", {}) | dict(coordinator_flags or {}) | {"store_path": store_path}
    config = build(CoordinatorConfig, coordinator, f"{path} [coordinator]")
    return run_settings(tables, str(path)), dataclasses.replace(config, track=track)


def default_store(path: Path) -> Path:
    """The coordinator's database: run.db beside run.toml."""
    return path.resolve().with_suffix(".db")


def read_tables(path: Path) -> Tables:
    """The sections of a run.toml, all keys known. Raises ConfigError."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{path}: larger than {MAX_FILE_BYTES} bytes; this is not a run.toml")
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; `atoll init {path}` writes one") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    known = sections()
    for key, why in WITHDRAWN.items():
        section, name = key.split(".")
        if isinstance(table := document.get(section), dict) and table.pop(name, None) is not None:
            log.warning("%s [%s]: %s has no effect any more: %s; remove the line", path, section, name, why)
    for section, table in document.items():
        if section not in known:
            kind = "section" if isinstance(table, dict) else "key outside of a section"
            raise ConfigError(f'{path}: unknown {kind} "{section}"; {nearest(section, known)}')
        if not isinstance(table, dict):
            raise ConfigError(f"{path}: {section} must be a section, [{section}]")
        for key in table:
            if key not in known[section]:
                raise ConfigError(f'{path} [{section}]: unknown key "{key}"; {_place(key, section, known)}')
    return document


def check_preset(where: str, name: str) -> None:
    """Raises ConfigError if there is no such preset."""
    if name not in PRESETS:
        raise ConfigError(f'{where} = "{name}"; {nearest(name, PRESETS)}')


def _place(key: str, section: str, known: Mapping[str, list[str]]) -> str:
    """The nearest key of this section, or the section that the key belongs to."""
    homes = [name for name, keys in known.items() if key in keys and name != section]
    return f"it belongs into [{homes[0]}]" if homes else nearest(key, known[section])


def run_settings(tables: Tables, where: str, options: Mapping[str, str] | None = None) -> RunSettings:
    """The validated settings of a run from the sections of a file, or from the `options` of a command, by key: it can
    set no others. Raises ConfigError."""
    said, run = tables, dict(tables.get("run", {}))
    if name := str(run.get("preset", "")):
        check_preset(f"{where}: run.preset", name)
        for key, own, other in against_preset(name, tables):
            log.warning("%s: %s = %s counts; preset %s has %s", where, key, own, name, other)
    tables = with_preset(name, tables)
    if not {"optimizer", "learning_rate", "momentum"} & tables.get("outer", {}).keys():
        tables = {**tables, "outer": {"optimizer": AUTO, **tables.get("outer", {})}}
    if not run.get("run_id"):
        raise ConfigError(f"{where} [run]: run_id is missing; `atoll init` writes a new one")
    parts: dict[str, Any] = {name: build(cls, tables.get(name, {}), f"{where} [{name}]") for name, cls in PARTS.items()}
    settings = dataclasses.replace(build(RunSettings, run, f"{where} [run]"), **parts)
    try:
        validate(settings)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}{_of_preset(name, said, settings, str(error), options)}") from None
    return settings


def _of_preset(name: str, said: Tables, settings: RunSettings, problem: str, options: Mapping[str, str] | None) -> str:
    """Which values in the problem are the preset's, and what to choose instead; empty if none are."""
    known = PRESETS[name].tables if name else {}
    filled = {f"{s}.{k}": v for s, table in known.items() for k, v in table.items() if k not in said.get(s, {})}
    if not (named := [key for key in filled if f"{key} = " in problem]):
        return ""
    against = {key: theirs for key, _, theirs in against_preset(name, said)}
    choose = []
    for key in against if options is None else [key for key in against if key in options]:
        least = _least_every(settings, against[key]) if key == "sync.every" else None
        flag = key if options is None else options[key]
        choose.append(f"{flag} {least} or more" if least else f"another {flag}")
    choose.append(f"write another {' or '.join(named)}" if options is None else "another preset")
    are = " and ".join(f"{key} = {json.dumps(filled[key])}" for key in named)
    return f" ({are} {'is' if len(named) == 1 else 'are'} of preset {name}: choose {', or '.join(choose)})"


def _least_every(settings: RunSettings, most: int) -> int | None:
    """More steps than `sync.every` has, with which the settings make a run."""
    for every in range(settings.sync.every + 1, most + 1):
        with suppress(ConfigError):
            validate(dataclasses.replace(settings, sync=dataclasses.replace(settings.sync, every=every)))
            return every
    return None
