"""A host of a site that does not lead, with its ranks, and its leader, over loopback."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atoll.node import host_protocol as hosts
from atoll.node import local_protocol as local
from atoll.node.core import events as e
from atoll.node.core.events import Answer, AnswerKind, FailureKind, Values
from atoll.node.core.host_events import SlicesArrived
from atoll.node.core.ranks.pieces import SitePieces, site_pieces
from atoll.node.daemon import health
from atoll.node.daemon import plane as plane_module
from atoll.node.daemon.hosts import leader as leader_module
from atoll.node.daemon.hosts.link import Outbox
from atoll.node.dataplane.slices import Wanted
from atoll.node.local_protocol import LocalJoin, Piece, SealedReport
from atoll.node.worker.client import LocalClient
from atoll.protocol import line_socket, transport
from atoll.protocol import messages as m
from atoll.protocol.errors import ConfigError, HostError
from atoll.protocol.layout import Layout, Manifest, Role, TensorSpec
from tests.harness.following import (
    GREETING,
    Rank,
    TwoHosts,
    an_older_state,
    attached,
    following,
    hosts_meet_at_once,
)
from tests.harness.hosts import Led, led
from tests.harness.model_on_hosts import (
    FOR_HOST_0,
    LAYOUT,
    OWNED_BY_RANK_1,
    SETTINGS,
    copied,
    offer_of,
    random_bytes,
)
from tests.unit.node_core.test_gradients import LOCAL
from tests.unit.test_health import Systemd

WITH_MOMENTS = replace(LOCAL, run_id=SETTINGS.run_id, time_limits=SETTINGS.time_limits)
EVERYTHING = Wanted(fragment=0, with_frozen=True)


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts_meet_at_once(monkeypatch)


def test_ranks_of_two_hosts_from_hello_to_a_commit(tmp_path: Path) -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            site = await stack.enter_async_context(led(tmp_path, settings=WITH_MOMENTS))
            host = await stack.enter_async_context(following(site.address, tmp_path))
            both = await attached(site, host)
            clients = []
            for rank, path in enumerate((site.server.path, both.path)):
                clients.append(await asyncio.to_thread(LocalClient.connect, path, 1, rank))
                stack.push_async_callback(asyncio.to_thread, clients[-1].close)  # before its node is gone
            greetings = [await asyncio.to_thread(client.hello, 2) for client in clients]
            assert greetings[0] == GREETING
            paths, folder = (str(tmp_path / "texts"),), str(tmp_path / "host1/optimizer")
            assert greetings[1] == replace(GREETING, data_paths=paths, checkpoint_folder=folder)
            joins = [
                asyncio.create_task(asyncio.to_thread(client.join, offer_of(rank), 2))
                for rank, client in enumerate(clients)
            ]
            await site.event(e.WorkersJoined)
            site.lays_out()
            await site.server.admit(LAYOUT, site.snapshot, site.publish)
            joined = await asyncio.gather(*joins)
            # What a rank has sealed comes into the memory of host 0: all of it, until there is a state.
            source = random_bytes(LAYOUT.buffer_bytes, seed=8)
            joined[1].snapshot[:] = source
            for seq in range(2):
                before = await sealed(site, clients, seq)
                assert bytes(site.snapshot.view) == copied(memoryview(source), before, OWNED_BY_RANK_1, EVERYTHING)
            # What is published is made of the state of the other host, which it has of host 0.
            await site.has_state()
            await site.plane.publish(Values(0))
            await site.leader.publish(site.leader.ranks, Values(0))
            assert b"".join((joined[1].publish, *joined[1].moments)) == bytes(site.publish.view)
            assert any(site.publish.view)
            # From the first values of the run on, of what is sealed what host 0 exchanges comes.
            await answered(site, clients, 2, Answer(kind=AnswerKind.APPLY, next_step=0, version=4))
            for client in clients:
                client.merged(version=4, step=0, wait_s=0.0)
            await site.event(e.Merged)
            before = await sealed(site, clients, 3)
            changing = replace(EVERYTHING, with_frozen=False)
            assert bytes(site.snapshot.view) == copied(memoryview(source), before, FOR_HOST_0, changing)
            assert bytes(joined[1].snapshot) == source

    transport.run(main())


async def sealed(site: Led, clients: list[LocalClient], seq: int) -> bytes:
    """When all slices are here; what SNAPSHOT held before that."""
    site.snapshot.view[:] = before = random_bytes(LAYOUT.buffer_bytes, seed=seq)
    await answered(site, clients, seq, Answer(kind=AnswerKind.SNAPSHOT))
    for rank, client in enumerate(clients):
        client.sealed(report(rank, seq))
    kinds = {type(await site.events.get()) for _ in range(2)}
    assert kinds == {e.SnapshotSealed, SlicesArrived}
    return before


async def answered(site: Led, clients: list[LocalClient], seq: int, answer: Answer) -> None:
    """All ranks ask at step 0, and are told that."""
    asked = [asyncio.create_task(asyncio.to_thread(client.boundary, 0, seq)) for client in clients]
    await site.event(e.BoundaryAsked)
    site.server.answer(1, 0, seq, answer)
    assert [found.kind for found in await asyncio.gather(*asked)] == [answer.kind] * len(clients)


def report(rank: int, seq: int) -> SealedReport:
    return SealedReport(step=0, seq=seq, fragment=0, data_rank=rank, tokens=5, loss_sum=4.0, num_steps=2, train_s=1.0)


def test_a_site_that_has_ended_says_so_and_the_follower_ends_with_its_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leader_module, "CLOSE_LIMIT_S", 60.0)

    async def main() -> None:
        async with led(tmp_path) as site, following(site.address, tmp_path) as host:
            both = await attached(site, host)
            rank = await both.rank()
            await rank.is_greeted()
            await site.leader.close(6, "a loss that is not finite")
            assert await host.task == (6, "a loss that is not finite")
            assert await rank.hears() is None

    transport.run(main())


@pytest.mark.parametrize("is_over", [True, False], ids=["the run is over", "the site was told to leave"])
def test_scripts_of_another_host_have_the_time_that_those_of_host_0_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_over: bool
) -> None:
    monkeypatch.setattr(leader_module, "CLOSE_LIMIT_S", 60.0)

    async def main() -> None:
        async with led(tmp_path) as site, following(site.address, tmp_path) as host:
            await attached(site, host)
            host.launcher.script_s = 500.0
            await site.leader.close(0, "the run is complete", scripts_go_on=is_over)
            assert await host.task == (0, "the run is complete")
            assert ("is killed" in caplog.text) is not is_over

    transport.run(main())


def test_a_greeting_without_checkpoints_has_none_here_either(tmp_path: Path) -> None:
    async def main() -> None:
        async with led(tmp_path) as site, following(site.address, tmp_path, data_paths=()) as host:
            both = await attached(site, host, greeting=replace(GREETING, checkpoint_folder=""))
            rank = await both.rank()
            greeting = await rank.is_greeted()
            assert (greeting.checkpoint_folder, greeting.data_paths) == ("", ())

    transport.run(main())


def test_hosts_that_were_told_different_layouts_end_the_site_with_both(tmp_path: Path) -> None:
    async def main() -> None:
        async with led(tmp_path) as site, following(site.address, tmp_path, parallel="tp=2") as host:
            both = await attached(site, host, greeting=replace(GREETING, parallel="dp_shard=2"))
            rank = await both.rank()
            await rank.says_hello()
            failed = await site.event(e.WorkersFailed)
            assert (failed.kind, failed.exit_code) == (FailureKind.FATAL, ConfigError.exit_code)
            assert "--parallel tp=2 here, dp_shard=2 on host 0: say one" in failed.text

    transport.run(main())


def test_ranks_that_cannot_be_started_end_the_site_with_the_reason(tmp_path: Path) -> None:
    async def main() -> None:
        async with led(tmp_path) as site, following(site.address, tmp_path) as host:
            host.launcher.error = ConfigError("train.py: no such script")
            await site.hosts_changed()
            site.starts(1)
            failed = await site.event(e.WorkersFailed)
            assert (failed.generation, failed.kind, failed.exit_code) == (1, FailureKind.FATAL, ConfigError.exit_code)
            assert failed.text.endswith("): train.py: no such script")

    transport.run(main())


async def joined(site: Led, both: TwoHosts, offers: tuple[LocalJoin, ...] = (offer_of(0), offer_of(1))) -> list[Rank]:
    """Both ranks, before their layout."""
    ranks = [await both.rank(rank) for rank in range(2)]
    for rank, offered in zip(ranks, offers, strict=True):
        await rank.is_greeted()
        await rank.says(offered)
    await site.event(e.WorkersJoined)
    return ranks


def test_memory_that_is_not_there_ends_the_site_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(num_bytes: int, name: str) -> None:
        raise HostError(f"{name} needs {num_bytes} bytes of shared memory")

    async def main() -> None:
        async with led(tmp_path) as site, following(site.address, tmp_path) as host:
            await joined(site, await attached(site, host))
            monkeypatch.setattr(plane_module, "SharedBuffer", no_memory)
            site.lays_out()
            failed = await site.event(e.WorkersFailed)
            assert (failed.kind, failed.exit_code) == (FailureKind.FATAL, HostError.exit_code)
            assert f"publish needs {LAYOUT.buffer_bytes} bytes of shared memory" in failed.text

    transport.run(main())


def test_a_disk_that_fails_before_ranks_are_started_ends_the_site(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no workers run, nothing that is said of them is heard."""
    an_older_state(tmp_path, seed=0)

    async def no_disk(commit: m.Commit) -> None:
        raise HostError(f"no room for commit {commit.commit}")

    async def main() -> None:
        async with led(tmp_path) as site:
            await site.has_state()
            async with following(site.address, tmp_path) as host:
                await site.hosts_changed()
                await site.follows(0)
                monkeypatch.setattr(host.plane, "apply", no_disk)
                await site.commits(1, host.plane)
                failed = await site.event(e.NodeFailed)
                assert failed.exit_code == HostError.exit_code
                assert failed.text.endswith("): no room for commit 1")

    transport.run(main())


def test_frames_of_more_than_a_mebibyte_pass_both_ways(tmp_path: Path) -> None:
    names = [f"layers.{index}.{'long' * 250}" for index in range(1200)]
    specs = [TensorSpec(name=name, shape=(1,), dtype="F32", role=Role.TRAINABLE) for name in names]
    manifest = Manifest.canonical(specs)
    layout = Layout(manifest)
    held = tuple(Piece(name=spec.name, offsets=(0,), sizes=(1,), dtype="F32") for spec in manifest.tensors)
    offers = [LocalJoin(manifest=manifest, pieces=held, data_fingerprint=b"", data_rank=rank) for rank in range(2)]
    assert local.pack(1, 0, offers[1]).ByteSize() > 1 << 20

    async def main() -> None:
        async with led(tmp_path) as site, following(site.address, tmp_path) as host:
            both = await attached(site, host)
            ranks = await joined(site, both, (offers[0], offers[1]))
            pieces = site_pieces(offers, 1)
            assert isinstance(pieces, SitePieces)
            site.leader.endpoints(manifest)
            site.leader.laid_out(pieces, layout, site.snapshot)
            await site.server.admit(layout, site.snapshot, site.publish)
            told = await ranks[1].hears()
            assert told is not None
            assert len(told.layout.manifest.tensors) == len(names)
            assert told.ByteSize() > 1 << 20

    transport.run(main())


def test_a_rank_that_is_refused_hears_why_and_one_that_goes_is_lost(tmp_path: Path) -> None:
    async def main() -> None:
        async with led(tmp_path) as site, following(site.address, tmp_path) as host:
            both = await attached(site, host)
            stranger = await both.connects(both.path, 0)
            await stranger.says_hello()
            refused = await stranger.hears()
            assert refused is not None
            assert refused.refused.text == "a message of rank 0 on a connection of rank None"
            assert await stranger.hears() is None
            rank = await both.rank()
            await rank.is_greeted()
            rank.close()
            assert (await site.event(e.RankLost)).rank == 1

    transport.run(main())


def test_ranks_of_the_generation_before_are_dropped_when_new_ones_start(tmp_path: Path) -> None:
    async def main() -> None:
        async with led(tmp_path) as site, following(site.address, tmp_path) as host:
            both = await attached(site, host)
            silent = await both.rank()  # of which the leader does not know
            old = await both.rank()
            await old.is_greeted()
            site.server.serve(2, 2, GREETING)
            site.starts(2)
            assert await host.starts_ranks(2) == both.path
            assert await old.hears() is None
            assert await silent.hears() is None
            new = await both.rank(1, 2)
            await new.is_greeted()

    transport.run(main())


def test_ranks_are_stopped_when_the_leader_says_so(tmp_path: Path) -> None:
    async def main() -> None:
        async with led(tmp_path) as site, following(site.address, tmp_path) as host:
            await attached(site, host)
            site.leader.stop()
            await host.launcher.stopped.get()

    transport.run(main())


def test_a_host_that_loses_its_leader_stops_its_ranks_and_comes_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            site = await stack.enter_async_context(led(tmp_path))
            host = await stack.enter_async_context(following(site.address, tmp_path))
            both = await attached(site, host)
            rank = await both.rank()
            await rank.is_greeted()
            # It is killed: nothing is said of an end.
            server, site.leader._server = site.leader._server, None
            assert server is not None
            await server.stop(0)
            assert await rank.hears() is None
            await host.launcher.stopped.get()
            assert (await site.event(e.RankLost)).rank == 1
            site.leader = site.a_leader()
            await site.leader.open(site.server.connected)
            await site.hosts_changed()
            site.server.serve(2, 2, GREETING)
            site.starts(2)
            again = await both.connects(await host.starts_ranks(2), 1, 2)
            await again.is_greeted()

    transport.run(main())
    assert "the workers of this host wait for it" in caplog.text


def test_a_word_that_is_said_as_the_stream_ends_does_not_end_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """grpc raises no error of its own for it."""
    write_all, failures = Outbox.write_all, [asyncio.InvalidStateError("RPC already finished.")]

    async def writes(outbox: Outbox[Any], write: Any) -> None:
        if failures and outbox._pack is hosts.said:
            raise failures.pop()
        await write_all(outbox, write)

    monkeypatch.setattr(Outbox, "write_all", writes)

    async def main() -> None:
        async with led(tmp_path) as site, following(site.address, tmp_path):
            await site.hosts_changed()
            assert not failures

    transport.run(main())


def test_systemd_and_probes_hear_of_a_host_that_does_not_lead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its unit is started when it is attached, and watched from its start on."""

    async def main() -> None:
        async with led(tmp_path) as site, following(site.address, tmp_path) as host:
            said = {await asyncio.to_thread(systemd.hears)}
            while not any("READY=1" in word for word in said):
                said.add(await asyncio.to_thread(systemd.hears))
            assert said == {"WATCHDOG=1", "READY=1\nSTATUS=host 1 of site a of run run"}
            await site.hosts_changed()

            async def obstacles() -> str:
                path = health.socket_path(tmp_path / "host1")
                return (await asyncio.to_thread(line_socket.ask, path, health.ASKED, "node"))["found"]

            assert await obstacles() == ""
            server, site.leader._server = site.leader._server, None
            assert server is not None
            await server.stop(0)
            await host.launcher.stopped.get()
            assert await obstacles() == f"host 0 of this site at {site.address} does not hear this host"

    with Systemd(tmp_path / "notify") as systemd:
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        monkeypatch.setenv("WATCHDOG_USEC", "3000000")
        transport.run(main())
