"""The lease: which of the coordinators on one database leads. A row, changed by the database's clock alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from atoll.coordinator.postgresql import Connection, Database, explained, placed
from atoll.protocol.errors import StaleError

LEASE_S = 5.0
RENEW_EVERY_S = 1.0
SEEN_WITHIN_S = 5.0
"""A coordinator that stands by says so each second."""

_READ = "SELECT holder, address, extract(epoch FROM until - clock_timestamp())::float8 FROM lease"
_RENEW = "UPDATE lease SET until = clock_timestamp() + make_interval(secs => ?) WHERE holder = ? AND until > clock_timestamp()"
_SAY = (
    "INSERT INTO standbys (holder, address, seen_at) VALUES (?, ?, clock_timestamp()) ON CONFLICT (holder) "
    "DO UPDATE SET address = excluded.address, seen_at = excluded.seen_at"
)
_SEEN = (
    "SELECT address FROM standbys WHERE seen_at > clock_timestamp() - make_interval(secs => ?) AND holder <> ? "
    "ORDER BY address"
)


class LeaseHeld(StaleError):
    """Another coordinator leads."""


@dataclass(frozen=True, slots=True)
class Held:
    """As the database said a moment ago."""

    holder: str
    address: str
    left_s: float

    @property
    def is_over(self) -> bool:
        return self.left_s <= 0.0


@dataclass(frozen=True, slots=True)
class Claim:
    """What one start of a coordinator says of itself."""

    holder: str
    """Of this start alone."""
    address: str
    """Where sites reach it."""
    root: str
    """The digest of the root that it has; empty in plain text."""

    def check(self, where: str, held: Held) -> None:
        """Raises LeaseHeld."""
        if not held.is_over and held.holder != self.holder:
            raise LeaseHeld(f"{where}: {held.address} leads for {held.left_s:.1f} s more")


class Lease:
    """Over a connection of its own, which is made anew when it broke: what the store waits for holds up no renewal. Not
    thread-safe. Each method raises HostError if the database does not answer."""

    def __init__(self, database: Database, claim: Claim) -> None:
        self._database = database
        self._claim = claim
        self._db: Connection | None = None

    @staticmethod
    def read(db: Connection) -> Held:
        holder, address, left_s = db.execute(_READ).fetchone() or ("", "", 0.0)
        return Held(str(holder), str(address), float(left_s))

    def stand_by(self) -> Held:
        """Says that this one is here, and who leads."""
        self._run(_SAY, (self._claim.holder, self._claim.address))
        with explained(self._database.where):
            return self.read(self._connected())

    def renew(self) -> tuple[str, ...] | None:
        """The addresses of those that stand by; None if the lease was over, or is another one's."""
        if not self._run(_RENEW, (LEASE_S, self._claim.holder)):
            return None
        with explained(self._database.where):
            found = self._connected().execute(placed(_SEEN), (SEEN_WITHIN_S, self._claim.holder)).fetchall()
        return tuple(str(address) for (address,) in found)

    def end(self) -> None:
        """Whoever stands by need not wait."""
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
