"""The store in a SQLite file that one process holds for its life."""

from __future__ import annotations

import importlib.resources
import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar, cast

from atoll.coordinator import rows
from atoll.coordinator.core.events import AttestationRecord, CommitRecord, LineRecord, Record
from atoll.coordinator.core.persisted import (
    DEPOSITED,
    HISTORY,
    KINDS,
    Key,
    Persisted,
    Row,
    RunRecord,
    as_deposited,
    changes,
    is_deposited,
    key_of,
    kind_of,
)
from atoll.coordinator.store import KEPT_AT_JOIN, RESTORE, run_of
from atoll.protocol.deposit_messages import MAX_DEPOSITS_AT_ONCE
from atoll.protocol.errors import ConfigError, HostError, InvalidMessage, StaleError, StateError
from atoll.protocol.messages import MAX_LOG_COMMITS, Deposit
from atoll.protocol.settings import RunSettings, settings_from_json, settings_to_json

R = TypeVar("R")

APPLICATION_ID = 0x61746F6C  # "atol", so that another program's database is told apart
SCHEMA_VERSION = 9
"""Of tables and rows. What another version would read otherwise raises it, and is refused by this number."""
LOCK_WAIT_S = 1.0  # a coordinator that was just told to end may still hold the file
NETWORK_FILE_SYSTEMS = (
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "ceph", "glusterfs", "lustre", "beegfs", "gpfs", "fuse.sshfs",
    "fuse.glusterfs", "fuse.ceph", "fuse.s3fs", "fuse.gcsfuse", "ncpfs", "ocfs2",
)  # fmt: skip

_DEPOSITED_KINDS = {kind for kind, cls in KINDS.items() if cls in DEPOSITED}
_COLUMNS = "seq, kind, number, part, name, body, kept_at"
_KEY = "kind = ? AND number = ? AND part = ? AND name = ?"


def file_system_of(path: Path, mounts: str) -> str:
    """The type of the file system that `path` lies on, from the text of /proc/mounts; '' if it is not known."""
    best, found = -1, ""
    for line in mounts.splitlines():
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        mount = Path(fields[1].encode().decode("unicode_escape"))
        if path.is_relative_to(mount) and len(mount.parts) >= best:
            best, found = len(mount.parts), fields[2]
    return found


def _refuse_network_file_systems(path: Path) -> None:
    try:
        mounts = Path("/proc/mounts").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return  # not Linux: there is no such list
    kind = file_system_of(path.parent.resolve(), mounts)
    if kind in NETWORK_FILE_SYSTEMS:
        raise ConfigError(
            f"the store {path} lies on a network file system ({kind}), whose locks do not keep a second coordinator "
            "out: put it on a local disk with --store"
        )


def _make_tables(db: sqlite3.Connection) -> None:
    schema = importlib.resources.files("atoll.coordinator").joinpath("schema.sql").read_text(encoding="utf-8")
    for statement in schema.split(";\n"):
        db.execute(statement)


class SqliteStore:
    """Opened exclusively until `close`; a second coordinator is refused, and the file is free after kill -9.

    Raises HostError if it cannot be had (in use, read-only, no space), StateError if it is damaged (to the last bit of
    every row) or not a store, ConfigError if it lies where it cannot be safe.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seq = 0
        """The last one that was given."""
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
        total = 0
        for *values, checksum in self._db.execute(f"SELECT {_COLUMNS}, checksum FROM records"):
            if rows.checksum(*values) != checksum:
                seq, kind, number, part, name = values[:5]
                where = ", ".join(str(value) for value in (number, part, name) if value)
                return f"table records, row {seq} ({kind} {where}): its checksum is not that of its values"
            total ^= int.from_bytes(checksum)
        head = self._db.execute("SELECT term, total, checksum FROM head").fetchone()
        if head is None:
            return "table head: its row is missing" if total else ""
        term, sum_of_all, checksum = head
        if rows.checksum(term, sum_of_all) != checksum:
            return "table head: its checksum is not that of its values"
        if total != int.from_bytes(sum_of_all):
            return "table records: a row is missing, or is not the newest one of its key"
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

    @contextmanager
    def _readable(self) -> Iterator[None]:
        """Rows that are not what was written, though the file is a database."""
        try:
            yield
        except (InvalidMessage, LookupError, ValueError, TypeError) as error:
            raise StateError(f"the store {self.path} is damaged ({error}): {RESTORE}") from error

    # --- the interface

    def begin(self, settings: RunSettings, parent_json: str = "") -> Persisted:
        with self._explained(), self._readable(), self._transaction():  # a start that is refused is none
            known = self._all(RunRecord)
            run, settings = run_of(f"the store {self.path}", known[0] if known else None, settings, parent_json)
            term, total = self._head()
            self._begin_seqs(term + 1)
            if not known:
                total, _ = self._keep((run,), total, 0.0)
            self._write_head(term + 1, total)
            return self._persisted(run, settings, term + 1)

    def _persisted(self, run: RunRecord, settings: RunSettings, term: int) -> Persisted:
        oldest = self._last_commit() - settings.sync.most_log_commits
        kinds = [cls for cls in KINDS.values() if cls is not RunRecord]
        found = [r for cls in kinds for r in self._all(cls, oldest if cls in HISTORY else -1)]
        found += self._all(AttestationRecord, last=0)  # the run can always go back to its start
        whole = replace(run, settings_json=settings_to_json(settings))  # what was stored may lack newer ones
        return Persisted(run=whole, term=term, records={key_of(r): r for r in found})

    def _last_commit(self) -> int:
        (last,) = self._db.execute("SELECT max(number) FROM records WHERE kind = 'commit'").fetchone()
        return last or 0

    def persist(self, term: int, records: Sequence[Record], wall_time_s: float) -> tuple[Deposit, ...]:
        with self._explained(), self._transaction():
            newest, total = self._head()
            if newest != term:
                raise StaleError(f"the store {self.path}: term {term} is over, the newest is {newest}")
            total, deposits = self._keep(records, total, wall_time_s)
            self._write_head(term, total)
            return deposits

    def last_seq(self) -> int:
        with self._explained():
            return self._last_seq()

    def _last_seq(self) -> int:
        (last,) = self._db.execute("SELECT max(seq) FROM records").fetchone()
        return last or 0

    def _begin_seqs(self, term: int) -> None:
        """Above all that were given in earlier terms, also to what has left no row."""
        self._seq = max(self._last_seq(), term << rows.TERM_BITS)

    def deposits_after(self, seq: int, most_bytes: int, *, is_new: bool = False) -> tuple[Deposit, ...]:
        oldest = self._last_commit() - KEPT_AT_JOIN if is_new else 0
        asked = (
            "SELECT seq, kind, body, kept_at FROM records WHERE seq > ? "
            "AND (kind NOT IN ('commit', 'attestation') OR number > ? OR number = 0) ORDER BY seq"
        )
        found: list[Deposit] = []
        with self._explained(), self._readable(), closing(self._db.execute(asked, (seq, oldest))) as kept:
            for number, kind, body, kept_at in kept:
                record = as_deposited(rows.decode(kind, body)) if kind in _DEPOSITED_KINDS else None
                if record is None:
                    continue
                deposit = rows.deposit_of(record, number, kept_at)
                most_bytes -= len(deposit.body)
                if found and (most_bytes < 0 or len(found) == MAX_DEPOSITS_AT_ONCE):
                    break
                found.append(deposit)
        return tuple(found)

    def restore(self, term: int, deposits: Sequence[Deposit], settle: Callable[[Persisted], Sequence[Record]]) -> None:
        with self._explained(), self._readable(), self._transaction():
            (run,) = self._all(RunRecord)
            _, total = self._head()
            for deposit in deposits:
                record = rows.decode(deposit.record, deposit.body)
                if isinstance(record, LineRecord) and key_of(record) in self._keys("line"):
                    continue  # its beginning, of which more is known
                self._seq = deposit.seq - 1
                total, _ = self._keep((record,), total, deposit.kept_at)
            self._begin_seqs(term)
            settings = settings_from_json(run.settings_json)
            total, _ = self._keep(settle(self._persisted(run, settings, term)), total, 0.0)
            self._write_head(term, total)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    def _head(self) -> tuple[int, int]:
        """The newest term, and the sum of all checksums."""
        term, total = self._db.execute("SELECT term, total FROM head").fetchone() or (0, b"")
        return term, int.from_bytes(total)

    def _write_head(self, term: int, total: int) -> None:
        data = total.to_bytes(rows.CHECKSUM_BYTES)
        self._db.execute(
            "INSERT OR REPLACE INTO head (id, term, total, checksum) VALUES (1, ?, ?, ?)",
            (term, data, rows.checksum(term, data)),
        )

    def _keep(self, records: Sequence[Row], total: int, wall_time_s: float) -> tuple[int, tuple[Deposit, ...]]:
        """Each with what it replaces and ends. The new sum of all checksums, and what is to be deposited."""
        drop = f"DELETE FROM records WHERE {_KEY} RETURNING checksum"
        write = f"INSERT INTO records ({_COLUMNS}, checksum) VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
        deposits: list[Deposit] = []
        for record in records:
            self._seq += 1  # also of what leaves no row: sites hear of it
            if is_deposited(record):
                deposits.append(rows.deposit_of(record, self._seq, float(wall_time_s)))
            own = key_of(record)
            for key, newest in changes(record, self._keys).items():
                for (old,) in self._db.execute(drop, key).fetchall():
                    total ^= int.from_bytes(old)
                if newest is not None:
                    self._seq += key != own
                    values = (self._seq, *key, rows.encode(newest), float(wall_time_s))
                    checksum = rows.checksum(*values)
                    self._db.execute(write, (*values, checksum))
                    total ^= int.from_bytes(checksum)
        return total, tuple(deposits)

    def _keys(self, kind: str) -> list[Key]:
        found = self._db.execute("SELECT kind, number, part, name FROM records WHERE kind = ?", (kind,))
        return [Key(*row) for row in found]

    def _all(self, cls: type[R], after: int = -1, last: int = (1 << 63) - 1) -> tuple[R, ...]:
        """Those whose number is more than `after`, by number."""
        kind = kind_of(cls)
        found = self._db.execute(
            "SELECT body FROM records WHERE kind = ? AND number > ? AND number <= ? ORDER BY number",
            (kind, after, last),
        )
        return tuple(cast(R, rows.decode(kind, body)) for (body,) in found)

    def read_commits(self, first: int, last: int) -> tuple[tuple[CommitRecord, ...], tuple[AttestationRecord, ...]]:
        with self._explained(), self._readable():
            commits = self._all(CommitRecord, first - 1, last)
            if [r.commit.commit for r in commits] != list(range(first, last + 1)):
                raise ValueError(f"of commits {first} to {last} only {len(commits)} are there")
            return commits, self._all(AttestationRecord, first - 1, last)

    def copy_to(self, path: Path) -> None:
        with self._explained():
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            with closing(sqlite3.connect(path, isolation_level=None)) as copy:
                self._db.backup(copy)
                copy.execute("PRAGMA journal_mode = DELETE")  # one file

    def commit_times(self) -> dict[int, float]:
        newest = "SELECT number, kept_at FROM records WHERE kind = 'commit' ORDER BY number DESC LIMIT ?"
        with self._explained():
            return dict(self._db.execute(newest, (MAX_LOG_COMMITS,)))

    def close(self) -> None:
        self._db.close()
