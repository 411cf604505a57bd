"""The coordinator's store on a disk that is full, read-only or damaged, and put back from a copy; real processes."""

from __future__ import annotations

import os
import shutil
import sqlite3
import sys
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import pytest

from atoll.coordinator import admin
from atoll.protocol.errors import HostError, RefusedError, StateError
from atoll.protocol.outer_settings import OuterSettings
from atoll.protocol.settings import RunSettings
from atoll.protocol.sync_settings import SyncSettings
from tests.harness.commit_records import commits_of
from tests.harness.local_run import LocalRun, Process, Status
from tests.harness.small_disk import read_only, small_disk

WORKER = [sys.executable, str(Path(__file__).parents[1] / "workers" / "plain_worker.py"), "--tensors", "a=30x40"]
SLOW = [*WORKER, "--step-delay-s", "0.02"]
SETTINGS = RunSettings(
    run_id="run",
    steps=100_000,
    min_sites=2,
    data="local",
    time_limits="local",
    sync=SyncSettings(every=10, chunk_elements=1000, codec="fp32"),
    outer=OuterSettings(learning_rate=0.7, momentum=0.5),
)
LIMIT_S = 150.0

pytestmark = pytest.mark.timeout(400)


def committed(count: int) -> Callable[[Status], bool]:
    return lambda status: bool(status["last_commit"] >= count)


def stopped(process: Process) -> None:
    process.popen.terminate()
    assert process.wait(LIMIT_S) == 0


def last_commit(store: Path) -> int:
    """Of a store that nobody has open. A coordinator that is told to stop may still commit the sync that is open."""
    with closing(sqlite3.connect(store)) as db:
        ((number,),) = db.execute("SELECT max(number) FROM records WHERE kind = 'commit'")
    return int(number)


def not_started(run: LocalRun, store: Path) -> Process:
    """A coordinator that ends by itself."""
    command = [sys.executable, "-m", "atoll", "coordinator", str(run.toml), "--listen", "127.0.0.1:0"]
    process = run.start("coordinator-again", [*command, "--store", str(store)])
    process.wait(LIMIT_S)
    assert not any("Traceback" in line for line in process.lines), process.lines
    return process


def fill_disk(path: Path) -> None:
    """Down to the last block."""
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(4096)):
            pass


def assert_ends_well(run: LocalRun, store: Path) -> None:
    """It goes on, and is stopped then."""
    at = run.status()["last_commit"]
    run.wait(lambda s: committed(at + 3)(s) and len(s["commits"][-1]["contributors"]) == 2, LIMIT_S, "the run goes on")
    admin.ask(store, "stop", reason="the test is over")
    assert run.wait_all(LIMIT_S, ["a", "b"]) == {"a": 0, "b": 0}
    last = run.status()["last_commit"]
    hashes = run.hashes(last)
    assert set(hashes) == {"a", "b"}
    assert len(set(hashes.values())) == 1
    assert run.coordinator is not None
    stopped(run.coordinator)
    assert [record.commit.commit for record in commits_of(store)] == list(range(1, last + 1)), "none twice, none lost"


@pytest.mark.root
def test_a_full_disk_ends_the_coordinator_with_a_reason_and_not_the_run(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 2 << 20), LocalRun(tmp_path, SETTINGS) as run:
        store = tmp_path / "disk" / "run.db"
        coordinator = run.start_coordinator(extra=["--store", str(store)])
        run.start_node("a", SLOW)
        run.start_node("b", SLOW)
        run.wait(lambda s: committed(2)(s) and s["store_disk"] is not None, LIMIT_S)
        assert 0 < run.status()["store_disk"]["total_bytes"] <= 2 << 20, "of its own disk"
        filler = tmp_path / "disk" / "filler"
        fill_disk(filler)
        assert coordinator.wait(LIMIT_S) == HostError.exit_code
        assert any("run.db: the disk is full; make room" in line for line in coordinator.lines), coordinator.lines
        assert not any("Traceback" in line for line in coordinator.lines), coordinator.lines
        assert not_started(run, store).popen.returncode == HostError.exit_code
        filler.unlink()
        run.start_coordinator(extra=["--store", str(store)])
        assert_ends_well(run, store)


@pytest.mark.root
def test_a_disk_that_cannot_be_written_is_an_error_that_says_so(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 2 << 20), LocalRun(tmp_path, SETTINGS) as run:
        store = tmp_path / "disk" / "run.db"
        stopped(run.start_coordinator(extra=["--store", str(store)]))
        with read_only(tmp_path / "disk"):
            process = not_started(run, store)
        assert process.popen.returncode == HostError.exit_code
        assert any("run.db cannot be opened: Read-only file system" in line for line in process.lines), process.lines


def test_a_damaged_store_is_refused(tmp_path: Path) -> None:
    with LocalRun(tmp_path, SETTINGS) as run:
        store = tmp_path / "run.db"
        coordinator = run.start_coordinator()
        run.start_node("a", SLOW)
        run.start_node("b", SLOW)
        run.wait(committed(2), LIMIT_S)
        stopped(coordinator)
        data = bytearray(store.read_bytes())
        data[4096 : len(data) // 2] = os.urandom(len(data) // 2 - 4096)
        store.write_bytes(data)
        process = not_started(run, store)
        assert process.popen.returncode == StateError.exit_code
        assert any("is damaged" in line and "restore it from a copy" in line for line in process.lines), process.lines


def test_a_store_with_a_flipped_bit_or_without_a_row_is_refused_and_its_copy_is_not(tmp_path: Path) -> None:
    with LocalRun(tmp_path, SETTINGS) as run:
        store = tmp_path / "run.db"
        coordinator = run.start_coordinator()
        run.start_node("a", SLOW)
        run.start_node("b", SLOW)
        run.wait(committed(2), LIMIT_S)
        stopped(coordinator)
        shutil.copyfile(store, tmp_path / "copy.db")
        for statement, says in (
            (
                "UPDATE records SET body = CAST(body || ' ' AS BLOB) WHERE kind = 'commit' AND number = 2",
                "(commit 2): its checksum is not that of its values",
            ),
            (
                "DELETE FROM records WHERE kind = 'commit' AND number = "
                "(SELECT max(number) FROM records WHERE kind = 'commit')",
                "a row is missing",
            ),
        ):
            with closing(sqlite3.connect(store, isolation_level=None)) as db:
                assert db.execute(statement).rowcount == 1
            process = not_started(run, store)
            assert process.popen.returncode == StateError.exit_code
            assert any(f"{store} is damaged" in line and says in line for line in process.lines), process.lines
            shutil.copyfile(tmp_path / "copy.db", store)
        run.start_coordinator()
        assert_ends_well(run, store)


def test_a_store_is_put_back_from_a_copy_and_an_older_copy_is_refused_by_the_sites(tmp_path: Path) -> None:
    with LocalRun(tmp_path, SETTINGS) as run:
        store = tmp_path / "run.db"
        coordinator = run.start_coordinator()
        run.start_node("a", SLOW)
        run.start_node("b", SLOW)
        run.wait(committed(2), LIMIT_S)
        stopped(coordinator)  # the sites train on meanwhile
        shutil.copyfile(store, tmp_path / "older.db")
        older = last_commit(tmp_path / "older.db")
        coordinator = run.start_coordinator()
        run.wait(committed(older + 3), LIMIT_S)
        stopped(coordinator)
        shutil.copyfile(store, tmp_path / "newest.db")

        shutil.copyfile(tmp_path / "older.db", store)
        coordinator = run.start_coordinator()
        for name in "ab":
            assert run.nodes[name].wait(LIMIT_S) == RefusedError.exit_code
            text = " ".join(run.nodes[name].lines)
            assert "old or a wrong store: start it with the newest copy" in text, run.nodes[name].lines
        assert run.status()["last_commit"] == older
        stopped(coordinator)

        shutil.copyfile(tmp_path / "newest.db", store)
        run.start_coordinator()
        for name in "ab":
            run.start_node(name, SLOW)
        assert_ends_well(run, store)
