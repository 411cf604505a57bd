"""A snapshot and the log that it needs, whatever comes in between: after a power cut the node's state is no older."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest

from atoll.node.computing import compute
from atoll.node.daemon.home import Home
from atoll.node.daemon.plane import DataPlane
from atoll.node.dataplane import publish
from atoll.node.dataplane.chunk_index import ChunkIndex
from atoll.node.dataplane.outer_state import OuterState
from atoll.node.dataplane.payload_file import PayloadFile
from atoll.node.dataplane.payload_log import PayloadLog
from atoll.protocol.settings import RunSettings
from tests.harness.data_plane import DTYPES, filled, manifest
from tests.harness.power_cut import Recorder
from tests.unit.local.test_power_cut import SETTINGS, Truth, being_written, loaded, written

NUM_IMAGES = 60


class Killed(BaseException):
    pass


def settings_of(*, fsync: bool = False, fragments: int = 1) -> RunSettings:
    return replace(SETTINGS, sync=replace(SETTINGS.sync, fsync=fsync, fragments=fragments))


@dataclass
class Site:
    """A node's disk, at commit 0 with a snapshot of it."""

    folder: Path
    settings: RunSettings

    def __post_init__(self) -> None:
        self.folder.mkdir(0o700)
        self.truth = Truth([], [], [], [], [])
        self.begin()
        outer = self.plane.fresh_outer()
        publish.seed_from_snapshot(outer, filled(self.plane.layout))
        self.note(outer, 0)
        asyncio.run(self.plane.write_snapshot())

    def begin(self) -> None:
        self.home = Home(self.folder)
        self.plane = DataPlane(self.home, self.settings, manifest(), 1)
        self.plane.attach_workers(DTYPES)

    def end(self) -> None:
        self.plane.close()
        self.home.close()

    def note(self, outer: OuterState, number: int) -> None:
        self.truth.state_hashes.append(outer.state_hash())
        self.truth.chunk_hashes.append(outer.chunk_hashes(number) or [])

    async def commit(self, number: int) -> None:
        record, file = written(self.plane, number)
        file.seal()
        await self.plane.apply(record)
        assert self.plane.outer is not None
        self.note(self.plane.outer, number)

    async def fetch(self, donor: Site) -> None:
        """All chunks, from a site that is further."""
        mine, others = self.plane, donor.plane.outer
        assert others is not None
        assert others.commit is not None
        async with mine.fetching() as outer:
            for chunk in mine.layout.chunks:
                if chunk.num_elements:
                    record = others.read(chunk.index)
                    outer.put(chunk.index, record.version, record.data)
            mine.log.lead_to(donor.plane.log.history.touched(others.commit) or ())
        self.truth.state_hashes[:], self.truth.chunk_hashes[:] = donor.truth.state_hashes, donor.truth.chunk_hashes

    def newest(self, folder: Path) -> int:
        """Of the snapshots there."""
        return max((int(p.stem.split("-")[1]) for p in (folder / "snapshots").glob("commit-*.snapshot")), default=0)

    def after_cuts(self, recorder: Recorder, since: int, tmp_path: Path) -> Counter[tuple[int | None, int]]:
        """(what came back, newest snapshot) of power cuts at moments from that one on."""
        found: Counter[tuple[int | None, int]] = Counter()
        for seed in islice((s for s in count() if recorder.cut_of(s) >= since), NUM_IMAGES):
            image = tmp_path / f"image-{seed}"
            image.mkdir(0o700)
            recorder.image(seed, image)
            newest = self.newest(image)
            found[loaded(image, self.settings, self.truth), newest] += 1
            shutil.rmtree(image)
        return found


@contextmanager
def recorded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    with Recorder(folder, monkeypatch) as recorder:
        recorder.noting(ChunkIndex, "write")
        recorder.noting(PayloadFile, "put")
        recorder.noting(PayloadLog, "commit")
        yield recorder


def no_older(found: Counter[tuple[int | None, int]]) -> bool:
    return all(commit is not None and commit >= newest for commit, newest in found)


def test_a_snapshot_that_is_being_written_while_a_state_is_fetched_comes_to_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its chunks would be of two commits, and the log here has none between them."""
    donor = Site(tmp_path / "donor", settings_of())
    for number in range(1, 9):
        asyncio.run(donor.commit(number))
    site = Site(tmp_path / "site", settings_of())
    with recorded(site.folder, monkeypatch) as recorder:
        asyncio.run(site.commit(1))

        async def fetch_meanwhile() -> None:
            async with being_written(site.plane, monkeypatch):
                await site.fetch(donor)

        asyncio.run(fetch_meanwhile())
        assert site.newest(site.folder) == 0
        assert site.plane.snapshot_is_due
        asyncio.run(site.plane.write_snapshot())
        since = recorder.note()
        assert site.newest(site.folder) == 8
        site.end()
    donor.end()
    assert set(site.after_cuts(recorder, since, tmp_path)) == {(8, 8)}


def test_commits_wait_for_a_snapshot_that_needs_the_log_though_the_one_before_is_of_no_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a fetch in a run of fragments the log does not lead on from the older one."""
    donor = Site(tmp_path / "donor", settings_of(fragments=3))
    for number in range(1, 9):
        asyncio.run(donor.commit(number))
    site = Site(tmp_path / "site", settings_of(fragments=3))
    with recorded(site.folder, monkeypatch) as recorder:
        asyncio.run(site.fetch(donor))

        async def commit_meanwhile() -> None:
            shield, waits, began = asyncio.shield, asyncio.Event(), asyncio.Event()

            def waits_for(future: Any) -> Any:
                waits.set()
                return shield(future)

            async def begins(work: Any) -> Any:
                began.set()
                return await compute(work)

            async with being_written(site.plane, monkeypatch):
                for number in range(9, 13):
                    await site.commit(number)
                monkeypatch.setattr(asyncio, "shield", waits_for)
                monkeypatch.setattr("atoll.node.daemon.plane.compute", begins)
                commit = asyncio.create_task(site.commit(13))
                await waits.wait()  # for the snapshot, or for its own work
                assert not began.is_set(), "the record of commit 9 would go, and the snapshot has chunks of before it"
            await commit

        asyncio.run(commit_meanwhile())
        since = recorder.note()
        site.end()
    donor.end()
    assert no_older(site.after_cuts(recorder, since, tmp_path))


def test_a_commit_that_comes_again_leaves_what_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(tmp_path / "site", settings_of())
    with recorded(site.folder, monkeypatch) as recorder:
        asyncio.run(site.commit(1))

        async def commit_meanwhile() -> None:
            async with being_written(site.plane, monkeypatch):
                await site.commit(2)

        asyncio.run(commit_meanwhile())
        since = recorder.note()
        site.plane.log.commit(site.plane.log.record(2))
        recorder.note()
        site.end()
    found = site.after_cuts(recorder, since, tmp_path)
    assert set(found) == {(2, 2)}


def test_what_a_killed_process_left_to_the_kernel_is_synced_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `sync.fsync`: it dies when the table of the payloads is written, and not synced."""
    site = Site(tmp_path / "site", settings_of(fsync=True))
    with recorded(site.folder, monkeypatch) as recorder:
        asyncio.run(site.commit(1))
        record, file = written(site.plane, 2)
        fdatasync, calls = os.fdatasync, []

        def dies(descriptor: Any) -> None:
            calls.append(descriptor)
            if len(calls) == 2:
                raise Killed
            fdatasync(descriptor)

        with monkeypatch.context() as patched:
            patched.setattr(os, "fdatasync", dies)
            with pytest.raises(Killed):
                file.seal()
        recorder.note()
        site.end()
        site.begin()
        asyncio.run(site.plane.apply(record))
        assert site.plane.outer is not None
        site.note(site.plane.outer, 2)
        since = recorder.note()
        site.end()
    found = site.after_cuts(recorder, since, tmp_path)
    assert {commit for commit, _ in found} == {2}
