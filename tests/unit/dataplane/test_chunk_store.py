"""A store of records by chunk, whatever they hold: the outer state is one, and others may lie beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.node.dataplane.chunk_index import Entry
from atoll.node.dataplane.chunk_store import EMPTY, ChunkStore
from atoll.node.dataplane.outer_state import OuterState
from atoll.node.dataplane.places import SPARES
from atoll.node.dataplane.store_files import Bytes, StoreKind
from atoll.protocol.disk import REAL_DISK
from atoll.protocol.errors import StateError
from atoll.protocol.layout import chunk_hash
from tests.harness import data_plane as dp

SIZES = [40, 0, 40, 16]


def kind(name: str = "error", **identity: str) -> StoreKind:
    return StoreKind(
        name=name,
        what=f"{name} store",
        identity={"run": "r", **identity},
        key=name.encode(),
        record_bytes=SIZES,
        name_of=lambda chunk: f"tensor {chunk}",
    )


def put(store: ChunkStore, chunk: int, version: int, value: int) -> bytes:
    def fill(record: Bytes) -> None:
        record[:] = value

    return store.replace(chunk, version, fill)


def test_records_come_back_with_their_versions(tmp_path: Path) -> None:
    store = ChunkStore.create(tmp_path, kind(), REAL_DISK)
    assert store.versions == [None, 0, None, None]
    for version in range(1, 2 * SPARES):
        for chunk in (0, 2):
            assert put(store, chunk, version, 10 * version + chunk) == chunk_hash(bytes([10 * version + chunk]) * 40)
    assert put(store, 1, 5, 1) == EMPTY.hash, "of no bytes"
    assert store.num_missing == 1
    again = ChunkStore.open(tmp_path, kind())
    again.verify(1)
    assert again.versions == [7, 0, 7, None]
    with again.pinned(2) as pin:
        assert pin.data.tobytes() == bytes([72]) * 40


def test_two_kinds_lie_in_one_folder_and_one_is_not_the_other(tmp_path: Path) -> None:
    used = dp.layout()
    outer = dp.seeded(tmp_path, used)
    expected = outer.state_hash()
    store = ChunkStore.create(tmp_path, kind(), REAL_DISK)
    put(store, 0, 3, 1)
    again = ChunkStore.open(tmp_path, kind())
    again.verify(1)
    assert again.versions == [3, 0, None, None]
    assert OuterState.open(tmp_path, used, ("momentum",), dp.RUN).state_hash() == expected
    with pytest.raises(StateError, match=r"error\.json: the error store there has run 'r', this run has 'other'"):
        ChunkStore.open(tmp_path, kind(run="other"))


def test_what_fails_changes_nothing(tmp_path: Path) -> None:
    store = ChunkStore.create(tmp_path, kind(), REAL_DISK)
    put(store, 0, 1, 1)

    def fails(record: Bytes) -> None:
        record[:] = 2
        raise StateError("no")

    for _ in range(2 * SPARES):  # no spare place is lost
        with pytest.raises(StateError, match="no"):
            store.replace(0, 2, fails)
    with store.pinned(0) as pin:
        assert (pin.entry.version, pin.data[0]) == (1, 1)
    assert store.damaged() == []


def test_the_owner_hears_of_each_change_in_order(tmp_path: Path) -> None:
    store = ChunkStore.create(tmp_path, kind(), REAL_DISK)
    heard: list[tuple[int, int | None, int | None]] = []

    def noted(chunk: int, old: Entry | None, new: Entry | None) -> None:
        heard.append((chunk, old.version if old else None, new.version if new else None))

    store.noted = noted
    put(store, 0, 1, 1)
    put(store, 0, 2, 1)
    store.forget(0)
    store.forget(0)
    store.forget(1)
    assert heard == [(0, None, 1), (0, 1, 2), (0, 2, None)]
    assert store.versions == [None, 0, None, None]
    again = ChunkStore.open(tmp_path, kind())
    again.noted = noted
    again.verify(1)
    assert not heard[3:], "it is forgotten for good: another process may have read the index meanwhile"


def test_all_are_pinned_at_one_moment(tmp_path: Path) -> None:
    store = ChunkStore.create(tmp_path, kind(), REAL_DISK)
    for chunk in (0, 2):
        put(store, chunk, 1, 1)
    pins = store.pin_all()
    assert sorted(pins) == [0, 2]
    for chunk in pins:
        put(store, chunk, 2, 2)
        assert set(pins[chunk].data) == {1}
        with pytest.raises(ValueError, match="read-only"):
            pins[chunk].data[0] = 3
        store.unpin(chunk, pins[chunk])
    for version in range(3, 3 + 2 * SPARES):  # their places are free again
        put(store, 0, version, version)
