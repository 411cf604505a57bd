"""The lease as a row of a PostgreSQL database, changed by the database's clock alone."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from atoll.coordinator.lease import LEASE_S, SEEN_WITHIN_S, Claim, Held, Standby
from atoll.coordinator.postgresql import Connection, Database, explained, placed
from atoll.coordinator.stage import Stage

_READ = "SELECT holder, address, extract(epoch FROM until - clock_timestamp())::float8, stage FROM lease"
_LASTS = "clock_timestamp() + make_interval(secs => ?)"
_TAKE = f"UPDATE lease SET holder = ?, address = ?, stage = ?, until = {_LASTS}"
_OF_THE_HOLDER = "WHERE holder = ? AND until > clock_timestamp()"
_RENEW = f"UPDATE lease SET until = {_LASTS} {_OF_THE_HOLDER}"
_KEEP_STAGE = f"UPDATE lease SET stage = ? {_OF_THE_HOLDER}"
_SAY = (
    "INSERT INTO standbys (holder, address, roots, seen_at) VALUES (?, ?, ?, clock_timestamp()) "
    "ON CONFLICT (holder) DO UPDATE SET roots = excluded.roots, seen_at = excluded.seen_at"
)
_SEEN = (
    "SELECT address, roots FROM standbys WHERE seen_at > clock_timestamp() - make_interval(secs => ?) "
    "ORDER BY address, holder"
)


def held(db: Connection) -> Held:
    """Raises StateError."""
    holder, address, left_s, stage = db.execute(_READ).fetchone() or ("", "", 0.0, None)
    return Held(str(holder), str(address), float(left_s), None if stage is None else Stage.from_text(str(stage)))


def take(db: Connection, claim: Claim, stage: Stage) -> None:
    """In the transaction in which the next term begins."""
    db.execute(placed(_TAKE), (claim.holder, claim.address, stage.to_text(), LEASE_S))
    db.execute(placed("DELETE FROM standbys WHERE holder = ?"), (claim.holder,))


class PostgresqlLease:
    """Over a connection of its own, which is made anew when it broke: what the store waits for holds up no renewal.
    Each method raises HostError if the database does not answer."""

    def __init__(self, database: Database, claim: Claim) -> None:
        self._database = database
        self._claim = claim
        self._db: Connection | None = None
        self._lock = threading.Lock()

    def stand_by(self, roots: frozenset[str]) -> Held:
        self._run(_SAY, (self._claim.holder, self._claim.address, " ".join(sorted(roots))))
        with self._lock, explained(self._database.where):
            return held(self._connected())

    def renew(self) -> tuple[Standby, ...] | None:
        if not self._run(_RENEW, (LEASE_S, self._claim.holder)):
            return None
        with self._lock, explained(self._database.where):
            found = self._connected().execute(placed(_SEEN), (SEEN_WITHIN_S,)).fetchall()
        return tuple(Standby(str(address), frozenset(str(roots).split())) for address, roots in found)

    def keep_stage(self, stage: Stage) -> bool:
        return bool(self._run(_KEEP_STAGE, (stage.to_text(), self._claim.holder)))

    def end(self) -> None:
        self._run("UPDATE lease SET until = clock_timestamp() WHERE holder = ?", (self._claim.holder,))
        self._run("DELETE FROM standbys WHERE holder = ?", (self._claim.holder,))

    def close(self) -> None:
        if self._db is not None:
            self._db.close()

    def _connected(self) -> Connection:
        if self._db is None or self._db.closed:
            self._db = self._database.connect()
        return self._db

    def _run(self, statement: str, values: Sequence[Any]) -> int:
        """How many rows it changed."""
        with self._lock, explained(self._database.where):
            return self._connected().execute(placed(statement), values).rowcount
