"""The disk of the store is measured in a thread, so that one that is stuck holds up nobody."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from atoll.coordinator import store_disk
from atoll.coordinator.store_disk import StoreDisk
from atoll.protocol.machine import REAL
from atoll.protocol.resources import Resources

LIMIT_S = 30.0


class Measured:
    """As by this machine. It says when it is asked again: what it found before is shown by then."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.again = asyncio.Event()
        self._num = 0

    def __call__(self, folder: Path) -> Resources:
        self._num += 1
        if self._num == 2:
            self._loop.call_soon_threadsafe(self.again.set)
        return REAL.resources(folder)


async def after_one(folder: Path) -> dict[str, int] | None:
    measured = Measured()
    disk = StoreDisk(folder, measured)
    assert disk.document() is None
    running = asyncio.create_task(disk.run())
    async with asyncio.timeout(LIMIT_S):
        await measured.again.wait()
    running.cancel()
    return disk.document()


def test_the_disk_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_disk, "EVERY_S", 0)
    found = asyncio.run(after_one(tmp_path))
    assert found is not None
    assert 0 <= found["free_bytes"] <= found["total_bytes"]
    assert found["total_bytes"] > 0


def test_a_disk_that_cannot_be_measured_is_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_disk, "EVERY_S", 0)
    assert asyncio.run(after_one(tmp_path / "not there")) is None


def test_a_disk_that_is_stuck_holds_up_nobody(tmp_path: Path) -> None:
    begun, freed = threading.Event(), threading.Event()

    def stuck(folder: Path) -> Resources:
        begun.set()
        assert threading.current_thread() is not threading.main_thread()
        freed.wait(LIMIT_S)
        return Resources(disk_free_bytes=1, disk_total_bytes=2)

    async def main() -> None:
        disk = StoreDisk(tmp_path, stuck)
        running = asyncio.create_task(disk.run())
        try:
            assert await asyncio.to_thread(begun.wait, LIMIT_S)
            assert not running.done()
            assert disk.document() is None
            running.cancel()
        finally:
            freed.set()

    asyncio.run(main())
