"""The coordinator's status document (`atoll.coordinator.core.view`), as far as people are shown it here. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from atoll.protocol.errors import ConfigError, InvalidMessage
from atoll.protocol.strict import check, field_types
from atoll.protocol.text import clean, last_line

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteStatus:
    site_id: int
    name: str
    address: str
    state: str
    connected: bool
    phase: str
    inner_step: int
    steps_per_s: float
    loss: float | None
    sent_bytes: int
    received_bytes: int
    train_s: float
    wait_s: float
    last_commit: int | None
    state_hash: str
    not_dialled_by: tuple[str, ...]

    @property
    def gone(self) -> bool:
        return self.state.startswith("gone")

    @property
    def utilization(self) -> float | None:
        """Share of time not waiting for a sync; None before the first step."""
        total_s = self.train_s + self.wait_s
        return self.train_s / total_s if total_s > 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncStatus:
    sync: int
    attempt: int
    ready: tuple[str, ...]
    waiting_for: tuple[str, ...]
    contributors: tuple[str, ...]
    done: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitStatus:
    commit: int
    sync: int
    attempt: int
    run_step: int
    contributors: tuple[str, ...]
    mean_loss: float | None
    cut: tuple[str, ...]
    state_hash: str
    final: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasedStatus:
    site: str
    num_samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PassStatus:
    number: int
    num_done: int
    num_leased: int
    num_open: int
    leased: tuple[LeasedStatus, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LineStatus:
    """The account of one line of positions (docs/protocol.md, "Sample order")."""

    line: int
    site: str
    num_samples: int
    num_passes_begun: int
    num_passes_done: int
    num_done: int
    num_leased: int
    num_open: int
    passes: tuple[PassStatus, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    run_id: str
    state: str
    started: bool
    finished: bool
    last_commit: int
    run_step: int
    run_tokens: int
    steps: int
    tokens: int
    codec: str
    num_parameters: int
    state_hash: str
    attested_commit: int | None
    errors: tuple[str, ...]
    store_stuck_s: float
    kept_out: tuple[str, ...]
    excluded: tuple[str, ...]
    sync: SyncStatus | None
    sites: tuple[SiteStatus, ...]
    num_at_the_door: int
    commits: tuple[CommitStatus, ...]
    data: tuple[LineStatus, ...]


_LISTS: dict[str, type] = {
    "sites": SiteStatus,
    "commits": CommitStatus,
    "data": LineStatus,
    "passes": PassStatus,
    "leased": LeasedStatus,
}


def parse_status(document: Mapping[str, Any]) -> RunStatus:
    """Raises InvalidMessage if something is missing or of another type; what is not known here is left alone."""
    try:
        return _pick(RunStatus, document, "status")
    except ConfigError as error:
        raise InvalidMessage(f"{error}; is the coordinator of another version?") from None


def _pick(cls: type[T], table: object, where: str) -> T:
    if not isinstance(table, Mapping):
        raise ConfigError(f"{where} must be a table")
    values: dict[str, Any] = {}
    for key, kind in field_types(cls).items():
        if key not in table:
            raise ConfigError(f"{where}: {key} is missing")
        value, place = table[key], f"{where}.{key}"
        if key in _LISTS:
            if not isinstance(value, list):
                raise ConfigError(f"{place} must be a list")
            values[key] = tuple(_pick(_LISTS[key], item, place) for item in value)
        elif key == "sync" and cls is RunStatus:
            values[key] = None if value is None else _pick(SyncStatus, value, place)
        elif value is None and "None" in str(kind):
            values[key] = None
        else:
            # Errors have room for all of a traceback.
            values[key] = _printable(check(kind, value, place), clean if key == "errors" else last_line)
    return cls(**values)


def _printable(value: Any, shown: Callable[[str], str]) -> Any:
    """Names and reasons come from other machines: nothing in them may steer a terminal."""
    if isinstance(value, str):
        return shown(value)
    if isinstance(value, tuple):
        return tuple(_printable(item, shown) for item in value)
    return value


def as_document(status: RunStatus) -> dict[str, Any]:
    return dataclasses.asdict(status)
