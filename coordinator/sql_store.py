"""What a store does in SQL, whichever database it is in: SQLite (`sqlite_store.py`) or PostgreSQL
(`postgresql_store.py`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

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
from atoll.protocol.errors import InvalidMessage, StaleError, StateError
from atoll.protocol.messages import MAX_LOG_COMMITS, Deposit
from atoll.protocol.settings import RunSettings, settings_from_json, settings_to_json

R = TypeVar("R")

SCHEMA_VERSION = 9
"""Of tables and rows. What another version would read otherwise raises it, and is refused by this number."""

_DEPOSITED_KINDS = {kind for kind, cls in KINDS.items() if cls in DEPOSITED}
_COLUMNS = "seq, kind, number, part, name, body, kept_at"
_KEY = "kind = ? AND number = ? AND part = ? AND name = ?"


class Found(Protocol):
    """What a statement finds."""

    def fetchone(self) -> Any: ...

    def fetchall(self) -> list[Any]: ...

    def __iter__(self) -> Iterator[Any]: ...


class SqlStore(ABC):
    """`Store`, but for what a database has of its own."""

    where: str
    """In words, for errors."""
    begins = "BEGIN"
    """A transaction that writes."""
    for_update = ""
    """Behind a SELECT of a row that this transaction then changes."""

    def __init__(self) -> None:
        self._seq = 0
        """The last one that was given."""
        self._begun_term = 0

    @abstractmethod
    def _execute(self, statement: str, values: Sequence[object] = ()) -> Found:
        """`?` stands for a value."""

    @abstractmethod
    def _stream(self, statement: str, values: Sequence[object] = ()) -> AbstractContextManager[Iterable[Any]]:
        """Of many rows, of which the caller may want the first ones alone."""

    @abstractmethod
    def _explained(self) -> AbstractContextManager[None]:
        """The database's errors in words."""

    @abstractmethod
    def _is_in_transaction(self) -> bool: ...

    def _may_take_long(self) -> None:  # noqa: B027 -- to a file it is all the same
        """In a transaction: its statements may be far apart."""

    @abstractmethod
    def copy_to(self, path: Path) -> None: ...

    @abstractmethod
    def close(self) -> None: ...

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._execute(self.begins)
        try:
            yield
            self._commit()
        except BaseException:
            if self._is_in_transaction():
                self._execute("ROLLBACK")
            raise

    def _commit(self) -> None:
        self._execute("COMMIT")

    @contextmanager
    def _readable(self) -> Iterator[None]:
        """Rows that are not what was written, though the file is a database."""
        try:
            yield
        except (InvalidMessage, LookupError, ValueError, TypeError) as error:
            raise StateError(f"{self.where} is damaged ({error}): {RESTORE}") from error

    def _damaged_row(self) -> str:
        """Which row is not as it was written, or is missing; '' if none is."""
        total = 0
        with self._stream(f"SELECT {_COLUMNS}, checksum FROM records") as found:
            for *values, checksum in found:
                if rows.checksum(*values) != checksum:
                    seq, kind, number, part, name = values[:5]
                    where = ", ".join(str(value) for value in (number, part, name) if value)
                    return f"table records, row {seq} ({kind} {where}): its checksum is not that of its values"
                total ^= int.from_bytes(checksum)
        head = self._execute("SELECT term, total, checksum FROM head").fetchone()
        if head is None:
            return "table head: its row is missing" if total else ""
        term, sum_of_all, checksum = head
        if rows.checksum(term, sum_of_all) != checksum:
            return "table head: its checksum is not that of its values"
        if total != int.from_bytes(sum_of_all):
            return "table records: a row is missing, or is not the newest one of its key"
        return ""

    # --- the interface

    def begin(self, settings: RunSettings, parent_json: str = "") -> Persisted:
        with self._explained(), self._readable(), self._transaction():  # a start that is refused is none
            return self._begun(settings, parent_json)

    def _begun(self, settings: RunSettings, parent_json: str) -> Persisted:
        """In a transaction."""
        term, total = self._head()
        known = self._all(RunRecord)
        run, settings = run_of(self.where, known[0] if known else None, settings, parent_json)
        self._begun_term = term + 1
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
        (last,) = self._execute("SELECT max(number) FROM records WHERE kind = 'commit'").fetchone()
        return last or 0

    def persist(self, term: int, records: Sequence[Record], wall_time_s: float) -> tuple[Deposit, ...]:
        with self._explained(), self._transaction():
            total = self._total_at(term)
            total, deposits = self._keep(records, total, wall_time_s)
            self._write_head(term, total)
            return deposits

    def last_seq(self) -> int:
        with self._explained():
            return self._last_seq()

    def _last_seq(self) -> int:
        (last,) = self._execute("SELECT max(seq) FROM records").fetchone()
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
        with self._explained(), self._readable(), self._stream(asked, (seq, oldest)) as kept:
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
            self._may_take_long()
            total = self._total_at(self._begun_term)
            (run,) = self._all(RunRecord)
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

    def _head(self) -> tuple[int, int]:
        """The newest term, and the sum of all checksums."""
        term, total = self._execute(f"SELECT term, total FROM head{self.for_update}").fetchone() or (0, b"")
        return term, int.from_bytes(total)

    def _total_at(self, term: int) -> int:
        """In a transaction: the sum of all checksums. Raises StaleError if that is not the newest term."""
        newest, total = self._head()
        if newest != term:
            raise StaleError(f"{self.where}: term {term} is over, the newest is {newest}")
        return total

    def _write_head(self, term: int, total: int) -> None:
        data = total.to_bytes(rows.CHECKSUM_BYTES)
        self._execute(
            "INSERT INTO head (id, term, total, checksum) VALUES (1, ?, ?, ?) ON CONFLICT (id) "
            "DO UPDATE SET term = excluded.term, total = excluded.total, checksum = excluded.checksum",
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
                for (old,) in self._execute(drop, key).fetchall():
                    total ^= int.from_bytes(old)
                if newest is not None:
                    self._seq += key != own
                    values = (self._seq, *key, rows.encode(newest), float(wall_time_s))
                    checksum = rows.checksum(*values)
                    self._execute(write, (*values, checksum))
                    total ^= int.from_bytes(checksum)
        return total, tuple(deposits)

    def _keys(self, kind: str) -> list[Key]:
        found = self._execute("SELECT kind, number, part, name FROM records WHERE kind = ?", (kind,))
        return [Key(*row) for row in found]

    def _all(self, cls: type[R], after: int = -1, last: int = (1 << 63) - 1) -> tuple[R, ...]:
        """Those whose number is more than `after`, by number."""
        kind = kind_of(cls)
        found = self._execute(
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

    def commit_times(self) -> dict[int, float]:
        newest = "SELECT number, kept_at FROM records WHERE kind = 'commit' ORDER BY number DESC LIMIT ?"
        with self._explained():
            return dict(self._execute(newest, (MAX_LOG_COMMITS,)).fetchall())
