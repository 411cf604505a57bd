"""The payload log: what was sealed is found again, what was torn is found out, and old commits make room."""

from __future__ import annotations

import logging
import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from atoll.node.dataplane.outer_state import OuterState
from atoll.node.dataplane.payload_file import PayloadFile
from atoll.node.dataplane.payload_log import PayloadLog
from atoll.protocol import log_length
from atoll.protocol.disk import REAL_DISK, Disk
from atoll.protocol.errors import DigestMismatch, HostError, InvalidMessage, StateError
from atoll.protocol.layout import Layout, Role
from atoll.protocol.plans import payload_digest, payload_hash
from atoll.protocol.settings import RunSettings
from atoll.protocol.sync_settings import SyncSettings
from tests.harness.data_plane import RUN, commit_record, fragment_at, layout, logged, payloads, seeded


@pytest.fixture(name="used")
def _used() -> Layout:
    return layout()


@pytest.fixture(name="found")
def _found(tmp_path: Path, used: Layout) -> dict[int, bytes]:
    outer = seeded(tmp_path / "outer", used)
    return payloads(outer)


def put_all(writer: PayloadFile, found: dict[int, bytes]) -> None:
    for chunk, data in reversed(found.items()):  # any order
        writer.put(chunk, data, payload_hash(data))


def reopened(folder: Path, used: Layout, keep: int = 3, disk: Disk = REAL_DISK) -> PayloadLog:
    return PayloadLog(folder, used, RunSettings(run_id=RUN, sync=SyncSettings(log_commits=keep)), disk=disk)


def sealed_commit(log: PayloadLog, number: int, found: dict[int, bytes], attempt: int = 0, branch: int = 0) -> None:
    record = replace(commit_record(number, attempt=attempt), branch=branch)
    writer = log.begin(record.sync, record.term, record.attempt)
    put_all(writer, found)
    writer.seal()
    log.commit(replace(record, payload_digest=writer.digest(record)))


def test_payloads_of_a_commit_come_back(tmp_path: Path, used: Layout, found: dict[int, bytes]) -> None:
    log = reopened(tmp_path / "log", used)
    writer = log.begin(1, 1, 0)
    assert writer.missing() == sorted(found)
    with pytest.raises(StateError, match="missing"):
        writer.seal()
    with pytest.raises(StateError, match="missing"):
        writer.digest(commit_record(1))
    put_all(writer, found)
    assert not writer.missing()
    assert writer.missing() == []
    assert writer is log.begin(1, 1, 0)
    record = commit_record(1)
    hashes = [payload_hash(found[c]) for c in sorted(found)]
    assert writer.digest(record) == payload_digest(RUN, record, hashes)
    assert writer.read(2) == found[2]
    with pytest.raises(StateError, match="not in the log"):
        log.commit(record)
    writer.seal()
    with pytest.raises(DigestMismatch):
        log.commit(record)
    assert not log.has(1)
    record = replace(record, payload_digest=writer.digest(record))
    log.commit(record)
    log.commit(record)
    assert log.has(1)
    assert log.commits() == [record]
    assert {c: log.read(1, c) for c in found} == found
    with pytest.raises(StateError, match="commit 2 is not"):
        log.read(2, 0)
    with pytest.raises(StateError):
        log.read(1, used.num_sync_chunks)


@pytest.mark.parametrize("counts", [(0, 0, 10), (0, 3, 7), (0, 20, 2), (5, 0, 5), (5, 2, 3), (8, 5, 2)])
def test_a_site_that_is_behind_takes_as_many_syncs_as_the_log_has_room_for(
    tmp_path: Path, used: Layout, found: dict[int, bytes], counts: tuple[int, int, int]
) -> None:
    """A quarter beside a full log, with the commits that are yet to come before them. Those that are here stay: they
    come first."""
    num_commits, num_between, num_ahead = counts
    log = reopened(tmp_path / "log", used, keep=8)
    for number in range(1, num_commits + 1):
        sealed_commit(log, number, found)
    first = num_commits + num_between + 1
    for sync in range(first, first + num_ahead):
        assert log.has_room_ahead(sync)
        put_all(log.begin(sync, 1, 0), found)
    assert not log.has_room_ahead(first + num_ahead)
    assert log.has_room_ahead(first + num_ahead - 1), "another attempt at the same sync"
    most = 0
    for number in range(num_commits + 1, first + num_ahead):
        put_all(log.begin(number, 1, 0), found)
        most = max(most, len(list((tmp_path / "log").glob("attempt-*"))))
        sealed_commit(log, number, found)
    assert most <= 8 + 2 + 1, "and the one that is fetched"
    assert log.has_room_ahead(first + num_ahead), "they are commits of the log now"


def test_attempts_that_failed_take_room_ahead(tmp_path: Path, used: Layout, found: dict[int, bytes]) -> None:
    log = reopened(tmp_path / "log", used, keep=8)
    for number in range(1, 9):
        sealed_commit(log, number, found)
    for attempt in (1, 2):
        put_all(log.begin(10, 1, attempt), found)
    assert not log.has_room_ahead(11)
    assert log.has_room_ahead(10)


def test_it_is_found_again_after_a_kill(tmp_path: Path, used: Layout, found: dict[int, bytes]) -> None:
    log = reopened(tmp_path / "log", used)
    sealed_commit(log, 1, found)
    put_all(log.begin(2, 1, 0), found)
    log.begin(2, 1, 0).seal()
    log.begin(2, 1, 1).put(0, found[0], payload_hash(found[0]))
    again = reopened(tmp_path / "log", used)  # nothing was closed: as after kill -9
    assert again.commits() == log.commits()
    assert {c: again.read(1, c) for c in found} == found
    writer = again.begin(2, 1, 0)
    assert writer.sealed
    record = replace(commit_record(2), payload_digest=writer.digest(commit_record(2)))
    again.commit(record)
    assert again.read(2, 3) == found[3]
    assert again.begin(2, 1, 1).missing() == sorted(found), "an attempt that was not sealed starts anew"


def test_payloads_that_do_not_fit_are_refused(tmp_path: Path, used: Layout, found: dict[int, bytes]) -> None:
    writer = reopened(tmp_path / "log", used).begin(1, 1, 0)
    last = max(found)
    for chunk, data in (
        (0, found[0][:-1]), (0, found[0] + b"x"), (0, found[last]), (last, found[0]), (0, b""), (0, bytes(1 << 20)),
        (used.num_sync_chunks, found[0]), (len(used.chunks) + 5, found[0]), (-1, found[0]),
    ):  # fmt: skip
        with pytest.raises(InvalidMessage):
            writer.put(chunk, data, payload_hash(data))
    assert writer.missing() == sorted(found)
    with pytest.raises(StateError):
        writer.read(0)


def test_a_payload_is_made_once(tmp_path: Path, used: Layout, found: dict[int, bytes]) -> None:
    writer = reopened(tmp_path / "log", used).begin(1, 1, 0)
    put_all(writer, found)
    size = writer.path.stat().st_size
    put_all(writer, found)
    assert writer.path.stat().st_size == size
    other = found[0][:-1] + bytes([found[0][-1] ^ 1])
    with pytest.raises(DigestMismatch, match="chunk 0 comes twice, with different bytes"):
        writer.put(0, other, payload_hash(other))


def test_only_the_last_commits_are_kept(tmp_path: Path, used: Layout, found: dict[int, bytes]) -> None:
    log = reopened(tmp_path / "log", used, keep=3)
    put_all(log.begin(4, 1, 7), found)
    log.begin(9, 1, 0)
    for number in range(1, 7):
        sealed_commit(log, number, found)
    for current in (log, reopened(tmp_path / "log", used)):
        assert [c.commit for c in current.commits()] == [4, 5, 6]
    names = sorted(p.name for p in (tmp_path / "log").iterdir())
    assert names == sorted([f"commit-{n}.record" for n in (4, 5, 6)] + [f"attempt-{n}-1-0.payloads" for n in (4, 5, 6)])


def test_dropping_a_sync_keeps_what_was_committed(tmp_path: Path, used: Layout, found: dict[int, bytes]) -> None:
    log = reopened(tmp_path / "log", used)
    sealed_commit(log, 1, found)
    writer = log.begin(2, 1, 0)
    log.drop(1)
    log.drop(2)
    log.drop(77)
    assert log.has(1)
    assert not writer.path.exists()
    with pytest.raises(StateError, match="dropped"):
        writer.put(0, found[0], payload_hash(found[0]))
    assert log.begin(2, 1, 0) is not writer


def test_a_new_branch_voids_later_commits(tmp_path: Path, used: Layout, found: dict[int, bytes]) -> None:
    log = reopened(tmp_path / "log", used)
    for number in (1, 2, 3):
        sealed_commit(log, number, found)
    record = replace(commit_record(2, sync=8), branch=1)
    writer = log.begin(8, 1, 0)
    put_all(writer, found)
    writer.seal()
    log.commit(replace(record, payload_digest=writer.digest(record)))
    assert [(c.commit, c.sync) for c in log.commits()] == [(1, 1), (2, 8)]


def test_payloads_fetched_later_replace_wrong_ones(tmp_path: Path, used: Layout, found: dict[int, bytes]) -> None:
    log = reopened(tmp_path / "log", used)
    right = logged(reopened(tmp_path / "peer", used), seeded(tmp_path / "state", used), 1, found)
    wrong = dict(found)
    wrong[0] = found[0][:-1] + bytes([found[0][-1] ^ 1])
    writer = log.begin(1, 1, 0)
    put_all(writer, wrong)
    writer.seal()
    with pytest.raises(DigestMismatch):
        log.commit(right)
    fetched = log.open_commit(right)
    assert fetched.missing() == sorted(found)
    put_all(fetched, found)
    assert log.open_commit(right) is fetched
    fetched.seal()
    log.commit(right)
    assert log.read(1, 0) == found[0]


def test_an_attempt_cut_off_at_any_byte_is_removed(tmp_path: Path, used: Layout, found: dict[int, bytes]) -> None:
    log = reopened(tmp_path / "log", used)
    sealed_commit(log, 1, found)
    file = log.begin(1, 1, 0)
    whole = file.path.read_bytes()
    for cut in [*range(0, 700, 7), *range(700, len(whole), 97), len(whole) - 1]:
        copy = tmp_path / "cut"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(tmp_path / "log", copy)
        (copy / file.path.name).write_bytes(whole[:cut])
        again = reopened(copy, used)
        assert again.commits() == []
        assert list(copy.iterdir()) == []
        again.close()


def test_damage_anywhere_is_found_at_the_start_or_when_read(
    tmp_path: Path, used: Layout, found: dict[int, bytes]
) -> None:
    log = reopened(tmp_path / "log", used)
    sealed_commit(log, 1, found)
    file = log.begin(1, 1, 0)
    whole = file.path.read_bytes()
    table_bytes = len(whole) - sum(map(len, found.values()))
    covered = 0
    for place in [*range(0, table_bytes, 5), *range(table_bytes, len(whole), 53)]:
        copy = tmp_path / "damaged"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(tmp_path / "log", copy)
        data = bytearray(whole)
        data[place] ^= 0x10
        (copy / file.path.name).write_bytes(data)
        again = reopened(copy, used)
        if again.has(1):
            damaged = []
            for chunk, expected in found.items():
                try:
                    assert again.read(1, chunk) == expected
                except StateError:
                    damaged.append(chunk)
            assert len(damaged) == 1
            covered += 1
        again.close()
    assert covered > 10


def test_a_torn_record_is_removed(
    tmp_path: Path, used: Layout, found: dict[int, bytes], caplog: pytest.LogCaptureFixture
) -> None:
    log = reopened(tmp_path / "log", used)
    sealed_commit(log, 1, found)
    path = tmp_path / "log" / "commit-1.record"
    whole = path.read_bytes()
    for data in (whole[:-1], whole[:20], b"", whole[:40] + b"\xff" + whole[41:], bytes(1 << 20)):
        path.write_bytes(data)
        with caplog.at_level(logging.WARNING):
            again = reopened(tmp_path / "log", used)
        assert again.commits() == []
        assert not path.exists()
        assert "commit-1.record" in caplog.text
        assert again.begin(1, 1, 0).sealed, "the attempt is still whole: the commit can be made again"
        again.close()
    os.rename(tmp_path / "log" / "attempt-1-1-0.payloads", tmp_path / "log" / "attempt-2-1-0.payloads")
    assert reopened(tmp_path / "log", used).begin(2, 1, 0).missing() == sorted(found)


def test_another_runs_log_is_not_taken(tmp_path: Path, used: Layout, found: dict[int, bytes]) -> None:
    sealed_commit(reopened(tmp_path / "log", used), 1, found)
    assert (
        PayloadLog(tmp_path / "log", used, RunSettings(run_id="other", sync=SyncSettings(log_commits=3))).commits()
        == []
    )


def test_a_full_disk_is_said_in_words(
    tmp_path: Path, used: Layout, found: dict[int, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = reopened(tmp_path / "log", used).begin(1, 1, 0)

    def full(descriptor: int, data: memoryview, offset: int) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(HostError, match="are free; make room"):
            writer.put(0, found[0], payload_hash(found[0]))
    assert 0 in writer.missing()
    put_all(writer, found)
    assert not writer.missing()


def test_threads_write_and_read_at_once(tmp_path: Path, used: Layout, found: dict[int, bytes]) -> None:
    log = reopened(tmp_path / "log", used)
    writer = log.begin(1, 1, 0)
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for chunk, data in found.items():
                writer.put(chunk, data, payload_hash(data))
                assert writer.read(chunk) == data
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    writer.seal()
    again = reopened(tmp_path / "log", used)
    assert {c: again.begin(1, 1, 0).read(c) for c in found} == found


def test_the_hashes_of_an_attempt_stand_in_the_order_of_chunks(
    tmp_path: Path, used: Layout, found: dict[int, bytes]
) -> None:
    log = reopened(tmp_path / "log", used)
    put_all(log.begin(1, 1, 0), found)
    listed = log.hashes(1, 1, 0)
    assert [listed[i : i + 32] for i in range(0, len(listed), 32)] == [
        payload_hash(found[chunk]) if chunk in found else bytes(32) for chunk in range(used.num_sync_chunks)
    ]
    with pytest.raises(StateError, match="sync 1 attempt 1: its payloads are not in the log"):
        log.hashes(1, 1, 1)


def test_a_payload_that_turns_out_damaged_is_missing_and_can_be_put_again(
    tmp_path: Path, used: Layout, found: dict[int, bytes]
) -> None:
    log = reopened(tmp_path / "log", used)
    sealed_commit(log, 1, found)
    (path,) = (tmp_path / "log").glob("attempt-*")
    with path.open("r+b") as file:
        file.seek(path.read_bytes().index(found[1]) + 20)
        file.write(b"\xff\xff")
    with pytest.raises(StateError, match="chunk 1 is damaged; fetch it again"):
        log.read(1, 1)
    (record,) = log.commits()
    file_again = log.open_commit(record)
    assert file_again.missing() == [1]
    file_again.put(1, found[1], payload_hash(found[1]))
    file_again.seal()
    assert log.read(1, 1) == found[1]
    log.close()
    assert reopened(tmp_path / "log", used).read(1, 1) == found[1]


def test_a_payload_that_is_cut_off_can_be_put_again(tmp_path: Path, used: Layout, found: dict[int, bytes]) -> None:
    log = reopened(tmp_path / "log", used)
    sealed_commit(log, 1, found)
    (path,) = (tmp_path / "log").glob("attempt-*")
    lost = next(iter(found))  # payloads were put in the opposite order: the first one is the last
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1)
    with pytest.raises(StateError, match=f"chunk {lost}"):
        log.read(1, lost)
    (record,) = log.commits()
    again = log.open_commit(record)
    assert again.missing() == [lost]
    again.put(lost, found[lost], payload_hash(found[lost]))
    again.seal()
    assert log.read(1, lost) == found[lost]
    log.close()
    assert reopened(tmp_path / "log", used).read(1, lost) == found[lost]


def test_a_long_log_has_no_open_files(tmp_path: Path, used: Layout, found: dict[int, bytes]) -> None:
    log = reopened(tmp_path / "log", used, keep=100)
    for number in range(1, 101):
        sealed_commit(log, number, found)
    assert len(log.commits()) == 100
    opened = [os.path.realpath(path) for path in Path("/proc/self/fd").iterdir()]
    assert not [path for path in opened if path.startswith(str(tmp_path / "log"))]


# --- of several fragments: what was touched before the log begins


@pytest.fixture(name="thirds")
def _thirds(tmp_path: Path) -> tuple[PayloadLog, OuterState, dict[int, bytes]]:
    used = layout(num_fragments=3)
    outer = seeded(tmp_path / "outer", used)
    return reopened(tmp_path / "log", used), outer, payloads(outer)


def touched_at(used: Layout, commit: int) -> tuple[int, ...]:
    fragments = [fragment_at(used, n) for n in range(1, commit + 1)]
    return tuple(max((n for n, f in enumerate(fragments, 1) if f == own), default=0) for own in range(3))


def test_what_was_touched_before_the_log_begins_is_known_after_a_restart(
    tmp_path: Path, thirds: tuple[PayloadLog, OuterState, dict[int, bytes]]
) -> None:
    log, outer, found = thirds
    for number in range(1, 10):
        logged(log, outer, number, found)
        again = reopened(tmp_path / "log", log.layout)
        for history in (log.history, again.history):
            first = max(number - 3, 0)
            assert [history.touched(n) for n in range(first, number + 1)] == [
                touched_at(log.layout, n) for n in range(first, number + 1)
            ]
            assert history.last == number
        again.close()
    with pytest.raises(StateError, match="chunk 8 is not here"):
        log.read(8, 8)  # commit 8 is of another fragment
    assert log.hashes_of(8).count(bytes(32)) >= 3


def test_a_rollback_before_the_log_begins_leaves_no_word_of_void_commits(
    tmp_path: Path, thirds: tuple[PayloadLog, OuterState, dict[int, bytes]]
) -> None:
    log, outer, found = thirds
    for number in range(1, 8):
        logged(log, outer, number, found)
    log.roll_back(5)
    assert (log.history.last, log.history.touched(5)) == (5, touched_at(log.layout, 5))
    log.roll_back(2)
    for history in (log.history, reopened(tmp_path / "log", log.layout).history):
        assert (history.last, history.touched(0)) == (0, (0, 0, 0))


def test_a_log_begins_where_a_fetched_state_is_unless_it_leads_there(
    tmp_path: Path, thirds: tuple[PayloadLog, OuterState, dict[int, bytes]]
) -> None:
    log, outer, found = thirds
    logged(log, outer, 1, found)
    log.lead_to(touched_at(log.layout, 1))
    assert log.history.touched(0) == (0, 0, 0), "it led there"
    log.lead_to((30, 28, 31))
    for history in (log.history, reopened(tmp_path / "log", log.layout).history):
        assert (history.last, history.touched(31), history.touched(1)) == (31, (30, 28, 31), None)
    (tmp_path / "log" / "touched").write_bytes(bytes(56))
    assert reopened(tmp_path / "log", log.layout).history.touched(31) is None, "damaged"


def test_with_one_fragment_there_is_no_file_of_it(tmp_path: Path, used: Layout, found: dict[int, bytes]) -> None:
    log = reopened(tmp_path / "log", used)
    for number in range(1, 6):
        sealed_commit(log, number, found)
    log.lead_to((90,))
    assert log.history.touched(90) == (90,)
    assert not (tmp_path / "log" / "touched").exists()


@pytest.mark.parametrize(("fragment", "left"), [(0, {8, 9}), (1, {7, 9}), (2, {7, 8}), (3, set[int]())])
def test_a_commit_ends_only_earlier_syncs_of_what_it_touches(
    tmp_path: Path, thirds: tuple[PayloadLog, OuterState, dict[int, bytes]], fragment: int, left: set[int]
) -> None:
    """Several are in flight, and are committed in any order."""
    log, _, found = thirds
    for sync in (7, 8, 9):
        log.begin(sync, 1, 0, sync - 7)
    record = replace(commit_record(1), sync=10, fragment=fragment)
    writer = log.begin(record.sync, record.term, record.attempt, fragment)
    put_all(writer, {chunk: found[chunk] for chunk in writer.missing()})
    writer.seal()
    log.commit(replace(record, payload_digest=writer.digest(record)))
    held = {int(path.name.split("-")[1]) for path in (tmp_path / "log").glob("attempt-*")}
    assert held - {10} == left
    log.close()


def test_the_attempt_whose_errors_count_is_of_the_last_commit_that_leaves_any(
    tmp_path: Path, used: Layout, found: dict[int, bytes]
) -> None:
    """In a run of momenta a commit of gradients leaves none, and those of the commit before it count on."""
    phases = {"strategy": "momentum", "every": 1, "warmup_commits": 6, "gradient_doubling": 1}
    for settings, wanted in ((phases, {0: None, 1: None, 2: None, 3: 3, 4: 3, 5: 5, 6: 6, 7: 7}), ({}, {3: 3, 4: 4})):
        run = RunSettings(run_id=RUN, sync=SyncSettings(**settings))  # type: ignore[arg-type]
        log = PayloadLog(tmp_path / str(len(settings)), used, run)
        for number in range(1, 8):
            sealed_commit(log, number, found)
            if number in wanted:
                in_force = {key.sync for key in log.attempts_in_force()}
                assert in_force == {sync for sync in (wanted[number],) if sync is not None}
        for commit, sync in wanted.items():
            attempt = log.attempt_of(0, commit)
            assert (attempt and attempt.sync) == sync


def test_after_the_warm_up_the_log_grows_to_as_many_commits_as_it_has_from_then_on(
    tmp_path: Path, used: Layout, found: dict[int, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"STATES": 1, "LEAST_COMMITS": 2, "SMALL_COMMITS": 0, "TABLE_BYTES": 0}.items():
        monkeypatch.setattr(log_length, name, value)
    sync = SyncSettings(strategy="momentum", every=1, warmup_commits=10, warmup_codec="fp32", codec="sign1")
    log = PayloadLog(tmp_path / "log", used, RunSettings(run_id=RUN, sync=sync))
    wanted = 12 * sum(tensor.num_elements for tensor in used.manifest.tensors if tensor.role is Role.TRAINABLE)
    num_held = []
    for number in range(1, 80):
        sealed_commit(log, number, found)
        held = log.commits()
        sizes = [log.length.bytes_of(commit) for commit in held]
        assert [c.commit for c in held] == list(range(number - len(held) + 1, number + 1))
        assert sum(sizes[1:]) < wanted
        assert sum(sizes) >= wanted or len(held) == number
        num_held.append(len(held))
    early, later = num_held[9], num_held[-1]
    assert early < 10 < later == log.num_kept < 60
    names = {path.name for path in (tmp_path / "log").iterdir()}
    assert len(names) == 2 * later, "and no file is left of those before"
    log.close()
    again = PayloadLog(tmp_path / "log", used, RunSettings(run_id=RUN, sync=sync))
    assert len(again.commits()) == later


class CountingDisk(Disk):
    def __init__(self) -> None:
        self.synced: list[str] = []

    def sync(self, path: Path) -> None:
        self.synced.append(path.name)
        super().sync(path)


def test_what_is_on_the_disk_for_good_is_not_synced_again(
    tmp_path: Path, used: Layout, found: dict[int, bytes]
) -> None:
    disk = CountingDisk()
    log = reopened(tmp_path / "log", used, disk=disk)
    sealed_commit(log, 1, found)
    sealed_commit(log, 2, found)
    log.sync()
    assert len(disk.synced) == 4, "a file and a record each"
    sealed_commit(log, 3, found)
    disk.synced.clear()
    log.sync()
    assert sorted(disk.synced) == ["attempt-3-1-0.payloads", "commit-3.record"]
    log.roll_back(2)
    sealed_commit(log, 3, found, branch=1)
    disk.synced.clear()
    log.sync()
    assert sorted(disk.synced) == ["attempt-3-1-0.payloads", "commit-3.record"], "other files than before"


def test_a_file_that_was_replaced_while_it_was_synced_is_synced_again(
    tmp_path: Path, used: Layout, found: dict[int, bytes]
) -> None:
    class Replacing(CountingDisk):
        def sync(self, path: Path) -> None:
            super().sync(path)
            if len(self.synced) == 1:
                log.roll_back(0)
                sealed_commit(log, 1, found, branch=1)

    disk = Replacing()
    log = reopened(tmp_path / "log", used, disk=disk)
    sealed_commit(log, 1, found)
    log.sync()
    assert sorted(disk.synced) == ["attempt-1-1-0.payloads"] * 2 + ["commit-1.record"] * 2


def test_a_file_whose_chunk_was_damaged_and_put_again_is_synced_again(
    tmp_path: Path, used: Layout, found: dict[int, bytes]
) -> None:
    disk = CountingDisk()
    log = reopened(tmp_path / "log", used, disk=disk)
    sealed_commit(log, 1, found)
    log.sync()
    (path,) = (tmp_path / "log").glob("attempt-*")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    (damaged,) = [chunk for chunk in found if not readable(log, chunk)]
    writer = log.open_commit(log.record(1))
    writer.put(damaged, found[damaged], payload_hash(found[damaged]))
    writer.seal()
    disk.synced.clear()
    log.sync()
    assert disk.synced == [path.name]


def test_a_file_that_is_sealed_again_while_the_log_is_synced_is_synced_before_that_ends(
    tmp_path: Path, used: Layout, found: dict[int, bytes]
) -> None:
    class Sealing(CountingDisk):
        def sync(self, path: Path) -> None:
            super().sync(path)
            if path.suffix == ".payloads" and self.synced.count(path.name) == 1:
                file = log.open_commit(log.record(1))
                file.lose(min(found))
                file.put(min(found), found[min(found)], payload_hash(found[min(found)]))
                file.seal()

    disk = Sealing()
    log = reopened(tmp_path / "log", used, disk=disk)
    sealed_commit(log, 1, found)
    log.sync()
    assert disk.synced.count("attempt-1-1-0.payloads") == 2


def readable(log: PayloadLog, chunk: int) -> bool:
    try:
        return bool(log.read(1, chunk))
    except StateError:
        return False


def test_a_log_that_is_closed_has_nothing_to_drop(tmp_path: Path, used: Layout, found: dict[int, bytes]) -> None:
    log = reopened(tmp_path / "log", used)
    sealed_commit(log, 1, found)
    put_all(log.begin(2, 1, 0), found)
    log.close()
    log.drop(2)
    log.roll_back(0)


def test_the_attempt_of_a_commit_that_another_one_replaces_goes(
    tmp_path: Path, used: Layout, found: dict[int, bytes]
) -> None:
    log = reopened(tmp_path / "log", used)
    sealed_commit(log, 1, found)
    sealed_commit(log, 1, found, attempt=1, branch=1)
    sealed_commit(log, 2, found, branch=1)
    assert sorted(path.name for path in (tmp_path / "log").glob("attempt-*")) == [
        "attempt-1-1-1.payloads",
        "attempt-2-1-0.payloads",
    ]
