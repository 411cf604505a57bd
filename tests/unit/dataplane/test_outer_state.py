"""The outer state: a pure function of what is applied, whole after a crash at any byte, consistent for readers."""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.node.dataplane import chunk_store, outer_state, publish
from atoll.node.dataplane.chunk_index import ENTRY_BYTES, ChunkIndex
from atoll.node.dataplane.outer_state import OuterState
from atoll.node.dataplane.outer_update import record_bytes
from atoll.node.dataplane.places import SPARES, PlaceMap, place_bytes
from atoll.protocol.errors import HostError, InvalidMessage, StateError
from atoll.protocol.history import History
from atoll.protocol.layout import Layout, Role, chunk_hash, state_hash
from tests.harness.chunks import cut_out
from tests.harness.data_plane import (
    RUN,
    apply_all,
    filled,
    fragment_at,
    layout,
    payloads,
    seeded,
    tensor,
    update_of,
    values_of,
)

SLOTS = ("momentum",)


def reopened(folder: Path, used: Layout) -> OuterState:
    return OuterState.open(folder, used, SLOTS, RUN)


def test_seeding_makes_commit_0(tmp_path: Path) -> None:
    used = layout()
    outer = OuterState.create(tmp_path, used, SLOTS, RUN)
    assert outer.commit is None
    assert set(outer.missing) == {c.index for c in used.chunks if c.num_elements}
    with pytest.raises(StateError, match="not complete"):
        outer.state_hash()
    with pytest.raises(StateError, match="missing"):
        outer.read(0)
    buffer = filled(used)
    publish.seed_from_snapshot(outer, buffer)
    assert outer.commit == 0
    assert outer.missing == []
    assert set(outer.versions) == {0}
    for chunk in used.chunks:
        record = outer.read(chunk.index)
        values = cut_out(buffer, chunk)
        slot = bytes(chunk.num_bytes) if chunk.role is Role.TRAINABLE else b""
        assert record.data == values + slot
        assert len(record.data) == record_bytes(used, SLOTS, chunk.index)
        assert record.hash == chunk_hash(record.data) == outer.hash_of(chunk.index)
    hashes = outer.chunk_hashes(0)
    assert hashes is not None
    assert outer.state_hash() == state_hash(used.manifest, SLOTS, hashes)
    assert values_of(outer, 0).dtype == np.float32
    with pytest.raises(ValueError, match="read-only"):
        values_of(outer, 0)[0] = 1


def test_local_buffers_are_not_in_it(tmp_path: Path) -> None:
    used = layout()
    first = seeded(tmp_path / "a", used)
    buffer = filled(used)
    tensor(used, buffer, "mine")[:] = 99
    second = OuterState.create(tmp_path / "b", used, SLOTS, RUN)
    publish.seed_from_snapshot(second, buffer)
    assert first.state_hash() == second.state_hash()


def test_sync_chunks_advance_and_frozen_ones_stay(tmp_path: Path) -> None:
    used = layout()
    outer = seeded(tmp_path, used)
    before = outer.state_hash()
    found = payloads(outer)
    chunks = sorted(found)
    for chunk in chunks[:-1]:
        outer.apply(chunk, found[chunk], update_of(1))
        assert outer.commit is None
    assert outer.chunk_hashes(0) is not None, "donors still serve the list of the commit before"
    assert outer.chunk_hashes(1) is None
    outer.apply(chunks[-1], found[chunks[-1]], update_of(1))
    assert outer.commit == 1
    assert outer.state_hash() != before
    versions = outer.versions
    for spec in used.chunks:
        in_sync = spec.index < used.num_sync_chunks and spec.num_elements
        assert versions[spec.index] == (1 if in_sync else 0)


def test_applying_again_changes_nothing_and_gaps_are_refused(tmp_path: Path) -> None:
    outer = seeded(tmp_path, layout())
    found = payloads(outer)
    with pytest.raises(StateError, match="commit 2 cannot be applied"):
        outer.apply(0, found[0], update_of(2))
    apply_all(outer, found, 1)
    before = outer.state_hash()
    apply_all(outer, found, 1)
    assert outer.state_hash() == before
    with pytest.raises(StateError, match="cannot be applied"):
        outer.apply(0, found[0], update_of(0))


def test_wrong_payloads_leave_the_chunk_as_it_was(tmp_path: Path) -> None:
    used = layout()
    outer = seeded(tmp_path, used)
    found, before = payloads(outer), outer.state_hash()
    for data in (found[0][:-1], found[1][:20], b"", found[max(found)], found[0][:2] + b"\1" + found[0][3:]):
        with pytest.raises(InvalidMessage):
            outer.apply(0, data, update_of(1))
    with pytest.raises(InvalidMessage, match="frozen"):
        outer.apply(len(used.chunks) - 1, found[0], update_of(1))
    assert outer.commit == 0
    assert outer.state_hash() == before
    apply_all(outer, found, 1)  # no spare place was lost
    assert outer.commit == 1


def test_wrong_sizes_and_versions_of_whole_records_are_refused(tmp_path: Path) -> None:
    used = layout()
    outer = seeded(tmp_path, used)
    frozen = len(used.chunks) - 1
    record = outer.read(frozen).data
    with pytest.raises(InvalidMessage, match="frozen"):
        outer.put(frozen, 1, record)
    with pytest.raises(InvalidMessage, match="bytes"):
        outer.put(frozen, 0, record + b"x")
    with pytest.raises(InvalidMessage, match="bytes"):
        outer.seed(frozen, record[:-1])


def test_a_joiner_that_takes_records_has_the_same_state(tmp_path: Path) -> None:
    used = layout()
    donor = seeded(tmp_path / "donor", used)
    for commit in (1, 2):
        apply_all(donor, payloads(donor, (commit, commit + 10)), commit)
    joiner = OuterState.create(tmp_path / "joiner", used, SLOTS, RUN)
    for chunk in used.chunks:
        record = donor.read(chunk.index)
        assert joiner.put(chunk.index, record.version, record.data) == record.hash
    assert joiner.commit == 2
    assert joiner.state_hash() == donor.state_hash()
    found = payloads(donor, (7, 8))
    apply_all(donor, found, 3)
    apply_all(joiner, found, 3)
    assert joiner.state_hash() == donor.state_hash()


@pytest.mark.parametrize(("most_hashes", "kept"), [(0, 4), (5, 5), (1 << 16, 10)])
def test_hash_lists_of_the_last_commits_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most_hashes: int, kept: int
) -> None:
    """`most_hashes`: for each chunk. However many these are, those that settle a dispute stay."""
    used = layout()
    monkeypatch.setattr(outer_state, "MOST_KEPT_HASHES", most_hashes * len(used.chunks))
    monkeypatch.setattr(outer_state, "MOST_HASH_LISTS", 10)
    outer = seeded(tmp_path, used)
    hashes = [outer.chunk_hashes(0)]
    for commit in range(1, 12):
        apply_all(outer, payloads(outer, (commit,)), commit)
        hashes.append(outer.chunk_hashes(commit))
    for commit in range(12):
        expected = hashes[commit] if commit >= 12 - kept else None
        assert outer.chunk_hashes(commit) == expected


def test_of_several_fragments_more_hash_lists_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sites that disagree about a commit go on while others are in flight: it is settled by the list of the commit
    before."""
    used = layout(num_fragments=3)
    monkeypatch.setattr(outer_state, "MOST_KEPT_HASHES", 0)
    later: list[int] = []
    outer = seeded(tmp_path, used)
    outer.history = lambda: History((0, 0, 0), later)
    hashes = [outer.chunk_hashes(0)]
    for commit in range(1, 10):
        later.append(fragment_at(used, commit))
        apply_all(outer, payloads(outer, (commit,)), commit)
        hashes.append(outer.chunk_hashes(commit))
    assert None not in hashes
    assert [outer.chunk_hashes(n) for n in range(10)] == [None, None, *hashes[2:]]


def test_the_list_of_the_commit_before_is_found_again(tmp_path: Path) -> None:
    """A dispute over the last commit needs it, and all sites may have been started again since."""
    used = layout()
    outer = seeded(tmp_path, used)
    hashes = [outer.chunk_hashes(0)]
    for commit in (1, 2, 3):
        apply_all(outer, payloads(outer, (commit,)), commit)
        hashes.append(outer.chunk_hashes(commit))
    again = reopened(tmp_path, used)
    assert [again.chunk_hashes(n) for n in range(4)] == [None, None, *hashes[2:]]
    assert again.state_hash() == state_hash(used.manifest, SLOTS, hashes[3] or [])
    again.apply(0, payloads(again, (4,))[0], update_of(4))
    torn = reopened(tmp_path, used)
    assert torn.commit is None
    assert [torn.chunk_hashes(n) for n in range(5)] == [None, None, None, hashes[3], None]


def test_it_is_found_again(tmp_path: Path) -> None:
    used = layout()
    outer = seeded(tmp_path, used)
    apply_all(outer, payloads(outer), 1)
    expected = outer.state_hash()
    again = reopened(tmp_path, used)
    assert again.commit == 1
    assert again.state_hash() == expected
    found = payloads(again, (5,))
    apply_all(again, found, 2)
    assert again.commit == 2


def test_another_run_manifest_or_optimizer_is_refused(tmp_path: Path) -> None:
    used = layout()
    assert not OuterState.exists(tmp_path)
    seeded(tmp_path, used)
    assert OuterState.exists(tmp_path)
    for other, slots, run_id in ((used, SLOTS, "other"), (used, (), RUN), (layout(401), SLOTS, RUN)):
        with pytest.raises(StateError, match="this run has"):
            OuterState.open(tmp_path, other, slots, run_id)
    (tmp_path / "outer.json").write_text("[]")
    with pytest.raises(StateError):
        reopened(tmp_path, used)
    (tmp_path / "outer.json").write_text("{")
    with pytest.raises(StateError, match="not an outer state"):
        reopened(tmp_path, used)


@pytest.mark.parametrize("name", ["outer.chunks", "outer.index"])
def test_truncated_files_are_refused(tmp_path: Path, name: str) -> None:
    used = layout()
    seeded(tmp_path, used)
    with (tmp_path / name).open("r+b") as file:
        file.truncate(100)
    with pytest.raises(StateError, match="truncated"):
        reopened(tmp_path, used)


def test_damage_is_found_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    used = layout()
    outer = seeded(tmp_path, used)
    record = outer.read(1)
    data = bytearray((tmp_path / "outer.chunks").read_bytes())
    data[data.index(record.data) + 5] ^= 1
    (tmp_path / "outer.chunks").write_bytes(data)
    with caplog.at_level(logging.WARNING):
        again = reopened(tmp_path, used)
    assert again.missing == [1]
    assert again.commit is None
    assert "chunk 1 of 'weight' is damaged" in caplog.text
    again.put(1, 0, record.data)
    assert again.commit == 0


def test_a_crash_at_any_byte_leaves_the_old_chunk_or_the_new_one(tmp_path: Path) -> None:
    """The writes of an apply, cut off after every byte of the index entry and many of the record."""
    used = layout(60)
    outer = seeded(tmp_path / "live", used)
    apply_all(outer, payloads(outer, (3,)), 1)
    names = ("outer.chunks", "outer.index")
    before = {name: (tmp_path / "live" / name).read_bytes() for name in names}
    old = outer.read(4)
    outer.apply(4, payloads(outer, (4,))[4], update_of(2))
    new = outer.read(4)
    after = {name: (tmp_path / "live" / name).read_bytes() for name in names}
    spans = {}
    for name in names:
        changed = [i for i, (x, y) in enumerate(zip(before[name], after[name], strict=True)) if x != y]
        spans[name] = (changed[0], changed[-1] + 1)
    assert spans["outer.chunks"][1] - spans["outer.chunks"][0] <= len(new.data)
    assert spans["outer.index"][1] - spans["outer.index"][0] <= ENTRY_BYTES
    crashed = tmp_path / "crashed"
    shutil.copytree(tmp_path / "live", crashed)
    seen = set()
    for name, step in (("outer.chunks", 37), ("outer.index", 1)):
        first, last = spans[name]
        for cut in [*range(first, last, step), last]:
            files = dict(before)
            if name == "outer.index":
                files["outer.chunks"] = after["outer.chunks"]
            files[name] = after[name][:cut] + before[name][cut:]
            for each in names:
                (crashed / each).write_bytes(files[each])
            state = reopened(crashed, used)
            assert state.missing == []
            assert state.read(4) in (old, new)
            assert state.versions[3] == 1
            seen.add(state.versions[4])
    assert seen == {1, 2}


def test_a_lost_record_falls_back_to_the_one_before_it(tmp_path: Path) -> None:
    """After a power cut the index may be on the disk and the record not."""
    used = layout()
    outer = seeded(tmp_path, used)
    old = outer.read(0)
    found = payloads(outer)
    outer.apply(0, found[0], update_of(1))
    new = outer.read(0)
    data = bytearray((tmp_path / "outer.chunks").read_bytes())
    start = data.index(new.data)
    data[start : start + len(new.data)] = bytes(len(new.data))
    (tmp_path / "outer.chunks").write_bytes(data)
    again = reopened(tmp_path, used)
    assert again.read(0) == old
    assert again.commit == 0
    again.apply(0, found[0], update_of(1))
    assert again.read(0) == new
    final = reopened(tmp_path, used)
    assert final.read(0) == new


def test_equal_records_never_share_a_place(tmp_path: Path) -> None:
    """Chunks of zeros have one hash; a fallback must not take the place that another chunk owns."""
    used = layout(50)
    outer = OuterState.create(tmp_path, used, SLOTS, RUN)
    publish.seed_from_snapshot(outer, memoryview(bytearray(used.buffer_bytes)))
    for _ in range(3):
        for chunk in range(5):
            outer.put(chunk, 0, bytes(record_bytes(used, SLOTS, chunk)))
    index = bytearray((tmp_path / "outer.index").read_bytes())
    for chunk in range(3):  # the newest entries of some chunks are lost
        entries = ChunkIndex(memoryview(index), b"").entries(chunk)
        assert not entries, "entries of another key are not valid"
        index[2 * chunk * ENTRY_BYTES : (2 * chunk + 1) * ENTRY_BYTES] = bytes(ENTRY_BYTES)
    (tmp_path / "outer.index").write_bytes(index)
    again = reopened(tmp_path, used)
    for chunk in range(used.num_sync_chunks):
        if used.chunks[chunk].num_elements:
            again.put(chunk, 0, bytes([chunk + 1]) * record_bytes(used, SLOTS, chunk))
    for chunk in range(used.num_sync_chunks):
        assert set(again.read(chunk).data) <= {chunk + 1}


def test_readers_see_version_hash_and_bytes_that_belong_together(tmp_path: Path) -> None:
    used = layout()
    outer = seeded(tmp_path, used)
    twin = seeded(tmp_path / "twin", used)
    steps = []
    for commit in range(1, 20):
        steps.append(payloads(twin, (commit,)))
        apply_all(twin, steps[-1], commit)
    done = threading.Event()
    problems: list[str] = []
    seen: set[int] = set()

    def read() -> None:
        while not done.is_set():
            for chunk in range(3):
                record = outer.read(chunk)
                seen.add(record.version)
                if chunk_hash(record.data) != record.hash:
                    problems.append(f"chunk {chunk} at {record.version}")

    def write(part: int) -> None:
        for commit, found in enumerate(steps, 1):
            for chunk in sorted(found)[part::2]:
                outer.apply(chunk, found[chunk], update_of(commit))

    readers = [threading.Thread(target=read) for _ in range(2)]
    writers = [threading.Thread(target=write, args=(part,)) for part in range(2)]
    for thread in readers + writers:
        thread.start()
    for thread in writers:
        thread.join()
    done.set()
    for thread in readers:
        thread.join()
    assert not problems
    assert seen
    assert outer.commit == 19
    assert outer.state_hash() == twin.state_hash()


def test_a_pinned_chunk_does_not_change(tmp_path: Path) -> None:
    outer = seeded(tmp_path, layout())
    with outer.pinned(0) as pinned:
        before = pinned.data.tobytes()
        for commit in range(1, 4 + SPARES):
            apply_all(outer, payloads(outer, (commit,)), commit)
        assert pinned.data.tobytes() == before
        assert pinned.version == 0
    apply_all(outer, payloads(outer, (99,)), 4 + SPARES)


def test_a_full_disk_is_said_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(HostError, match=r"outer\.chunks: .* MiB are needed, .* MiB are free"):
        OuterState.create(tmp_path, layout(), SLOTS, RUN)
    assert not OuterState.exists(tmp_path)
    assert not (tmp_path / "outer.chunks").exists()


def test_creating_replaces_what_was_there(tmp_path: Path) -> None:
    used = layout()
    seeded(tmp_path, used)
    assert OuterState.create(tmp_path, used, SLOTS, "next").commit is None
    assert json.loads((tmp_path / "outer.json").read_text())["run"] == "next"


@given(st.lists(st.integers(0, 5000), max_size=60))
def test_places_do_not_overlap_and_waste_little(sizes: list[int]) -> None:
    places = PlaceMap(sizes)
    end = 0
    for group in places.groups:
        assert group.offset_bytes == end
        end += group.num_places * group.place_bytes
    assert end == places.file_bytes
    for chunk, size in enumerate(sizes):
        if size:
            group = places.groups[places.group_of[chunk]]
            assert size <= group.place_bytes <= max(64, size * 1.125 + 64)
            assert places.offset_bytes(chunk, group.first_place) == group.offset_bytes
            assert not places.fits(chunk, group.first_place + group.num_places)
        else:
            assert places.group_of[chunk] == -1


def test_large_records_get_places_of_nearly_their_size() -> None:
    for size in (8 << 20, (8 << 20) + 1, 5_000_000):
        assert size <= place_bytes(size) <= size * 1.125 + 64


def test_bytes_of_a_record_are_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they are computed; and not again where the caller has hashed them to see whether they are right."""
    used, hashed = layout(), list[int]()

    def counted(data: memoryview) -> bytes:
        hashed.append(len(data))
        return chunk_hash(data)

    donor = seeded(tmp_path / "donor", used)
    found, joiner = payloads(donor, (1, 2)), OuterState.create(tmp_path / "joiner", used, SLOTS, RUN)
    synced = [record_bytes(used, SLOTS, chunk) for chunk in used.sync_chunks if used.chunks[chunk].num_elements]
    monkeypatch.setattr(chunk_store, "chunk_hash", counted)
    apply_all(donor, found, 1)
    assert sorted(hashed) == sorted(synced)
    for chunk in used.chunks:
        record = donor.read(chunk.index)
        joiner.put(chunk.index, record.version, record.data, record.hash)
    assert len(hashed) == len(synced)
    assert joiner.state_hash() == donor.state_hash()
    assert not joiner.damaged()
