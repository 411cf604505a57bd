"""The lease as a row of a PostgreSQL database, changed by the database's clock alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from atoll.coordinator.lease import LEASE_S, SEEN_WITHIN_S, Claim, Held
from atoll.coordinator.postgresql import Connection, Database, explained, placed

_READ = "SELECT holder, address, extract(epoch FROM until - clock_timestamp())::float8 FROM lease"
_LASTS = "clock_timestamp() + make_interval(secs => ?)"
_TAKE = f"UPDATE lease SET holder = ?, address = ?, root = ?, until = {_LASTS}"
_RENEW = f"UPDATE lease SET until = {_LASTS} WHERE holder = ? AND until > clock_timestamp()"
_SAY = (
    "INSERT INTO standbys (holder, address, seen_at) VALUES (?, ?, clock_timestamp()) "
    "ON CONFLICT (holder) DO UPDATE SET seen_at = excluded.seen_at"
)
_SEEN = "SELECT address FROM standbys WHERE seen_at > clock_timestamp() - make_interval(secs => ?) ORDER BY address"


def held(db: Connection) -> Held:
    holder, address, left_s = db.execute(_READ).fetchone() or ("", "", 0.0)
    return Held(str(holder), str(address), float(left_s))


def take(db: Connection, claim: Claim) -> None:
    """In the transaction in which the next term begins."""
    db.execute(placed(_TAKE), (claim.holder, claim.address, claim.root, LEASE_S))
    db.execute(placed("DELETE FROM standbys WHERE holder = ?"), (claim.holder,))


class PostgresqlLease:
    """Over a connection of its own, which is made anew when it broke: what the store waits for holds up no renewal. Not
    thread-safe. Each method raises HostError if the database does not answer."""

    def __init__(self, database: Database, claim: Claim) -> None:
        self._database = database
        self._claim = claim
        self._db: Connection | None = None

    def stand_by(self) -> Held:
        self._run(_SAY, (self._claim.holder, self._claim.address))
        with explained(self._database.where):
            return held(self._connected())

    def renew(self) -> tuple[str, ...] | None:
        if not self._run(_RENEW, (LEASE_S, self._claim.holder)):
            return None
        with explained(self._database.where):
            found = self._connected().execute(placed(_SEEN), (SEEN_WITHIN_S,)).fetchall()
        return tuple(str(address) for (address,) in found)

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
        with explained(self._database.where):
            return self._connected().execute(placed(statement), values).rowcount
