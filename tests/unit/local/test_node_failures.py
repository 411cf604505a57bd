"""What goes wrong inside a node ends it, with the reason: it is never taken for the failure of whoever spoke to it."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from io import FileIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock, patch

import pytest

from atoll.node import host_protocol as hosts
from atoll.node.core import events as e
from atoll.node.core import outputs as out
from atoll.node.core.ranks.pieces import SitePieces
from atoll.node.daemon import node as node_module
from atoll.node.daemon import worker_control
from atoll.node.daemon.config import NodeConfig
from atoll.node.daemon.home import Home
from atoll.node.daemon.journal import Journal
from atoll.node.daemon.node import Node
from atoll.node.daemon.peers import Met
from atoll.node.daemon.plane import DataPlane
from atoll.node.daemon.room import Room
from atoll.node.dataplane import publish, saved_model
from atoll.node.exchange.catchup.fetch import Fetched
from atoll.node.exchange.hub import Hub
from atoll.node.exchange.peers.dialer import Dialer
from atoll.node.exchange.sync.spill import Spill
from atoll.node.local_protocol import Greeting
from atoll.node.worker.client import LocalClient
from atoll.protocol import messages as m
from atoll.protocol.errors import (
    DigestMismatch,
    HostError,
    InvalidMessage,
    NonFiniteError,
    PeerError,
    StaleError,
    StateError,
)
from atoll.protocol.machine import Machine
from atoll.protocol.settings import RunSettings, settings_to_json
from atoll.protocol.sync_settings import SyncSettings
from tests.harness.data_plane import DTYPES, RUN, filled, layout, logged, payloads, update_of
from tests.harness.hand_host import HandHost
from tests.harness.hosts import config_of
from tests.harness.peer_streams import plan
from tests.harness.sites import until
from tests.harness.sockets import free_address

SETTINGS = RunSettings(run_id="run", time_limits="local")
NOBODY = "127.0.0.1:1"
MANIFEST = layout().manifest
CHANGED = '{"outer.learning_rate": 0.25}'
A_COMMIT = m.Commit(
    commit=5, sync=5, attempt=1, term=1, contributors=(), payload_digest=bytes(32), run_step=50, run_tokens=1
)
A_PLAN = m.Plan(
    sync=1,
    attempt=1,
    term=1,
    base_commit=0,
    contributors=(),
    trees=(),
    stall_limit_s=1.0,
    num_steps=1,
    deadline_s=1.0,
    slowest_bytes_per_s=1,
)
GREETING = Greeting(settings_json="{}", data_paths=())
PIECES = SitePieces(
    manifest=MANIFEST,
    offered=((),),
    owned=((),),
    kept=((),),
    shared=(),
    dtypes={t.name: "F32" for t in MANIFEST.tensors},
)


def ended_by(
    happen: Callable[[Node], Awaitable[None]],
    folder: Path,
    data_plane: Callable[[Home], DataPlane] | None = None,
    config: NodeConfig | None = None,
) -> tuple[int, str]:
    """How a node ends to which that happened. `data_plane`: what an earlier start left."""

    async def scenario() -> tuple[int, str]:
        home = Home(folder / "home")
        journal = Journal(home.folder / "journal.jsonl")
        hub = Hub(run_id="run", incarnation=home.incarnation, dialer=Dialer(), pool=ThreadPoolExecutor(1))
        node = Node(
            config=config or NodeConfig(coordinator=NOBODY, name="a", command=("true",), launcher="exec"),
            settings=SETTINGS,
            home=home,
            plane=data_plane(home) if data_plane is not None else None,
            met=Met(hub, "127.0.0.1:0", "127.0.0.1:2"),
            journal=journal,
            machine=Machine(),
        )
        started = asyncio.Event()
        home.note_socket_folder = lambda _: started.set()  # type: ignore[method-assign,assignment]
        running = asyncio.create_task(node.run())
        await started.wait()
        await happen(node)
        result = await running
        await hub.close()
        node.close()
        journal.close()
        home.close()
        return result

    with patch.object(node_module, "FLUSH_S", 0.0):  # there is no coordinator for the last words
        return asyncio.run(scenario())


def on_a_disk_that_fails(error: Exception) -> Any:
    """A data plane of which every part fails so."""

    class Failing:
        outer = None
        snapshot_is_due = False

        def __getattr__(self, name: str) -> Any:
            async def fail(*_: Any) -> None:
                raise error

            return fail

        def close(self) -> None:
            pass

        @asynccontextmanager
        async def frozen(self, commit: int) -> AsyncIterator[None]:
            yield await self.outer_at(commit)

    return Failing()


def start_workers(node: Node) -> None:
    """Its core has them started."""
    for event in (e.SessionOpened(), e.Received(1, m.Welcome(settings_json=settings_to_json(SETTINGS), last_commit=0))):
        node.core.handle(event, time.monotonic())


def have_joined(node: Node, generation: int) -> None:
    """Ranks of this generation hold the model together."""
    node.core.ranks.begin(generation, 0.0)
    group = node.core.ranks.group
    assert group is not None
    group.pieces = PIECES


WORK = (
    out.SeedState(),
    out.PublishState(e.Values(1)),
    out.SaveModel(commit=1, run_step=1, run_tokens=1),
    out.RollBack(1, 1),
    out.DistrustState("it may be wrong"),
)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OSError(errno.EIO, "I/O error"), HostError.exit_code),
        (HostError("no space is left"), HostError.exit_code),
        (StateError("chunk 3 is damaged"), StateError.exit_code),
        (InvalidMessage("codec 77"), StateError.exit_code),
        (DigestMismatch("other bytes"), StateError.exit_code),
        (NonFiniteError("a NaN in w"), NonFiniteError.exit_code),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
@pytest.mark.parametrize("output", WORK, ids=lambda output: type(output).__name__)
def test_the_exit_code_says_why_work_on_this_disk_failed(
    output: out.Output, error: Exception, code: int, tmp_path: Path
) -> None:
    async def happen(node: Node) -> None:
        node.disk.plane = on_a_disk_that_fails(error)
        node._execute(output)

    assert ended_by(happen, tmp_path)[0] == code


def saves_the_last_model(node: Node) -> None:
    """Its core has come there: the run is over, the state is the run's, the workers have left."""
    attested = (m.Attestation(commit=1, state_hash=bytes(32)),)
    donors = (m.Donor(site_id=2, incarnation=1, address=NOBODY, commit=1),)
    events: tuple[e.Event, ...] = (
        e.SessionOpened(),
        e.Received(1, m.Welcome(settings_json=settings_to_json(SETTINGS), last_commit=1, changed_json=CHANGED)),
        e.WorkersJoined(generation=1, manifest=MANIFEST, data_fingerprint=b"", max_retained_bytes=1 << 20),
        e.Received(1, m.Admitted(site_id=1, admitted_as=m.AdmittedAs.JOINER, run_seed=1)),
        e.Received(1, m.Sources(attested=attested, donors=donors)),
        e.StateFetched(commit=1, state_hash=bytes(32), run_step=1, run_tokens=1, final=True),
        e.Received(1, m.Finished(commit=1, reason="", run_step=1, run_tokens=1, state_hash=bytes(32))),
        e.WorkersLeft(generation=1, reason="told to stop"),
        e.SessionLost("the coordinator ended the session"),
    )
    outputs = [output for event in events for output in node.core.handle(event, time.monotonic())]
    assert [o for o in outputs if isinstance(o, out.SaveModel)] == [out.SaveModel(commit=1, run_step=1, run_tokens=1)]
    assert not [o for o in outputs if isinstance(o, out.Exit)]


@pytest.mark.parametrize("error", [OSError(errno.ENOENT, "gone"), HostError("no space is left")])
def test_a_model_that_cannot_be_saved_where_it_shall_be_is_saved_below_the_home(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = tmp_path / "asked"
    saved: list[Path] = []
    monkeypatch.setattr(saved_model, "put_in_place", lambda folder, _: saved.append(folder))

    async def save(frozen: object, folder: Path, info: Any, instead: Path) -> Exception:
        assert (folder, instead) == (asked, tmp_path / "home" / "model")
        assert info["settings"]["outer"]["learning_rate"] == 0.25, "as it is, for a run that is resumed with it"
        return error

    async def happen(node: Node) -> None:
        node.models.folder = asked
        plane = on_a_disk_that_fails(error)
        plane.save = save
        plane.frozen = lambda commit: nullcontext()
        node.disk.plane = plane
        saves_the_last_model(node)
        node._execute(out.SaveModel(commit=1, run_step=1, run_tokens=1))

    code, text = ended_by(happen, tmp_path)
    assert saved == [tmp_path / "home" / "model"]
    assert code == HostError.exit_code
    assert text.startswith(f"the run is complete; the model of commit 1 is in {tmp_path / 'home' / 'model'}, as --save")
    assert str(error) in text


def test_a_model_of_the_number_of_a_void_commit_stays_when_the_node_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    for name in ("put_in_place", "discard", "take_back"):
        monkeypatch.setattr(saved_model, name, lambda *_, name=name: calls.append(name))

    async def save(*_: object) -> None:
        calls.append("save")

    async def happen(node: Node) -> None:
        async def done(output: out.Output) -> None:
            before = set(node.shell.tasks)
            node._execute(output)
            await asyncio.gather(*set(node.shell.tasks) - before)

        plane = on_a_disk_that_fails(StateError("not asked for"))
        plane.save = save
        plane.frozen = lambda commit: nullcontext()
        node.disk.plane = plane
        await done(out.SaveModel(commit=4, run_step=40, run_tokens=1))
        await done(out.DropModel(4))  # the run went back to commit 3
        await done(out.SaveModel(commit=4, run_step=40, run_tokens=1))
        await done(out.KeepModel(4))
        node.leave_now("enough")

    assert ended_by(happen, tmp_path) == (130, "enough")
    assert calls == ["save", "discard", "save", "put_in_place"]


def test_a_model_is_of_its_commit_though_the_one_before_is_still_being_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run goes on meanwhile: the state is taken before the place of the model is free."""
    goes_on = threading.Event()
    saved: list[int] = []
    monkeypatch.setattr(saved_model, "discard", lambda _: goes_on.wait(60))

    async def save(frozen: int, *_: object) -> None:
        saved.append(frozen)

    async def happen(node: Node) -> None:
        held = 4

        @asynccontextmanager
        async def frozen(commit: int) -> AsyncIterator[int]:
            assert held == commit
            yield held

        async def apply(commit: m.Commit, *, lets_go: bool) -> bytes:
            nonlocal held
            held = commit.commit
            return bytes(32)

        plane = on_a_disk_that_fails(StateError("not asked for"))
        plane.save, plane.frozen, plane.apply, plane.snapshot_is_due = save, frozen, apply, False
        node.disk.plane = node.shell.leader.replicas.plane = plane
        node.models._is_beside = True
        before = set(node.shell.tasks)
        node._execute(out.DropModel(3))
        await until(node.models._lock.locked)
        node._execute(out.SaveModel(commit=4, run_step=40, run_tokens=1))
        node._execute(out.ApplyCommit(A_COMMIT))
        await until(lambda: held == 5)
        goes_on.set()
        await asyncio.gather(*set(node.shell.tasks) - before)
        assert saved == [4]
        node.leave_now("enough")

    assert ended_by(happen, tmp_path) == (130, "enough")


def test_what_fails_for_workers_that_are_gone_is_not_told_to_those_who_came_after_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[str] = []
    measuring, goes_on = asyncio.Event(), threading.Event()

    async def happen(node: Node) -> None:
        loop = asyncio.get_running_loop()

        def room_of(*_: object, **__: object) -> None:
            loop.call_soon_threadsafe(measuring.set)
            assert goes_on.wait(60)
            raise HostError("no room")

        monkeypatch.setattr(worker_control, "room_of", room_of)
        monkeypatch.setattr(node.workers.server, "refuse", refused.append)
        monkeypatch.setattr(worker_control, "site_pieces", lambda *_: PIECES)
        node.workers.server.begin(1, GREETING)
        joined = asyncio.create_task(node.workers._merge_pieces(out.MergePieces(1, ())))
        await measuring.wait()
        node.workers.server.begin(2, GREETING)
        goes_on.set()
        await joined
        layout = out.SendLayout(generation=1, site_id=1, run_seed=1)
        have_joined(node, 1)
        with patch.object(node.disk, "_attached", side_effect=HostError("no memory")):
            await node.workers._send_layout(layout, None)
        node.leave_now("enough")

    assert ended_by(happen, tmp_path) == (130, "enough")
    assert not refused


def kept_branch(home: Path) -> int:
    path = home / "branch"
    return int(path.read_text()) if path.exists() else 0


def test_a_disk_is_of_the_new_branch_only_once_void_commits_are_off_it(tmp_path: Path) -> None:
    """A node that is killed between says the old branch when it starts again, and is told of the rollback."""
    branches: list[int] = []

    async def happen(node: Node) -> None:
        plane = on_a_disk_that_fails(StateError("not asked for"))
        plane.roll_back = AsyncMock(side_effect=HostError("the disk is broken"))
        node.disk.plane = plane
        with pytest.raises(HostError):
            await node.disk._roll_back(1, 3)
        branches.append(kept_branch(node.home.folder))
        plane.roll_back = AsyncMock(return_value=(1, bytes(32)))
        await node.disk._roll_back(1, 3)
        branches.append(kept_branch(node.home.folder))
        node.leave_now("enough")

    assert ended_by(happen, tmp_path) == (130, "enough")
    assert branches == [0, 3]


def test_an_exchange_whose_state_a_rollback_takes_while_it_waits_to_begin_ends_no_node(tmp_path: Path) -> None:
    broken: list[e.Event] = []

    async def happen(node: Node) -> None:
        node.disk.plane = await asyncio.to_thread(DataPlane, node.home, SETTINGS, MANIFEST, 1)
        await asyncio.to_thread(node.disk.plane.attach_workers, {tensor.name: "F32" for tensor in MANIFEST.tensors})
        with patch.object(node.shell, "handle", broken.append):
            await node.exchanges._begin(out.BeginExchange(A_PLAN, tokens=0, weights=()))
        node.leave_now("enough")

    assert ended_by(happen, tmp_path) == (130, "enough")
    (event,) = broken
    assert isinstance(event, e.ExchangeBroken)
    assert "the run has gone back" in str(event.error)


@pytest.mark.parametrize("of", ["outer", "errors"])
def test_a_node_whose_disk_takes_a_record_gets_on(tmp_path: Path, of: str) -> None:
    """A slow one takes longer for a commit than the coordinator waits without a sign of progress."""
    progress: list[int] = []

    async def happen(node: Node) -> None:
        settings = replace(SETTINGS, sync=replace(SETTINGS.sync, codec="sign1", error_feedback=1.0))
        node.disk.plane = plane = await asyncio.to_thread(DataPlane, node.home, settings, MANIFEST, 1)
        await asyncio.to_thread(plane.attach_workers, {tensor.name: "F32" for tensor in MANIFEST.tensors})
        await asyncio.to_thread(plane.fresh_outer)
        store = getattr(plane, of).store
        progress.extend(node.shell.observer.heartbeat().progress for _ in range(2))
        store.replace(0, 0, lambda record: None)
        progress.append(node.shell.observer.heartbeat().progress)
        node.leave_now("enough")

    assert ended_by(happen, tmp_path) == (130, "enough")
    first, second, third = progress
    assert (second - first, third - second) == (0, 1)


@pytest.mark.parametrize("why", ["", "its log is full", "several hosts", "several processes"])
def test_a_site_that_is_behind_takes_payloads_ahead_where_its_log_has_room(tmp_path: Path, why: str) -> None:
    """And where it is of one process: the others take part in its own exchanges alone."""
    happened: list[object] = []

    async def happen(node: Node) -> None:
        asked: list[int] = []

        def has_room(sync: int) -> bool:
            asked.append(sync)
            return why != "its log is full"

        plane: Any = SimpleNamespace(log=SimpleNamespace(has_room_ahead=has_room))
        num_hosts, num_processes = 1 + (why == "several hosts"), 1 + (why == "several processes")
        config = replace(node.shell.config, site_hosts=num_hosts, exchange_processes=num_processes)
        with patch.object(node.shell, "config", config):
            happened.append(await node.exchanges._takes_ahead(plane, A_PLAN))
        assert asked == ([A_PLAN.sync] if num_hosts == num_processes == 1 else [])
        node.disk.plane = await asyncio.to_thread(DataPlane, node.home, SETTINGS, MANIFEST, 1)
        refused = AsyncMock(return_value=False)
        with (
            patch.object(node.shell, "handle", happened.append),
            patch.object(node.exchanges, "_takes_ahead", refused),
        ):
            await node.exchanges._begin(out.BeginExchange(A_PLAN, tokens=0, weights=(), is_behind=True))
        node.leave_now("enough")

    assert ended_by(happen, tmp_path) == (130, "enough")
    takes_it, broken = happened
    assert takes_it is (not why)
    assert isinstance(broken, e.ExchangeBroken)
    assert "this site is behind" in str(broken.error)


@pytest.mark.parametrize("is_behind", [False, True])
def test_an_exchange_that_begins_behind_ends_none_that_the_site_contributed_to(tmp_path: Path, is_behind: bool) -> None:
    """Their commits are not applied yet, and what was lost of averages made here counts once they are."""
    kept: list[frozenset[int]] = []

    def begins(*_: object, in_flight: frozenset[int], **__: object) -> None:
        kept.append(in_flight)
        raise StaleError("enough")

    async def happen(node: Node) -> None:
        plane = node.disk.present
        await asyncio.to_thread(plane.attach_workers, DTYPES)
        for sync, contributes in {2: False, 3: True, 4: True}.items():
            node.hub._exchanges[sync] = cast(Any, SimpleNamespace(attempt=SimpleNamespace(contributes=contributes)))
        begun = out.BeginExchange(A_PLAN, tokens=0, weights=(), in_flight=frozenset({4}), is_behind=is_behind)
        with (
            patch.object(node.shell, "handle"),
            patch.object(node.hub, "share", lambda *_: lambda: None),
            patch.object(node.hub, "begin", begins),
        ):
            await node.exchanges._begin(begun)
        node.hub._exchanges.clear()
        node.leave_now("enough")

    assert ended_by(happen, tmp_path, at_commit_0) == (130, "enough")
    assert kept == [{3, 4} if is_behind else {4}]


def at_commit_0(home: Home) -> DataPlane:
    plane = DataPlane(home, replace(SETTINGS, run_id=RUN, sync=SyncSettings(chunk_elements=400)), MANIFEST, 1)
    plane.attach_workers(DTYPES)
    publish.seed_from_snapshot(plane.fresh_outer(), filled(plane.layout))
    return plane


@pytest.mark.parametrize("num_chunks", [0, 1])
@pytest.mark.parametrize("job", ["apply", "fetch"])
def test_a_job_that_breaks_off_says_whether_the_disk_is_where_it_was(job: str, num_chunks: int, tmp_path: Path) -> None:
    """`num_chunks` are at the next commit. Nothing can be published then, and the core asks for nothing."""
    broken: list[Any] = []

    async def happen(node: Node) -> None:
        plane = node.disk.plane
        assert plane is not None
        assert plane.outer is not None
        outer, found = plane.outer, payloads(plane.outer)
        record, read = logged(plane.log, outer, 1, found), plane.log.read

        def breaks(commit: int, chunk: int) -> bytes:
            if chunk >= num_chunks:
                raise StateError("the payload is damaged")
            return read(commit, chunk)

        async def breaks_off(**_: Any) -> None:
            for chunk in range(num_chunks):
                outer.apply(chunk, found[chunk], update_of(1, plane.optimizer))
            raise PeerError("its link is cut")

        plane.log.read = breaks  # type: ignore[method-assign]
        node.hub.fetch_state = breaks_off  # type: ignore[method-assign,assignment]
        with patch.object(node.shell, "handle", broken.append):
            node._execute(out.ApplyCommit(record) if job == "apply" else out.FetchState(m.Sources()))
            await until(lambda: bool(broken))
        if num_chunks:
            with pytest.raises(StateError, match="cannot be published"):
                await plane.publish(e.Values(0))
        node.leave_now("enough")

    assert ended_by(happen, tmp_path, at_commit_0) == (130, "enough")
    (event,) = broken
    assert isinstance(event, e.ApplyFailed | e.FetchFailed)
    assert event.has_moved is (num_chunks > 0)


@pytest.mark.parametrize(("num_commits", "is_said"), [(16, False), (17, True)])
def test_a_fetch_in_which_half_of_the_log_went_by_is_said(
    num_commits: int, is_said: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Payloads of 32 commits are kept."""
    ended: list[Any] = []

    async def happen(node: Node) -> None:
        async def fetches(**_: Any) -> Fetched:
            return Fetched(commit=100 + num_commits, state_hash=bytes(32), record=None)

        node.hub.fetch_state = fetches  # type: ignore[method-assign]
        with patch.object(node.shell, "handle", ended.append):
            attested = m.Attestation(commit=100, state_hash=bytes(32))
            node._execute(out.FetchState(m.Sources(attested=(attested,))))
            await until(lambda: bool(ended))
        node.leave_now("enough")

    assert ended_by(happen, tmp_path, at_commit_0) == (130, "enough")
    assert isinstance(ended[0], e.StateFetched)
    said = f"the run made {num_commits} commits while this site fetched its state, and sites keep the payloads of 32"
    assert (said in caplog.text) is is_said


def test_workers_that_join_again_leave_what_the_site_offered_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plans are made by the offer. What memory there is then bounds the part that is in memory."""
    rooms = [Room(max_retained_bytes=1000, reduce_buffer_bytes=100), Room(max_retained_bytes=10, reduce_buffer_bytes=5)]
    offered: list[int] = []

    async def happen(node: Node) -> None:
        monkeypatch.setattr(worker_control, "room_of", lambda *_, **__: rooms.pop(0))
        monkeypatch.setattr(worker_control, "site_pieces", lambda *_: PIECES)
        node.hub.spill = Spill(tmp_path / "spill")
        with patch.object(node.shell, "handle", lambda event: offered.append(event.max_retained_bytes)):
            for generation in (1, 2):
                await node.workers._merge_pieces(out.MergePieces(generation, ()))
        assert (node.hub.max_retained_bytes, node.hub.spill.memory_limit_bytes) == (1000, 5)
        node.leave_now("enough")

    assert ended_by(happen, tmp_path) == (130, "enough")
    assert offered == [1000, 1000]


def test_what_is_as_large_as_the_model_is_made_and_removed_beside_the_loop(tmp_path: Path) -> None:
    """`tests/harness/loop_guard.py` raises where it is not."""
    left: list[str] = []

    async def happen(node: Node) -> None:
        async def done(output: out.Output) -> None:
            before = set(node.shell.tasks)
            # As the loop calls it, not this test.
            asyncio.get_running_loop().call_soon(node._execute, output)
            await asyncio.sleep(0)
            await asyncio.gather(*set(node.shell.tasks) - before)

        node.workers.server.begin(1, GREETING)
        have_joined(node, 1)
        sent = asyncio.Event()

        async def send(*_: Any) -> None:
            sent.set()

        node.workers.server.send_layout = send  # type: ignore[method-assign,assignment]
        await done(out.SendLayout(generation=1, site_id=1, run_seed=1))
        assert sent.is_set(), node._result
        assert node.disk.plane is not None
        await asyncio.to_thread(node.disk.plane.log.begin, 1, 1, 1)
        await done(out.DropSync(1))
        left.extend(path.name for path in node.home.payload_folder.iterdir())
        await done(out.ListPayloads(plan()))
        await done(out.RollBack(0, 1))
        node.leave_now("enough")

    assert ended_by(happen, tmp_path) == (130, "enough")
    assert not left


def is_full(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk of its journal, from now on."""

    class Full(FileIO):
        def write(self, data: object) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    node.journal.close()
    monkeypatch.setattr(node.journal, "_file", Full(os.devnull, "a"))


def test_a_journal_that_cannot_be_written_ends_the_node_and_not_the_connection_of_the_rank_that_spoke(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_off: list[BaseException] = []
    connected: list[int] = []

    async def happen(node: Node) -> None:
        server = node.workers.server
        start_workers(node)
        server.begin(1, GREETING)
        client = await asyncio.to_thread(LocalClient.connect, server.path, 1, 0)
        await asyncio.to_thread(client.hello, 1)
        close_server = server.close

        async def close() -> None:
            """A server's end is its clients' end, and this client's process is the test's: the client goes first."""
            cut_off.extend(t.exception() for t in server._tasks if t.done() and t.exception())  # type: ignore[misc]
            connected.append(len(server._open))
            await asyncio.to_thread(client.close)
            await close_server()

        server.close = close  # type: ignore[method-assign]
        is_full(node, monkeypatch)
        await asyncio.to_thread(client.fatal, "nonfinite", "the loss is not finite")

    code, text = ended_by(happen, tmp_path)
    assert code == HostError.exit_code
    assert "journal.jsonl: no space is left" in text
    assert not cut_off
    assert connected == [1], "the rank is still connected: it did nothing wrong"


def test_a_journal_that_cannot_be_written_ends_the_node_whoever_brings_the_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def happen(node: Node) -> None:
        is_full(node, monkeypatch)
        node.handle(e.ExchangeBroken(A_PLAN, PeerError("gone", 2)))

    code, text = ended_by(happen, tmp_path)
    assert code == HostError.exit_code
    assert "journal.jsonl: no space is left" in text


@pytest.mark.parametrize("part", ["data", "server", "launcher", "prober"])
def test_a_task_that_fails_ends_the_node_with_its_words(part: str, tmp_path: Path) -> None:
    async def fails(*_: object) -> None:
        raise ZeroDivisionError("of a task")

    async def happen(node: Node) -> None:
        match part:
            case "data":
                node.shell.start(fails, lambda error: e.FetchFailed(str(error)))
            case "server":
                node.workers.server._tasks.spawn(fails())
            case "launcher":
                assert node.workers.launcher is not None
                node.workers.launcher._watch = fails  # type: ignore[method-assign,assignment]
                await node.workers.launcher.start(1, node.workers.server.path)
            case "prober":
                node.prober._look = fails  # type: ignore[method-assign,assignment]
                node.prober.watch((m.Member(site_id=2, incarnation=1, address="127.0.0.1:1"),))

    code, text = ended_by(happen, tmp_path)
    assert code == HostError.exit_code
    assert "ZeroDivisionError" in text


def test_the_journal_of_a_long_run_takes_bounded_space_and_loses_no_line_of_the_last_file(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path, max_bytes=1000)
    for number in range(100):
        journal.write("commit", commit=number)
        assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 2000
    journal.close()
    journal = Journal(path, max_bytes=1000)  # a start goes on where the one before ended
    journal.write("commit", commit=100)
    journal.close()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["journal.jsonl", "journal.jsonl.1"]
    text = "".join((tmp_path / name).read_text() for name in ("journal.jsonl.1", "journal.jsonl"))
    numbers = [json.loads(line)["commit"] for line in text.splitlines()]
    assert numbers == list(range(numbers[0], 101))
    assert len(numbers) > 15


def test_starts_that_write_little_have_one_bound_together(tmp_path: Path) -> None:
    for number in range(100):
        journal = Journal(tmp_path / "journal.jsonl", max_bytes=1000)
        journal.write("commit", commit=number)
        journal.close()
        assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 2000
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in tmp_path.iterdir())


def test_a_line_of_the_journal_is_whole_though_the_file_takes_it_in_parts(tmp_path: Path) -> None:
    class Slow(FileIO):
        def write(self, data: Any) -> int:
            return super().write(data[:7])

    journal = Journal(tmp_path / "journal.jsonl")
    journal.close()
    journal._file = Slow(tmp_path / "journal.jsonl", "a")
    for number in range(3):
        journal.write("commit", commit=number)
    journal.close()
    lines = (tmp_path / "journal.jsonl").read_text().splitlines()
    assert [json.loads(line)["commit"] for line in lines] == [0, 1, 2]


def test_a_journal_with_one_line_beyond_its_bound_keeps_it(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl", max_bytes=10)
    for text in ("first", "second"):
        journal.write("report", text=text * 10)
    journal.close()
    assert "second" in (tmp_path / "journal.jsonl").read_text()
    assert "first" in (tmp_path / "journal.jsonl.1").read_text()


def test_an_exchange_that_begins_before_there_are_buffers_waits_for_them(tmp_path: Path) -> None:
    """A site that starts with a state on its disk receives at once; its buffers are made in a thread meanwhile."""
    me = m.Member(site_id=2, incarnation=1, address="127.0.0.1:2", tokens=0)
    plan = m.Plan(
        sync=4,
        attempt=1,
        term=1,
        base_commit=3,
        contributors=(),
        receivers=(me,),
        trees=(),
        stall_limit_s=6.0,
        num_steps=10,
        deadline_s=60.0,
        slowest_bytes_per_s=0,
    )
    begins_it = out.BeginExchange(plan, tokens=0, weights=(), spread_s=2.5)
    outputs: list[out.Output] = [begins_it, out.HurryExchange(4), out.CancelExchange(4, 1), out.DropSync(4)]
    happened: list[object] = []
    begins, goes_on = asyncio.Event(), threading.Event()

    async def happen(node: Node) -> None:
        loop = asyncio.get_running_loop()
        for output in outputs:
            node._execute(output)
        assert list(node.exchanges._waiting) == outputs
        have_joined(node, 0)
        plane: Any = SimpleNamespace(
            snapshot=b"",
            published=SimpleNamespace(buffer=b"", outer_name=""),
            layout=layout(),
            log=None,
            own_part=None,
            close=lambda: None,
            sync_data=lambda *_: None,
        )

        def share() -> str:
            assert threading.current_thread() is not threading.main_thread()
            loop.call_soon_threadsafe(begins.set)
            assert goes_on.wait(60)
            return "a share"

        def begin(plan: m.Plan, data: None, share: str, **options: Any) -> Any:
            happened.append((plan, share, options["spread_s"]))
            raise StaleError("it is over")

        with (
            patch.object(node.disk, "_attached", lambda *_: plane),
            patch.object(node.hub, "serve"),
            patch.object(node.hub, "share", lambda *_, **__: share),
            patch.object(node.hub, "begin", begin),
            patch.object(node.hub, "hurry", lambda sync: happened.append(f"hurried {sync}")),
            patch.object(node.hub, "cancel", lambda sync, attempt: happened.append(f"cancelled {sync}.{attempt}")),
            patch.object(node.hub, "drop_sync", lambda sync: happened.append(f"dropped {sync}")),
            patch.object(node.disk, "drop_payloads"),
            patch.object(node.shell, "handle", happened.append),
            patch.object(node.workers.server, "send_layout", AsyncMock()),
        ):
            await node.workers._send_layout(out.SendLayout(generation=0, site_id=2, run_seed=1), None)
            await begins.wait()
            assert not happened, "the end of an exchange waits for its beginning"
            assert node.exchanges._beginning is not None
            goes_on.set()
            await node.exchanges._beginning
            broken = happened[1]
            assert isinstance(broken, e.ExchangeBroken)
            assert happened == [(plan, "a share", 2.5), broken, "hurried 4", "cancelled 4.1", "dropped 4"]
            node._execute(out.DropSync(5))
        assert happened[-1] == "dropped 5", "from then on they are carried out at once"
        node._result.set_result((0, ""))

    assert ended_by(happen, tmp_path) == (0, "")


@pytest.mark.parametrize(
    ("end", "goes_on"),
    [
        (lambda node: node.handle(e.LeaveAsked("its ranks have left the run")), True),
        (lambda node: node.leave("Ctrl-C"), False),
        (lambda node: node.handle(e.NodeFailed("no disk", 7)), False),
    ],
    ids=["by itself", "told to", "failed"],
)
def test_the_other_hosts_of_a_site_hear_whether_its_scripts_go_on(
    tmp_path: Path, end: Callable[[Node], None], goes_on: bool
) -> None:
    config = config_of(0, free_address())

    async def happen(node: Node) -> None:
        host = HandHost(config.site_address)
        await host.says_hello()
        await host.hears(hosts.HostWelcome)
        end(node)
        assert (await host.hears(hosts.SiteEnded)).scripts_go_on is goes_on
        await host.close()

    ended_by(happen, tmp_path, config=config)
