"""What survives the coordinator: the interface of `sqlite_store.py`.

The core decides what is kept (`core/events.py`, records) and what that replaces (`core/persisted.py`, `changes`); a
store keeps each `persist` whole or not at all, and only for the newest term.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Protocol

from atoll.coordinator.core.events import AttestationRecord, CommitRecord, Record
from atoll.coordinator.core.persisted import Persisted, RunRecord
from atoll.protocol.effects import check_effects
from atoll.protocol.errors import ConfigError, UnsupportedError
from atoll.protocol.messages import Deposit
from atoll.protocol.outer import resolved
from atoll.protocol.settings import RunSettings, read_settings, settings_to_json
from atoll.protocol.text import differences

log = logging.getLogger("atoll.coordinator")

KEPT_AT_JOIN = 1024
"""Commits of which a site that comes gets the records. Of all later ones it gets them as well."""
RESTORE = "restore it from a copy (deploy/README.md), or start a new run in another file"
"""What to do about a store that is damaged."""


class Store(Protocol):
    """One run. Not thread-safe: one call at a time, from any thread."""

    def begin(self, settings: RunSettings, parent_json: str = "") -> Persisted:
        """Starts a new term: what was kept, for `Core`. The first call makes the run.

        Raises ConfigError if the store has another run, other settings or another parent.
        """

    def persist(self, term: int, records: Sequence[Record], wall_time_s: float) -> tuple[Deposit, ...]:
        """All records or none. `wall_time_s` (since 1970) is kept with them, for people. What of them is to be
        deposited with sites.

        Raises StaleError if `term` is not the newest, HostError if the records cannot be kept: then the process ends,
        because nobody knows whether they were.
        """

    def read_commits(self, first: int, last: int) -> tuple[tuple[CommitRecord, ...], tuple[AttestationRecord, ...]]:
        """Commits `first` to `last`, which were kept, and what is attested of them; both ascending.

        Raises StateError if one of them is missing.
        """

    def deposits_after(self, seq: int, most_bytes: int, *, is_new: bool = False) -> tuple[Deposit, ...]:
        """Of what is kept, by seq, for a site that has all up to `seq`: as many bytes as that, or one; nothing if there
        is no more. For a site that had none (`is_new`), of commits the newest ones alone."""

    def last_seq(self) -> int:
        """Of all that was ever kept here; what is kept later has a higher one."""

    def restore(self, term: int, deposits: Sequence[Deposit], settle: Callable[[Persisted], Sequence[Record]]) -> None:
        """Keeps the deposits, which come after all that is kept here, with the seqs that they had; and, in the same
        transaction, what `settle` makes of all that. `term`: no coordinator had a later one."""

    def copy_to(self, path: Path) -> None:
        """All that is kept, in a new file. Raises HostError."""

    def commit_times(self) -> dict[int, float]:
        """Commit -> seconds since 1970."""

    def close(self) -> None: ...


def run_of(
    where: str, known: RunRecord | None, settings: RunSettings, parent_json: str
) -> tuple[RunRecord, RunSettings]:
    """What the store has, or a new run, and its settings, with nothing left to be chosen. Raises ConfigError, naming
    what differs, if it has another one; or what has no effect, if it is new."""
    if known is None:
        check_effects(settings)
        settings = resolved(settings)
        record = RunRecord(run_id=settings.run_id, settings_json=settings_to_json(settings), parent_json=parent_json)
        return record, settings
    if known.run_id != settings.run_id:
        raise ConfigError(
            f"{where} holds run {known.run_id!r}, the settings name run {settings.run_id!r}: give the new run a store "
            "of its own (--store PATH, or a copy of the file under another name), or the old run its own settings"
        )
    try:
        stored, unknown = read_settings(known.settings_json)
    except UnsupportedError as error:
        raise ConfigError(f"{where}: {error}") from error
    if unknown:
        log.warning(
            "%s: run %s was begun by a newer version of atoll; settings that this one does not know have no effect: %s",
            where, known.run_id, ", ".join(unknown),
        )  # fmt: skip
    settings = replace(resolved(settings, stored.outer), preset=stored.preset)  # a name, which means nothing by itself
    if stored != settings:
        changed = "; ".join(differences(asdict(stored), asdict(settings)))
        raise ConfigError(
            f"{where}: run {known.run_id!r} was begun with other settings ({changed}): change them back, or start "
            "a new run (with --resume from a saved model)"
        )
    if parent_json and parent_json != known.parent_json:
        raise ConfigError(
            f"{where}: run {known.run_id!r} was begun {'from another saved model' if known.parent_json else 'afresh'}: "
            "leave --resume out to go on with it, or choose another run id and store"
        )
    return known, settings
