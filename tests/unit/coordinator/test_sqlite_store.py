"""What only a file can get wrong."""

from __future__ import annotations

import hashlib
import os
import sqlite3
from pathlib import Path

import pytest

from atoll.coordinator import sql_store, sqlite_store
from atoll.coordinator.core.events import AttestationRecord, StopRecord
from atoll.coordinator.core.persisted import RunRecord
from atoll.coordinator.sqlite_store import SqliteStore
from atoll.protocol import file_systems
from atoll.protocol.errors import ConfigError, HostError, StateError
from tests.harness.coordinator_story import a_hash, some_settings

SETTINGS = some_settings()


SCHEMA = (9, "1dc45bc338898df0294ce633b7852993")
"""The format of the store, and the BLAKE2b-128 of schema.sql."""


def test_another_schema_is_another_format() -> None:
    """A store of another one under the same number would be called damaged, not another version's."""
    schema = (Path(__file__).parents[3] / "coordinator" / "schema.sql").read_bytes()
    found = (sql_store.SCHEMA_VERSION, hashlib.blake2b(schema, digest_size=16).hexdigest())
    assert found == SCHEMA, "raise SCHEMA_VERSION, if stores of this number were released, and write both here"


def test_a_second_store_on_the_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_store, "LOCK_WAIT_S", 0.0)
    first = SqliteStore(tmp_path / "run.db")
    with pytest.raises(HostError, match="another coordinator has it open"):
        SqliteStore(tmp_path / "run.db")
    first.close()
    SqliteStore(tmp_path / "run.db").close()


def test_the_lock_is_held_between_transactions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_store, "LOCK_WAIT_S", 0.0)
    first = SqliteStore(tmp_path / "run.db")
    first.begin(SETTINGS)
    first.persist(1, (StopRecord("x"),), 1.0)
    with pytest.raises(HostError, match="another coordinator"):
        SqliteStore(tmp_path / "run.db")
    first.close()


def test_a_transaction_is_kept_whole_or_not_at_all(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "run.db")
    store.begin(SETTINGS)
    broken = AttestationRecord(2, object())  # type: ignore[arg-type]
    with pytest.raises(AttributeError):
        store.persist(1, (AttestationRecord(1, a_hash("a")), broken), 1.0)
    store.close()
    store = SqliteStore(tmp_path / "run.db")
    assert store.begin(SETTINGS).all(AttestationRecord) == ()
    store.close()


def test_a_file_that_is_no_database(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    path.write_bytes(b"these are not the bytes of a database" * 100)
    with pytest.raises(StateError, match="damaged or not a database"):
        SqliteStore(path)


def test_another_programs_database(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE songs (name TEXT)")
    db.close()
    with pytest.raises(StateError, match="another program"):
        SqliteStore(path)


def test_a_damaged_store(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    store = SqliteStore(path)
    store.begin(SETTINGS)
    store.close()
    data = bytearray(path.read_bytes())
    data[4096:] = os.urandom(len(data) - 4096)
    path.write_bytes(data)
    with pytest.raises(StateError, match="damaged"):
        SqliteStore(path).begin(SETTINGS)


@pytest.mark.parametrize("version", [5, 6, 99])
def test_a_store_of_another_version(tmp_path: Path, version: int) -> None:
    path = tmp_path / "run.db"
    SqliteStore(path).close()
    with sqlite3.connect(path) as db:
        db.execute(f"PRAGMA user_version = {version}")
    db.close()
    with pytest.raises(StateError, match=f"format {version}.*end the run with the version that made it"):
        SqliteStore(path)


def test_no_folder_and_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no folder"):
        SqliteStore(tmp_path / "missing" / "run.db")
    with pytest.raises(ConfigError, match="is a folder"):
        SqliteStore(tmp_path)


def test_a_full_disk_says_so(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "run.db")
    store.begin(SETTINGS)
    (pages,) = store._db.execute("PRAGMA page_count").fetchone()
    store._db.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(HostError, match="the disk is full"):
        store.persist(1, (StopRecord("x" * 1_000_000),), 1.0)
    store.close()


def test_the_store_is_for_its_owner_only(tmp_path: Path) -> None:
    SqliteStore(tmp_path / "run.db").close()
    assert (tmp_path / "run.db").stat().st_mode & 0o077 == 0


def test_network_file_systems_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_systems, "kind_of", lambda path: "nfs4")
    with pytest.raises(ConfigError, match=r"network file system \(nfs4\)"):
        SqliteStore(tmp_path / "run.db")


def test_a_store_whose_settings_are_none(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    store = SqliteStore(path)
    store.begin(SETTINGS)
    with store._transaction():
        _, total = store._head()
        whole, _ = store._keep((RunRecord(run_id="run", settings_json="no JSON"),), total, 1.0)
        store._write_head(1, whole)
    store.close()
    with pytest.raises(StateError, match="damaged"):
        SqliteStore(path).begin(SETTINGS)


def test_a_store_that_lacks_a_commit(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "run.db")
    store.begin(SETTINGS)
    with pytest.raises(StateError, match=r"damaged .*of commits 3 to 4 only 0 are there"):
        store.read_commits(3, 4)
    store.close()


def test_a_store_whose_text_is_not_text(tmp_path: Path) -> None:
    """SQLite itself reports the name of what is damaged; it may not be UTF-8."""
    path = tmp_path / "run.db"
    store = SqliteStore(path)
    store.begin(SETTINGS)
    store.close()
    data = path.read_bytes()
    path.write_bytes(data.replace(b"CREATE TABLE", b"\x80" * 12))
    with pytest.raises(StateError, match="damaged"):
        SqliteStore(path).begin(SETTINGS)
