"""The store in a SQLite file that one process holds for its life."""

from __future__ import annotations

import importlib.resources
import json
import os
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from atoll.coordinator.core.events import (
    AbandonRecord,
    AttestationRecord,
    CommitRecord,
    DoneRecord,
    ExclusionRecord,
    FinishedRecord,
    ForgetRecord,
    KeptOutRecord,
    LeaseRecord,
    LetInRecord,
    LineRecord,
    ManifestRecord,
    OpenRecord,
    Persisted,
    PlanRecord,
    Record,
    ResetRecord,
    RollbackRecord,
    SiteRecord,
    StopRecord,
)
from atoll.coordinator.core.sync.exclusions import KEPT_EXCLUSIONS
from atoll.coordinator.row_checksums import keep_checksums, wrong_row
from atoll.coordinator.store import RESTORE, check_same_run
from atoll.protocol import wire
from atoll.protocol.errors import ConfigError, HostError, InvalidMessage, StaleError, StateError
from atoll.protocol.layout import Manifest
from atoll.protocol.messages import Commit, DataRange, Open, Outlier, Plan
from atoll.protocol.settings import RunSettings, settings_to_json

APPLICATION_ID = 0x61746F6C  # "atol", so that another program's database is told apart
SCHEMA_VERSION = 5
"""Of tables and rows. What another version would read otherwise raises it, and is refused by this number."""
LOCK_WAIT_S = 1.0  # a coordinator that was just told to end may still hold the file
NETWORK_FILE_SYSTEMS = (
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "ceph", "glusterfs", "lustre", "beegfs", "gpfs", "fuse.sshfs",
    "fuse.glusterfs", "fuse.ceph", "fuse.s3fs", "fuse.gcsfuse", "ncpfs", "ocfs2",
)  # fmt: skip

_SITE_COLUMNS = (
    "site_id, name, key_digest, incarnation, address, live, evicted, epoch, max_retained_bytes, bandwidth_bytes_per_s, "
    "may_hold, voided_sync, contributed, strikes, has_contributed"
)
_COMMIT_COLUMNS = "body, mean_loss, median_loss, cut, stood_out"
_MAX_INTEGER = (1 << 63) - 1


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


def _to_json(ranges: Iterable[DataRange]) -> str:
    return json.dumps([(r.first, r.num_samples) for r in ranges])


def _from_json(text: str) -> tuple[DataRange, ...]:
    return tuple(DataRange(first=first, num_samples=num_samples) for first, num_samples in json.loads(text))


def _commit_record(row: tuple[Any, ...]) -> CommitRecord:
    body, mean_loss, median_loss, cut, stood_out = row
    return CommitRecord(
        commit=wire.decode(Commit, body),
        mean_loss=mean_loss,
        median_loss=median_loss,
        cut=tuple(json.loads(cut)),
        stood_out=wire.decode(Outlier, stood_out) if stood_out is not None else None,
    )


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
            with self._explained():
                self._open()
        except BaseException:
            self._db.close()
            raise

    def _open(self) -> None:
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
                f"the store {self.path} has format {version}, this version of atoll reads {SCHEMA_VERSION}: use the "
                "version that made it"
            )
        self._db.execute("COMMIT")
        if damage := self._damage():
            raise StateError(f"the store {self.path} is damaged ({damage}): {RESTORE}")

    def _damage(self) -> str:
        """What of the file is not as it was written; '' if nothing is."""
        (verdict,) = self._db.execute("PRAGMA integrity_check(1)").fetchone()
        if verdict != "ok":
            return str(verdict)
        schema = "SELECT hex(type), hex(name), hex(tbl_name), hex(sql) FROM sqlite_master ORDER BY name"
        with closing(sqlite3.connect(":memory:")) as new:
            _make_tables(new)
            if self._db.execute(schema).fetchall() != new.execute(schema).fetchall():
                return "its tables are not those of a store"
        keep_checksums(self._db)
        return wrong_row(self._db)

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
        except (InvalidMessage, ValueError, TypeError) as error:
            raise StateError(f"the store {self.path} is damaged ({error}): {RESTORE}") from error

    # --- the interface

    def begin(self, settings: RunSettings, parent_json: str = "") -> Persisted:
        with self._explained(), self._readable():
            row = self._db.execute("SELECT run_id, settings_json, parent_json, term FROM run").fetchone()
            if row is None:
                if self._db.execute("SELECT count(*) FROM sites").fetchone() != (0,):
                    raise ValueError("table run: its row is missing")
                row = (settings.run_id, settings_to_json(settings), parent_json, 0)
            else:
                check_same_run(
                    f"the store {self.path}",
                    stored_run_id=row[0],
                    stored_settings=row[1],
                    stored_parent=row[2],
                    settings=settings,
                    parent_json=parent_json,
                )
            run_id, settings_json, stored_parent, term = row
            with self._transaction():  # a start that is refused is none
                self._db.execute(
                    "INSERT INTO run (id, run_id, settings_json, parent_json, term) VALUES (1, ?, ?, ?, 1) "
                    "ON CONFLICT (id) DO UPDATE SET term = term + 1",
                    (run_id, settings_json, stored_parent),
                )
                now = settings_to_json(settings)  # whole; what was stored may lack settings that are newer
                return self._read(run_id, now, stored_parent, term + 1, settings.sync.log_commits)

    def _read(self, run_id: str, settings_json: str, parent_json: str, term: int, log_commits: int) -> Persisted:
        db = self._db
        stop_reason, final_commit, final_reason, last_site_id = db.execute(
            "SELECT stop_reason, final_commit, final_reason, last_site_id FROM run"
        ).fetchone()
        manifest = db.execute("SELECT manifest, data_fingerprint FROM manifest").fetchone()
        newest = db.execute("SELECT sync, open, expected, outcome FROM syncs ORDER BY sync DESC LIMIT 1").fetchone()
        is_open = newest is not None and newest[3] == "open"
        commits = db.execute(
            f"SELECT {_COMMIT_COLUMNS} FROM commits ORDER BY commit_number DESC LIMIT ?", (log_commits,)
        ).fetchall()
        attestations = db.execute(
            "SELECT commit_number, state_hash FROM attestations ORDER BY commit_number DESC LIMIT ?", (log_commits,)
        ).fetchall()
        num_commits, last_commit = db.execute("SELECT count(*), max(commit_number) FROM commits").fetchone()
        if num_commits != (last_commit or 0):
            raise ValueError(f"table commits has {num_commits} rows, the last one is commit {last_commit}")
        (num_abandoned,) = db.execute(
            "SELECT count(*) FROM syncs WHERE outcome NOT IN ('open', 'committed')"
        ).fetchone()
        return Persisted(
            run_id=run_id,
            settings_json=settings_json,
            parent_json=parent_json,
            term=term,
            manifest=ManifestRecord(manifest=wire.decode(Manifest, manifest[0]), data_fingerprint=manifest[1])
            if manifest
            else None,
            sites=tuple(
                SiteRecord(
                    site_id=r[0],
                    name=r[1],
                    key_digest=r[2],
                    incarnation=r[3],
                    address=r[4],
                    live=bool(r[5]),
                    evicted=r[6],
                    epoch=r[7],
                    max_retained_bytes=r[8],
                    bandwidth_bytes_per_s=r[9],
                    may_hold=r[10],
                    voided_sync=r[11],
                    contributed=bool(r[12]),
                    strikes=r[13],
                    has_contributed=bool(r[14]),
                )
                for r in db.execute(f"SELECT {_SITE_COLUMNS} FROM sites ORDER BY site_id")
            ),
            last_site_id=last_site_id,
            open=OpenRecord(open=wire.decode(Open, newest[1]), expected=tuple(json.loads(newest[2])))
            if is_open
            else None,
            plans=tuple(
                PlanRecord(wire.decode(Plan, r[0]), tuple(map(_from_json, json.loads(r[1]))), tuple(json.loads(r[2])))
                for r in db.execute(
                    "SELECT plan, ranges, said FROM plans WHERE sync = ? ORDER BY attempt", (newest[0],)
                )
            )
            if is_open
            else (),
            last_sync=newest[0] if newest else 0,
            commits=tuple(map(_commit_record, reversed(commits))),
            losses=tuple(
                db.execute(
                    "SELECT commit_number, run_step, run_tokens, median_loss FROM commits "
                    "WHERE median_loss IS NOT NULL ORDER BY commit_number"
                )
            ),
            attestations=tuple(AttestationRecord(r[0], r[1]) for r in reversed(attestations)),
            lines=tuple(
                LineRecord(line=r[0], num_samples=r[1], frontier=r[2], returned=_from_json(r[3]))
                for r in db.execute("SELECT line, num_samples, frontier, returned FROM data_lines ORDER BY line")
            ),
            done=tuple(
                DoneRecord(line=r[0], ranges=_from_json(r[1]))
                for r in db.execute("SELECT line, done FROM data_lines WHERE done IS NOT NULL ORDER BY line")
            ),
            leases=tuple(
                LeaseRecord(line=r[0], site_id=r[1], incarnation=r[2], ranges=_from_json(r[3]))
                for r in db.execute(
                    "SELECT line, site_id, incarnation, ranges FROM data_leases ORDER BY line, site_id, incarnation"
                )
            ),
            rollbacks=self._rollbacks(),
            exclusions=self._exclusions(),
            kept_out=tuple(
                KeptOutRecord(name=r[0], key_digest=r[1], reason=r[2])
                for r in db.execute("SELECT name, key_digest, reason FROM kept_out ORDER BY name")
            ),
            void_starts=tuple(r[0] for r in db.execute("SELECT state_hash FROM void_starts ORDER BY state_hash")),
            num_abandoned=num_abandoned,
            stop_reason=stop_reason,
            finished=FinishedRecord(final_commit, final_reason) if final_commit is not None else None,
        )

    def _rollbacks(self) -> tuple[RollbackRecord, ...]:
        voided: dict[int, list[int]] = {}
        for branch, number in self._db.execute("SELECT branch, commit_number FROM voided_commits ORDER BY 1, 2"):
            voided.setdefault(branch, []).append(number)
        return tuple(
            RollbackRecord(branch=branch, commit=commit, voided=tuple(voided.get(branch, ())), reason=reason)
            for branch, commit, reason in self._db.execute(
                "SELECT branch, commit_number, reason FROM rollbacks ORDER BY branch"
            )
        )

    def _exclusions(self) -> tuple[ExclusionRecord, ...]:
        rows = self._db.execute(
            "SELECT sync, attempt, site_id, incarnation, by_site_id, reason FROM exclusions ORDER BY sync, site_id"
        )
        return tuple(
            ExclusionRecord(sync=r[0], attempt=r[1], site_id=r[2], incarnation=r[3], by_site_id=r[4], reason=r[5])
            for r in rows
        )

    def persist(self, term: int, records: Sequence[Record], wall_time_s: float) -> None:
        with self._explained(), self._transaction():
            (stored,) = self._db.execute("SELECT term FROM run").fetchone()
            if stored != term:
                raise StaleError(f"the store {self.path}: term {term} is over, the newest is {stored}")
            for record in records:
                self._write(record, wall_time_s)

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

    def _write(self, record: Record, wall_time_s: float) -> None:
        execute = self._db.execute
        match record:
            case SiteRecord():
                values = (
                    record.site_id,
                    record.name,
                    record.key_digest,
                    record.incarnation,
                    record.address,
                    record.live,
                    record.evicted,
                    record.epoch,
                    min(record.max_retained_bytes, _MAX_INTEGER),
                    min(record.bandwidth_bytes_per_s, _MAX_INTEGER),
                    record.may_hold,
                    record.voided_sync,
                    record.contributed,
                    record.strikes,
                    record.has_contributed,
                )
                places = ", ".join("?" * len(values))
                execute(f"INSERT OR REPLACE INTO sites ({_SITE_COLUMNS}) VALUES ({places})", values)
            case ForgetRecord():
                execute("UPDATE run SET last_site_id = ?", (record.last_site_id,))
                named = (
                    ("sites", "site_id"), ("data_leases", "line"), ("data_lines", "line"), ("exclusions", "site_id"),
                )  # fmt: skip
                for table, column in named:
                    for site_id in record.site_ids:
                        execute(f"DELETE FROM {table} WHERE {column} = ?", (site_id,))
            case ManifestRecord():
                execute(
                    "INSERT INTO manifest (id, manifest, data_fingerprint) VALUES (1, ?, ?)",
                    (wire.encode(record.manifest), record.data_fingerprint),
                )
            case OpenRecord():
                execute(
                    "INSERT INTO syncs (sync, open, expected) VALUES (?, ?, ?)",
                    (record.open.sync, wire.encode(record.open), json.dumps(record.expected)),
                )
                execute("DELETE FROM plans WHERE sync < ?", (record.open.sync,))
            case PlanRecord(plan):
                ranges = json.dumps([_to_json(r) for r in record.ranges])
                execute(
                    "INSERT OR REPLACE INTO plans (sync, attempt, plan, ranges, said) VALUES (?, ?, ?, ?, ?)",
                    (plan.sync, plan.attempt, wire.encode(plan), ranges, json.dumps(record.said)),
                )
            case CommitRecord():
                commit = record.commit
                execute(
                    "INSERT INTO commits "
                    f"(commit_number, {_COMMIT_COLUMNS}, run_step, run_tokens, committed_at) "
                    "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    (
                        commit.commit,
                        wire.encode(commit),
                        record.mean_loss,
                        record.median_loss,
                        json.dumps(record.cut),
                        wire.encode(record.stood_out) if record.stood_out is not None else None,
                        commit.run_step,
                        commit.run_tokens,
                        wall_time_s,
                    ),
                )
                self._end_sync(commit.sync, "committed", wall_time_s)
            case AbandonRecord(sync, reason):
                self._end_sync(sync, f"abandoned: {reason}", wall_time_s)
            case AttestationRecord(commit_number, state_hash):
                execute(
                    "INSERT OR REPLACE INTO attestations (commit_number, state_hash) VALUES (?, ?)",
                    (commit_number, state_hash),
                )
            case LineRecord():
                execute(
                    "INSERT INTO data_lines (line, num_samples, frontier, returned) VALUES (?, ?, ?, ?) ON CONFLICT "
                    "(line) DO UPDATE SET frontier = excluded.frontier, returned = excluded.returned",
                    (record.line, record.num_samples, record.frontier, _to_json(record.returned)),
                )
            case DoneRecord():
                execute("UPDATE data_lines SET done = ? WHERE line = ?", (_to_json(record.ranges), record.line))
            case LeaseRecord():
                key = (record.line, record.site_id, record.incarnation)
                if record.ranges:
                    execute(
                        "INSERT OR REPLACE INTO data_leases (line, site_id, incarnation, ranges) VALUES (?, ?, ?, ?)",
                        (*key, _to_json(record.ranges)),
                    )
                else:
                    execute("DELETE FROM data_leases WHERE (line, site_id, incarnation) = (?, ?, ?)", key)
            case RollbackRecord():
                execute(
                    "INSERT INTO rollbacks (branch, commit_number, reason, rolled_back_at) VALUES (?, ?, ?, ?)",
                    (record.branch, record.commit, record.reason, wall_time_s),
                )
                execute(
                    "INSERT INTO voided_commits (branch, commit_number, body, committed_at) "
                    "SELECT ?, commit_number, body, committed_at FROM commits WHERE commit_number > ?",
                    (record.branch, record.commit),
                )
                for table in ("commits", "attestations"):
                    execute(f"DELETE FROM {table} WHERE commit_number > ?", (record.commit,))
            case ExclusionRecord():
                execute(
                    "INSERT OR REPLACE INTO exclusions (sync, site_id, attempt, incarnation, by_site_id, reason, "
                    "excluded_at) VALUES (?, ?, ?, ?, ?, ?, ?)",
                    (
                        record.sync,
                        record.site_id,
                        record.attempt,
                        record.incarnation,
                        record.by_site_id,
                        record.reason,
                        wall_time_s,
                    ),
                )
                # Of the newest sync, which may be open, all are kept.
                execute(
                    "DELETE FROM exclusions WHERE sync < ? AND (sync, site_id) NOT IN "
                    "(SELECT sync, site_id FROM exclusions ORDER BY sync DESC, site_id DESC LIMIT ?)",
                    (record.sync, KEPT_EXCLUSIONS),
                )
            case KeptOutRecord():
                execute(
                    "INSERT OR REPLACE INTO kept_out (name, key_digest, reason, kept_out_at) VALUES (?, ?, ?, ?)",
                    (record.name, record.key_digest, record.reason, wall_time_s),
                )
            case LetInRecord(name):
                execute("DELETE FROM kept_out WHERE name = ?", (name,))
            case ResetRecord():
                execute("UPDATE run SET last_site_id = ?", (record.last_site_id,))
                for state_hash in record.void_starts:
                    execute(
                        "INSERT OR REPLACE INTO void_starts (state_hash, voided_at) VALUES (?, ?)",
                        (state_hash, wall_time_s),
                    )
                for table in ("manifest", "sites", "attestations", "data_lines", "data_leases"):
                    execute(f"DELETE FROM {table}")
            case StopRecord(reason):
                execute("UPDATE run SET stop_reason = ?", (reason,))
            case FinishedRecord(commit_number, reason):
                execute("UPDATE run SET final_commit = ?, final_reason = ?", (commit_number, reason))

    def _end_sync(self, sync: int, outcome: str, wall_time_s: float) -> None:
        self._db.execute("UPDATE syncs SET outcome = ?, ended_at = ? WHERE sync = ?", (outcome, wall_time_s, sync))

    def read_commits(self, first: int, last: int) -> tuple[tuple[CommitRecord, ...], tuple[AttestationRecord, ...]]:
        with self._explained(), self._readable():
            commits = tuple(
                _commit_record(r)
                for r in self._db.execute(
                    f"SELECT {_COMMIT_COLUMNS} FROM commits WHERE commit_number BETWEEN ? AND ? ORDER BY commit_number",
                    (first, last),
                )
            )
            if [r.commit.commit for r in commits] != list(range(first, last + 1)):
                raise ValueError(f"of commits {first} to {last} only {len(commits)} are there")
            attestations = self._db.execute(
                "SELECT commit_number, state_hash FROM attestations WHERE commit_number BETWEEN ? AND ? "
                "ORDER BY commit_number",
                (first, last),
            )
            return commits, tuple(AttestationRecord(r[0], r[1]) for r in attestations)

    def commit_times(self) -> dict[int, float]:
        with self._explained():
            return dict(self._db.execute("SELECT commit_number, committed_at FROM commits"))

    def close(self) -> None:
        self._db.close()
