"""Rule 30: contributions beyond the bound on memory are on the disk, and come back as they were."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from atoll.node.exchange.peers.frames import Encoded
from atoll.node.exchange.sync.retained import Retained
from atoll.node.exchange.sync.spill import Spill, Spilled
from atoll.protocol.errors import HostError, InvalidMessage, StaleError
from atoll.protocol.plans import payload_hash
from tests.harness.small_disk import small_disk


def encoded(chunk: int, size: int = 10) -> Encoded:
    data = bytes([chunk]) * size
    return Encoded(chunk, data, payload_hash(data))


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as made:
        yield made


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def add(retained: Retained, site_id: int, *items: Encoded) -> None:
    """As a stream does, which keeps them in a thread."""
    for item in retained.kept(list(items)):
        retained.add(site_id, 1, item)


def test_what_has_no_room_in_memory_goes_to_the_disk(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    spill = Spill(tmp_path / "spill", 25)
    held, other = Retained(pool, spill), Retained(pool, spill)
    for site in range(1, 5):
        add(held, site, encoded(0))
    kinds = [type(held.get(site, 1, 0)) for site in range(1, 5)]
    assert kinds == [Encoded, Encoded, Spilled, Spilled]
    assert (spill.memory_bytes, held.num_bytes, spill.disk_bytes) == (20, 40, 20)
    spilled = held.get(3, 1, 0)
    assert isinstance(spilled, Spilled)
    assert spilled.read() == encoded(0).data
    # They are held like the others.
    assert held.chunks_of(3, 1) == {0}
    assert not held.is_new(3, 1, encoded(0))
    with pytest.raises(InvalidMessage, match="a contribution never changes"):
        held.is_new(3, 1, Encoded(0, b"x", b"y" * 32))
    # The bound is of all syncs.
    add(other, 1, encoded(5))
    assert isinstance(other.get(1, 1, 5), Spilled)
    assert len(files(spill.folder)) == 3
    asyncio.run(other.keep(lambda _: False))
    asyncio.run(held.keep(lambda key: key[0] in (2, 3)))
    pool.shutdown()
    assert len(files(spill.folder)) == 1
    assert (spill.memory_bytes, held.num_bytes, other.num_bytes, spill.disk_bytes) == (10, 20, 0, 10)


@pytest.mark.parametrize("limit_bytes", [0, 100])
@pytest.mark.parametrize("is_dropped", [False, True])
def test_what_is_kept_and_not_wanted_takes_no_room(
    tmp_path: Path, pool: ThreadPoolExecutor, limit_bytes: int, is_dropped: bool
) -> None:
    """Two streams brought the same, or the sync ended meanwhile."""
    spill = Spill(tmp_path / "spill", limit_bytes)
    held = Retained(pool, spill)
    first, second = held.kept([encoded(0)]), held.kept([encoded(0)])
    if is_dropped:
        held.drop()
    for item in (*first, *second):
        held.add(1, 1, item)
    pool.shutdown()
    left = 0 if is_dropped else 10
    assert held.num_bytes == spill.memory_bytes + spill.disk_bytes == left
    assert len(files(spill.folder)) == (0 if limit_bytes else left // 10)


@pytest.mark.root
def test_a_full_disk_is_an_error(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    with small_disk(tmp_path / "disk", 64 << 10):
        spill = Spill(tmp_path / "disk" / "spill", 0)
        with pytest.raises(HostError, match=r"spill/0: no space is left, 0\.1 MiB are needed, .* make room"):
            Retained(pool, spill).kept([encoded(0, 100_000)])
        assert files(spill.folder) == [], "nothing half written is left"
        assert (spill.memory_bytes, spill.disk_bytes) == (0, 0)


@pytest.mark.parametrize("now", [b"x" * 10, b"", bytes([3]) * 11, bytes(1 << 20)])
def test_bytes_that_change_on_the_disk_are_noticed(tmp_path: Path, now: bytes) -> None:
    spill = Spill(tmp_path / "spill", 0)
    spilled = spill.keep(encoded(3))
    assert isinstance(spilled, Spilled)
    spilled.path.write_bytes(now)
    with pytest.raises(HostError, match="spill/0: what was written there has changed on this disk"):
        spilled.read()


def test_only_what_was_dropped_may_be_gone(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    held = Retained(pool, Spill(tmp_path / "spill", 0))
    add(held, 1, encoded(1), encoded(2))
    dropped, removed = held.get(1, 1, 1), held.get(1, 1, 2)
    assert isinstance(dropped, Spilled)
    assert isinstance(removed, Spilled)
    asyncio.run(held.keep(lambda key: key[2] == 2))
    removed.path.unlink()
    pool.shutdown()
    with pytest.raises(StaleError, match="chunk 1 was dropped while it was read"):
        dropped.read()
    with pytest.raises(HostError, match="spill/1: No such file"):
        removed.read()


def test_what_an_earlier_start_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / "spill").mkdir()
    (tmp_path / "spill" / "7").write_bytes(b"old")
    assert files(Spill(tmp_path / "spill", 0).folder) == []
