"""The data plane of a node that starts again: whole, torn in the middle of a commit, or damaged."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atoll.node.core.events import Difference, Values
from atoll.node.daemon.home import Home
from atoll.node.daemon.plane import DataPlane
from atoll.node.dataplane import publish, safetensors_file, saved_model
from atoll.node.dataplane.outer_state import OuterState
from atoll.protocol.disk import PRIVATE_FILE, Disk
from atoll.protocol.errors import ConfigError, HostError, StateError
from atoll.protocol.layout import Layout, Manifest, Role, TensorSpec
from atoll.protocol.machine import Machine
from atoll.protocol.messages import Evidence
from atoll.protocol.outer_settings import OuterSettings
from atoll.protocol.plans import payload_hash
from atoll.protocol.settings import RunSettings
from atoll.protocol.sync_settings import SyncSettings
from tests.harness.chunks import cut_out
from tests.harness.data_plane import (
    DTYPES,
    RUN,
    commit_record,
    filled,
    fragment_at,
    logged,
    manifest,
    payloads,
    update_of,
)
from tests.harness.mappings import mapped_bytes

SETTINGS = RunSettings(
    run_id=RUN,
    steps=100,
    data="local",
    sync=SyncSettings(chunk_elements=400),
    outer=OuterSettings(learning_rate=0.7, momentum=0.9),
)


@pytest.fixture(name="num_fragments", autouse=True)
def _num_fragments(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Of the data planes in a test."""
    num: int = getattr(request, "param", 1)
    monkeypatch.setattr("atoll.node.daemon.plane.Layout", lambda of, chunk_elements, _: Layout(of, chunk_elements, num))
    return num


of_one_or_three = pytest.mark.parametrize("num_fragments", [1, 3], indirect=True, ids="of_{}".format)


@pytest.fixture(name="home")
def _home(tmp_path: Path) -> Iterator[Home]:
    home = Home(tmp_path / "home")
    yield home
    home.close()


def stopped_in_commit_1(home: Home, num_applied: int) -> int:
    """A home whose node died after `num_applied` chunks of commit 1; how many there are."""
    plane = DataPlane(home, SETTINGS, manifest(), 2)
    plane.attach_workers(DTYPES)
    outer = plane.fresh_outer()
    publish.seed_from_snapshot(outer, filled(plane.layout))
    found = payloads(outer)
    logged(plane.log, outer, 1, found)
    chunks = plane.layout.fragments[fragment_at(plane.layout, 1)]
    for chunk in chunks[:num_applied]:
        outer.apply(chunk, found[chunk], update_of(1, plane.optimizer))
    plane.close()
    return len(chunks)


def started_again(home: Home) -> tuple[int, bytes] | None:
    plane = DataPlane.load(home, SETTINGS, 2)
    assert plane is not None
    held = plane.held()
    plane.close()
    return held


@of_one_or_three
@pytest.mark.parametrize("num_applied", [0, 1, 3, -1])
def test_a_commit_that_a_kill_tore_is_finished_from_the_log(tmp_path: Path, num_applied: int) -> None:
    whole = Home(tmp_path / "whole")
    count = stopped_in_commit_1(whole, 1000)
    expected = started_again(whole)
    whole.close()
    assert expected is not None
    assert expected[0] == 1
    home = Home(tmp_path / "torn")
    num_applied %= count
    stopped_in_commit_1(home, num_applied)
    assert started_again(home) == expected
    home.close()


def test_a_torn_commit_whose_payload_is_damaged_is_left_to_be_fetched(
    home: Home, caplog: pytest.LogCaptureFixture
) -> None:
    stopped_in_commit_1(home, 1)
    files = [f for f in home.payload_folder.rglob("*") if f.is_file()]
    biggest = max(files, key=lambda f: f.stat().st_size)
    data = bytearray(biggest.read_bytes())
    data[len(data) // 2] ^= 1
    biggest.write_bytes(data)

    again = DataPlane.load(home, SETTINGS, 2)
    assert again is not None
    assert "no whole state can be put together here" in caplog.text
    assert again.held() is None, "some chunks are at commit 0, some at 1: peers have them"
    assert again.outer is not None
    assert again.outer.versions[0] == 1
    again.close()


@of_one_or_three
@pytest.mark.parametrize(("to", "held"), [(3, 3), (2, 2), (1, 1), (0, None)])
def test_rolling_back_leaves_what_can_be_put_together_and_nothing_of_later_commits(
    home: Home, to: int, held: int | None
) -> None:
    settings = replace(SETTINGS, sync=replace(SETTINGS.sync, log_commits=6, snapshots=2))
    plane = DataPlane(home, settings, manifest(), 2)
    plane.attach_workers(DTYPES)
    outer = plane.fresh_outer()
    publish.seed_from_snapshot(outer, filled(plane.layout))
    hashes = [outer.state_hash()]
    for number in (1, 2, 3):
        found = payloads(outer, (number,))
        record = logged(plane.log, outer, number, found)
        hashes.append(asyncio.run(plane.apply(record)))
        if number != 2:
            asyncio.run(plane.write_snapshot())
    plane.log.begin(4, 1, 1)

    expected = None if held is None else (held, hashes[held])
    assert asyncio.run(plane.roll_back(to)) == expected
    assert [c.commit for c in plane.log.commits()] == list(range(1, to + 1))
    assert all(file.newest <= to for file in plane.snapshots.files)
    assert len(list(home.payload_folder.glob("attempt-*"))) == to
    plane.close()
    assert started_again(home) == expected


@pytest.mark.parametrize("is_shown_meanwhile", [False, True])
@pytest.mark.parametrize("change", ["fetched", "rolled back"])
def test_what_is_shown_in_a_dispute_is_of_the_state_that_is_held_now(
    home: Home, change: str, is_shown_meanwhile: bool
) -> None:
    """A site that has repaired its state is asked at the same commit again."""
    plane = DataPlane(home, SETTINGS, manifest(), 2)
    plane.attach_workers(DTYPES)
    outer = plane.fresh_outer()
    publish.seed_from_snapshot(outer, filled(plane.layout))
    wrong = outer.read(0).data
    asked = (Evidence.RECORD, 0, 0)

    async def main() -> None:
        assert await plane.show(*asked) == wrong
        async with plane.fetching() as held:
            if is_shown_meanwhile:
                assert await plane.show(*asked) == wrong
            held.put(0, 0, bytes(len(wrong)))
        if change == "rolled back":
            assert await plane.show(*asked) == bytes(len(wrong))
            held.put(0, 0, wrong)
            await plane.roll_back(0)
            assert await plane.show(*asked) == wrong
        else:
            assert await plane.show(*asked) == bytes(len(wrong))

    asyncio.run(main())
    plane.close()


@of_one_or_three
def test_no_difference_is_made_of_a_difference(home: Home, num_fragments: int) -> None:
    """PUBLISH holds what the workers have not taken yet, and the outer state has moved on."""
    plane = DataPlane(home, SETTINGS, manifest(), 2)
    plane.attach_workers(DTYPES)
    outer = plane.fresh_outer()
    publish.seed_from_snapshot(outer, filled(plane.layout))
    with pytest.raises(StateError, match="the shared buffer holds, None"):
        asyncio.run(plane.publish(Difference(0, 0)))
    asyncio.run(plane.publish(Values(0)))
    asyncio.run(plane.apply(logged(plane.log, outer, 1, payloads(outer))))
    assert plane.published.buffer is not None
    before = bytes(plane.published.buffer.view)
    asyncio.run(plane.publish(Difference(0, 1)))
    changed = {
        plane.layout.fragment_of[chunk.index]
        for chunk in plane.layout.chunks[: plane.layout.num_sync_chunks]
        if cut_out(before, chunk) != cut_out(plane.published.buffer.view, chunk)
    }
    assert changed == {0}
    asyncio.run(plane.apply(logged(plane.log, outer, 2, payloads(outer, (3,)))))
    with pytest.raises(StateError, match=r"Difference\(base=1, .* cannot be made of .*Difference\(base=0"):
        asyncio.run(plane.publish(Difference(1, 2)))
    for fragment in range(num_fragments):  # of the others PUBLISH holds nothing yet, whatever it has of the first
        if fragment:
            with pytest.raises(StateError, match="the shared buffer holds, None"):
                asyncio.run(plane.publish(Difference(0, 2, fragment)))
        asyncio.run(plane.publish(Values(2, fragment)))
    expected = memoryview(bytearray(plane.layout.buffer_bytes))
    publish.publish_replace(outer, expected, range(len(outer.layout.chunks)), None)
    assert plane.published.buffer.view == expected, "values can be written whatever was there"
    with pytest.raises(StateError, match="the outer state is at commit 2"):
        asyncio.run(plane.publish(Values(1)))
    plane.close()


@of_one_or_three
def test_a_difference_can_be_made_of_values_that_a_rollback_leaves_in_force(home: Home) -> None:
    """The workers of a site that was applying a void commit go on from the one before."""
    plane = DataPlane(home, SETTINGS, manifest(), 2)
    plane.attach_workers(DTYPES)
    outer = plane.fresh_outer()
    publish.seed_from_snapshot(outer, filled(plane.layout))
    asyncio.run(plane.write_snapshot())
    held = plane.held()
    asyncio.run(plane.publish(Values(0)))
    asyncio.run(plane.apply(logged(plane.log, outer, 1, payloads(outer))))
    assert asyncio.run(plane.roll_back(0)) == held
    again = plane.outer
    assert again is not None
    asyncio.run(plane.apply(logged(plane.log, again, 1, payloads(again, (3,)))))
    asyncio.run(plane.publish(Difference(0, 1)))
    asyncio.run(plane.publish(Values(1)))
    asyncio.run(plane.roll_back(0))
    again = plane.outer
    assert again is not None
    asyncio.run(plane.apply(logged(plane.log, again, 1, payloads(again, (4,)))))
    asyncio.run(plane.apply(logged(plane.log, again, 2, payloads(again, (5,)))))
    with pytest.raises(StateError, match="the shared buffer holds, None"):
        asyncio.run(plane.publish(Difference(1, 2)))  # they are of the void commit of that number
    plane.close()


def test_errors_of_void_commits_are_gone_after_a_rollback_and_others_outlive_the_node(home: Home) -> None:
    settings = replace(SETTINGS, sync=replace(SETTINGS.sync, codec="sign1", error_feedback=1.0))

    def begun() -> DataPlane:
        plane = DataPlane(home, settings, manifest(), 2)
        plane.attach_workers(DTYPES)
        return plane

    def errors_of(plane: DataPlane) -> tuple[int | None, ...]:
        assert plane.errors is not None
        return plane.errors.commits()

    plane = begun()
    publish.seed_from_snapshot(plane.fresh_outer(), filled(plane.layout))
    assert errors_of(plane) == (0,)
    for commit in (1, 2):
        asyncio.run(plane.advance_errors(commit, plane.sync_data(0, 0, (commit - 1,))))
    plane.close()
    for last, left in ((2, 2), (1, 0)):
        plane = begun()
        assert errors_of(plane) == (2,)
        asyncio.run(plane.roll_back(last))
        assert errors_of(plane) == (left,)
        plane.close()
    plane = begun()
    asyncio.run(plane.advance_errors(1, plane.sync_data(0, 0, (0,))))
    assert errors_of(plane) == (1,)
    asyncio.run(plane.distrust())
    assert errors_of(plane) == (0,), "it may be of a wrong state"
    plane.close()


SAVED = {"run_step": 20, "run_tokens": 100, "settings": {}}


async def save_model(plane: DataPlane, commit: int, folder: Path, instead: Path | None = None) -> Exception | None:
    async with plane.frozen(commit) as frozen:
        return await plane.save(frozen, folder, SAVED, instead)


@pytest.mark.parametrize("work", ["publish", "frozen"])
def test_work_that_waits_for_a_rollback_is_done_on_what_that_leaves(home: Home, work: str) -> None:
    """The outer state that was there before is closed by then, and of void commits."""
    plane = DataPlane(home, SETTINGS, manifest(), 2)
    plane.attach_workers(DTYPES)
    outer = plane.fresh_outer()
    publish.seed_from_snapshot(outer, filled(plane.layout))
    asyncio.run(plane.apply(logged(plane.log, outer, 1, payloads(outer))))
    asyncio.run(plane.write_snapshot())
    asyncio.run(plane.apply(logged(plane.log, outer, 2, payloads(outer, (3,)))))

    async def rolled_back_first() -> None:
        rolling_back = asyncio.create_task(plane.roll_back(1))
        await asyncio.sleep(0)  # it has the lock
        assert plane.lock.locked()
        if work == "publish":
            await plane.publish(Values(1))
        else:
            async with plane.frozen(1):
                pass
        assert await rolling_back is not None

    asyncio.run(rolled_back_first())
    assert plane.outer is not None
    assert plane.outer is not outer
    assert plane.outer.commit == 1
    plane.close()


@of_one_or_three
@pytest.mark.parametrize("num_later", [1, 3])
def test_a_model_is_of_its_commit_though_later_ones_are_applied_while_it_is_written(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_later: int
) -> None:
    plane = DataPlane(home, SETTINGS, manifest(), 2)
    plane.attach_workers(DTYPES)
    outer = plane.fresh_outer()
    publish.seed_from_snapshot(outer, filled(plane.layout))
    first = asyncio.run(plane.apply(logged(plane.log, outer, 1, payloads(outer))))
    write, applied = safetensors_file.write, []

    async def later() -> None:
        """Commits, and a chunk that is damaged and put together again."""
        async with asyncio.timeout(60):
            for number in range(2, 2 + num_later):
                applied.append(await plane.apply(logged(plane.log, outer, number, payloads(outer, (number,)))))
            damaged = outer.read(2)
            outer.forget(2)
            outer.put(2, damaged.version, damaged.data)

    async def save() -> None:
        loop = asyncio.get_running_loop()

        def written_slowly(*args: Any) -> None:
            if not applied:
                asyncio.run_coroutine_threadsafe(later(), loop).result()
            write(*args)

        monkeypatch.setattr(saved_model, "write", written_slowly)
        await save_model(plane, 1, tmp_path / "model")

    asyncio.run(save())
    assert not (tmp_path / "model").exists(), "it is put in place when it counts"
    saved_model.put_in_place(tmp_path / "model")
    assert plane.held() == (1 + num_later, applied[-1])
    found = OuterState.create(tmp_path / "found", plane.layout, outer.slots, RUN)
    saved_model.restore(tmp_path / "model", found)
    assert found.state_hash() == first
    assert asyncio.run(plane.apply(logged(plane.log, outer, 2 + num_later, payloads(outer, (9,))))), "no place is held"
    assert not list(home.state_folder.glob("tmp*"))
    plane.close()


def test_a_model_that_cannot_be_written_where_it_shall_be_is_written_elsewhere(home: Home, tmp_path: Path) -> None:
    plane = DataPlane(home, SETTINGS, manifest(), 2)
    plane.attach_workers(DTYPES)
    outer = plane.fresh_outer()
    publish.seed_from_snapshot(outer, filled(plane.layout))
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="no place for a saved model"):
        asyncio.run(save_model(plane, 0, tmp_path / "file" / "model"))
    why = asyncio.run(save_model(plane, 0, tmp_path / "file" / "model", tmp_path / "elsewhere"))
    assert isinstance(why, ConfigError)
    saved_model.put_in_place(tmp_path / "elsewhere")
    assert saved_model.load_manifest(tmp_path / "elsewhere").state_hash == outer.state_hash()
    plane.close()


def test_no_room_for_what_a_save_still_reads_fails_the_save_and_not_the_commit(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane = DataPlane(home, SETTINGS, manifest(), 2)
    plane.attach_workers(DTYPES)
    outer = plane.fresh_outer()
    publish.seed_from_snapshot(outer, filled(plane.layout))
    frozen = outer.freeze()

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(frozen, "_copy", full)
        asyncio.run(plane.apply(logged(plane.log, outer, 1, payloads(outer))))
    with pytest.raises(HostError, match="no space is left"):
        saved_model.write_aside(tmp_path / "model", frozen, plane.layout, outer.slots, SAVED)
    frozen.close()
    assert not list(tmp_path.glob(".model*"))
    with pytest.raises(StateError, match="commit 0 is to be saved, the outer state is at 1"):
        asyncio.run(save_model(plane, 0, tmp_path / "model"))
    plane.close()


def test_what_may_fill_a_disk_is_written_to_the_disk_of_the_home(tmp_path: Path) -> None:
    """A file that went past it would not know that a simulated disk is full."""

    class Noted(Disk):
        def allocate(self, path: Path, size_bytes: int) -> None:
            names.append(path.name)
            super().allocate(path, size_bytes)

        def write_whole(self, path: Path, data: bytes, *, fsync: bool = False, mode: int = PRIVATE_FILE) -> None:
            names.append(path.name)
            super().write_whole(path, data, fsync=fsync, mode=mode)

    names: list[str] = []
    home = Home(tmp_path / "home", Machine(disk=Noted()))
    plane = DataPlane(home, SETTINGS, manifest(), 1)
    plane.attach_workers(DTYPES)
    assert names[:2] == ["key", "incarnation"]
    names.clear()
    outer = plane.fresh_outer()
    assert names == ["outer.chunks", "outer.index", "outer.json"]
    publish.seed_from_snapshot(outer, filled(plane.layout))
    asyncio.run(plane.apply(logged(plane.log, outer, 1, payloads(outer))))
    assert set(names[3:]) == {"commit-1.record"}
    names.clear()
    asyncio.run(save_model(plane, 1, tmp_path / "model"))
    assert names == ["manifest.json"]
    plane.close()
    home.close()


@pytest.mark.parametrize("with_snapshot", [True, False])
def test_damage_that_a_snapshot_finds_is_mended_or_the_site_says_so(home: Home, with_snapshot: bool) -> None:
    plane = DataPlane(home, SETTINGS, manifest(), 2)
    plane.attach_workers(DTYPES)
    outer = plane.fresh_outer()
    publish.seed_from_snapshot(outer, filled(plane.layout))
    if with_snapshot:
        asyncio.run(plane.write_snapshot())
    asyncio.run(plane.apply(logged(plane.log, outer, 1, payloads(outer))))
    held = plane.held()
    path = home.state_folder / "outer.chunks"
    with path.open("r+b") as file:
        file.seek(path.read_bytes().index(outer.read(2).data))
        file.write(b"\xff" * 8)
    if with_snapshot:
        asyncio.run(plane.write_snapshot())
        assert plane.held() == held
        assert outer.damaged() == []
    else:
        with pytest.raises(StateError, match="1 chunks are damaged and cannot be put together here"):
            asyncio.run(plane.write_snapshot())
    plane.close()


def test_what_ranks_read_in_place_is_mended_with_it(home: Home) -> None:
    """A record is moved to PUBLISH as it is, so damage goes there, too; later workers take what is there."""
    specs = [TensorSpec(name=name, shape=(64, 512), dtype="F32", role=Role.TRAINABLE) for name in "ab"]
    settings = replace(SETTINGS, sync=replace(SETTINGS.sync, fragments=1, chunk_elements=64 * 512))
    plane = DataPlane(home, settings, Manifest.canonical(specs), 2)
    plane.attach_workers({spec.name: "F32" for spec in specs}, read_in_place=True)
    assert plane.published.outer_name
    outer = plane.fresh_outer()
    publish.seed_from_snapshot(outer, filled(plane.layout))
    asyncio.run(plane.write_snapshot())
    asyncio.run(plane.publish(Values(0)))
    whole = bytes(outer.read(1).data)
    path = home.state_folder / "outer.chunks"
    with path.open("r+b") as file:
        file.seek(path.read_bytes().index(whole[:4096]))
        file.write(b"\xff" * 8)
    asyncio.run(plane.write_snapshot())
    assert outer.damaged() == []
    chunk = plane.layout.chunks[1]
    buffer = plane.published.buffer
    assert buffer is not None
    assert bytes(buffer.view[chunk.offset_bytes :][: chunk.num_bytes]) == whole[: chunk.num_bytes]
    plane.close()


def test_what_a_node_has_published_in_a_file_is_not_memory_of_the_node(home: Home) -> None:
    """Also where later workers cannot read in place, and all of it is copied."""
    specs = [TensorSpec(name=name, shape=(64, 512), dtype="F32", role=Role.TRAINABLE) for name in "ab"]
    settings = replace(SETTINGS, sync=replace(SETTINGS.sync, fragments=1, chunk_elements=64 * 512))
    plane = DataPlane(home, settings, Manifest.canonical(specs), 2)
    dtypes = {spec.name: "F32" for spec in specs}
    plane.attach_workers(dtypes, read_in_place=True)
    outer = plane.fresh_outer()
    publish.seed_from_snapshot(outer, filled(plane.layout))
    plane.attach_workers(dtypes)
    asyncio.run(plane.publish(Values(0)))
    buffer = plane.published.buffer
    assert buffer is not None
    assert mapped_bytes(buffer.view) < plane.layout.buffer_bytes
    for index in (0, 1):
        chunk = plane.layout.chunks[index]
        assert buffer.view[chunk.offset_bytes :][: chunk.num_bytes] == outer.read(index).data[: chunk.num_bytes]
    plane.close()


def test_a_cancelled_commit_keeps_the_state_to_itself_until_its_thread_is_done(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane = DataPlane(home, SETTINGS, manifest(), 2)
    plane.attach_workers(DTYPES)
    outer = plane.fresh_outer()
    publish.seed_from_snapshot(outer, filled(plane.layout))
    record = logged(plane.log, outer, 1, payloads(outer))
    order, may_go_on, apply_chunk = list[str](), threading.Event(), plane._apply_chunk

    async def main() -> None:
        loop, begun = asyncio.get_running_loop(), asyncio.Event()

        def slow(*args: Any) -> None:
            loop.call_soon_threadsafe(begun.set)
            may_go_on.wait()
            apply_chunk(*args)
            order.append("applied")

        async def roll_back() -> None:
            await plane.roll_back(0)
            order.append("rolled back")

        monkeypatch.setattr(plane, "_apply_chunk", slow)
        applying = loop.create_task(plane.apply(record))
        await begun.wait()
        rolling_back = loop.create_task(roll_back())
        for _ in range(2):  # the second one must not let go either
            applying.cancel()
            for _ in range(10):
                await asyncio.sleep(0)
        may_go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await applying
        await rolling_back

    asyncio.run(main())
    assert order[-1] == "rolled back"
    assert order.count("applied") == len(plane.layout.sync_chunks)
    plane.close()


def test_a_commit_that_is_cancelled_while_it_waits_for_a_snapshot_leaves_the_snapshot_alone(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = replace(SETTINGS, sync=replace(SETTINGS.sync, log_commits=1))
    plane = DataPlane(home, settings, manifest(), 2)
    plane.attach_workers(DTYPES)
    outer = plane.fresh_outer()
    publish.seed_from_snapshot(outer, filled(plane.layout))
    asyncio.run(plane.write_snapshot())
    asyncio.run(plane.apply(logged(plane.log, outer, 1, payloads(outer))))
    record = logged(plane.log, outer, 2, payloads(outer, (2,)))
    may_go_on, write = threading.Event(), plane.snapshots.write

    async def main() -> None:
        loop, begun = asyncio.get_running_loop(), asyncio.Event()

        def slow(*args: Any) -> None:
            loop.call_soon_threadsafe(begun.set)
            may_go_on.wait()
            write(*args)

        monkeypatch.setattr(plane.snapshots, "write", slow)
        writing = loop.create_task(plane.write_snapshot())
        await begun.wait()
        applying = loop.create_task(plane.apply(record))
        for _ in range(10):
            await asyncio.sleep(0)
        applying.cancel()
        for _ in range(10):
            await asyncio.sleep(0)
        may_go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await applying
        await writing

    asyncio.run(main())
    assert plane.snapshots.files[0].newest == 1
    plane.close()


def test_nothing_is_written_after_a_commit_has_failed(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk may be rolled back next."""
    stopped_in_commit_1(home, 0)
    plane = DataPlane(home, SETTINGS, manifest(), 2)
    (record,) = plane.log.commits()
    assert plane.outer is not None
    writing, go_on, written = threading.Event(), threading.Event(), threading.Event()

    def apply(chunk: int, *_: Any) -> None:
        if chunk == 0:
            assert writing.wait(60)
            threading.Timer(0.1, go_on.set).start()
            raise StateError("the payload of chunk 0 is damaged")
        writing.set()
        assert go_on.wait(60)
        written.set()

    monkeypatch.setattr(plane.outer, "apply", apply)

    async def main() -> None:
        with pytest.raises(StateError, match="damaged"):
            await plane.apply(record)
        assert written.is_set()

    asyncio.run(main())
    plane.close()


def test_a_snapshot_that_begins_during_a_rollback_does_not_bring_the_void_commit_back(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane = DataPlane(home, SETTINGS, manifest(), 2)
    plane.attach_workers(DTYPES)
    outer = plane.fresh_outer()
    publish.seed_from_snapshot(outer, filled(plane.layout))
    seeded = plane.held()
    asyncio.run(plane.write_snapshot())
    asyncio.run(plane.apply(logged(plane.log, outer, 1, payloads(outer))))
    may_write, written = threading.Event(), threading.Event()
    write, roll_back = plane.snapshots.write, plane.snapshots.roll_back

    def late(*args: Any) -> None:  # its thread begins after the rollback's
        may_write.wait()
        write(*args)
        written.set()

    def then_write(commit: int) -> None:
        roll_back(commit)
        may_write.set()
        written.wait()

    monkeypatch.setattr(plane.snapshots, "write", late)
    monkeypatch.setattr(plane.snapshots, "roll_back", then_write)

    async def main() -> tuple[int, bytes] | None:
        writing = asyncio.get_running_loop().create_task(plane.write_snapshot())
        await asyncio.sleep(0)  # it has begun
        held = await plane.roll_back(0)
        await writing
        return held

    assert asyncio.run(main()) == seeded
    assert [file.newest for file in plane.snapshots.files] == [0]
    plane.close()
    assert started_again(home) == seeded


def test_damage_that_a_snapshot_finds_is_mended_while_a_commit_waits_for_it(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = replace(SETTINGS, sync=replace(SETTINGS.sync, log_commits=2, snapshots=1))
    plane = DataPlane(home, settings, manifest(), 2)
    plane.attach_workers(DTYPES)
    outer = plane.fresh_outer()
    publish.seed_from_snapshot(outer, filled(plane.layout))
    asyncio.run(plane.write_snapshot())
    for number in (1, 2):
        asyncio.run(plane.apply(logged(plane.log, outer, number, payloads(outer, (number,)))))
    held, found = plane.held(), payloads(outer, (3,))
    path = home.state_folder / "outer.chunks"
    with path.open("r+b") as file:
        file.seek(path.read_bytes().index(outer.read(2).data))
        file.write(b"\xff" * 8)
    writer = plane.log.begin(3, 1, 0)
    for chunk, payload in found.items():
        writer.put(chunk, payload, payload_hash(payload))
    writer.seal()
    record = commit_record(3)
    record = replace(record, payload_digest=writer.digest(record))
    may_go_on, write = threading.Event(), plane.snapshots.write
    mended: list[tuple[int, bytes] | None] = []

    def slow(*args: Any) -> None:
        may_go_on.wait()
        write(*args)

    monkeypatch.setattr(plane.snapshots, "write", slow)

    async def snapshot() -> None:
        await plane.write_snapshot()
        mended.append(plane.held())

    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(60):
            writing = loop.create_task(snapshot())
            await asyncio.sleep(0)
            applying = loop.create_task(plane.apply(record))
            for _ in range(10):
                await asyncio.sleep(0)
            may_go_on.set()
            await writing
            await applying

    asyncio.run(main())
    assert mended == [held], "from the log, before the commit drops from it"
    assert outer.commit == 3
    assert outer.damaged() == []
    plane.close()


def test_no_snapshot_is_made_of_a_state_that_is_distrusted(home: Home) -> None:
    """It is due when the commit that was being applied meanwhile is done."""
    plane = DataPlane(home, SETTINGS, manifest(), 2)
    plane.attach_workers(DTYPES)
    outer = plane.fresh_outer()
    publish.seed_from_snapshot(outer, filled(plane.layout))
    asyncio.run(plane.write_snapshot())

    async def main() -> None:
        assert await plane.distrust() == []
        await plane.write_snapshot()
        assert not plane.snapshots.files
        assert plane.fresh_outer() is outer, "what is right of it need not be fetched"
        await plane.write_snapshot()
        assert len(plane.snapshots.files) == 1

    asyncio.run(main())
    plane.close()
