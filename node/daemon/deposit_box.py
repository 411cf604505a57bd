"""What a site keeps for its coordinator: records of the run, sealed, for the day on which the coordinator's store is
lost and only an old copy of it is left."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from atoll.protocol.deposit_messages import DEPOSITS_PART_BYTES, MAX_DEPOSITS_AT_ONCE
from atoll.protocol.errors import HostError
from atoll.protocol.messages import Deposit

log = logging.getLogger("atoll.node")

MAX_KEPT = 1 << 16
"""Of each kind; the coordinator keeps as many commits."""
MAX_KEPT_BYTES = 1 << 30
"""Of all, where nobody says less; then the older half of those goes of which there are many."""
TRIMMED_EVERY = 1024
"""Records: so many more there may be."""
SHARE_OF_HOME = 32
"""The part (one in so many) of what a home may have."""
MORE_ON_DISK = 4
"""And one in so many of that for what comes between two trims."""
SQLITE_LOG_BYTES = 8 << 20
"""Of SQLite, beside the file."""
_MANY = ("commit", "attestation", "open")
_COLUMNS = "seq, record, kind, number, part, name, body, kept_at, seal"
_TABLE = """CREATE TABLE IF NOT EXISTS deposits (
    seq INTEGER PRIMARY KEY, record TEXT NOT NULL, kind TEXT NOT NULL, number INTEGER NOT NULL, part INTEGER NOT NULL,
    name TEXT NOT NULL, body BLOB NOT NULL, kept_at REAL NOT NULL, seal BLOB NOT NULL,
    UNIQUE (kind, number, part, name)) STRICT"""
_NEWER = """INSERT INTO deposits VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (seq) DO NOTHING
    ON CONFLICT (kind, number, part, name) DO UPDATE SET seq = excluded.seq, record = excluded.record,
    body = excluded.body, kept_at = excluded.kept_at, seal = excluded.seal WHERE excluded.seq > seq"""


def box_bytes(max_disk_bytes: int) -> int:
    """For a home that may have so much; 0: as much as there is."""
    return min(MAX_KEPT_BYTES, max_disk_bytes // SHARE_OF_HOME) if max_disk_bytes else MAX_KEPT_BYTES


def most_on_disk(max_bytes: int) -> int:
    """That the files of a box of `max_bytes` have."""
    return max_bytes + max_bytes // MORE_ON_DISK + SQLITE_LOG_BYTES


class DepositBox:
    """Opened for the life of the node; one call at a time, from any thread. Raises HostError.

    A file that is damaged is begun anew: the coordinator says everything again. One that only cannot be opened now is
    left: if the coordinator's store is lost, what is in it may be nowhere else.
    """

    def __init__(self, path: Path | None, max_bytes: int = MAX_KEPT_BYTES) -> None:
        """`path` None: in memory. `max_bytes`: of the file's pages that are in use; see `most_on_disk`."""
        self._path = path
        self._max_bytes = max_bytes
        self.last_seq = 0
        self._db = self._opened()
        self._num_untrimmed = self._bytes_untrimmed = 0
        try:
            self._shrink()
        except (sqlite3.Error, OSError) as error:  # to be made smaller a file needs room; nothing here depends on that
            log.warning("%s could not be made smaller, and stays as large as it is: %s", path, error)

    def _opened(self) -> sqlite3.Connection:
        with self._explained():
            try:
                return self._connected()
            except sqlite3.OperationalError:  # of the disk or a lock: the file may be whole
                raise
            except sqlite3.DatabaseError as damage:
                if self._path is None:
                    raise
                log.warning("%s is damaged, and is begun anew: %s", self._path, damage)
            for suffix in ("", "-wal", "-shm"):
                self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)
            return self._connected()

    def _connected(self) -> sqlite3.Connection:
        db = sqlite3.connect(self._path or ":memory:", isolation_level=None, check_same_thread=False)
        try:
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA journal_size_limit = 0")  # what SQLite's log has grown to is given back
            db.execute("PRAGMA synchronous = NORMAL")  # what a power cut takes, other sites have, or it is said again
            db.execute(_TABLE)
            (self.last_seq,) = db.execute("SELECT ifnull(max(seq), 0) FROM deposits").fetchone()
        except BaseException:
            db.close()
            raise
        return db

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise HostError(
                f"{self._path} cannot be read or written ({error}): check the disk; with the node stopped, the file "
                "may be removed, and the coordinator says again what it holds"
            ) from error

    def add(self, deposits: Sequence[Deposit]) -> None:
        """What has come, by seq, each in the place of an older one of its key."""
        with self._explained():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                for d in deposits:
                    row = (d.seq, d.record, d.kind, d.number, d.part, d.name, d.body, d.kept_at, d.seal)
                    self._db.execute(_NEWER, row)
                self._num_untrimmed += len(deposits)
                self._bytes_untrimmed += sum(len(d.body) for d in deposits)
                if self._num_untrimmed >= TRIMMED_EVERY or self._bytes_untrimmed > self._max_bytes // (
                    2 * MORE_ON_DISK
                ):
                    self._trim()
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise
        self.last_seq = max([self.last_seq, *(d.seq for d in deposits)])

    def _trim(self) -> None:
        self._num_untrimmed = self._bytes_untrimmed = 0
        found = dict(self._db.execute("SELECT kind, count(*) FROM deposits GROUP BY kind").fetchall())
        is_large = self._used_bytes() > self._max_bytes
        for kind, num in found.items():
            most = num // 2 if is_large and kind in _MANY else MAX_KEPT
            if num > most:
                self._db.execute(
                    "DELETE FROM deposits WHERE kind = ? AND seq <= (SELECT seq FROM deposits WHERE kind = ? "
                    "ORDER BY seq DESC LIMIT 1 OFFSET ?)",
                    (kind, kind, most),
                )

    def _used_bytes(self) -> int:
        """Of the file; what is free in it is used again."""
        return self._in_file("page_size") * (self._in_file("page_count") - self._in_file("freelist_count"))

    def _in_file(self, name: str) -> int:
        return int(self._db.execute(f"PRAGMA {name}").fetchone()[0])

    def _shrink(self) -> None:
        """A file that was left when the home might have more: SQLite gives nothing back by itself."""
        file_bytes = self._in_file("page_size") * self._in_file("page_count")
        if file_bytes <= self._max_bytes + self._max_bytes // MORE_ON_DISK:
            return
        num_before = -1
        while self._used_bytes() > self._max_bytes and num_before != self._db.total_changes:
            num_before = self._db.total_changes
            self._trim()
        self._db.execute("VACUUM")
        self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # or the file has its old length, and another one beside it

    def after(self, seq: int) -> tuple[Deposit, ...]:
        """The next ones, for one message; nothing if there is no more."""
        found: list[Deposit] = []
        most_bytes = DEPOSITS_PART_BYTES
        asked = f"SELECT {_COLUMNS} FROM deposits WHERE seq > ? ORDER BY seq LIMIT ?"
        with self._explained(), closing(self._db.execute(asked, (seq, MAX_DEPOSITS_AT_ONCE))) as kept:
            for values in kept:
                deposit = Deposit(**dict(zip(_COLUMNS.split(", "), values, strict=True)))
                most_bytes -= len(deposit.body)
                if found and most_bytes < 0:
                    break
                found.append(deposit)
        return tuple(found)

    def close(self) -> None:
        self._db.close()
