"""run.toml, the environment and flags -> the run's settings and the coordinator's configuration.

Each wins over the one before it: defaults, file, environment (`ATOLL_SECTION_KEY`), flags. What came from the
environment is returned by name, so that it never wins unseen.
"""

from __future__ import annotations

import dataclasses
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.coordinator.config import CoordinatorConfig
from atoll.protocol.errors import ConfigError
from atoll.protocol.settings import RunSettings, validate
from atoll.protocol.strict import build, check, field_types, nearest

PREFIX = "ATOLL_"
RESERVED = frozenset({"ATOLL_SOCKET", "ATOLL_GENERATION"})
"""Set by a node for its workers (atoll.node.local_protocol); never settings."""

Tables = dict[str, dict[str, Any]]

_FILE_TYPES = (str, int, float, bool)
PARTS: dict[str, type] = {key: kind for key, kind in field_types(RunSettings).items() if kind not in _FILE_TYPES}
SECTIONS: dict[str, type] = {"run": RunSettings, **PARTS, "coordinator": CoordinatorConfig}
MAX_FILE_BYTES = 1 << 20


def sections() -> dict[str, dict[str, Any]]:
    """Name of each section of run.toml -> its keys and their types. Paths and the like of the coordinator are no keys:
    they come from flags."""
    return {
        name: {key: kind for key, kind in field_types(cls).items() if kind in _FILE_TYPES}
        for name, cls in SECTIONS.items()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedRun:
    settings: RunSettings
    coordinator: CoordinatorConfig
    from_environment: tuple[str, ...]
    """Variables that decided a setting."""


def load_run(
    path: Path,
    *,
    environment: Mapping[str, str] | None = None,
    flags: Tables | None = None,
    store_path: Path,
) -> LoadedRun:
    """Everything that `atoll coordinator` needs. Raises ConfigError: what, where, what to do."""
    tables = read_tables(path)
    variables = environment_tables(os.environ if environment is None else environment)
    flags = flags or {}
    for extra in (variables, flags):
        for section, table in extra.items():
            tables[section] = tables.get(section, {}) | table
    return LoadedRun(
        settings=run_settings(tables, str(path)),
        coordinator=CoordinatorConfig(store_path=store_path, **tables.get("coordinator", {})),
        from_environment=tuple(
            sorted(
                variable(section, key)
                for section, table in variables.items()
                for key in table
                if key not in flags.get(section, {})
            )
        ),
    )


def default_store(path: Path) -> Path:
    """The coordinator's database: run.db beside run.toml."""
    return path.resolve().with_suffix(".db")


def read_tables(path: Path) -> Tables:
    """The sections of a run.toml, keys known and types right. Raises ConfigError."""
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
    for section, table in document.items():
        if section not in known:
            kind = "section" if isinstance(table, dict) else "key outside of a section"
            raise ConfigError(f'{path}: unknown {kind} "{section}"; {nearest(section, known)}')
        if not isinstance(table, dict):
            raise ConfigError(f"{path}: {section} must be a section, [{section}]")
        for key, value in table.items():
            if key not in known[section]:
                raise ConfigError(f'{path} [{section}]: unknown key "{key}"; {_place(key, section, known)}')
            check(known[section][key], value, f"{path} [{section}]: {key}")
    return document


def _place(key: str, section: str, known: Mapping[str, Mapping[str, Any]]) -> str:
    """The nearest key of this section, or the section that the key belongs to."""
    homes = [name for name, keys in known.items() if key in keys and name != section]
    return f"it belongs into [{homes[0]}]" if homes else nearest(key, known[section])


def variable(section: str, key: str) -> str:
    """Name of the environment variable of a setting: ATOLL_SYNC_EVERY for `every` in [sync]."""
    return f"{PREFIX}{section}_{key}".upper()


def environment_tables(environment: Mapping[str, str]) -> Tables:
    """The settings that the environment gives. Raises ConfigError for an ATOLL_ variable that is not one."""
    names = {
        variable(section, key): (section, key, kind)
        for section, keys in sections().items()
        for key, kind in keys.items()
    }
    tables: Tables = {}
    for name, text in sorted(environment.items()):
        if not name.startswith(PREFIX) or name in RESERVED:
            continue
        if name not in names:
            raise ConfigError(f"environment: {name} is not a setting; {nearest(name, names)}")
        section, key, kind = names[name]
        tables.setdefault(section, {})[key] = _parse(kind, text, f"environment: {name}")
    return tables


def _parse(kind: Any, text: str, where: str) -> Any:
    if kind is str:
        return text
    if kind is bool:
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
        raise ConfigError(f'{where} must be true or false, not "{text}"')
    try:
        value = kind(text)
    except ValueError:
        raise ConfigError(f'{where} must be {"an integer" if kind is int else "a number"}, not "{text}"') from None
    return check(kind, value, where)


def run_settings(tables: Tables, where: str) -> RunSettings:
    """The validated settings of a run from the sections of a file. Raises ConfigError."""
    run = dict(tables.get("run", {}))
    if not run.get("run_id"):
        raise ConfigError(f"{where} [run]: run_id is missing; `atoll init` writes a new one")
    parts: dict[str, Any] = {name: build(cls, tables.get(name, {}), f"{where} [{name}]") for name, cls in PARTS.items()}
    settings = dataclasses.replace(build(RunSettings, run, f"{where} [run]"), **parts)
    try:
        validate(settings)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    return settings
