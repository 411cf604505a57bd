"""A store in which a bit is another one, or a row is missing or old: refused with the place, never believed."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import struct
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atoll.coordinator.config import CoordinatorConfig
from atoll.coordinator.core import events as e
from atoll.coordinator.core.core import Core
from atoll.coordinator.core.persisted import KINDS
from atoll.coordinator.service import CoordinatorServer
from atoll.coordinator.sqlite_store import SqliteStore
from atoll.protocol.errors import StateError
from atoll.protocol.messages import DataRange
from tests.harness.coordinator_story import Story, ranges_of, some_settings
from tests.unit.coordinator.test_rollback import back, power_cut

SETTINGS = some_settings()
SCHEMA = (Path(__file__).parents[3] / "coordinator" / "schema.sql").read_text(encoding="utf-8")


def columns() -> list[tuple[str, str]]:
    with closing(sqlite3.connect(":memory:")) as db:
        db.executescript(SCHEMA)
        tables = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        return [(table, column[1]) for table in tables for column in db.execute(f"PRAGMA table_info({table})")]


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    """A start that was taken back, a site that is banned, three commits, of which a power cut voided the last; a plan
    of the sync that is open, from which a site was left out; leases. It has ended."""
    path = tmp_path_factory.mktemp("store") / "run.db"
    store = SqliteStore(path)
    story = Story(SETTINGS, store=store)
    story.join("x")
    story.applied("x", 0, "strange")
    assert not story.reset()
    assert not story.ban("x", by="root")
    story.start("a", "b")
    for name in "ab":
        story.wants(name, 100)
    for number in range(3):
        story.ready("a", data=ranges_of(f"{10 * number}-{10 * number + 9}"))
        story.ready("b", data=ranges_of(f"{100 + 10 * number}-{100 + 10 * number + 9}"))
        for name in "ab":
            story.done(name, f"s{number}")
        for name in "ab":
            story.applied(name, number + 1, f"s{number + 1}")
    power_cut(story, "a", "b")
    for name in "ab":
        back(story, name, 2)
    for name in "ab":
        story.ready(name, data=[DataRange(first=story.wants(name, 100)[0].first, num_samples=10)])
    story.failed("a", tensor="weight", outliers="b")
    story.happens(e.InviteAsked(role="site", name="y", invite_id="0123"))
    assert story.contributor_ids() == [2]
    store.close()
    return story


@pytest.fixture
def path(story: Story, tmp_path: Path) -> Path:
    assert isinstance(story.store, SqliteStore)
    return Path(shutil.copy(story.store.path, tmp_path / "run.db"))


def flipped(value: Any, kind: str) -> Any:
    """With another bit; of what is empty or NULL, something."""
    if kind == "INTEGER":
        return (value or 0) ^ 1 << 20
    if kind == "REAL":
        (bits,) = struct.unpack("<q", struct.pack("<d", value or 0.0))
        return struct.unpack("<d", struct.pack("<q", bits ^ 1 << 20))[0]
    data = bytearray(value.encode() if isinstance(value, str) else value or b"") or bytearray(b"0")
    data[len(data) // 2] ^= 0x08
    return bytes(data)


def change(path: Path, statement: str, *values: Any) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("PRAGMA ignore_check_constraints = ON")
        assert db.execute(statement, values).rowcount == 1


def start(path: Path) -> None:
    async def main(store: SqliteStore) -> None:
        CoordinatorServer(CoordinatorConfig(listen="127.0.0.1:0", store_path=path), SETTINGS, store)

    with closing(SqliteStore(path)) as store:
        asyncio.run(main(store))


def test_the_store_is_sound(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db:
        kinds = {kind for (kind,) in db.execute("SELECT kind FROM records")}
    assert kinds == set(KINDS) - {
        "forget",
        "drawing",  # in runs with audits, as are the next two
        "openaudits",
        "auditsended",
        "influences",  # in runs that average by influence
        "banlifted",
        "paused",
        "resumed",
        "inviteforgotten",
        "finished",
        "stop",
        "changed",
    }
    start(path)
    start(path)


@pytest.mark.parametrize(("table", "column"), columns())
def test_a_flipped_bit_in_any_column_is_found(path: Path, table: str, column: str) -> None:
    with closing(sqlite3.connect(path)) as db:
        found = db.execute(f"SELECT rowid, {column} FROM {table} ORDER BY rowid").fetchall()
        ((kind,),) = db.execute("SELECT type FROM pragma_table_info(?) WHERE name = ?", (table, column)).fetchall()
    new = "CAST(? AS TEXT)" if kind == "TEXT" else "?"
    for number, (row, value) in enumerate(found):
        damaged = Path(shutil.copy(path, path.with_name(f"{number}.db")))
        change(damaged, f"UPDATE {table} SET {column} = {new} WHERE rowid = ?", flipped(value, kind), row)
        with pytest.raises(StateError, match=rf"{number}\.db is damaged \(.*\b{table}\b.*restore it from a copy"):
            SqliteStore(damaged)


def test_a_row_that_is_damaged_while_the_store_is_open_is_found(path: Path) -> None:
    with closing(SqliteStore(path)) as store:
        term = store.begin(SETTINGS).term
        store._db.execute("UPDATE records SET body = x'7b7d' WHERE kind = 'site' AND name = ''")
        store.persist(term, (e.DoneRecord(line=0, ranges=()),), 1.0)
    with pytest.raises(StateError, match=r"table records, row .* \(site .*\)"):
        SqliteStore(path)


def test_any_row_that_is_missing_is_missed(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db:
        found = [seq for (seq,) in db.execute("SELECT seq FROM records")]
    for seq in found:
        damaged = Path(shutil.copy(path, path.with_name(f"{seq}.db")))
        change(damaged, "DELETE FROM records WHERE seq = ?", seq)
        with pytest.raises(StateError, match=r"a row is missing, or is not the newest one of its key.*restore it"):
            start(damaged)
    change(path, "DELETE FROM head")
    with pytest.raises(StateError, match=r"table head: its row is missing.*restore it from a copy"):
        start(path)


def test_any_row_as_it_was_once_does_not_fit(path: Path, tmp_path: Path) -> None:
    """A page that the disk said it had written: everything in it has a right checksum."""
    newer = Path(shutil.copy(path, tmp_path / "newer.db"))
    with closing(SqliteStore(newer)) as store:
        persisted = store.begin(SETTINGS)
        again: Any = persisted.records.values()
        store.persist(persisted.term, list(again), 2.0)  # the same, later
    with closing(sqlite3.connect(path)) as db:
        old = db.execute("SELECT * FROM records WHERE kind IN ('line', 'site', 'open', 'attestation')").fetchall()
        head = db.execute("SELECT * FROM head").fetchall()
    for number, row in enumerate([*old, *head]):
        stale = Path(shutil.copy(newer, tmp_path / f"stale{number}.db"))
        table = "head" if row in head else "records"
        change(stale, f"INSERT OR REPLACE INTO {table} VALUES ({', '.join('?' * len(row))})", *row)
        with pytest.raises(StateError, match=r"a row is missing, or is not the newest one of its key"):
            start(stale)


def test_changed_tables_are_refused(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.execute("ALTER TABLE head RENAME COLUMN total TO totam")
    with pytest.raises(StateError, match="its tables are not those of a store"):
        SqliteStore(path)


def test_an_account_of_positions_that_does_not_add_up(path: Path) -> None:
    with closing(SqliteStore(path)) as store:
        persisted = store.begin(SETTINGS)
    Core(SETTINGS, persisted, 0.0, 0.0)
    for cls, says in ((e.LineRecord, "there is no such line"), (e.LeaseRecord, "are neither done, leased nor open")):
        records = {key: record for key, record in persisted.records.items() if not isinstance(record, cls)}
        with pytest.raises(StateError, match=says):
            Core(SETTINGS, replace(persisted, records=records), 0.0, 0.0)
