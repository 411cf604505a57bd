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
from atoll.coordinator.core.machine import Core
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
    """A start that was taken back, a site that is kept out, three commits, of which a power cut voided the last; a plan
    of the sync that is open, from which a site was left out; leases. It has ended."""
    path = tmp_path_factory.mktemp("store") / "run.db"
    store = SqliteStore(path)
    story = Story(SETTINGS, store=store)
    story.join("x")
    story.applied("x", 0, "strange")
    assert not story.reset()
    assert not story.evict("x")
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
        for table in {table for table, _ in columns()}:
            assert db.execute(f"SELECT count(*) FROM {table}").fetchone() > (0,), table
    start(path)
    start(path)


@pytest.mark.parametrize(("table", "column"), columns())
def test_a_flipped_bit_in_any_column_is_found(path: Path, table: str, column: str) -> None:
    with closing(sqlite3.connect(path)) as db:
        row, value = db.execute(f"SELECT rowid, {column} FROM {table} ORDER BY rowid DESC").fetchone()
        ((kind,),) = db.execute("SELECT type FROM pragma_table_info(?) WHERE name = ?", (table, column)).fetchall()
    new = "CAST(? AS TEXT)" if kind == "TEXT" else "?"
    change(path, f"UPDATE {table} SET {column} = {new} WHERE rowid = ?", flipped(value, kind), row)
    with pytest.raises(StateError, match=rf"run\.db is damaged \(.*\b{table}\b.*restore it from a copy"):
        SqliteStore(path)


def test_a_row_that_is_damaged_while_the_store_is_open_does_not_get_a_new_checksum(path: Path) -> None:
    store = SqliteStore(path)
    term = store.begin(SETTINGS).term
    store._db.execute("UPDATE data_lines SET checksum = x'00'")
    with pytest.raises(StateError, match="table data_lines"):
        store.persist(term, (e.DoneRecord(line=0, ranges=()),), 1.0)
    store.close()


@pytest.mark.parametrize(
    ("statement", "says"),
    [
        ("DELETE FROM run", "table run: its row is missing"),
        ("DELETE FROM commits WHERE commit_number = 1", "table commits has 1 rows, the last one is commit 2"),
        ("DELETE FROM commits WHERE commit_number = 2", r"is open on commit 2, the last commit is 1"),
        ("DELETE FROM data_lines", "there is no such line"),
        ("DELETE FROM data_leases WHERE site_id = 3", "line 0: positions .* are neither done, leased nor open"),
    ],
)
def test_a_row_that_is_missing_is_missed(path: Path, statement: str, says: str) -> None:
    change(path, statement)
    with pytest.raises(StateError, match=rf"run\.db is damaged \(.*{says}.*restore it from a copy"):
        start(path)


def test_a_row_as_it_was_once_does_not_fit(path: Path) -> None:
    """A page that the disk said it had written: everything in it has a right checksum."""
    with closing(SqliteStore(path)) as store:
        term = store.begin(SETTINGS).term
        store.persist(term, (e.DoneRecord(line=0, ranges=ranges_of("0-9,100-109")),), 1.0)
    with pytest.raises(StateError, match="line 0: positions 10 to 19 are neither done, leased nor open"):
        start(path)


def test_changed_tables_are_refused(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.execute("ALTER TABLE syncs RENAME COLUMN outcome TO outcomf")
    with pytest.raises(StateError, match="its tables are not those of a store"):
        SqliteStore(path)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (lambda p: {"commits": p.commits[1:]}, "commit 1 is missing"),
        (lambda p: {"commits": p.commits[:1]}, "is open on commit 2, the last commit is 1"),
        (lambda p: {"commits": (p.commits[0], p.commits[0])}, "commit 1 follows commit 1"),
        (
            lambda p: {"commits": (altered(p.commits[0], run_tokens=7), p.commits[1])},
            "commit 1 adds 200 tokens to 0 an",
        ),
        (lambda p: {"commits": (p.commits[0], altered(p.commits[1], run_tokens=7))}, "commit 2 adds 200 tokens to 200"),
        (lambda p: {"commits": (p.commits[0], altered(p.commits[1], sync=1))}, "commit 2 is of sync 1, after sync 1"),
        (lambda p: {"term": 1}, "commit 1 is of term 1, this is term 1"),
        (lambda p: {"last_sync": 1}, "commit 2 is of sync 2, after sync 1 of 1"),
        (
            lambda p: {"open": None, "plans": (), "finished": e.FinishedRecord(5, "")},
            "over with commit 5, the last com",
        ),
    ],
)
def test_commits_that_do_not_add_up(path: Path, changes: Any, says: str) -> None:
    with closing(SqliteStore(path)) as store:
        persisted = store.begin(SETTINGS)
    Core(SETTINGS, persisted, 0.0)
    with pytest.raises(StateError, match=says):
        Core(SETTINGS, replace(persisted, **changes(persisted)), 0.0)


def altered(record: e.CommitRecord, **changes: Any) -> e.CommitRecord:
    return replace(record, commit=replace(record.commit, **changes))


def test_commits_list_what_is_done(path: Path) -> None:
    with closing(SqliteStore(path)) as store:
        persisted = store.begin(SETTINGS)
    (line,) = persisted.lines
    opened = replace(line, returned=(DataRange(first=0, num_samples=line.frontier),))
    with pytest.raises(StateError, match="commit 1 lists positions of line 0 that are not done"):
        Core(SETTINGS, replace(persisted, lines=(opened,), done=(), leases=()), 0.0)
