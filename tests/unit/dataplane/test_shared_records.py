"""Records of a store that another process writes: whole, or refused at the end."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from atoll.node.dataplane import error_feedback, outer_state
from atoll.node.dataplane.chunk_store import EMPTY, ChunkStore
from atoll.node.dataplane.error_feedback import ErrorFeedback
from atoll.node.dataplane.outer_state import OuterState, PinnedChunk
from atoll.node.dataplane.shared_records import SharedErrors, SharedOuter, SharedRecords
from atoll.node.dataplane.store_files import Bytes, StoreKind
from atoll.node.dataplane.sync_data import SyncData
from atoll.protocol.codecs.arithmetic import Floats
from atoll.protocol.disk import REAL_DISK
from atoll.protocol.errors import NonFiniteError, StateError
from atoll.protocol.layout import Layout
from atoll.protocol.settings import RunSettings
from atoll.protocol.spec import spec_of
from atoll.protocol.sync_settings import SyncSettings
from tests.harness import data_plane as dp

ROOT = Path(__file__).parents[3]
SIZES = [40, 0, 40]
SLOTS = ("momentum",)


def kind(run: str = "r", sizes: list[int] = SIZES) -> StoreKind:
    return StoreKind(
        name="shared",
        what="shared store",
        identity={"run": run},
        key=run.encode(),
        record_bytes=sizes,
        name_of=lambda chunk: f"tensor {chunk}",
    )


def put(store: ChunkStore, chunk: int, version: int, value: int) -> int:
    """Its place."""

    def fill(record: Bytes) -> None:
        record[:] = value

    store.replace(chunk, version, fill)
    with store.pinned(chunk) as pin:
        return pin.entry.place


def read(reader: SharedRecords, chunk: int) -> tuple[int, set[int]]:
    with reader.pinned(chunk) as pin:
        return pin.entry.version, set(pin.data.tolist())


@pytest.fixture(name="store")
def _store(tmp_path: Path) -> ChunkStore:
    return ChunkStore.create(tmp_path, kind(), REAL_DISK)


@pytest.fixture(name="reader")
def _reader(tmp_path: Path, store: ChunkStore) -> SharedRecords:
    put(store, 0, 1, 10)
    reader = SharedRecords(tmp_path, kind())
    reader.look_anew()
    return reader


def test_what_is_in_force_is_read_and_what_comes_into_force_next(store: ChunkStore, reader: SharedRecords) -> None:
    assert read(reader, 0) == (1, {10})
    for version in range(2, 12):
        put(store, 0, version, 10 * version)
        put(store, 2, version, 10 * version + 1)
        assert read(reader, 0) == (version, {10 * version})
        assert read(reader, 2) == (version, {10 * version + 1})
    store.relabel(2, 0)
    assert read(reader, 2) == (0, {111})
    with reader.pinned(0) as shared, store.pinned(0) as own:
        assert shared.entry == own.entry
        assert shared.data.tobytes() == own.data.tobytes()


def test_a_chunk_without_bytes_is_there_and_one_that_was_never_put_is_not(
    tmp_path: Path, reader: SharedRecords
) -> None:
    for any_reader in (reader, SharedRecords(tmp_path, kind())):
        with any_reader.pinned(1) as pin:
            assert (pin.entry, pin.data.size) == (EMPTY, 0)
    with pytest.raises(StateError, match="chunk 2 of 'tensor 2' is missing"):
        read(reader, 2)


def test_records_are_read_only(reader: SharedRecords) -> None:
    with reader.pinned(0) as pin, pytest.raises(ValueError, match="read-only"):
        pin.data[0] = 3


def test_a_record_that_was_replaced_while_it_was_read_is_refused_at_the_end(
    store: ChunkStore, reader: SharedRecords
) -> None:
    reading = ExitStack()
    pin = reading.enter_context(reader.pinned(0))
    put(store, 0, 2, 20)
    assert set(pin.data.tolist()) == {10}, "its place is not used before the next one is in force"
    with pytest.raises(StateError, match="chunk 0 of the shared store was replaced while it was read"):
        reading.close()
    with reader.pinned(0):
        put(store, 2, 2, 20)


def test_a_record_whose_place_was_used_again_is_refused_at_the_end(store: ChunkStore, reader: SharedRecords) -> None:
    reading = ExitStack()
    pin = reading.enter_context(reader.pinned(0))
    places = [put(store, 0, version, version) for version in (2, 3)]
    assert places[1] == pin.entry.place
    assert set(pin.data.tolist()) == {3}
    with pytest.raises(StateError, match="was replaced while it was read"):
        reading.close()


def test_a_record_of_the_same_bytes_and_version_in_another_place_is_another_one(
    store: ChunkStore, reader: SharedRecords
) -> None:
    with pytest.raises(StateError, match="was replaced while it was read"), reader.pinned(0):
        put(store, 0, 1, 10)


def test_what_was_made_of_a_replaced_record_is_not_said(store: ChunkStore, reader: SharedRecords) -> None:
    """That it is not finite, say: perhaps no record ever was."""

    def fails(meanwhile: Callable[[], object]) -> None:
        with reader.pinned(0):
            meanwhile()
            raise NonFiniteError("it has a NaN")

    with pytest.raises(StateError, match="was replaced while it was read") as raised:
        fails(lambda: put(store, 0, 2, 20))
    assert isinstance(raised.value.__context__, NonFiniteError)
    with pytest.raises(NonFiniteError, match="it has a NaN"):
        fails(lambda: put(store, 2, 2, 20))


def test_a_chunk_that_is_forgotten_is_missing_at_once(store: ChunkStore, reader: SharedRecords) -> None:
    put(store, 0, 2, 20)  # now there are two entries
    store.forget(0)
    with pytest.raises(StateError, match="chunk 0 of 'tensor 0' is missing"):
        read(reader, 0)
    put(store, 0, 2, 21)
    assert read(reader, 0) == (2, {21})


def test_a_forgotten_chunk_whose_place_another_one_has_stays_missing(store: ChunkStore, reader: SharedRecords) -> None:
    reading = ExitStack()
    pin = reading.enter_context(reader.pinned(0))
    store.forget(0)
    assert put(store, 2, 1, 30) == pin.entry.place
    assert set(pin.data.tolist()) == {30}
    with pytest.raises(StateError, match="is missing"):
        reading.close()
    with pytest.raises(StateError, match="is missing"):
        read(reader, 0)
    assert read(reader, 2) == (1, {30})


# --- files that are made anew


def test_files_that_were_made_anew_are_read_from_the_next_look_on(
    tmp_path: Path, store: ChunkStore, reader: SharedRecords
) -> None:
    for value in (50, 60):
        before = read(reader, 0)
        again = ChunkStore.create(tmp_path, kind(), REAL_DISK)
        put(again, 0, value, value)
        put(store, 2, 1, 1)  # to files that nobody finds any more
        assert read(reader, 0) == before
        reader.look_anew()
        assert read(reader, 0) == (value, {value})
        with pytest.raises(StateError, match="is missing"):
            read(reader, 2)
        reader.look_anew()
        assert read(reader, 0) == (value, {value})


def test_nothing_is_read_before_the_first_look(tmp_path: Path, store: ChunkStore) -> None:
    put(store, 0, 1, 10)
    reader = SharedRecords(tmp_path, kind())
    with pytest.raises(StateError, match="the shared store was not looked at yet"):
        read(reader, 0)
    reader.look_anew()
    assert read(reader, 0) == (1, {10})


def test_files_of_another_kind_are_refused_at_each_look(tmp_path: Path, reader: SharedRecords) -> None:
    put(ChunkStore.create(tmp_path, kind("other"), REAL_DISK), 0, 1, 10)
    for refused in (reader, reader, SharedRecords(tmp_path, kind())):
        with pytest.raises(StateError, match="the shared store there has run 'other', this run has 'r'"):
            refused.look_anew()
    ChunkStore.create(tmp_path, kind(), REAL_DISK)
    reader.look_anew()
    with pytest.raises(StateError, match="is missing"):
        read(reader, 0)


def test_files_that_are_not_there_or_not_whole_are_refused(tmp_path: Path, reader: SharedRecords) -> None:
    for suffix, text in (("chunks", "No such file"), ("json", "not an shared store"), ("index", "no shared store is")):
        whole = (tmp_path / f"shared.{suffix}").read_bytes()
        (tmp_path / f"shared.{suffix}").unlink()
        with pytest.raises(StateError, match=text):
            SharedRecords(tmp_path, kind()).look_anew()
        (tmp_path / f"shared.{suffix}").write_bytes(whole)
    SharedRecords(tmp_path, kind()).look_anew()
    (tmp_path / "shared.index").write_bytes(whole[:-1])
    with pytest.raises(StateError, match=r"shared\.index: truncated"):
        reader.look_anew()


# --- what it is for


def shared_outer(outer: OuterState) -> SharedOuter:
    records = SharedRecords(outer.folder, outer_state.kind_of(outer.layout, outer.slots, outer.run_id))
    records.look_anew()
    return SharedOuter(outer.layout, records)


def shown(pinned: PinnedChunk) -> tuple[object, ...]:
    return pinned.version, pinned.hash, pinned.values.dtype, pinned.values.tobytes(), pinned.data.tobytes()


def test_an_outer_state_is_the_same_for_another_process(tmp_path: Path) -> None:
    used = dp.layout()
    outer = dp.seeded(tmp_path, used)
    shared = shared_outer(outer)
    for commit in range(4):
        if commit:
            dp.apply_all(outer, dp.payloads(outer), commit)
        for chunk in range(len(used.chunks)):
            with shared.pinned(chunk) as theirs, outer.pinned(chunk) as own:
                assert shown(theirs) == shown(own)
    found = dp.payloads(outer)
    with pytest.raises(StateError, match="chunk 0 of the outer state was replaced"), shared.pinned(0):
        dp.apply_all(outer, found, 4)
    outer.forget(0)
    with pytest.raises(StateError, match="chunk 0 of 'weight' is missing"), shared.pinned(0):
        pass


def sync_of(outer: OuterState | SharedOuter, errors: ErrorFeedback | SharedErrors, commit: int) -> SyncData:
    used, sync = outer.layout, SyncSettings(codec="sign1", error_feedback=0.9)
    travels, snapshot = spec_of(sync, commit, 0), dp.filled(used, 1)
    return SyncData(used, travels, outer, snapshot, dp.DTYPES, errors=errors, error_commits=(commit,))


def with_errors(folder: Path, used: Layout) -> tuple[OuterState, ErrorFeedback, SharedErrors]:
    """At commit 2."""
    settings = RunSettings(run_id=dp.RUN, sync=SyncSettings(codec="sign1", error_feedback=0.9))
    outer = dp.seeded(folder / "outer", used)
    errors = ErrorFeedback.create(folder / "errors", used, settings, REAL_DISK)
    data = sync_of(outer, errors, 0)
    errors.advance(data.chunks, 2, data.left_over, None)
    records = SharedRecords(folder / "errors", error_feedback.kind_of(used, settings))
    records.look_anew()
    return outer, errors, SharedErrors(used, np.float32(0.9), records)


def test_error_feedback_is_the_same_for_another_process(tmp_path: Path) -> None:
    used = dp.layout()
    _, errors, shared = with_errors(tmp_path, used)
    sizes = set()
    for chunk in used.sync_chunks:
        with shared.of(chunk, 0) as nothing:
            assert not nothing.size
        if errors.store.versions[chunk] == 2:
            with shared.of(chunk, 2) as theirs, errors.of(chunk, 2) as own:
                assert theirs.dtype == np.float32
                assert theirs.tobytes() == own.tobytes()
                sizes.add(theirs.size)
    assert len(sizes) > 1
    for commit in (1, 3):
        words = f"chunk 0 is of commit 2, that of commit {commit} is needed"
        with pytest.raises(StateError, match=words), shared.of(0, commit):
            pass


def test_error_feedback_that_was_advanced_while_it_was_read_is_refused_at_the_end(tmp_path: Path) -> None:
    _, errors, shared = with_errors(tmp_path, dp.layout())

    def nothing(chunk: int, out: Floats) -> float:
        out[:] = 0
        return 1.0

    with pytest.raises(StateError, match="chunk 0 of the error feedback was replaced"), shared.of(0, 2):
        errors.advance([0], 3, nothing, None)
    with shared.of(0, 3) as left:
        assert not left.any()


def test_another_process_contributes_what_the_node_itself_would(tmp_path: Path) -> None:
    used = dp.layout()
    outer, errors, shared = with_errors(tmp_path, used)
    own, theirs = sync_of(outer, errors, 2), sync_of(shared_outer(outer), shared, 2)
    assert own.chunks == theirs.chunks
    assert [own.contribution(chunk) for chunk in own.chunks] == [theirs.contribution(chunk) for chunk in own.chunks]


# --- two processes, at full speed

LARGE = [1 << 16, 1 << 16]
LAST = 1500
FORGOTTEN = 7

WRITER = """
import sys
from pathlib import Path
from atoll.node.dataplane.chunk_store import ChunkStore
from tests.unit.dataplane.test_shared_records import FORGOTTEN, LARGE, LAST, kind, put, value_of
store = ChunkStore.open(Path(sys.argv[1]), kind(sizes=LARGE))
store.verify(1)
for version in range(1, LAST + 1):
    for chunk in range(len(LARGE)):
        if version % FORGOTTEN == chunk:
            store.forget(chunk)
        put(store, chunk, version, value_of(chunk, version))
"""


def value_of(chunk: int, version: int) -> int:
    return (2 * version + chunk) % 251


def test_what_is_read_while_another_process_writes_is_one_record_throughout(tmp_path: Path) -> None:
    store = ChunkStore.create(tmp_path, kind(sizes=LARGE), REAL_DISK)
    for chunk in range(len(LARGE)):
        put(store, chunk, 0, value_of(chunk, 0))
    reader = SharedRecords(tmp_path, kind(sizes=LARGE))
    reader.look_anew()
    newest = dict.fromkeys(range(len(LARGE)), 0)
    with subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], cwd=ROOT) as writer:
        while set(newest.values()) != {LAST}:
            assert writer.poll() in {None, 0}
            for chunk, before in newest.items():
                try:
                    with reader.pinned(chunk) as pin:
                        version, found = pin.entry.version, (int(pin.data.min()), int(pin.data.max()))
                except StateError:
                    continue
                assert found == (value_of(chunk, version),) * 2
                assert version >= before
                newest[chunk] = version
    assert writer.returncode == 0


def test_what_the_writer_does_not_count_after_a_start_does_not_count_for_the_reader(tmp_path: Path) -> None:
    """The newest record is damaged, and the writer goes on from the one before."""
    store = ChunkStore.create(tmp_path, kind(), REAL_DISK)
    put(store, 2, 1, 70)
    put(store, 0, 8, 80)
    put(store, 0, 9, 90)
    path = tmp_path / "shared.chunks"
    path.write_bytes(path.read_bytes().replace(bytes([90]) * 40, bytes([90]) * 20 + bytes(20)))
    path.write_bytes(path.read_bytes().replace(bytes([70]) * 40, bytes([70]) * 20 + bytes(20)))
    again = ChunkStore.open(tmp_path, kind())
    again.verify(1)
    assert again.versions[0] == 8
    reader = SharedRecords(tmp_path, kind())
    reader.look_anew()
    assert read(reader, 0) == (8, {80})
    with pytest.raises(StateError, match=r"chunk 2 .* is missing"), reader.pinned(2):
        pass
    put(again, 0, 9, 91)
    assert read(reader, 0) == (9, {91})
    later = ChunkStore.open(tmp_path, kind())
    later.verify(1)
    assert later.versions[0] == 9


def test_a_chunk_that_is_forgotten_and_put_again_as_before_is_another_record(tmp_path: Path) -> None:
    store = ChunkStore.create(tmp_path, kind(), REAL_DISK)
    put(store, 0, 1, 7)
    reader = SharedRecords(tmp_path, kind())
    reader.look_anew()
    with ExitStack() as stack:
        stack.enter_context(reader.pinned(0))
        store.forget(0)
        put(store, 0, 1, 7)
        with pytest.raises(StateError, match="was replaced while it was read"):
            stack.close()
