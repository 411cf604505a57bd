"""The store in a SQLite file that one process holds for its life."""

from __future__ import annotations

import importlib.resources
import os
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Any

from atoll.coordinator.sql_store import SCHEMA_VERSION, Found, SqlStore
from atoll.coordinator.store import RESTORE
from atoll.protocol import file_systems
from atoll.protocol.errors import ConfigError, HostError, StateError

APPLICATION_ID = 0x61746F6C  # "atol", so that another program's database is told apart
LOCK_WAIT_S = 1.0  # a coordinator that was just told to end may still hold the file


def _refuse_network_file_systems(path: Path) -> None:
    if (kind := file_systems.kind_of(path.parent)) in file_systems.NETWORK:
        raise ConfigError(
            f"the store {path} lies on a network file system ({kind}), whose locks do not keep a second coordinator "
            "out: put it on a local disk with --store"
        )


def _make_tables(db: sqlite3.Connection) -> None:
    schema = importlib.resources.files("atoll.coordinator").joinpath("schema.sql").read_text(encoding="utf-8")
    for statement in schema.split(";\n"):
        db.execute(statement)


class SqliteStore(SqlStore):
    """Opened exclusively until `close`; a second coordinator is refused, and the file is free after kill -9.

    Raises HostError if it cannot be had (in use, read-only, no space), StateError if it is damaged (to the last bit of
    every row) or not a store, ConfigError if it lies where it cannot be safe.
    """

    begins = "BEGIN IMMEDIATE"

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.where = f"the store {path}"
        if not path.parent.is_dir():
            raise ConfigError(f"the store {path}: there is no folder {path.parent}; make it, or choose another --store")
        _refuse_network_file_systems(path)
        if path.is_dir():
            raise ConfigError(f"the store {path} is a folder; choose the name of a file with --store")
        with self._explained():
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            os.close(descriptor)
            self._db = sqlite3.connect(
                path, timeout=LOCK_WAIT_S, isolation_level=None, check_same_thread=False, cached_statements=64
            )
        try:
            with self._explained(), self._readable():
                self._open()
        except BaseException:
            self._db.close()
            raise

    def _open(self) -> None:
        self._db.text_factory = lambda data: data.decode(errors="surrogateescape")  # damaged text has its checksum
        self._db.execute("PRAGMA locking_mode = EXCLUSIVE")
        (mode,) = self._db.execute("PRAGMA journal_mode = WAL").fetchone()
        if mode != "wal":
            raise HostError(f"the store {self.path}: this file system has no write-ahead log; put it on a local disk")
        self._db.execute("PRAGMA synchronous = FULL")
        self._db.execute("BEGIN IMMEDIATE")  # takes the lock that is then held
        (application,) = self._db.execute("PRAGMA application_id").fetchone()
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        (tables,) = self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if (application, version, tables) == (0, 0, 0):
            _make_tables(self._db)
            self._db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            self._db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        elif application != APPLICATION_ID:
            raise StateError(f"{self.path} is a database of another program; choose another file with --store")
        elif version != SCHEMA_VERSION:
            raise StateError(
                f"the store {self.path} has format {version}, this version of atoll reads {SCHEMA_VERSION}: end the "
                "run with the version that made it, or start a new one from its saved model (--resume) in another file"
            )
        self._db.execute("COMMIT")
        if damage := self._damage():
            raise StateError(f"the store {self.path} is damaged ({damage}): {RESTORE}")

    def _damage(self) -> str:
        """What of the file is not as it was written; '' if nothing is."""
        schema = "SELECT hex(type), hex(name), hex(tbl_name), hex(sql) FROM sqlite_master ORDER BY name"
        with closing(sqlite3.connect(":memory:")) as new:
            _make_tables(new)
            if self._db.execute(schema).fetchall() != new.execute(schema).fetchall():
                return "its tables are not those of a store"
        if damage := self._damaged_row():
            return damage
        (verdict,) = self._db.execute("PRAGMA integrity_check(1)").fetchone()
        return "" if verdict == "ok" else str(verdict)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """SQLite's and the system's errors in words."""
        try:
            yield
        except sqlite3.OperationalError as error:
            code = getattr(error, "sqlite_errorname", "")
            if code.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
                text = "another coordinator has it open; end that one first, or choose another --store"
            elif code.startswith("SQLITE_FULL"):
                text = "the disk is full; make room, then start the coordinator again"
            elif code.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM")):
                text = f"it cannot be written ({error}); check its folder's permissions"
            else:
                text = f"{error}; check the disk, then start the coordinator again"
            raise HostError(f"the store {self.path}: {text}") from error
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            raise StateError(f"the store {self.path} is damaged or not a database ({error}): {RESTORE}") from error
        except OSError as error:
            raise HostError(f"the store {self.path} cannot be opened: {error.strerror}") from error

    def copy_to(self, path: Path) -> None:
        with self._explained():
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            with closing(sqlite3.connect(path, isolation_level=None)) as copy:
                self._db.backup(copy)
                copy.execute("PRAGMA journal_mode = DELETE")  # one file

    def close(self) -> None:
        self._db.close()

    # --- what SQLite has of its own

    def _execute(self, statement: str, values: Sequence[object] = ()) -> Found:
        return self._db.execute(statement, values)

    def _stream(self, statement: str, values: Sequence[object] = ()) -> AbstractContextManager[Iterable[Any]]:
        return closing(self._db.execute(statement, values))

    def _is_in_transaction(self) -> bool:
        return self._db.in_transaction
