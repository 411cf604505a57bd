"""Host 0 of a site and another one, over loopback: who may be in it, what is lost, and what moves between them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atoll.node import host_protocol as hosts
from atoll.node import local_protocol as local
from atoll.node.core import events as e
from atoll.node.core.events import Answer, AnswerKind, FailureKind
from atoll.node.core.host_events import SlicesArrived
from atoll.node.daemon.hosts import follower as follower_module
from atoll.node.daemon.hosts import leader as leader_module
from atoll.node.daemon.hosts import relay as relay_module
from atoll.node.daemon.hosts.leader import Leader
from atoll.node.daemon.hosts.link import BEATS_A_LEASE, Outbox
from atoll.node.daemon.rank_connection import Connection
from atoll.node.dataplane.slices import Wanted
from atoll.node.local_protocol import Greeting, LocalHello, LocalJoin, Piece, SealedReport
from atoll.node.worker.client import LocalClient
from atoll.protocol import PROTOCOL_VERSION, transport
from atoll.protocol.errors import (
    ConfigError,
    HostError,
    InvalidMessage,
    PeerError,
    RefusedError,
    StaleError,
)
from atoll.protocol.layout import Layout, Manifest, Role, TensorSpec
from atoll.protocol.time_limits import PRESETS
from atoll.protocol.v1 import hosts_pb2
from tests.harness.hosts import (
    LAYOUT,
    LIMITS,
    OWNED_BY_RANK_1,
    SETTINGS,
    HandHost,
    Led,
    Rank,
    config_of,
    copied,
    following,
    led,
    offer_of,
    pieces_of,
    pieces_of_site,
    random_bytes,
)
from tests.harness.sockets import free_address
from tests.unit.node_core.test_gradients import LOCAL

GREETING = Greeting(settings_json="{}", data_paths=("/of/host/0",), checkpoint_folder="/home/of/host/0")
SHORT = replace(LIMITS, lease_s=0.2)
SNAPSHOT = Answer(kind=AnswerKind.SNAPSHOT)
WITH_MOMENTS = replace(LOCAL, time_limits="wan")
EVERYTHING = Wanted(fragment=0, with_frozen=True)


def in_loop(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    transport.run(main())


def never(event: e.Event) -> None:
    raise AssertionError(event)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that lost its leader comes back soon, and a leader ends without waiting for those that hear
    nothing any more. Silence ends nothing where no test wants it to."""
    monkeypatch.setitem(PRESETS, SETTINGS.time_limits, LIMITS)
    monkeypatch.setattr(follower_module, "RETRY_S", 0.05)
    monkeypatch.setattr(leader_module, "FLUSH_S", 0.0)
    monkeypatch.setattr(leader_module, "STOP_S", 0.0)


# --- who may be in the site


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"protocol_version": PROTOCOL_VERSION + 1}, "run both from one release of atoll"),
        ({"site_name": "b"}, "host 0 of this site has 'a', this host 'b': --name"),
        ({"num_hosts": 3}, "host 0 of this site has 2, this host 3: --site-hosts"),
        ({"num_ranks": 4}, "host 0 of this site has 1, this host 4: number of ranks on each host (--ranks)"),
        ({"host": 0}, "--site-rank 0: others than host 0 are 1 to 1"),
        ({"host": 2}, "--site-rank 2: others than host 0 are 1 to 1"),
    ],
)
def test_a_host_that_was_told_something_else_is_refused_with_what_to_change(wrong: dict[str, Any], text: str) -> None:
    async def main() -> None:
        async with led() as site:
            host = HandHost(site.address)
            await host.says_hello(**wrong)
            with pytest.raises(RefusedError) as caught:
                await host.hears(hosts.HostWelcome)
            assert text in str(caught.value)
            assert site.events.empty(), "the core hears nothing of it"
            await host.close()

    in_loop(main)


def test_a_follower_that_is_refused_ends_with_the_reason(tmp_path: Path) -> None:
    async def main() -> None:
        async with led() as site, following(site.address, tmp_path, name="b") as host:
            with pytest.raises(RefusedError, match="host 0 of this site has 'a', this host 'b': --name"):
                await host.task

    in_loop(main)


def test_the_first_word_says_who_it_is_and_no_other_does() -> None:
    async def main() -> None:
        async with led() as site:
            stranger = HandHost(site.address)
            await stranger.says(hosts.HostBeat())
            with pytest.raises(InvalidMessage, match="a host of this site says who it is first"):
                await stranger.hears(hosts.HostWelcome)
            await stranger.close()
            host = await site.host()
            await site.hosts_changed()
            await host.says_hello()
            assert "says who it is a second time" in await site.hosts_changed(1)
            await host.ended()

    in_loop(main)


def test_a_host_that_starts_again_takes_its_place_and_the_one_before_is_nobody() -> None:
    async def main() -> None:
        async with led() as site:
            first = await site.host()
            assert await site.hosts_changed() == ""
            second = await site.host()
            assert second.session != first.session
            assert await site.hosts_changed(1) == "host 1 of this site (b) attaches anew"
            assert await site.hosts_changed() == ""
            await first.ended()
            with pytest.raises(StaleError, match="not wanted any more"):
                await first.take(1)
            await site.runs(1, second)
            with pytest.raises(StaleError):
                await first.put(first.put_of(1), bytes(LAYOUT.buffer_bytes))
            await second.put(second.put_of(1), bytes(LAYOUT.buffer_bytes))
            assert (await site.event(SlicesArrived)).rank == 1, "and no word of the first host's end"

    in_loop(main)


def test_another_process_that_says_it_is_a_host_waits_until_that_one_is_gone() -> None:
    """Two that push each other out would start the workers of the site again and again."""

    async def main() -> None:
        async with led() as site:
            first = await site.host()
            await site.hosts_changed()
            with pytest.raises(PeerError, match=r"another process is host 1 of this site \(b\) still"):
                await site.host(process=b"another")
            await first.close()
            assert "is lost" in await site.hosts_changed(1)
            await site.host(process=b"another")
            assert await site.hosts_changed() == ""

    in_loop(main)


def test_ranks_of_a_host_that_ended_well_end_nothing_of_the_others() -> None:
    async def main() -> None:
        async with led() as site:
            host = await site.host()
            await site.hosts_changed()
            await site.runs(1, host)
            await host.says(hosts.RanksExited(generation=1, code=0, text="at once"))
            await host.says(hosts.RanksExited(generation=0, code=1, text="of ranks that nobody knows any more"))
            await host.put(host.put_of(1), bytes(LAYOUT.buffer_bytes))
            await site.event(SlicesArrived)
            site.leader.exited(e.WorkersExited(generation=1, code=0, text="after an evaluation"))
            assert (await site.event(e.WorkersExited)).text == "after an evaluation"

    in_loop(main)


@pytest.mark.parametrize("is_silent", [True, False])
def test_a_host_that_is_silent_for_a_lease_or_hangs_up_is_lost(is_silent: bool) -> None:
    async def main() -> None:
        async with led(SHORT) as site:
            host = await site.host()
            await site.hosts_changed()
            if is_silent:
                assert (await site.hosts_changed(1)).endswith("is lost: host 1 of this site (b) was silent for 0.2 s")
                await host.ended()
            else:
                await host.close()
                assert (await site.hosts_changed(1)).startswith("host 1 of this site (b) is lost")

    in_loop(main)


def test_a_host_beats_as_often_as_the_run_wants_from_its_welcome_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it does before is for the longest leases that there are."""
    limits = replace(LIMITS, lease_s=2.0)
    monkeypatch.setitem(PRESETS, "local", limits)
    beats: asyncio.Queue[None] = asyncio.Queue()
    heard_of_host = hosts.heard_of_host

    def hears(envelope: hosts_pb2.AttachRequest) -> hosts.HostSaid:
        said = heard_of_host(envelope)
        if isinstance(said, hosts.HostBeat):
            beats.put_nowait(None)
        return said

    monkeypatch.setattr(hosts, "heard_of_host", hears)

    async def main() -> None:
        async with led(limits, replace(SETTINGS, time_limits="local")) as site, following(site.address, tmp_path):
            await site.hosts_changed()
            for _ in range(BEATS_A_LEASE + 2):
                await beats.get()
            assert site.events.empty(), "it was not lost meanwhile"

    in_loop(main)


def test_a_follower_gives_a_leader_up_that_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(PRESETS, "local", SHORT)

    async def main() -> None:
        async with led(settings=replace(SETTINGS, time_limits="local")) as site, following(site.address, tmp_path):
            await site.hosts_changed()  # from now on the leader, whose leases are long, has nothing to say
            await site.hosts_changed(1)
            await site.hosts_changed()

    in_loop(main)
    assert "was silent for 0.2 s; the workers of this host wait for it" in caplog.text


def test_a_word_that_makes_no_sense_ends_the_host() -> None:
    async def main() -> None:
        async with led() as site:
            host = await site.host()
            await site.hosts_changed()
            await host._call.write(hosts_pb2.AttachRequest())
            assert "a message of unknown kind" in await site.hosts_changed(1)

    in_loop(main)


def test_a_site_of_three_hosts_says_who_is_missing() -> None:
    async def main() -> None:
        async with led(site_hosts=3) as site:
            second = await site.host(2, num_hosts=3)
            await site.hosts_changed(1)
            await site.host(1, num_hosts=3)
            await site.hosts_changed()
            await second.close()
            assert "host 2 of this site" in await site.hosts_changed(2)

    in_loop(main)


def test_the_leader_of_one_host_listens_nowhere_and_waits_for_nobody() -> None:
    async def main() -> None:
        address = free_address()
        leader = Leader(replace(config_of(0, address), site_hosts=1), SETTINGS, LIMITS, never)
        await leader.open(Connection.close)
        leader.start(1, None)
        await leader.publish(leader.ranks, 0, 0)
        leader.stop()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(*address.split(":"))
        await leader.close(0, "over")

    in_loop(main)


# --- words of ranks


def test_a_rank_speaks_for_ranks_of_its_own_host_alone() -> None:
    async def main() -> None:
        async with led() as site:
            host = await site.host()
            await site.hosts_changed()
            site.server.serve(1, 2, GREETING)
            hello = LocalHello(world_size=2, pid=7, protocol_version=PROTOCOL_VERSION)
            await host.says_of_rank(5, 0, 1, hello)
            refused = (await host.rank_hears(5)).refused
            assert (refused.kind, refused.text) == ("refused", "a message of rank 0 on a connection of rank None")
            assert (await host.hears(hosts.RankClosed)).connection == 5
            await host.says_of_rank(6, 1, 1, hello)
            assert (await host.rank_hears(6)).WhichOneof("body") == "greeting"
            await host.says(hosts.RankClosed(connection=6))
            lost = await site.event(e.RankLost)
            assert lost == e.RankLost(generation=1, rank=1, text="closed its connection without a word")

    in_loop(main)


def test_with_a_host_its_ranks_are_lost_after_the_core_has_heard_of_it() -> None:
    """Else they would have crashed."""

    async def main() -> None:
        async with led() as site:
            host = await site.host()
            await site.hosts_changed()
            site.server.serve(1, 2, GREETING)
            await host.says_of_rank(1, 1, 1, LocalHello(world_size=2, pid=7, protocol_version=PROTOCOL_VERSION))
            await host.rank_hears(1)
            await host.close()
            await site.hosts_changed(1)
            assert (await site.event(e.RankLost)).rank == 1

    in_loop(main)


def test_how_ranks_of_another_host_end_is_as_of_this_one() -> None:
    async def main() -> None:
        async with led() as site:
            host = await site.host()
            await site.hosts_changed()
            await site.runs(2, host)
            await host.says(hosts.RanksExited(generation=1, code=1, text="of the generation before"))
            await host.says(hosts.RanksExited(generation=2, code=3, text="rank 1 ended with exit code 3"))
            exited = await site.event(e.WorkersExited)
            text = "host 1 of this site (b): rank 1 ended with exit code 3"
            assert exited == e.WorkersExited(generation=2, code=3, text=text)
            await host.says(hosts.HostFailed(generation=2, text="no memory", exit_code=7))
            failed = await site.event(e.WorkersFailed)
            assert (failed.generation, failed.kind, failed.exit_code) == (2, FailureKind.FATAL, 7)
            assert failed.text == "host 1 of this site (b): no memory"

    in_loop(main)


# --- slices that ranks have sealed


def test_what_a_rank_owns_comes_into_the_sites_snapshot_and_nothing_else() -> None:
    async def main() -> None:
        async with led() as site:
            host = await site.host()
            await site.hosts_changed()
            await site.runs(1, host)
            source, before = random_bytes(LAYOUT.buffer_bytes), bytes(site.snapshot.view)
            await host.put(host.put_of(1, with_frozen=False), source)
            assert await site.event(SlicesArrived) == SlicesArrived(generation=1, rank=1, step=10, seq=2)
            without_frozen = replace(EVERYTHING, with_frozen=False)
            then = copied(memoryview(source), before, OWNED_BY_RANK_1, without_frozen)
            assert bytes(site.snapshot.view) == then
            await host.put(host.put_of(1, step=20, seq=0), source)
            assert await site.event(SlicesArrived) == SlicesArrived(generation=1, rank=1, step=20, seq=0)
            assert bytes(site.snapshot.view) == copied(memoryview(source), before, OWNED_BY_RANK_1, EVERYTHING) != then

    in_loop(main)


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        ({"session": 77}, StaleError, "the slices of this host are not wanted any more"),
        ({"generation": 1}, StaleError, "slices of generation 1; generation 2 is running"),
        ({"rank": 0}, InvalidMessage, "has no rank 0"),
        ({"rank": 2}, InvalidMessage, "has no rank 2"),
    ],
)
def test_slices_that_are_not_wanted_are_refused_and_the_host_stays(
    wrong: dict[str, Any], error: type[Exception], text: str
) -> None:
    async def main() -> None:
        async with led() as site:
            host = await site.host()
            await site.hosts_changed()
            await site.runs(2, host)
            before = bytes(site.snapshot.view)
            with pytest.raises(error, match=text):
                await host.put(replace(host.put_of(2), **wrong), random_bytes(LAYOUT.buffer_bytes))
            assert bytes(site.snapshot.view) == before
            await host.put(host.put_of(2), random_bytes(LAYOUT.buffer_bytes))
            assert (await site.event(SlicesArrived)).generation == 2

    in_loop(main)


@pytest.mark.parametrize("is_over", ["not laid out yet", "stopped"])
def test_slices_for_ranks_that_are_not_there_are_refused(is_over: str) -> None:
    async def main() -> None:
        async with led() as site:
            host = await site.host()
            await site.hosts_changed()
            if is_over == "stopped":
                await site.runs(1, host)
                site.leader.stop()
                assert (await host.hears(hosts.StopRanks)).generation == 1
            else:
                site.starts(1)
            with pytest.raises(StaleError, match="not wanted any more"):
                await host.put(host.put_of(1), random_bytes(LAYOUT.buffer_bytes))
            assert site.events.empty()

    in_loop(main)


@pytest.mark.parametrize("damage", ["hash", "more", "less"])
def test_a_host_whose_slices_do_not_come_whole_is_given_up(damage: str) -> None:
    async def main() -> None:
        async with led() as site:
            host = await site.host()
            await site.hosts_changed()
            await site.runs(1, host)
            pieces = {"hash": OWNED_BY_RANK_1, "more": pieces_of(1), "less": OWNED_BY_RANK_1[1:]}[damage]
            wrong_hash = bytes(32) if damage == "hash" else b""
            with pytest.raises(InvalidMessage):
                await host.put(host.put_of(1), random_bytes(LAYOUT.buffer_bytes), pieces=pieces, wrong_hash=wrong_hash)
            assert "is lost: " in await site.hosts_changed(1)
            await host.ended()

    in_loop(main)


def test_slices_that_arrive_when_their_generation_is_over_are_not_said(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with led() as site:
            host = await site.host()
            await site.hosts_changed()
            await site.runs(1, host)
            found, opened = site.leader._of_session, asyncio.Event()

            def finds(session: int) -> Any:
                opened.set()
                return found(session)

            monkeypatch.setattr(site.leader, "_of_session", finds)

            async def until_new_ranks_run() -> None:
                await opened.wait()
                await site.runs(2, host)

            with pytest.raises(StaleError, match="these slices are not wanted any more"):
                await host.put(host.put_of(1), random_bytes(LAYOUT.buffer_bytes), after_opening=until_new_ranks_run)
            await host.put(host.put_of(2), random_bytes(LAYOUT.buffer_bytes))
            assert (await site.event(SlicesArrived)).generation == 2

    in_loop(main)


# --- what is published


async def published(site: Led, host: HandHost, num_moments: int = 0) -> tuple[asyncio.Task[None], int]:
    """It is under way; the number that the host is told."""
    task = asyncio.create_task(site.leader.publish(site.leader.ranks, 0, num_moments))
    return task, (await host.hears(hosts.SlicesPublished)).number


def test_a_host_takes_all_that_its_ranks_hold_once_with_what_is_frozen() -> None:
    async def main() -> None:
        async with led() as site:
            host = await site.host()
            await site.hosts_changed()
            await site.runs(1, host)
            site.publish.view[:] = random_bytes(len(site.publish.view))
            sizes = {"count": 8, "own": 6, "shared": 20, "w": 48}
            for with_frozen, num_moments in ((True, 2), (False, 0), (False, 1)):
                task, number = await published(site, host, num_moments)
                opened, data = await host.take(number)
                expected = hosts.SlicesOpen(fragment=0, with_frozen=with_frozen, num_moments=num_moments)
                assert opened == expected
                frozen = sizes["own"] + sizes["shared"] if with_frozen else 0
                assert len(data) == sizes["count"] + sizes["w"] * (1 + num_moments) + frozen
                assert not task.done()
                await host.says(hosts.SlicesTaken(number=number))
                await task
            await site.runs(2, host)
            _, number = await published(site, host)
            assert (await host.take(number))[0].with_frozen, "new ranks have nothing yet"

    in_loop(main)


def test_what_is_published_no_more_cannot_be_taken() -> None:
    async def main() -> None:
        async with led() as site:
            host = await site.host()
            await site.hosts_changed()
            await site.runs(1, host)
            with pytest.raises(StaleError, match="PUBLISH holds something else by now"):
                await host.take(1)
            task, number = await published(site, host)
            for wrong in (number - 1, number + 1):
                with pytest.raises(StaleError, match="PUBLISH holds something else by now"):
                    await host.take(wrong)
            with pytest.raises(StaleError, match="not wanted any more"):
                await host.take(number, session=77)
            await site.runs(2, host)
            await task
            with pytest.raises(StaleError):
                await host.take(number)

    in_loop(main)


@pytest.mark.parametrize("ends", ["the host is lost", "new ranks are started", "the ranks are stopped"])
def test_publishing_waits_for_nobody_that_is_gone(ends: str) -> None:
    async def main() -> None:
        async with led() as site:
            host = await site.host()
            await site.hosts_changed()
            await site.runs(1, host)
            task, _ = await published(site, host)
            assert not task.done()
            match ends:
                case "the host is lost":
                    await host.close()
                case "new ranks are started":
                    site.starts(2)
                case _:
                    site.leader.stop()
            await task

    in_loop(main)


def test_publishing_waits_for_every_host() -> None:
    async def main() -> None:
        async with led(site_hosts=3) as site:
            both = [await site.host(number, num_hosts=3) for number in (1, 2)]
            for missing in ((2,), ()):
                await site.hosts_changed(*missing)
            site.starts(1)
            site.lays_out(1)
            task = asyncio.create_task(site.leader.publish(site.leader.ranks, 0, 0))
            for host in both:
                await host.hears(hosts.StartRanks)
            numbers = [(await host.hears(hosts.SlicesPublished)).number for host in both]
            await both[0].says(hosts.SlicesTaken(number=numbers[0]))
            await both[0].says(hosts.RanksExited(generation=1, code=1, text="that word is heard"))
            await site.event(e.WorkersExited)
            assert not task.done()
            await both[1].says(hosts.SlicesTaken(number=numbers[1]))
            await task

    in_loop(main)


# --- a follower


class TwoHosts:
    """Both hosts, and a rank on each."""

    def __init__(self, site: Led, path: str) -> None:
        self.site = site
        self.path = path

    async def rank(self, rank: int = 1, generation: int = 1) -> Rank:
        return await self.site.rank(self.path if rank else self.site.server.path, rank, generation)


async def attached(site: Led, host: Any, *, generation: int = 1, greeting: Greeting = GREETING) -> TwoHosts:
    """The follower is in the site, and was told to start ranks."""
    await site.hosts_changed()
    site.server.serve(generation, 2, greeting)
    site.starts(generation)
    return TwoHosts(site, await host.starts_ranks(generation))


def test_ranks_of_two_hosts_from_hello_to_a_commit(tmp_path: Path) -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            site = await stack.enter_async_context(led(settings=WITH_MOMENTS))
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
            site.leader.laid_out(pieces_of_site(), LAYOUT, site.snapshot, site.publish)
            await site.server.admit(LAYOUT, site.snapshot, site.publish)
            joined = await asyncio.gather(*joins)
            # What is published comes into the memory of the other host, and what is not its own does not.
            site.publish.view[:] = random_bytes(len(site.publish.view))
            await site.leader.publish(site.leader.ranks, 0, 2)
            wanted, size = replace(EVERYTHING, num_moments=2), len(site.publish.view)
            expected = copied(site.publish.view, bytes(size), pieces_of(1), wanted)
            assert b"".join((joined[1].publish, *joined[1].moments)) == expected
            # What a rank has sealed comes back the same way.
            size = LAYOUT.buffer_bytes
            joined[1].snapshot[:] = random_bytes(size, seed=8)
            for seq, with_frozen in enumerate((True, True, False)):
                if seq == 2:  # after values of the run
                    apply = Answer(kind=AnswerKind.APPLY, next_step=0, version=4)
                    await answered(site, clients, seq, apply)
                    for client in clients:
                        client.merged(version=4, step=0, wait_s=0.0)
                    await site.event(e.Merged)
                site.snapshot.view[:] = before = random_bytes(size, seed=seq)
                number = seq + (seq == 2)
                await answered(site, clients, number, SNAPSHOT)
                for rank, client in enumerate(clients):
                    client.sealed(report(rank, number))
                kinds = {type(await site.events.get()) for _ in range(2)}
                assert kinds == {e.SnapshotSealed, SlicesArrived}
                wanted = replace(EVERYTHING, with_frozen=with_frozen)
                assert bytes(site.snapshot.view) == copied(joined[1].snapshot, before, OWNED_BY_RANK_1, wanted)

    in_loop(main)


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
    monkeypatch.setattr(leader_module, "FLUSH_S", 60.0)

    async def main() -> None:
        async with led() as site, following(site.address, tmp_path) as host:
            both = await attached(site, host)
            rank = await both.rank()
            await rank.is_greeted()
            await site.leader.close(6, "a loss that is not finite")
            assert await host.task == (6, "a loss that is not finite")
            assert await rank.hears() is None

    in_loop(main)


def test_a_greeting_without_checkpoints_has_none_here_either(tmp_path: Path) -> None:
    async def main() -> None:
        async with led() as site, following(site.address, tmp_path, data_paths=()) as host:
            both = await attached(site, host, greeting=replace(GREETING, checkpoint_folder=""))
            rank = await both.rank()
            greeting = await rank.is_greeted()
            assert (greeting.checkpoint_folder, greeting.data_paths) == ("", ())

    in_loop(main)


def test_hosts_that_were_told_different_layouts_end_the_site_with_both(tmp_path: Path) -> None:
    async def main() -> None:
        async with led() as site, following(site.address, tmp_path, parallel="tp=2") as host:
            both = await attached(site, host, greeting=replace(GREETING, parallel="dp_shard=2"))
            rank = await both.rank()
            await rank.says_hello()
            failed = await site.event(e.WorkersFailed)
            assert (failed.kind, failed.exit_code) == (FailureKind.FATAL, ConfigError.exit_code)
            assert "--parallel tp=2 here, dp_shard=2 on host 0: say one" in failed.text

    in_loop(main)


def test_ranks_that_cannot_be_started_end_the_site_with_the_reason(tmp_path: Path) -> None:
    async def main() -> None:
        async with led() as site, following(site.address, tmp_path) as host:
            host.launcher.error = ConfigError("train.py: no such script")
            await site.hosts_changed()
            site.starts(1)
            failed = await site.event(e.WorkersFailed)
            assert (failed.generation, failed.kind, failed.exit_code) == (1, FailureKind.FATAL, ConfigError.exit_code)
            assert failed.text.endswith("): train.py: no such script")

    in_loop(main)


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

    monkeypatch.setattr(relay_module, "SharedBuffer", no_memory)

    async def main() -> None:
        async with led() as site, following(site.address, tmp_path) as host:
            await joined(site, await attached(site, host))
            await site.server.admit(LAYOUT, site.snapshot, site.publish)
            failed = await site.event(e.WorkersFailed)
            assert (failed.kind, failed.exit_code) == (FailureKind.FATAL, HostError.exit_code)
            assert f"snapshot needs {LAYOUT.buffer_bytes} bytes of shared memory" in failed.text

    in_loop(main)


def test_frames_of_more_than_a_mebibyte_pass_both_ways(tmp_path: Path) -> None:
    names = [f"layers.{index}.{'long' * 250}" for index in range(1200)]
    specs = [TensorSpec(name=name, shape=(1,), dtype="F32", role=Role.TRAINABLE) for name in names]
    manifest = Manifest.canonical(specs)
    layout = Layout(manifest)
    pieces = tuple(Piece(name=spec.name, offsets=(0,), sizes=(1,), dtype="F32") for spec in manifest.tensors)
    offers = [LocalJoin(manifest=manifest, pieces=pieces, data_fingerprint=b"", data_rank=rank) for rank in range(2)]
    assert local.pack(1, 0, offers[1]).ByteSize() > 1 << 20

    async def main() -> None:
        async with led() as site, following(site.address, tmp_path) as host:
            both = await attached(site, host)
            ranks = await joined(site, both, (offers[0], offers[1]))
            await site.server.admit(layout, site.snapshot, site.publish)
            told = await ranks[1].hears()
            assert told is not None
            assert len(told.layout.manifest.tensors) == len(names)
            assert told.ByteSize() > 1 << 20

    in_loop(main)


def test_a_rank_that_is_refused_hears_why_and_one_that_goes_is_lost(tmp_path: Path) -> None:
    async def main() -> None:
        async with led() as site, following(site.address, tmp_path) as host:
            both = await attached(site, host)
            stranger = await site.rank(both.path, 0)
            await stranger.says_hello()
            refused = await stranger.hears()
            assert refused is not None
            assert refused.refused.text == "a message of rank 0 on a connection of rank None"
            assert await stranger.hears() is None
            rank = await both.rank()
            await rank.is_greeted()
            rank.close()
            assert (await site.event(e.RankLost)).rank == 1

    in_loop(main)


def test_ranks_of_the_generation_before_are_dropped_when_new_ones_start(tmp_path: Path) -> None:
    async def main() -> None:
        async with led() as site, following(site.address, tmp_path) as host:
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

    in_loop(main)


def test_ranks_are_stopped_when_the_leader_says_so(tmp_path: Path) -> None:
    async def main() -> None:
        async with led() as site, following(site.address, tmp_path) as host:
            await attached(site, host)
            site.leader.stop()
            await host.launcher.stopped.get()

    in_loop(main)


def test_a_host_that_loses_its_leader_stops_its_ranks_and_comes_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            site = await stack.enter_async_context(led())
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
            site.leader = Leader(site.config, SETTINGS, LIMITS, site.events.put_nowait)
            await site.leader.open(site.server.connected)
            await site.hosts_changed()
            site.server.serve(2, 2, GREETING)
            site.starts(2)
            again = await site.rank(await host.starts_ranks(2), 1, 2)
            await again.is_greeted()

    in_loop(main)
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
        async with led() as site, following(site.address, tmp_path):
            await site.hosts_changed()
            assert not failures

    in_loop(main)
