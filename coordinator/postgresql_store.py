"""The store in a PostgreSQL database, which several coordinators share: the one that has the lease leads."""

from __future__ import annotations

import importlib.resources
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from psycopg.pq import TransactionStatus

from atoll.coordinator.core.persisted import Persisted, RunRecord
from atoll.coordinator.lease import Claim, Held
from atoll.coordinator.postgresql import SCHEMA, Database, explained, placed
from atoll.coordinator.postgresql_lease import held, take
from atoll.coordinator.sql_store import SCHEMA_VERSION, Found, SqlStore
from atoll.coordinator.stage import NoRoots, Roots
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

    def __init__(self, database: Database) -> None:
        super().__init__()
        self.where = database.where
        self._claim: Claim | None = None
        self._roots: Roots = NoRoots()
        self._takes: Callable[[], None] = lambda: None
        self._database = database
        self._connect()

    def _connect(self) -> None:
        self._db = self._database.connect()
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
            return held(self._db).stage is None

    def claims(self, claim: Claim, takes: Callable[[], None], roots: Roots) -> None:
        """Before `begin`, which calls `takes` when it is about to take the lease. Raises ConfigError where a root of
        the run is none of `roots`."""
        self._claim, self._takes, self._roots = claim, takes, roots
        with self._explained():
            self._follow(held(self._db))

    def check(self, settings: RunSettings, parent_json: str) -> None:
        """Raises ConfigError for another run, or other settings."""
        with self._explained(), self._readable():
            known = self._all(RunRecord)
            run_of(self.where, known[0] if known else None, settings, parent_json)

    def _follow(self, found: Held) -> None:
        if found.stage is None:
            return
        try:
            is_another = self._roots.follow(found.stage)
        except ConfigError as error:
            raise ConfigError(f"{self.where}: {error}") from None
        for tell in self._roots.told if is_another else ():
            tell()

    def begin(self, settings: RunSettings, parent_json: str = "") -> Persisted:
        """Raises LeaseHeld if another coordinator leads."""
        claim = self._claim
        assert claim is not None, "`claims` comes first"
        self._db.close()  # it may have broken while this one stood by
        self._connect()
        with self._explained(), self._readable(), self._transaction():
            self._execute("SELECT id FROM lease FOR UPDATE")
            found = held(self._db)
            claim.check(self.where, found)
            self._follow(found)
            self._execute("SELECT id FROM head FOR UPDATE")  # an old leader changes no row while all are read
            if damage := self._damaged_row():
                raise StateError(f"{self.where} is damaged ({damage}): {RESTORE}")
            self._may_take_long()  # to decode a long log; the lease is taken behind that, and lasts from then
            persisted = self._begun(settings, parent_json)
            self._takes()
            take(self._db, claim, self._roots.stage)
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

    def _may_take_long(self) -> None:
        self._execute("SET LOCAL idle_in_transaction_session_timeout = '10min'")

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
