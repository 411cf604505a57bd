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


def test_the_newest_go_to_the_disk(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    async def main() -> None:
        spill = Spill(tmp_path / "spill", 25)
        held, other = Retained(spill), Retained(spill)
        for site in range(1, 5):
            assert held.add(site, 1, encoded(0))
        await held.fit_memory(pool)
        kinds = [type(held.get(site, 1, 0)) for site in range(1, 5)]
        assert kinds == [Encoded, Encoded, Spilled, Spilled]
        assert (spill.memory_bytes, held.num_bytes, spill.disk_bytes) == (20, 40, 20)
        spilled = held.get(3, 1, 0)
        assert isinstance(spilled, Spilled)
        assert spilled.read() == encoded(0).data
        # They are held like the others.
        assert held.chunks_of(3, 1) == {0}
        assert not held.add(3, 1, encoded(0))
        with pytest.raises(InvalidMessage, match="a contribution never changes"):
            held.add(3, 1, Encoded(0, b"x", b"y" * 32))
        # The bound is of all syncs.
        other.add(1, 1, encoded(5))
        await other.fit_memory(pool)
        assert isinstance(other.get(1, 1, 5), Spilled)
        assert len(files(spill.folder)) == 3
        await other.keep(lambda _: False, pool)
        await held.keep(lambda key: key[0] in (2, 3), pool)
        pool.shutdown()
        assert len(files(spill.folder)) == 1
        assert (spill.memory_bytes, held.num_bytes, other.num_bytes, spill.disk_bytes) == (10, 20, 0, 10)

    asyncio.run(main())


def test_what_is_forgotten_while_it_is_written_leaves_no_file(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    async def main() -> None:
        spill = Spill(tmp_path / "spill", 0)
        held = Retained(spill)
        held.add(1, 1, encoded(0))
        writing = asyncio.create_task(held.fit_memory(pool))
        await asyncio.sleep(0)  # it has begun
        await held.keep(lambda _: False, pool)
        await writing
        assert held.get(1, 1, 0) is None
        await asyncio.sleep(0)  # callbacks
        await asyncio.to_thread(pool.shutdown)  # what they handed in is done
        assert (spill.memory_bytes, held.num_bytes, spill.disk_bytes) == (0, 0, 0)
        assert files(spill.folder) == []

    asyncio.run(main())


def test_a_stream_that_ends_while_it_writes_loses_nothing(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    async def main() -> None:
        spill = Spill(tmp_path / "spill", 0)
        held = Retained(spill)
        held.add(1, 1, encoded(0))
        writing = asyncio.create_task(held.fit_memory(pool))
        await asyncio.sleep(0)
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing
        assert (held.get(1, 1, 0), spill.memory_bytes) == (encoded(0), 10)
        await held.fit_memory(pool)  # of the next that comes
        spilled = held.get(1, 1, 0)
        assert isinstance(spilled, Spilled)
        assert spilled.read() == encoded(0).data
        assert spill.memory_bytes == 0

    asyncio.run(main())


@pytest.mark.root
def test_a_full_disk_is_an_error_and_the_contribution_stays(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    async def main() -> None:
        item = encoded(0, 100_000)
        held.add(1, 1, item)
        with pytest.raises(HostError, match=r"spill/0: no space is left, 0\.1 MiB are needed, .* make room"):
            await held.fit_memory(pool)
        assert files(spill.folder) == [], "nothing half written is left"
        assert (held.get(1, 1, 0), spill.memory_bytes) == (item, 100_000)

    with small_disk(tmp_path / "disk", 64 << 10):
        spill = Spill(tmp_path / "disk" / "spill", 0)
        held = Retained(spill)
        asyncio.run(main())


@pytest.mark.parametrize("now", [b"x" * 10, b"", bytes([3]) * 11, bytes(1 << 20)])
def test_bytes_that_change_on_the_disk_are_noticed(tmp_path: Path, now: bytes) -> None:
    spill = Spill(tmp_path / "spill", 0)
    spilled = spill.write(encoded(3), spill.new_path())
    spilled.path.write_bytes(now)
    with pytest.raises(HostError, match="spill/0: the bytes of a contribution have changed on this disk"):
        spilled.read()


def test_only_what_was_dropped_may_be_gone(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    async def main() -> None:
        held = Retained(Spill(tmp_path / "spill", 0))
        for chunk in (1, 2):
            held.add(1, 1, encoded(chunk))
        await held.fit_memory(pool)
        dropped, removed = held.get(1, 1, 1), held.get(1, 1, 2)
        assert isinstance(dropped, Spilled)
        assert isinstance(removed, Spilled)
        await held.keep(lambda key: key[2] == 2, pool)
        removed.path.unlink()
        pool.shutdown()
        with pytest.raises(StaleError, match="chunk 1 was dropped while it was read"):
            dropped.read()
        with pytest.raises(HostError, match="spill/0: No such file"):
            removed.read()

    asyncio.run(main())


def test_what_an_earlier_start_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / "spill").mkdir()
    (tmp_path / "spill" / "7").write_bytes(b"old")
    assert files(Spill(tmp_path / "spill", 0).folder) == []
