"""A store of records by chunk, whatever they hold: the outer state is one, and others may lie beside it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from atoll.node.dataplane.chunk_index import Entry
from atoll.node.dataplane.chunk_store import EMPTY, ChunkStore
from atoll.node.dataplane.outer_state import OuterState
from atoll.node.dataplane.places import SPARES, spares_for
from atoll.node.dataplane.store_files import Bytes, StoreKind, TornState
from atoll.protocol.disk import REAL_DISK
from atoll.protocol.errors import StateError
from atoll.protocol.layout import chunk_hash
from tests.harness import data_plane as dp

SIZES = [40, 0, 40, 16]


def kind(name: str = "error", sizes: Sequence[int] = SIZES, **identity: str) -> StoreKind:
    return StoreKind(
        name=name,
        what=f"{name} store",
        identity={"run": "r", **identity},
        key=name.encode(),
        record_bytes=sizes,
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


@pytest.mark.parametrize("num_threads", [1, 9])
def test_as_many_chunks_are_replaced_at_once_as_the_node_has_threads(tmp_path: Path, num_threads: int) -> None:
    store = ChunkStore.create(tmp_path, kind(sizes=[64] * 12), REAL_DISK, spares_for(num_threads))
    for chunk in range(12):
        put(store, chunk, 1, 1)
    at_once = max(SPARES, num_threads)
    together = threading.Barrier(at_once, timeout=10.0)

    def fill(record: Bytes) -> None:
        together.wait()
        record[:] = 7

    with ThreadPoolExecutor(at_once) as pool:
        replaced = list(pool.map(lambda chunk: store.replace(chunk, 2, fill), range(at_once)))
    assert len(replaced) == at_once


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


def test_as_many_records_are_replaced_at_once_as_the_store_was_made_for(tmp_path: Path) -> None:
    """Whoever opens it learns how many places there are from its files."""
    num = SPARES + 2
    sizes = [64] * num
    made = ChunkStore.create(tmp_path, kind(sizes=sizes), REAL_DISK, num)
    for chunk in range(num):
        put(made, chunk, 1, 6)
    store = ChunkStore.open(tmp_path, kind(sizes=sizes))
    store.verify(1)
    assert store.versions == [1] * num
    all_at_once = threading.Barrier(num)

    def fill(record: Bytes) -> None:
        all_at_once.wait(60)
        record[:] = 7

    with ThreadPoolExecutor(num) as pool:
        list(pool.map(lambda chunk: store.replace(chunk, 2, fill), range(num)))
    assert store.versions == [2] * num
    assert store.damaged() == []


@pytest.mark.parametrize("spares", [0, 1025, "4", True, None])
def test_a_description_of_impossible_spares_is_torn(tmp_path: Path, spares: object) -> None:
    ChunkStore.create(tmp_path, kind(), REAL_DISK)
    path = tmp_path / "error.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"spares": spares}))
    with pytest.raises(TornState, match="spare places of each size"):
        ChunkStore.open(tmp_path, kind())


def test_a_slow_disk_is_waited_for_while_it_writes_and_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ChunkStore.create(tmp_path, kind(sizes=[64] * 6), REAL_DISK)
    waited: list[float] = []
    real = store.lock.wait_for

    def wait_for(ready: Callable[[], bool], timeout: float) -> bool:
        """As if the time were over, as often as another record has ended since."""
        waited.append(timeout)
        if ready():
            return True
        if len(waited) < 4:
            store.num_ended += 1
            return False
        return real(ready, 0.0)

    monkeypatch.setattr(store.lock, "wait_for", wait_for)
    store._spares[0].clear()
    with pytest.raises(StateError, match="no spare place for chunk 5; nothing was written there for 60 s"):
        store.replace(5, 1, lambda record: None)
    assert waited == [60.0] * 4, "three times others ended meanwhile, and once none did"
