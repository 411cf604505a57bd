"""Snapshots, and the state that is put together from them, the outer state and the payload log."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from atoll.node.dataplane import snapshot
from atoll.node.dataplane.chunk_store import ChunkRecord
from atoll.node.dataplane.outer_state import OuterState, PinnedChunk
from atoll.node.dataplane.payload_log import PayloadLog
from atoll.node.dataplane.rebuild import Rebuilder
from atoll.node.dataplane.snapshot import SnapshotFile, Snapshots
from atoll.protocol.errors import StateError
from atoll.protocol.layout import Layout, state_hash
from atoll.protocol.settings import RunSettings
from atoll.protocol.sync_settings import SyncSettings
from tests.harness.data_plane import OPTIMIZER, RUN, apply_all, layout, logged, payloads, seeded, update_of

SLOTS = ("momentum",)


class Site:
    """The three things a node has on its disk, after some commits; `records[n]` is what commit n really is."""

    def __init__(self, folder: Path, *, keep_commits: int = 32, num_fragments: int = 1) -> None:
        self.folder = folder
        self.keep_commits = keep_commits
        self.layout: Layout = layout(num_fragments=num_fragments)
        self.log = PayloadLog(
            folder / "payloads", self.layout, RunSettings(run_id=RUN, sync=SyncSettings(log_commits=keep_commits))
        )
        self.snapshots = Snapshots(folder / "snapshots", self.layout, SLOTS, RUN, lambda: None)
        self.outer = seeded(folder / "state", self.layout)
        self.outer.history = lambda: self.log.history
        self.records: list[list[ChunkRecord]] = [self.now()]

    def now(self) -> list[ChunkRecord]:
        return [self.outer.read(c.index) for c in self.layout.chunks]

    def commit(self, count: int = 1) -> Site:
        for _ in range(count):
            number = len(self.records)
            found = payloads(self.outer, (number, number + 50))
            logged(self.log, self.outer, number, found)
            apply_all(self.outer, found, number)
            self.records.append(self.now())
        return self

    def snapshot(self, keep: int = 2) -> Site:
        self.snapshots.write(self.outer, keep, self.snapshots.num_cleared)
        return self

    def restarted(self, *, without_outer: bool = False) -> OuterState:
        """What the next start of the node puts together."""
        self.log.close()
        if without_outer:
            OuterState.create(self.folder / "state", self.layout, SLOTS, RUN)
        self.log = PayloadLog(
            self.folder / "payloads",
            self.layout,
            RunSettings(run_id=RUN, sync=SyncSettings(log_commits=self.keep_commits)),
        )
        self.snapshots = Snapshots(self.folder / "snapshots", self.layout, SLOTS, RUN, lambda: None)
        self.outer = OuterState.open(self.folder / "state", self.layout, SLOTS, RUN, history=lambda: self.log.history)
        self.rebuilder.rebuild()
        return self.outer

    @property
    def rebuilder(self) -> Rebuilder:
        return Rebuilder(self.outer, self.log, self.snapshots, OPTIMIZER)

    def assert_is(self, commit: int) -> None:
        assert self.outer.commit == commit
        assert self.now() == self.records[commit]

    def damage(self, record: bytes) -> None:
        """Other bytes where this record lies in the outer state."""
        path = self.folder / "state" / "outer.chunks"
        start = path.read_bytes().index(record)
        with path.open("r+b") as file:
            file.seek(start)
            file.write(b"\xff" * 8)

    def tear_log(self, commit: int) -> None:
        """The payloads of a commit are there by name only."""
        (path,) = (self.folder / "payloads").glob(f"attempt-{commit}-1-0*.payloads")
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 2] + bytes(len(data) - len(data) // 2))


@pytest.fixture(name="site", params=[1, 3], ids="of_{}".format)
def _site(tmp_path: Path, request: pytest.FixtureRequest) -> Site:
    return Site(tmp_path, num_fragments=request.param)


def test_snapshot_and_log_give_the_newest_commit(site: Site) -> None:
    site.commit(2).snapshot().commit(3).restarted(without_outer=True)
    site.assert_is(5)


def test_without_a_snapshot_there_is_nothing_to_begin_with(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    assert site.commit(3).restarted(without_outer=True).commit is None
    assert "no whole state can be put together here" in caplog.text


def test_a_chunk_that_is_damaged_comes_from_the_snapshot(site: Site) -> None:
    site.commit(2).snapshot().commit(2)
    site.damage(site.records[4][1].data)
    site.restarted()
    site.assert_is(4)


def test_a_frozen_chunk_comes_from_its_own_file(site: Site) -> None:
    site.snapshot().commit()
    assert (site.folder / "snapshots" / snapshot.FROZEN).exists()
    site.damage(site.records[0][-1].data)
    site.restarted()
    site.assert_is(1)


@pytest.mark.parametrize("torn", [3, 4, 5])
def test_a_log_that_is_torn_ends_the_way_there_and_says_so(
    site: Site, torn: int, caplog: pytest.LogCaptureFixture
) -> None:
    site.commit(2).snapshot().commit(3)
    site.tear_log(torn)
    site.restarted(without_outer=True)
    site.assert_is(torn - 1)
    if torn < 5:
        assert "commit 5, which was here, cannot be put together any more" in caplog.text


def test_what_a_log_does_not_tell_of_is_kept_for_a_fetch(tmp_path: Path) -> None:
    """The chunks of a snapshot are whole, and no commit that is known here leads to them: the disk lost a record."""
    site = Site(tmp_path, num_fragments=3)
    site.commit(3).snapshot()
    (site.folder / "payloads" / "commit-3.record").unlink()
    assert site.restarted(without_outer=True).commit is None
    assert site.outer.versions == [record.version for record in site.records[3]]


def test_an_older_snapshot_is_used_if_the_newest_is_damaged(site: Site) -> None:
    site.commit().snapshot().commit(2).snapshot().commit()
    newest = site.folder / "snapshots" / "commit-3.snapshot"
    data = bytearray(newest.read_bytes())
    data[-100] ^= 1  # a record: its table is right
    newest.write_bytes(data)
    site.restarted(without_outer=True)
    site.assert_is(4)


def test_a_snapshot_that_is_cut_off_is_removed_and_named(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    site.commit().snapshot().commit().snapshot()
    newest = site.folder / "snapshots" / "commit-2.snapshot"
    newest.write_bytes(newest.read_bytes()[:-1])
    again = Snapshots(site.folder / "snapshots", site.layout, SLOTS, RUN, lambda: None)
    assert [f.newest for f in again.files] == [1]
    assert not newest.exists()
    assert "commit-2.snapshot" in caplog.text


def test_chunks_of_two_commits_in_one_snapshot(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit that is applied while the snapshot is written: the log puts the chunks together again."""
    site.commit()
    read = site.outer.read

    def and_commit(chunk: int) -> ChunkRecord:
        if chunk == 2:
            monkeypatch.undo()
            site.commit()
        return read(chunk)

    monkeypatch.setattr(site.outer, "read", and_commit)
    site.snapshot()
    (written,) = site.snapshots.files
    assert (written.oldest, written.newest) == ((1,) if len(site.layout.fragments) == 1 else (0, 2, 1), 2)
    site.commit()
    site.restarted(without_outer=True)
    site.assert_is(3)


def test_old_snapshots_go(site: Site) -> None:
    for _ in range(4):
        site.commit().snapshot(keep=2)
    assert [f.newest for f in site.snapshots.files] == [4, 3]
    assert sorted(p.name for p in (site.folder / "snapshots").iterdir()) == [
        "commit-3.snapshot", "commit-4.snapshot", "frozen.snapshot",
    ]  # fmt: skip


def test_damage_is_not_copied_into_a_snapshot(site: Site) -> None:
    site.commit().snapshot()
    site.damage(site.records[1][1].data)
    with pytest.raises(StateError, match=rf"chunk 1 of .* is damaged at commit {site.records[1][1].version}"):
        site.snapshot()
    assert [f.newest for f in site.snapshots.files] == [1]
    assert not (site.folder / "snapshots" / "snapshot.new").exists()


def test_damage_is_found_by_the_own_hash_until_the_next_commit_and_an_older_record_is_put_together(site: Site) -> None:
    site.snapshot().commit(2)
    assert site.outer.damaged() == []
    site.damage(site.records[2][1].data)
    assert site.outer.damaged() == [1]
    site.commit()  # computed from the damaged values: it has its own hash
    assert site.outer.damaged() == []
    assert site.rebuilder.record_at(chunk=1, commit=2) == site.records[2][1]
    with pytest.raises(StateError):
        site.rebuilder.record_at(chunk=1, commit=4)
    site.outer.forget(1)
    assert site.outer.missing == [1]
    assert site.outer.commit is None
    assert site.rebuilder.rebuild() == 3


def test_a_record_is_of_its_commit_though_the_next_one_is_applied_meanwhile(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned = site.outer.pinned
    site.snapshot().commit()

    def after_a_commit(chunk: int) -> AbstractContextManager[PinnedChunk]:
        monkeypatch.undo()
        site.commit()
        return pinned(chunk)

    monkeypatch.setattr(site.outer, "pinned", after_a_commit)
    assert site.rebuilder.record_at(chunk=1, commit=1) == site.records[1][1]


def test_a_record_is_found_in_the_middle_of_the_next_commit(site: Site) -> None:
    site.commit()
    site.outer.apply(0, payloads(site.outer)[0], update_of(2))
    assert site.rebuilder.record_at(chunk=1, commit=1) == site.records[1][1]


def test_a_record_is_found_while_another_thread_takes_snapshots_away(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The snapshot that it is in stays, and comes after some that go."""
    site.snapshot().commit(2).snapshot()
    aside(site, 1)
    site.commit()
    is_reading, are_gone = threading.Event(), threading.Event()
    version, unlink = SnapshotFile.version, Path.unlink
    num_looked_at = 0
    readers: list[Future[ChunkRecord]] = []

    def slow_after_the_first(file: SnapshotFile, chunk: int) -> int | None:
        nonlocal num_looked_at
        num_looked_at += 1
        if num_looked_at == 2:
            is_reading.set()
            assert are_gone.wait(60)
        return version(file, chunk)

    def while_it_is_read(path: Path, missing_ok: bool = False) -> None:
        if not readers:
            readers.append(pool.submit(site.rebuilder.record_at, chunk=1, commit=1))
            assert is_reading.wait(60)
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(SnapshotFile, "version", slow_after_the_first)
    monkeypatch.setattr(Path, "unlink", while_it_is_read)
    with ThreadPoolExecutor(1) as pool:
        site.snapshot(keep=1)
        are_gone.set()
        assert readers[0].result() == site.records[1][1]
    assert [f.newest for f in site.snapshots.files] == [3, 1]


def test_what_is_discarded_meanwhile_does_not_come_back(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    read = site.outer.read

    def and_clear(chunk: int) -> ChunkRecord:
        site.snapshots.clear()
        return read(chunk)

    monkeypatch.setattr(site.outer, "read", and_clear)
    site.snapshot()
    assert not site.snapshots.files
    assert not list((site.folder / "snapshots").glob("*.snapshot"))


def test_putting_together_does_not_list_all_chunks_for_each_chunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site(tmp_path).commit(2).snapshot().commit(1)
    listed = vars(OuterState)["versions"]
    num_lists = 0

    def versions(self: OuterState) -> object:
        nonlocal num_lists
        num_lists += 1
        return listed.fget(self)

    monkeypatch.setattr(OuterState, "versions", property(versions))
    site.restarted(without_outer=True)
    assert num_lists < len(site.layout.chunks), "with a hundred thousand chunks it would take for ever"


# --- an older commit beside the newest, for a run that is to go back to it


def aside(site: Site, commit: int, expected: bytes = b"") -> bytes:
    return site.rebuilder.put_aside(commit, expected)


def hash_at(site: Site, commit: int) -> bytes:
    return state_hash(site.layout.manifest, SLOTS, [r.hash for r in site.records[commit]])


@pytest.mark.parametrize("commit", [2, 3, 4, 5])
def test_an_older_state_is_put_beside_the_newest_and_has_the_hash_that_it_had(site: Site, commit: int) -> None:
    site.commit(2).snapshot().commit(3)
    assert aside(site, commit, hash_at(site, commit)) == hash_at(site, commit)
    site.assert_is(5)
    for number in range(commit + 1, 6):
        site.tear_log(number)
    site.snapshots.roll_back(commit)
    site.log.roll_back(commit)
    site.restarted(without_outer=True)
    site.assert_is(commit)


def with_a_damaged_chunk_of_commit_4(folder: Path) -> Site:
    """At commit 5, which touched others: the newest state has it still."""
    site = Site(folder, num_fragments=3).commit(2).snapshot().commit(3)
    chunk = max(c for c in site.layout.sync_chunks if site.outer.versions[c] == 4)  # in the half that `tear_log` takes
    site.damage(site.records[4][chunk].data)
    return site


def test_a_chunk_that_is_damaged_is_not_copied_into_an_older_state(tmp_path: Path) -> None:
    site = with_a_damaged_chunk_of_commit_4(tmp_path)
    assert aside(site, 4, hash_at(site, 4)) == hash_at(site, 4)
    made, chunks = site.snapshots.files[0], site.layout.sync_chunks
    assert [made.record(chunk) for chunk in chunks] == [site.records[4][chunk] for chunk in chunks]


def test_an_older_state_with_a_chunk_that_is_damaged_everywhere_is_not_kept(tmp_path: Path) -> None:
    site = with_a_damaged_chunk_of_commit_4(tmp_path)
    site.tear_log(4)
    with pytest.raises(StateError, match="attempt-4"):
        aside(site, 4, hash_at(site, 4))
    site.snapshots.clear()
    with pytest.raises(StateError, match="is damaged at commit 4"):
        aside(site, 4, hash_at(site, 4))
    assert not site.snapshots.files


def test_a_state_that_turns_out_otherwise_is_not_kept(site: Site) -> None:
    site.commit(2).snapshot().commit(3)
    with pytest.raises(StateError, match="in the run it had 0101"):
        aside(site, 4, bytes([1] * 32))
    assert [f.newest for f in site.snapshots.files] == [2]
    assert not list((site.folder / "snapshots").glob("*.new"))


def test_a_commit_before_the_oldest_snapshot_is_out_of_reach_and_the_oldest_is_known(site: Site) -> None:
    site.commit(2).snapshot().commit(2).snapshot().commit()
    assert site.rebuilder.oldest() == 2
    with pytest.raises(StateError, match="no snapshot here is as old as commit 1"):
        aside(site, 1)
    site.assert_is(5)
    assert [f.newest for f in site.snapshots.files] == [4, 2]


def test_a_damaged_snapshot_or_payload_gives_way_to_an_older_snapshot_or_is_named(site: Site) -> None:
    site.commit(1).snapshot().commit(1).snapshot().commit(3)
    newest = site.folder / "snapshots" / "commit-2.snapshot"
    data = bytearray(newest.read_bytes())
    data[-100] ^= 1
    newest.write_bytes(data)
    aside(site, 3, hash_at(site, 3))
    site.snapshots.clear()
    site.commit(1).snapshot().commit(6)
    site.tear_log(7)
    with pytest.raises(StateError, match="attempt-7"):
        aside(site, 8)


def test_no_younger_snapshot_takes_the_place_of_the_one_that_the_run_may_go_back_to(site: Site) -> None:
    site.commit(2).snapshot().commit(1)
    aside(site, 2)
    for _ in range(3):
        site.commit().snapshot(keep=1)
    assert [f.newest for f in site.snapshots.files] == [6, 2]
    site.snapshots.spared = None
    site.commit().snapshot(keep=1)
    assert [f.newest for f in site.snapshots.files] == [7]
