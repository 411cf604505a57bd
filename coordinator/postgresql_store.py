"""The store in a PostgreSQL database, which several coordinators share: the one that has the lease leads."""

from __future__ import annotations

import importlib.resources
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from psycopg.pq import TransactionStatus

from atoll.coordinator.core.persisted import Persisted, RunRecord
from atoll.coordinator.lease import LEASE_S, Claim, Lease
from atoll.coordinator.postgresql import SCHEMA, Database, explained, placed
from atoll.coordinator.sql_store import SCHEMA_VERSION, Found, SqlStore
from atoll.coordinator.store import run_of
from atoll.protocol.errors import ConfigError, HostError, StateError
from atoll.protocol.settings import RunSettings

ROWS_AT_ONCE = 500
MAKING = 0x61746F6C
"""The lock of whoever makes the tables: "atol"."""
RESTORE = "restore the database from a copy (docs/operations.md), or start a new run in another one"


class PostgresqlStore(SqlStore):
    """`begin` takes the lease and the next term in one transaction, and each later one compares the term: of two
    coordinators that believe to lead, the older one changes nothing.

    Raises HostError if the database does not answer, StateError if its tables are of another version, ConfigError for
    one that is not safe.
    """

    for_update = " FOR UPDATE"

    def __init__(self, database: Database, claim: Claim) -> None:
        super().__init__()
        self.where = database.where
        self._claim = claim
        self._db = database.connect()
        try:
            with self._explained(), self._readable():
                self._open()
        except BaseException:
            self._db.close()
            raise

    def _open(self) -> None:
        with self._transaction():
            self._execute("SELECT pg_advisory_xact_lock(?)", (MAKING,))
            if not self._execute("SELECT to_regclass(?) IS NOT NULL", (f"{SCHEMA}.format",)).fetchone()[0]:
                if not self._execute("SELECT to_regnamespace(?) IS NOT NULL", (SCHEMA,)).fetchone()[0]:
                    self._execute(f"CREATE SCHEMA {SCHEMA}")
                self._make_tables()
            (version,) = self._execute("SELECT version FROM format").fetchone()
        if version != SCHEMA_VERSION:
            raise StateError(
                f"{self.where} has format {version}, this version of atoll reads {SCHEMA_VERSION}: end the run with "
                "the version that made it, or start a new one from its saved model (--resume) in another database"
            )

    def _make_tables(self) -> None:
        file = importlib.resources.files("atoll.coordinator").joinpath("schema_postgresql.sql")
        for statement in file.read_text(encoding="utf-8").split(";\n"):
            self._execute(statement)
        self._execute("INSERT INTO format (version) VALUES (?)", (SCHEMA_VERSION,))

    # --- who leads

    @property
    def is_new(self) -> bool:
        """Whether no coordinator has led here."""
        with self._explained():
            return self._root() is None

    def _root(self) -> str | None:
        (root,) = self._execute("SELECT root FROM lease").fetchone()
        return None if root is None else str(root)

    def check(self, settings: RunSettings, parent_json: str) -> None:
        """Whether this coordinator could lead here. Raises ConfigError: another run, other settings, another root."""
        with self._explained(), self._readable():
            self._refuse_another_root()
            known = self._all(RunRecord)
            run_of(self.where, known[0] if known else None, settings, parent_json)

    def _refuse_another_root(self) -> None:
        root = self._root()
        if root is not None and root != self._claim.root:
            has = f"root {self._claim.root[:16]}" if self._claim.root else "no root (plain text)"
            wanted = f"with root {root[:16]}" if root else "in plain text"
            raise ConfigError(
                f"{self.where} has a run {wanted}, and this coordinator has {has}: sites would not know it. Give it "
                "the folder with root.pem and root.key of the coordinator that began the run (--trust DIR)"
            )

    def begin(self, settings: RunSettings, parent_json: str = "") -> Persisted:
        """Raises LeaseHeld if another coordinator leads."""
        with self._explained(), self._readable(), self._transaction():
            self._execute("SELECT id FROM lease FOR UPDATE")
            self._claim.check(self.where, Lease.read(self._db))
            self._refuse_another_root()
            if damage := self._damaged_row():
                raise StateError(f"{self.where} is damaged ({damage}): {RESTORE}")
            persisted = self._begun(settings, parent_json)
            self._execute(
                "UPDATE lease SET holder = ?, address = ?, root = ?, "
                "until = clock_timestamp() + make_interval(secs => ?)",
                (self._claim.holder, self._claim.address, self._claim.root, LEASE_S),
            )
            return persisted

    # --- what PostgreSQL has of its own

    def _execute(self, statement: str, values: Sequence[object] = ()) -> Found:
        return self._db.execute(placed(statement), values or None)

    @contextmanager
    def _stream(self, statement: str, values: Sequence[object] = ()) -> Iterator[Iterable[Any]]:
        """By a cursor of the server, which lives as long as a transaction."""
        with self._within_transaction(), self._db.cursor("stream") as cursor:
            cursor.itersize = ROWS_AT_ONCE
            yield cursor.execute(placed(statement), values or None)

    def _within_transaction(self) -> AbstractContextManager[None]:
        return _nothing() if self._is_in_transaction() else self._transaction()

    def _explained(self) -> AbstractContextManager[None]:
        return explained(self.where)

    def _is_in_transaction(self) -> bool:
        """A session that broke is in none: the server has ended it."""
        status = self._db.info.transaction_status
        return status in (TransactionStatus.INTRANS, TransactionStatus.INERROR)

    def _commit(self) -> None:
        done = self._db.execute("COMMIT").statusmessage
        if done != "COMMIT":  # of one in which something failed
            raise HostError(f"{self.where}: a transaction ended with {done}")

    def copy_to(self, path: Path) -> None:
        raise HostError(
            f"no copy at {path}: {self.where} is copied by the tools of PostgreSQL (pg_dump --schema={SCHEMA}, or the "
            "backups of the server), and the folder with root.key beside it"
        )

    def close(self) -> None:
        self._db.close()


@contextmanager
def _nothing() -> Iterator[None]:
    yield
