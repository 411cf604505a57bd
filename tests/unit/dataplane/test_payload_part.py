"""Payloads that several processes put into one file, each into a region of its own."""

from __future__ import annotations

import itertools
import struct
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from atoll.node.dataplane.chunk_file import ENTRY_BYTES
from atoll.node.dataplane.payload_file import AttemptKey, PayloadFile
from atoll.node.dataplane.payload_log import PayloadLog
from atoll.node.dataplane.payload_part import STORED_BYTES, LastPayloads, PartFile, PartLog, adopt, heard, stored
from atoll.protocol.digest import DIGEST_BYTES
from atoll.protocol.errors import DigestMismatch, InvalidMessage, StaleError, StateError
from atoll.protocol.layout import Layout
from atoll.protocol.plans import payload_hash
from atoll.protocol.settings import RunSettings
from atoll.protocol.sync_settings import SyncSettings
from tests.harness.data_plane import RUN, commit_record, filled, layout, logged, payloads, seeded, sync_data

ATTEMPT = AttemptKey(1, 1, 0)
ENTRY = struct.Struct("<QIQ32s")
"""Of a chunk: offset, length, version, hash."""


@pytest.fixture(name="used")
def _used() -> Layout:
    return layout()


@pytest.fixture(name="found")
def _found(tmp_path: Path, used: Layout) -> dict[int, bytes]:
    return payloads(seeded(tmp_path / "outer", used))


@pytest.fixture(name="node")
def _node(tmp_path: Path, used: Layout) -> PayloadFile:
    return log_in(tmp_path, used).begin(1, 1, 0)


def log_in(folder: Path, used: Layout) -> PayloadLog:
    return PayloadLog(folder / "log", used, RunSettings(run_id=RUN, sync=SyncSettings(log_commits=4)))


def put(file: PayloadFile, found: dict[int, bytes], *chunks: int) -> None:
    for chunk in chunks:
        file.put(chunk, found[chunk], payload_hash(found[chunk]))


def num_bytes(found: dict[int, bytes], *chunks: int) -> int:
    return sum(len(found[chunk]) for chunk in chunks)


def part_of(node: PayloadFile, used: Layout, region: range, *own: int) -> PartFile:
    return PartFile(node.path.parent, used, RUN, ATTEMPT, own=own, region=region)


def other(data: bytes) -> bytes:
    """A payload that differs by one bit."""
    return data[:-1] + bytes([data[-1] ^ 1])


def any_size(chunk: int) -> int:
    return 1 << 20


# --- several processes


def test_what_processes_put_into_their_regions_is_found_again(
    tmp_path: Path, used: Layout, found: dict[int, bytes]
) -> None:
    log, alone = log_in(tmp_path, used), log_in(tmp_path / "alone", used).begin(1, 1, 0)
    node = log.begin(1, 1, 0)
    before, first, after, second = (sorted(found)[start::4] for start in range(4))
    put(node, found, *before)
    regions = {number: node.set_aside(2 * num_bytes(found, *own)) for number, own in ((1, first), (2, second))}
    parts = {number: part_of(node, used, regions[number], *own) for number, own in ((1, first), (2, second))}
    with ThreadPoolExecutor(3) as pool:
        work = [pool.submit(put, parts[1], found, *first), pool.submit(put, parts[2], found, *reversed(second))]
        for task in (*work, pool.submit(put, node, found, *after)):
            task.result()
    assert node.missing() == sorted([*first, *second])
    with pytest.raises(StateError, match="chunks are missing"):
        node.seal()
    for number, own in ((1, first), (2, second)):
        assert adopt(node, stored(parts[number], own), [regions[number]], any_size) == own
    assert {chunk: node.read(chunk) for chunk in found} == found
    node.seal()
    put(alone, found, *found)
    assert node.digest(commit_record(1)) == alone.digest(commit_record(1))
    log.commit(replace(commit_record(1), payload_digest=node.digest(commit_record(1))))
    again = PayloadFile(tmp_path / "log", used, RUN, ATTEMPT, is_new=False, fsync=False)
    assert again.sealed
    assert {chunk: again.read(chunk) for chunk in found} == found
    log.close()
    assert {chunk: log_in(tmp_path, used).read(1, chunk) for chunk in found} == found


def test_a_region_is_apart_from_what_is_put_before_and_after_it_and_from_other_regions(
    used: Layout, found: dict[int, bytes], node: PayloadFile
) -> None:
    before, first, second, after = sorted(found)[:4]
    put(node, found, before)
    regions = [node.set_aside(num_bytes(found, chunk)) for chunk in (first, second)]
    put(node, found, after)
    for chunk, region in zip((first, second), regions, strict=True):
        assert len(region) == num_bytes(found, chunk)
        part = part_of(node, used, region, chunk)
        put(part, found, chunk)
        adopt(node, stored(part, [chunk]), [region], any_size)
    assert {chunk: node.read(chunk) for chunk in sorted(found)[:4]} == {c: found[c] for c in sorted(found)[:4]}


def test_what_does_not_fit_into_a_region_is_refused_and_nothing_is_written_over(
    used: Layout, found: dict[int, bytes], node: PayloadFile
) -> None:
    fits, after, smaller = min(found), min(found) + 1, max(found)
    too_large = fits + 2
    assert len(found[smaller]) < len(found[too_large])
    region = node.set_aside(num_bytes(found, fits, too_large) - 1)
    put(node, found, after)
    whole = node.path.read_bytes()
    part = part_of(node, used, region, fits, too_large, smaller)
    put(part, found, fits)
    with pytest.raises(StateError, match=f"no room for chunk {too_large} in what was set aside"):
        put(part, found, too_large)
    assert part.missing() == [too_large, smaller]
    assert node.path.read_bytes() == whole[: region.start] + found[fits] + whole[region.start + len(found[fits]) :]
    put(part, found, smaller)
    assert adopt(node, stored(part, [fits, too_large, smaller]), [region], any_size) == [fits, smaller]
    assert [node.read(chunk) for chunk in (fits, after, smaller)] == [found[c] for c in (fits, after, smaller)]


def test_a_region_can_be_filled_to_its_last_byte(used: Layout, found: dict[int, bytes], node: PayloadFile) -> None:
    chunk = min(found)
    for size, has_room in ((len(found[chunk]), True), (len(found[chunk]) - 1, False)):
        part = part_of(node, used, node.set_aside(size), chunk)
        if has_room:
            put(part, found, chunk)
            assert part.read(chunk) == found[chunk]
        else:
            with pytest.raises(StateError, match="no room"):
                put(part, found, chunk)


# --- what is said of payloads


def said(chunk: int, offset: int, data: bytes) -> bytes:
    return struct.pack("<Q", chunk) + ENTRY.pack(offset, len(data), 0, payload_hash(data))


def test_only_what_is_there_is_said(used: Layout, found: dict[int, bytes], node: PayloadFile) -> None:
    assert (ENTRY.size, STORED_BYTES) == (ENTRY_BYTES, ENTRY_BYTES + 8)
    region = node.set_aside(1 << 16)
    part = part_of(node, used, region, *found)
    assert stored(part, list(found)) == b""
    put(part, found, 3, 1)
    assert part.entry_of(0) is None
    assert stored(part, [0, 1, 2, 3]) == (
        said(1, region.start + len(found[3]), found[1]) + said(3, region.start, found[3])
    )
    assert list(heard(stored(part, [3, 1]))) == [(3, part.entry_of(3)), (1, part.entry_of(1))]
    assert list(heard(b"")) == []


@pytest.mark.parametrize("change", [b"x", bytes(STORED_BYTES - 1)], ids=["a byte more", "a byte less"])
def test_malformed_words_are_refused(used: Layout, found: dict[int, bytes], node: PayloadFile, change: bytes) -> None:
    region = node.set_aside(1 << 16)
    part = part_of(node, used, region, 0)
    put(part, found, 0)
    with pytest.raises(InvalidMessage, match="no multiple of"):
        adopt(node, stored(part, [0]) + change, [region], any_size)
    assert node.missing() == sorted(found)
    with pytest.raises(InvalidMessage, match="no multiple of"):
        PartLog(node.path.parent, used, RUN).expect(ATTEMPT, [0], region, change)


@pytest.mark.parametrize("where", ["table", "before", "beyond", "in the other", "at the end of all"])
def test_what_does_not_lie_in_the_region_of_the_process_is_refused(
    found: dict[int, bytes], node: PayloadFile, where: str
) -> None:
    data = found[0]
    region, of_other = node.set_aside(2 * len(data)), node.set_aside(2 * len(data))
    offset = {
        "table": 0,
        "before": region.start - 1,
        "beyond": region.stop - len(data) + 1,
        "in the other": of_other.start,
        "at the end of all": 2**64 - 1,
    }[where]
    with pytest.raises(InvalidMessage, match="chunk 0 is not within what was set aside for it"):
        adopt(node, said(0, offset, data), [region], any_size)
    assert node.missing() == sorted(found)
    for inside in (region.start, region.stop - len(data)):
        node.lose(0)
        assert adopt(node, said(0, inside, data), [region], any_size) == [0]


def test_what_is_longer_than_any_payload_of_the_chunk_is_refused(found: dict[int, bytes], node: PayloadFile) -> None:
    region = node.set_aside(1 << 16)
    word = said(0, region.start, found[0])
    with pytest.raises(InvalidMessage, match="chunk 0 is not within"):
        adopt(node, word, [region], lambda chunk: len(found[chunk]) - 1)
    assert node.missing() == sorted(found)
    assert adopt(node, word, [region], lambda chunk: len(found[chunk])) == [0]


def test_a_chunk_that_another_process_has_is_refused(found: dict[int, bytes], node: PayloadFile) -> None:
    def own_bytes(chunk: int) -> int:
        if chunk:
            raise InvalidMessage(f"chunk {chunk} is not its own")
        return len(found[chunk])

    region = node.set_aside(1 << 16)
    for foreign in (1, 2**64 - 1):
        with pytest.raises(InvalidMessage, match=f"chunk {foreign} is not its own"):
            adopt(node, said(foreign, region.start, found[1]), [region], own_bytes)
    assert node.missing() == sorted(found)


def test_what_is_said_twice_is_no_error_unless_it_is_of_other_bytes(
    used: Layout, found: dict[int, bytes], node: PayloadFile
) -> None:
    put(node, found, 1)
    region = node.set_aside(1 << 16)
    part, again = (part_of(node, used, region, 0, 1) for _ in range(2))
    put(part, found, 0)
    for _ in range(2):
        assert adopt(node, stored(part, [0]), [region], any_size) == [0]
    again.put_within(range(region.start + len(found[0]), region.stop))
    put(again, found, 0, 1)  # a process that was started anew puts it to another place
    assert adopt(node, stored(again, [0, 1]), [region], any_size) == [0, 1]
    for chunk in (0, 1):
        with pytest.raises(DigestMismatch, match=f"chunk {chunk} comes twice, with different bytes"):
            adopt(node, said(chunk, region.start, other(found[chunk])), [region], any_size)
        assert node.read(chunk) == found[chunk]
    node.lose(0)
    put(node, found, *found)
    node.seal()
    assert adopt(node, stored(part, [0]), [region], any_size) == [0], "what comes late is there already"
    assert node.sealed


def test_what_is_held_may_be_said_again_from_a_region_of_before(
    used: Layout, found: dict[int, bytes], node: PayloadFile
) -> None:
    first, later = node.set_aside(1 << 16), node.set_aside(1 << 16)
    part = part_of(node, used, first, 0, 1)
    put(part, found, 0)
    assert adopt(node, stored(part, [0]), [first], any_size) == [0]
    put(part, found, 1)  # and says so when the attempt was begun again
    assert adopt(node, stored(part, [0]), [later], any_size) == [0]
    with pytest.raises(InvalidMessage, match="is not within what was set aside for it"):
        adopt(node, stored(part, [1]), [later], any_size)
    assert adopt(node, stored(part, [1]), [first, later], any_size) == [1]


def test_words_of_bytes_that_are_not_there_are_found_out_by_who_reads(
    found: dict[int, bytes], node: PayloadFile
) -> None:
    region = node.set_aside(1 << 16)
    adopt(node, said(0, region.start, found[0]), [region], any_size)
    with pytest.raises(StateError, match="chunk 0 is damaged; fetch it again"):
        node.read(0)
    put(node, found, 0)
    assert node.read(0) == found[0]


# --- the file as a process has it


def test_a_process_lacks_its_own_chunks_alone_and_does_not_seal_the_file(
    tmp_path: Path, used: Layout, found: dict[int, bytes], node: PayloadFile
) -> None:
    part = part_of(node, used, node.set_aside(1 << 16), 1, 2)
    put(part, found, 2)
    assert part.missing() == [1]
    with pytest.raises(StateError, match="1 of 2 chunks are missing"):
        part.seal()
    put(part, found, 1)
    assert part.missing() == []
    part.seal()
    assert not part.sealed
    assert part.digest(commit_record(1)) == bytes(DIGEST_BYTES)
    assert [part.read(chunk) for chunk in (1, 2)] == [found[1], found[2]]
    with pytest.raises(StateError, match="not sealed, torn, or of another run"):
        PayloadFile(tmp_path / "log", used, RUN, ATTEMPT, is_new=False, fsync=False)


def test_payloads_of_a_process_are_checked_as_those_of_the_node_are(
    used: Layout, found: dict[int, bytes], node: PayloadFile
) -> None:
    part = part_of(node, used, node.set_aside(1 << 16), 0, 1)
    for chunk, data in ((0, found[0][:-1]), (0, found[max(found)]), (used.num_sync_chunks, found[0])):
        with pytest.raises(InvalidMessage):
            part.put(chunk, data, payload_hash(data))
    put(part, found, 0)
    with pytest.raises(DigestMismatch, match="chunk 0 comes twice"):
        part.put(0, other(found[0]), payload_hash(other(found[0])))
    put(part, found, 0)
    assert part.missing() == [1]


def test_a_process_that_is_late_makes_no_file(used: Layout, found: dict[int, bytes], node: PayloadFile) -> None:
    part = part_of(node, used, node.set_aside(1 << 16), 0)
    node.remove()
    with pytest.raises(StateError, match="it was dropped"):
        put(part, found, 0)
    assert part.missing() == [0]
    assert not node.path.exists()


# --- the log as a process has it


def expecting(node: PayloadFile, used: Layout, *attempts: AttemptKey, held: bytes = b"") -> PartLog:
    log = PartLog(node.path.parent, used, RUN, frozenset({ATTEMPT}))
    for attempt in attempts:
        log.expect(attempt, [0, 1], node.set_aside(1 << 12), held)
    return log


def test_an_attempt_that_is_expected_begins_and_no_other_one(used: Layout, node: PayloadFile) -> None:
    log = expecting(node, used, ATTEMPT)
    file = log.begin(1, 1, 0)
    assert file is log.begin(1, 1, 0)
    assert (file.path, file.missing()) == (node.path, [0, 1])
    for sync, term, attempt in ((2, 1, 0), (1, 2, 0), (1, 1, 1)):
        with pytest.raises(StaleError, match=f"sync {sync} attempt {attempt} was over before it began"):
            log.begin(sync, term, attempt)
    with pytest.raises(StaleError, match="was over before it began"):
        log.begin(1, 1, 0, is_over=lambda: True)


def test_what_the_node_has_already_is_there_for_the_process(
    used: Layout, found: dict[int, bytes], node: PayloadFile
) -> None:
    put(node, found, 1, 2)
    file = expecting(node, used, ATTEMPT, held=stored(node, [0, 1])).begin(1, 1, 0)
    assert file.missing() == [0]
    assert file.read(1) == found[1]
    with pytest.raises(StateError, match="chunk 2 is not here"):
        file.read(2)
    with pytest.raises(DigestMismatch, match="chunk 1 comes twice"):
        file.put(1, other(found[1]), payload_hash(other(found[1])))


def test_dropped_are_all_attempts_at_that_sync(used: Layout, node: PayloadFile) -> None:
    log = expecting(node, used, ATTEMPT, AttemptKey(1, 1, 1), AttemptKey(2, 1, 0))
    log.drop(1)
    for attempt in (0, 1):
        with pytest.raises(StaleError):
            log.begin(1, 1, attempt)
    log.drop(3)
    assert log.begin(2, 1, 0).missing() == [0, 1]


def test_attempts_that_left_errors_are_those_that_the_node_named_last(node: PayloadFile) -> None:
    log = expecting(node, layout(num_fragments=3))
    assert log.attempt_of(0, 5) is None
    first, later = AttemptKey(4, 1, 0), AttemptKey(5, 1, 0)
    log.led_to_base(0, {0: first})
    log.led_to_base(1, {1: AttemptKey(3, 1, 2)})
    log.led_to_base(1, {1: later})
    assert [log.attempt_of(fragment, 5) for fragment in range(3)] == [first, later, None]
    log.led_to_base(0, {})
    assert log.attempt_of(0, 50) is None, "the node's log does not have it any more: what was named is of before"
    log.led_to_base(3, {2: first})
    assert [log.attempt_of(fragment, 5) for fragment in range(3)] == [None, None, first], "a sync of all fragments"
    assert log.attempts_in_force() == {ATTEMPT}
    log.attempts_in_force().clear()
    assert log.attempts_in_force() == {ATTEMPT}


def test_a_log_keeps_what_is_in_flight(used: Layout, node: PayloadFile) -> None:
    log = expecting(node, used, ATTEMPT, AttemptKey(2, 1, 0), AttemptKey(3, 1, 0))
    log.keep({ATTEMPT.sync, 3})
    assert log.begin(ATTEMPT.sync, ATTEMPT.term, ATTEMPT.attempt).missing() == [0, 1]
    assert log.begin(3, 1, 0).missing() == [0, 1]
    with pytest.raises(StaleError):
        log.begin(2, 1, 0)


# --- payloads of the commits before


def test_payloads_of_the_commits_that_led_to_the_base_are_read_where_the_node_has_them(tmp_path: Path) -> None:
    used = layout(num_fragments=3)
    outer = seeded(tmp_path / "outer", used)
    log, found = log_in(tmp_path, used), payloads(outer)
    commits = {commit.fragment: commit for commit in (logged(log, outer, number, found) for number in (1, 2, 3))}
    assert sorted(commits) == [0, 1, 2]
    last = LastPayloads(tmp_path / "log", used, RUN, commits)
    assert {chunk: last(chunk) for chunk in found} == {chunk: (data, (100,)) for chunk, data in found.items()}
    only = LastPayloads(tmp_path / "log", used, RUN, {1: commits[1]})
    assert {chunk for chunk in found if only(chunk) is not None} == set(used.fragments[1])
    assert LastPayloads(tmp_path / "log", used, "another", commits)(0) is None


def test_there_is_no_payload_where_the_nodes_file_is_removed_or_damaged(
    tmp_path: Path, used: Layout, found: dict[int, bytes]
) -> None:
    log = log_in(tmp_path, used)
    commit = logged(log, seeded(tmp_path / "other", used), 1, found)
    last = LastPayloads(tmp_path / "log", used, RUN, {0: commit})
    path = tmp_path / "log" / ATTEMPT.file_name
    path.write_bytes(path.read_bytes().replace(found[0], other(found[0])))
    assert last(0) is None
    assert last(1) == (found[1], (100,))
    log.roll_back(0)
    assert last(1) is None
    assert LastPayloads(tmp_path / "log", used, RUN, {0: commit})(1) is None


# --- what a process has of a sync


@pytest.mark.parametrize("num_fragments", [1, 3])
def test_a_process_that_keeps_its_own_alone_has_its_own_chunks_of_each_fragment(
    tmp_path: Path, num_fragments: int
) -> None:
    used = layout(num_fragments=num_fragments)
    outer = seeded(tmp_path, used)
    empty = next(chunk.index for chunk in used.chunks if not chunk.num_elements)
    cuts = [0, 2, empty, empty + 1, used.num_sync_chunks, len(used.chunks)]
    for fragment in range(num_fragments + (num_fragments > 1)):
        whole = sync_data(outer, filled(used), fragment=fragment)
        parts: list[int] = []
        for first, end in itertools.pairwise(cuts):
            part = replace(whole, own=range(first, end), keeps_own_alone=True)
            assert part.chunks == tuple(chunk for chunk in whole.chunks if first <= chunk < end)
            assert all(part.is_own(chunk) for chunk in part.chunks)
            assert replace(whole, own=range(first, end)).chunks == whole.chunks, "a host keeps those of others too"
            parts += part.chunks
        assert tuple(parts) == whole.chunks
        assert replace(whole, keeps_own_alone=True).chunks == whole.chunks
