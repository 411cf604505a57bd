"""A node's disk after a power cut at any moment: a verified state of a commit, or a refusal that names the damage."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from atoll.node.daemon.home import Home
from atoll.node.daemon.plane import DataPlane
from atoll.node.dataplane import publish, snapshot
from atoll.node.dataplane.chunk_index import ChunkIndex
from atoll.node.dataplane.chunk_store import ChunkRecord
from atoll.node.dataplane.outer_state import OuterState
from atoll.node.dataplane.payload_file import PayloadFile
from atoll.node.dataplane.payload_log import PayloadLog
from atoll.node.dataplane.snapshot import Snapshots
from atoll.protocol.errors import AtollError
from atoll.protocol.layout import chunk_hash
from atoll.protocol.messages import Commit
from atoll.protocol.outer_settings import OuterSettings
from atoll.protocol.plans import payload_hash
from atoll.protocol.settings import RunSettings
from atoll.protocol.sync_settings import SyncSettings
from tests.harness.data_plane import DTYPES, RUN, commit_record, filled, fragment_at, manifest, payloads
from tests.harness.loop_guard import guarded
from tests.harness.power_cut import Recorder

SETTINGS = RunSettings(
    run_id=RUN,
    steps=100,
    data="local",
    sync=SyncSettings(chunk_elements=400, log_commits=4, snapshots=1, fsync=True),
    outer=OuterSettings(learning_rate=0.7, momentum=0.9),
)
NUM_COMMITS = 7
WITHIN_SNAPSHOTS = (2, 5)
NUM_IMAGES = 150


@pytest.fixture(autouse=True)
def _no_image_waits_for_the_disk() -> Iterator[None]:
    """The recorder's folder has the syncs that are looked at; an image is made by the test and thrown away."""
    with pytest.MonkeyPatch.context() as patched:
        for name in ("fsync", "fdatasync"):
            patched.setattr(os, name, guarded(lambda descriptor: None, name))
        yield


@dataclass(slots=True)
class Truth:
    """What the run really was: the state hash of each commit, the hash of each chunk at it; and what a cut may cost."""

    state_hashes: list[bytes]
    chunk_hashes: list[list[bytes]]
    promises: list[tuple[int, int]]  # (moment, commit): from then on at least this commit comes back
    done: list[tuple[int, Commit]]  # Done was said: from then on the payloads of this commit come back
    starts: list[tuple[int, int]]  # (moment, start count)


def written(plane: DataPlane, number: int) -> tuple[Commit, PayloadFile]:
    """A commit, and all its payloads in a file that is not sealed."""
    assert plane.outer is not None
    record = replace(commit_record(number), fragment=fragment_at(plane.layout, number))
    file = plane.log.begin(record.sync, record.term, record.attempt, record.fragment)
    for chunk, data in payloads(plane.outer, (number, number + 50)).items():
        if plane.layout.travels(chunk, record.fragment):
            file.put(chunk, data, payload_hash(data))
    return replace(record, payload_digest=file.digest(record)), file


@asynccontextmanager
async def being_written(plane: DataPlane, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """A snapshot: its first chunk is there, and the others come after the block."""
    first_is_read, may_go_on = asyncio.Event(), threading.Event()
    checked, loop = snapshot._checked, asyncio.get_running_loop()

    def waits(outer: OuterState, chunk: int) -> ChunkRecord:
        record = checked(outer, chunk)
        if chunk == 0 and not may_go_on.is_set():
            loop.call_soon_threadsafe(first_is_read.set)
            assert may_go_on.wait(60)
        return record

    with monkeypatch.context() as patched:
        patched.setattr(snapshot, "_checked", waits)
        writing = asyncio.create_task(plane.write_snapshot())
        await first_is_read.wait()
        try:
            yield
        finally:
            may_go_on.set()
            await writing


async def commit(
    plane: DataPlane, number: int, truth: Truth, recorder: Recorder, *, with_snapshots: bool = True
) -> None:
    outer = plane.outer
    assert outer is not None
    record, file = written(plane, number)
    file.seal()
    truth.done.append((recorder.note(), record))
    truth.state_hashes.append(await plane.apply(record))
    hashes = outer.chunk_hashes(number)
    assert hashes is not None
    truth.chunk_hashes.append(hashes)
    if plane.settings.sync.fsync:
        truth.promises.append((recorder.note(), number))
    if with_snapshots and plane.snapshot_is_due:
        await plane.write_snapshot()
        truth.promises.append((recorder.note(), number))


async def commit_within_a_snapshot(
    plane: DataPlane, number: int, truth: Truth, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first chunk is of the commit before, and others are of this one."""
    async with being_written(plane, monkeypatch):
        await commit(plane, number, truth, recorder, with_snapshots=False)
    newest = plane.snapshots.files[0]
    assert newest.version(0) != newest.newest == number
    truth.promises.append((recorder.note(), number))


def a_run(
    folder: Path, settings: RunSettings, monkeypatch: pytest.MonkeyPatch, *, mixed: bool = False
) -> tuple[Recorder, Truth]:
    """Two starts of one node, several commits each, with a snapshot every other one. `mixed`: commits go on while they
    are written."""
    folder.mkdir(0o700)
    truth = Truth([], [], [], [], [])
    with Recorder(folder, monkeypatch) as recorder:
        recorder.noting(ChunkIndex, "write")
        recorder.noting(PayloadFile, "put")
        recorder.noting(PayloadLog, "commit")
        for last in (3, NUM_COMMITS):
            home = Home(folder)
            truth.starts.append((recorder.note(), home.incarnation))
            plane = DataPlane(home, settings, manifest(), 1)
            plane.attach_workers(DTYPES)
            if plane.outer is None:
                outer = plane.fresh_outer()
                publish.seed_from_snapshot(outer, filled(plane.layout))
                truth.state_hashes.append(outer.state_hash())
                truth.chunk_hashes.append(outer.chunk_hashes(0) or [])
                asyncio.run(plane.write_snapshot())
                truth.promises.append((recorder.note(), 0))
            for number in range(len(truth.state_hashes), last + 1):
                if mixed and number in WITHIN_SNAPSHOTS:
                    asyncio.run(commit_within_a_snapshot(plane, number, truth, recorder, monkeypatch))
                else:
                    asyncio.run(commit(plane, number, truth, recorder, with_snapshots=not mixed))
            plane.close()
            home.close()
    return recorder, truth


def loaded(folder: Path, settings: RunSettings, truth: Truth, done: Commit | None = None) -> int | None:
    """The commit that a node finds there, each of its bytes checked; None if it finds no whole state.

    `done`: a commit that it has the payloads of; hearing of it, it comes to it.
    """
    home = Home(folder)
    plane = None
    try:
        plane = DataPlane.load(home, settings, 1)
        if plane is None or plane.outer is None:
            return None
        for chunk, version in enumerate(plane.outer.versions):
            if version is not None and plane.layout.chunks[chunk].num_elements:
                record = plane.outer.read(chunk)
                assert chunk_hash(record.data) == record.hash == truth.chunk_hashes[version][chunk]
        held = plane.held()
        if held is None:
            return None
        assert held[1] == truth.state_hashes[held[0]]
        if done is not None and done.commit == held[0] + 1:
            assert asyncio.run(plane.apply(done)) == truth.state_hashes[done.commit]
            return done.commit
        return held[0]
    finally:
        if plane is not None:
            plane.close()
        home.close()


def test_a_file_that_is_replaced_is_the_old_one_or_the_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old one is as it was when the recorder began, long after its name is another file's."""
    folder = tmp_path / "run"
    home = Home(folder)
    home.write("count", b"7")
    with Recorder(folder, monkeypatch) as recorder:
        home.write("count", b"8")
    home.close()
    found = set()
    for seed in range(NUM_IMAGES):
        image = tmp_path / f"image-{seed}"
        recorder.image(seed, image)
        found.add((image / "count").read_bytes())
    assert found == {b"7", b"8"}


@pytest.mark.parametrize(
    ("fsync", "fragments", "mixed"), [(True, 1, False), (True, 3, False), (False, 1, True), (False, 3, False)]
)
def test_a_power_cut_at_any_moment_loses_no_more_than_is_promised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fsync: bool, fragments: int, mixed: bool
) -> None:
    """Also in a run of fragments, whose snapshots say nothing without the history of commits; and where the chunks of
    a snapshot are of several commits, so that the log has to lead on from the older ones."""
    settings = replace(SETTINGS, sync=replace(SETTINGS.sync, fsync=fsync, fragments=fragments))
    recorder, truth = a_run(tmp_path / "run", settings, monkeypatch, mixed=mixed)
    found = set()
    for seed in range(NUM_IMAGES):
        folder = tmp_path / f"image-{seed}"
        folder.mkdir(0o700)
        cut = recorder.image(seed, folder)
        promised = max((n for moment, n in truth.promises if moment <= cut), default=None)
        done = [record for moment, record in truth.done if moment <= cut] if fsync else []
        promised = max(promised or 0, done[-1].commit) if done else promised
        commit = loaded(folder, settings, truth, done[-1] if done else None)
        if promised is not None:
            assert commit is not None, (seed, promised)
            assert commit >= promised, (seed, commit, promised)
        found.add(commit)
        started = max((n for moment, n in truth.starts if moment <= cut), default=0)
        again = Home(folder)
        assert again.incarnation > started + 1, (seed, "a start count came twice")
        again.close()
        shutil.rmtree(folder)
    often = set(range(NUM_COMMITS + 1)) if fsync else {n for _, n in truth.promises}
    assert found >= often, "cuts at many moments"


def test_a_power_cut_at_any_moment_of_going_back_ends_at_one_commit_or_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until it is told that commits are void the newest comes back; from then on what the run went back to does."""
    folder, to = tmp_path / "run", 5
    settings = replace(SETTINGS, sync=replace(SETTINGS.sync, log_commits=32))
    _, truth = a_run(folder, settings, monkeypatch)
    with Recorder(folder, monkeypatch) as recorder:
        recorder.noting(ChunkIndex, "write")
        recorder.noting(Snapshots, "_put_in_place")
        home = Home(folder)
        plane = DataPlane(home, settings, manifest(), 1)
        assert asyncio.run(plane.put_aside(to, truth.state_hashes[to], NUM_COMMITS)) == truth.state_hashes[to]
        decided = recorder.note()
        assert asyncio.run(plane.roll_back(to)) == (to, truth.state_hashes[to])
        plane.close()
        home.close()
    before = after = 0
    for seed in range(NUM_IMAGES):
        image = tmp_path / f"image-{seed}"
        image.mkdir(0o700)
        if recorder.image(seed, image) < decided:
            assert loaded(image, settings, truth) == NUM_COMMITS
            before += 1
        else:
            found = loaded(image, settings, truth)
            assert found is not None
            assert found >= to
            home = Home(image)
            again = DataPlane(home, settings, manifest(), 1)
            assert asyncio.run(again.roll_back(to)) == (to, truth.state_hashes[to]), "it is told once more"
            again.close()
            home.close()
            after += 1
        shutil.rmtree(image)
    assert before > 5
    assert after > 5


def damaged(choose: random.Random, path: Path, earlier: bytes | None) -> str:
    """Truncates, tears, flips or takes back one file; what was done."""
    data = bytearray(path.read_bytes())
    place = choose.randrange(len(data)) if data else 0
    how = choose.choice(["truncated", "flipped", "zeroed", "mixed", "gone", "empty"])
    if how == "truncated":
        del data[place:]
    elif how == "flipped" and data:
        data[place] ^= 1 << choose.randrange(8)
    elif how == "zeroed":
        data[place:] = bytes(len(data) - place)
    elif how == "mixed" and earlier is not None:
        data[:place] = earlier[:place].ljust(place, b"\0")
    elif how == "empty":
        data.clear()
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes(data)
    return f"{path.name} {how} at {place}"


def test_whatever_happens_to_its_files_a_node_starts_right_or_says_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder, truth = a_run(tmp_path / "run", SETTINGS, monkeypatch)
    last, middle = recorder.moments[-1], recorder.moments[len(recorder.moments) // 2]
    found: dict[int | str | None, int] = {}
    for seed in range(2 * NUM_IMAGES):
        choose = random.Random(seed)
        folder = tmp_path / f"image-{seed}"
        folder.mkdir(0o700)
        for name, inode in last.names.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(last.contents[inode])
        words = []
        for name in choose.sample(sorted(last.names), choose.choice([1, 1, 2, 3])):
            words.append(damaged(choose, folder / name, middle.contents.get(middle.names.get(name, -1))))
        outcome: int | str | None
        try:
            outcome = loaded(folder, SETTINGS, truth)
        except AtollError as error:
            names_it = any(word.split(maxsplit=1)[0] in str(error) for word in words)
            outcome = "refused" if names_it else f"{words}: {error}"
        found[outcome] = found.get(outcome, 0) + 1
        shutil.rmtree(folder)
    assert found.get(NUM_COMMITS, 0) > NUM_IMAGES, "one damaged file is no loss as a rule"
    assert found.pop("refused") > 0
    assert not [outcome for outcome in found if isinstance(outcome, str)], "an error that does not name the file"
