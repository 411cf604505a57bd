"""Host 0 of a site and the others, over loopback: who may be in it, who is lost, and what ranks say."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atoll import __version__
from atoll.node import host_protocol as hosts
from atoll.node.core import events as e
from atoll.node.core.events import FailureKind, Values
from atoll.node.core.host_events import SlicesArrived, SnapshotShared
from atoll.node.core.outputs import AdvanceErrors, ShareSnapshot
from atoll.node.daemon.hosts.link import BEATS_A_LEASE
from atoll.node.local_protocol import LOCAL_VERSION, LocalHello
from atoll.protocol import PROTOCOL_VERSION, transport
from atoll.protocol.addresses import parse_address
from atoll.protocol.errors import InvalidMessage, PeerError, RefusedError, StaleError
from atoll.protocol.time_limits import PRESETS
from atoll.protocol.v1 import hosts_pb2
from tests.harness.following import GREETING, following, hosts_meet_at_once
from tests.harness.hand_host import HandHost
from tests.harness.hosts import LIMITS, led
from tests.harness.model_on_hosts import LAYOUT, MANIFEST, SETTINGS

SHORT = replace(LIMITS, lease_s=2.0)
"""A host has that long to come, on however busy a machine."""
TAKEN = hosts.TakeSnapshot(generation=1, fragment=0, step=10, seq=2)
ADVANCE = AdvanceErrors(1, 0, 0, ())


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts_meet_at_once(monkeypatch)


# --- who may be in the site


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"protocol_version": PROTOCOL_VERSION + 1}, "run both from one release of atoll"),
        (
            {"hosts_version": 0, "atoll_version": ""},
            "host 1 of this site has an older atoll (version 0 of what hosts of a site say to each other), host 0 has "
            f"atoll {__version__} (version {hosts.HOSTS_VERSION}): install one release on all hosts of the site",
        ),
        ({"hosts_version": 9, "atoll_version": "7.1"}, "host 1 of this site has atoll 7.1 (version 9 of what hosts"),
        ({"site_name": "b"}, "host 0 of this site has 'a', this host 'b': --name"),
        ({"num_hosts": 3}, "host 0 of this site has 2, this host 3: --site-hosts"),
        ({"num_ranks": 4}, "host 0 of this site has 1, this host 4: number of ranks on each host (--ranks)"),
        ({"host": 0}, "--site-rank 0: others than host 0 are 1 to 1"),
        ({"host": 2}, "--site-rank 2: others than host 0 are 1 to 1"),
    ],
)
def test_a_host_that_was_told_something_else_is_refused_with_what_to_change(
    tmp_path: Path, wrong: dict[str, Any], text: str
) -> None:
    async def main() -> None:
        async with led(tmp_path) as site:
            host = HandHost(site.address)
            await host.says_hello(**wrong)
            with pytest.raises(RefusedError) as caught:
                await host.hears(hosts.HostWelcome)
            assert text in str(caught.value)
            assert site.events.empty(), "the core hears nothing of it"
            await host.close()

    transport.run(main())


def test_a_follower_whose_host_0_is_of_another_release_ends_with_both_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an older one, which does not look at that and welcomes it."""
    told = hosts.told

    def of_another_release(message: hosts.HostTold) -> hosts_pb2.AttachResponse:
        if isinstance(message, hosts.HostWelcome):
            message = replace(message, hosts_version=0, atoll_version="")
        return told(message)

    monkeypatch.setattr(hosts, "told", of_another_release)

    async def main() -> None:
        async with led(tmp_path) as site, following(site.address, tmp_path) as host:
            with pytest.raises(RefusedError, match=r"has an older atoll \(version 0 .*, this host has atoll "):
                await host.task

    transport.run(main())


def test_a_follower_that_is_refused_ends_with_the_reason(tmp_path: Path) -> None:
    async def main() -> None:
        async with led(tmp_path) as site, following(site.address, tmp_path, name="b") as host:
            with pytest.raises(RefusedError, match="host 0 of this site has 'a', this host 'b': --name"):
                await host.task

    transport.run(main())


def test_the_first_word_says_who_it_is_and_no_other_does(tmp_path: Path) -> None:
    async def main() -> None:
        async with led(tmp_path) as site:
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

    transport.run(main())


def test_a_host_that_starts_again_takes_its_place_and_the_one_before_is_nobody(tmp_path: Path) -> None:
    async def main() -> None:
        async with led(tmp_path) as site:
            first = await site.host()
            assert await site.hosts_changed() == ""
            second = await site.host()
            assert second.session != first.session
            assert await site.hosts_changed(1) == "host 1 of this site (b) attaches anew"
            assert await site.hosts_changed() == ""
            await first.ended()
            with pytest.raises(StaleError, match="not wanted any more"):
                await first.take(TAKEN)
            await site.runs(1, second)
            with pytest.raises(StaleError):
                await first.put(first.put_of(1), bytes(LAYOUT.buffer_bytes))
            await second.put(second.put_of(1), bytes(LAYOUT.buffer_bytes))
            assert (await site.event(SlicesArrived)).rank == 1, "and no word of the first host's end"

    transport.run(main())


def test_another_process_that_says_it_is_a_host_waits_until_that_one_is_gone(tmp_path: Path) -> None:
    """Two that push each other out would start the workers of the site again and again."""

    async def main() -> None:
        async with led(tmp_path) as site:
            first = await site.host()
            await site.hosts_changed()
            with pytest.raises(PeerError, match=r"another process is host 1 of this site \(b\) still"):
                await site.host(process=b"another")
            await first.close()
            assert "is lost" in await site.hosts_changed(1)
            await site.host(process=b"another")
            assert await site.hosts_changed() == ""

    transport.run(main())


def test_ranks_of_a_host_that_ended_well_end_nothing_of_the_others(tmp_path: Path) -> None:
    async def main() -> None:
        async with led(tmp_path) as site:
            host = await site.host()
            await site.hosts_changed()
            await site.runs(1, host)
            await host.says(hosts.RanksExited(generation=1, code=0, text="at once"))
            await host.says(hosts.RanksExited(generation=0, code=1, text="of ranks that nobody knows any more"))
            await host.put(host.put_of(1), bytes(LAYOUT.buffer_bytes))
            await site.event(SlicesArrived)
            site.leader.exited(e.WorkersExited(generation=1, code=0, text="after an evaluation"))
            assert (await site.event(e.WorkersExited)).text == "after an evaluation"

    transport.run(main())


def test_a_host_counts_as_here_once_it_is_ready(tmp_path: Path) -> None:
    async def main() -> None:
        async with led(tmp_path) as site:
            host = await site.welcome_host()
            assert site.events.empty()
            site.starts(1)  # which it does not hear
            await host.says(host.ready())
            assert await site.hosts_changed() == ""
            await site.runs(2, host)

    transport.run(main())


@pytest.mark.parametrize(
    "word",
    [
        hosts.StateHeld(has_state=False, commit=0, state_hash=b""),
        hosts.SourcesWanted(),
        hosts.StatePublished(number=1),
        hosts.SnapshotTaken(generation=1, fragment=0, step=1, seq=1),
        hosts.HostErrorsAdvanced(commit=1, fragment=0, share=0.5),
    ],
    ids=lambda word: type(word).__name__,
)
def test_what_a_host_says_of_a_state_before_it_is_ready_ends_it(tmp_path: Path, word: hosts.HostSaid) -> None:
    async def main() -> None:
        async with led(tmp_path) as site:
            host = await site.welcome_host()
            await host.says(word)
            assert f"says {type(word).__name__} before it is ready" in await site.hosts_changed(1)
            await host.ended()

    transport.run(main())


@pytest.mark.parametrize("address", ["", "no address\n"])
def test_a_host_is_ready_once_and_at_an_address(tmp_path: Path, address: str) -> None:
    async def main() -> None:
        async with led(tmp_path) as site:
            host = await site.welcome_host()
            await host.says(host.ready(address=address or "127.0.0.1:8"))
            if not address:
                await site.hosts_changed()
                await host.says(host.ready())
            assert "says again where it is, or at no address" in await site.hosts_changed(1)
            await host.ended()

    transport.run(main())


@pytest.mark.parametrize("is_silent", [True, False])
def test_a_host_that_is_silent_for_a_lease_or_hangs_up_is_lost(tmp_path: Path, is_silent: bool) -> None:
    async def main() -> None:
        async with led(tmp_path, SHORT if is_silent else LIMITS) as site:
            host = await site.host()
            await site.hosts_changed()
            if is_silent:
                assert (await site.hosts_changed(1)).endswith("is lost: host 1 of this site (b) was silent for 2 s")
                await host.ended()
            else:
                await host.close()
                assert (await site.hosts_changed(1)).startswith("host 1 of this site (b) is lost")

    transport.run(main())


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
        async with (
            led(tmp_path, limits, replace(SETTINGS, time_limits="local")) as site,
            following(site.address, tmp_path),
        ):
            await site.hosts_changed()
            for _ in range(BEATS_A_LEASE + 2):
                await beats.get()
            assert site.events.empty(), "it was not lost meanwhile"

    transport.run(main())


def test_a_follower_gives_a_leader_up_that_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(PRESETS, "local", SHORT)

    async def main() -> None:
        async with (
            led(tmp_path, settings=replace(SETTINGS, time_limits="local")) as site,
            following(site.address, tmp_path),
        ):
            await site.hosts_changed()  # from now on the leader, whose leases are long, has nothing to say
            await site.hosts_changed(1)
            await site.hosts_changed()

    transport.run(main())
    assert "was silent for 2 s; the workers of this host wait for it" in caplog.text


def test_a_word_that_makes_no_sense_ends_the_host(tmp_path: Path) -> None:
    async def main() -> None:
        async with led(tmp_path) as site:
            host = await site.host()
            await site.hosts_changed()
            await host.says_bytes(hosts_pb2.AttachRequest())
            assert "a message of unknown kind" in await site.hosts_changed(1)

    transport.run(main())


def test_connections_that_cut_links_have_left_keep_no_host_out(tmp_path: Path) -> None:
    """They look as these do, which say nothing."""

    async def main() -> None:
        async with led(tmp_path) as site:
            host, port = parse_address(site.address)
            left = [(await asyncio.open_connection(host, port))[1] for _ in range(40)]
            await site.host()
            await site.hosts_changed()
            for writer in left:
                writer.close()

    transport.run(main())


def test_a_site_of_three_hosts_says_who_is_missing(tmp_path: Path) -> None:
    async def main() -> None:
        async with led(tmp_path, site_hosts=3) as site:
            second = await site.host(2, num_hosts=3)
            await site.hosts_changed(1)
            await site.host(1, num_hosts=3)
            await site.hosts_changed()
            await second.close()
            assert "host 2 of this site" in await site.hosts_changed(2)

    transport.run(main())


def test_the_leader_of_one_host_listens_nowhere_and_waits_for_nobody(tmp_path: Path) -> None:
    async def main() -> None:
        async with led(tmp_path, site_hosts=1) as site:
            leader = site.leader
            assert leader.endpoints(MANIFEST) == ()
            site.starts(1)
            site.lays_out()
            await site.has_state()
            await leader.publish(leader.ranks, Values(0))
            await leader.share(ShareSnapshot(generation=1, fragment=0, step=3, seq=1))
            assert await site.event(SnapshotShared) == SnapshotShared(generation=1, step=3, seq=1)
            assert await leader.replicas.advance_errors(ADVANCE) == []
            leader.stop()
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection(*site.address.split(":"))

    transport.run(main())


# --- words of ranks


def test_a_rank_speaks_for_ranks_of_its_own_host_alone(tmp_path: Path) -> None:
    async def main() -> None:
        async with led(tmp_path) as site:
            host = await site.host()
            await site.hosts_changed()
            site.server.serve(1, 2, GREETING)
            hello = LocalHello(world_size=2, pid=7, protocol_version=LOCAL_VERSION)
            await host.says_of_rank(5, 0, 1, hello)
            refused = (await host.rank_hears(5)).refused
            assert (refused.kind, refused.text) == ("refused", "a message of rank 0 on a connection of rank None")
            assert (await host.hears(hosts.RankClosed)).connection == 5
            await host.says_of_rank(6, 1, 1, hello)
            assert (await host.rank_hears(6)).WhichOneof("body") == "greeting"
            await host.says(hosts.RankClosed(connection=6))
            lost = await site.event(e.RankLost)
            assert lost == e.RankLost(generation=1, rank=1, text="closed its connection without a word")

    transport.run(main())


def test_with_a_host_its_ranks_are_lost_after_the_core_has_heard_of_it(tmp_path: Path) -> None:
    """Else they would have crashed."""

    async def main() -> None:
        async with led(tmp_path) as site:
            host = await site.host()
            await site.hosts_changed()
            site.server.serve(1, 2, GREETING)
            await host.says_of_rank(1, 1, 1, LocalHello(world_size=2, pid=7, protocol_version=LOCAL_VERSION))
            await host.rank_hears(1)
            await host.close()
            await site.hosts_changed(1)
            assert (await site.event(e.RankLost)).rank == 1

    transport.run(main())


def test_how_ranks_of_another_host_end_is_as_of_this_one(tmp_path: Path) -> None:
    async def main() -> None:
        async with led(tmp_path) as site:
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

    transport.run(main())


def test_what_fails_a_host_itself_ends_the_node_whichever_workers_run(tmp_path: Path) -> None:
    async def main() -> None:
        async with led(tmp_path) as site:
            host = await site.host()
            await site.hosts_changed()
            await site.runs(2, host)
            await host.says(hosts.HostFailed(generation=0, text="no disk", exit_code=7))
            assert await site.event(e.NodeFailed) == e.NodeFailed("host 1 of this site (b): no disk", 7)

    transport.run(main())
