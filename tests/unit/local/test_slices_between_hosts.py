"""What ranks have sealed, on its way between the hosts of a site, over loopback."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atoll.node import host_protocol as hosts
from atoll.node.core import events as e
from atoll.node.core.host_events import HostsChanged, SlicesArrived, SnapshotShared
from atoll.node.core.outputs import ShareSnapshot
from atoll.node.dataplane.slices import Wanted, views
from atoll.protocol import messages as m
from atoll.protocol import transport
from atoll.protocol.errors import InvalidMessage, RefusedError, StaleError
from atoll.protocol.trust.names import Kind
from tests.harness.following import hosts_meet_at_once
from tests.harness.hand_host import HAND_ADDRESS
from tests.harness.hosts import SITE_ID, led
from tests.harness.model_on_hosts import (
    COUNT,
    FOR_HOST_0,
    FOR_HOST_1,
    LAYOUT,
    MANIFEST,
    OWNED_BY_RANK_1,
    W,
    copied,
    pieces_of,
    pieces_of_site,
    random_bytes,
)
from tests.unit.trust.test_security import tls

EVERYTHING = Wanted(fragment=0, with_frozen=True)
CHANGING = Wanted(fragment=0, with_frozen=False)
TAKE = hosts.TakeSnapshot(generation=1, fragment=0, step=10, seq=2)
SHARED = next(piece for piece in pieces_of(0) if piece.name == "shared")
DTYPES = {"count": "I64", "own": "F16", "shared": "F32", "v": "F32", "w": "F32"}
SHARE = ShareSnapshot(generation=1, fragment=0, step=10, seq=2)


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts_meet_at_once(monkeypatch)


def hand_ready(state_hash: bytes, address: str = HAND_ADDRESS) -> hosts.HostReady:
    """Of one that holds commit 0, if that has a hash."""
    return hosts.HostReady(
        address=address,
        has_state=bool(state_hash),
        commit=0,
        state_hash=state_hash,
        branch=0,
        site_address=HAND_ADDRESS,
    )


def taken(**wrong: int) -> hosts.SnapshotTaken:
    return replace(hosts.SnapshotTaken(generation=1, fragment=0, step=10, seq=2), **wrong)


# --- slices that ranks have sealed


def test_a_rank_elsewhere_writes_all_it_owns_for_the_first_state_then_what_host_0_exchanges(tmp_path: Path) -> None:
    async def main() -> None:
        async with led(tmp_path) as site:
            host = await site.host()
            await site.hosts_changed()
            await site.runs(1, host)
            source, before = random_bytes(LAYOUT.buffer_bytes), bytes(site.snapshot.view)
            await host.put(host.put_of(1, with_frozen=False), source, pieces=FOR_HOST_0)
            assert await site.event(SlicesArrived) == SlicesArrived(generation=1, rank=1, step=10, seq=2)
            then = copied(memoryview(source), before, FOR_HOST_0, CHANGING)
            assert bytes(site.snapshot.view) == then
            await host.put(host.put_of(1, step=20, seq=0), source)
            assert await site.event(SlicesArrived) == SlicesArrived(generation=1, rank=1, step=20, seq=0)
            assert bytes(site.snapshot.view) == copied(memoryview(source), before, OWNED_BY_RANK_1, EVERYTHING) != then
            with pytest.raises(InvalidMessage, match="do not fit those that are listed here"):
                await host.put(host.put_of(1, with_frozen=False), source)  # of the host's own tensors, too
            assert "is lost" in await site.hosts_changed(1)

    transport.run(main())


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        ({"session": 77}, StaleError, "what this host has, or asks for, is not wanted any more"),
        ({"generation": 1}, StaleError, "slices of generation 1; generation 2 is running"),
        ({"rank": 0}, InvalidMessage, "has no rank 0"),
        ({"rank": 2}, InvalidMessage, "has no rank 2"),
    ],
)
def test_slices_that_are_not_wanted_are_refused_and_the_host_stays(
    tmp_path: Path, wrong: dict[str, Any], error: type[Exception], text: str
) -> None:
    async def main() -> None:
        async with led(tmp_path) as site:
            host = await site.host()
            await site.hosts_changed()
            await site.runs(2, host)
            before = bytes(site.snapshot.view)
            with pytest.raises(error, match=text):
                await host.put(replace(host.put_of(2), **wrong), random_bytes(LAYOUT.buffer_bytes))
            assert bytes(site.snapshot.view) == before
            await host.put(host.put_of(2), random_bytes(LAYOUT.buffer_bytes))
            assert (await site.event(SlicesArrived)).generation == 2

    transport.run(main())


def test_a_host_moves_nothing_in_the_session_of_another_one(tmp_path: Path) -> None:
    """Sessions are counted, so any host can say that of another one."""

    async def main() -> None:
        async with led(tmp_path, security=tls(Kind.SITE, "a"), site_hosts=3) as site:
            both = []
            for number in (1, 2):
                handshake = tls(Kind.HOST, f"a/{number}").towards(Kind.HOST, "a/0")
                both.append(await site.host(number, handshake=handshake, num_hosts=3))
                await site.event(HostsChanged)
            one, two = both
            await site.runs(1, *both)
            before, source = bytes(site.snapshot.view), random_bytes(LAYOUT.buffer_bytes)
            payloads = hosts.PayloadsOf(session=one.session, sync=1, term=1, attempt=1)
            for moves in (
                two.put(one.put_of(1), source),
                two.take(TAKE, one.session),
                two.put_payloads(payloads),
                two.take_payloads(payloads),
            ):
                with pytest.raises(RefusedError, match="host a/2 of run run is not host 1"):
                    await moves
            assert bytes(site.snapshot.view) == before
            await one.put(one.put_of(1), source)
            assert (await site.event(SlicesArrived)).rank == 1

    transport.run(main())


@pytest.mark.parametrize("is_over", ["not laid out yet", "stopped"])
def test_slices_for_ranks_that_are_not_there_are_refused(tmp_path: Path, is_over: str) -> None:
    async def main() -> None:
        async with led(tmp_path) as site:
            host = await site.host()
            await site.hosts_changed()
            if is_over == "stopped":
                await site.runs(1, host)
                site.leader.stop()
                assert (await host.hears(hosts.StopRanks)).generation == 1
            else:
                site.starts(1)
            with pytest.raises(StaleError, match="slices of generation 1; none is running"):
                await host.put(host.put_of(1), random_bytes(LAYOUT.buffer_bytes))
            assert site.events.empty()

    transport.run(main())


@pytest.mark.parametrize("damage", ["hash", "more", "less"])
def test_a_host_whose_slices_do_not_come_whole_is_given_up(tmp_path: Path, damage: str) -> None:
    async def main() -> None:
        async with led(tmp_path) as site:
            host = await site.host()
            await site.hosts_changed()
            await site.runs(1, host)
            pieces = {"hash": OWNED_BY_RANK_1, "more": pieces_of(1), "less": OWNED_BY_RANK_1[1:]}[damage]
            wrong_hash = bytes(32) if damage == "hash" else b""
            with pytest.raises(InvalidMessage):
                await host.put(host.put_of(1), random_bytes(LAYOUT.buffer_bytes), pieces=pieces, wrong_hash=wrong_hash)
            assert "is lost: " in await site.hosts_changed(1)
            await host.ended()

    transport.run(main())


def test_slices_that_arrive_when_their_generation_is_over_are_not_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with led(tmp_path) as site:
            host = await site.host()
            await site.hosts_changed()
            await site.runs(1, host)
            found, opened = site.leader._moving._of_session, asyncio.Event()

            def finds(session: int, context: Any) -> Any:
                opened.set()
                return found(session, context)

            monkeypatch.setattr(site.leader._moving, "_of_session", finds)

            async def until_new_ranks_run() -> None:
                await opened.wait()
                await site.runs(2, host)

            with pytest.raises(StaleError, match="these slices are not wanted any more"):
                await host.put(host.put_of(1), random_bytes(LAYOUT.buffer_bytes), after_opening=until_new_ranks_run)
            await host.put(host.put_of(2), random_bytes(LAYOUT.buffer_bytes))
            assert (await site.event(SlicesArrived)).generation == 2

    transport.run(main())


# --- what the host sends of a snapshot


def test_a_host_hears_what_the_site_holds_and_what_ranks_elsewhere_write_of_its_tensors(tmp_path: Path) -> None:
    async def main() -> None:
        async with led(tmp_path, site_hosts=3) as site:
            both = []
            for number in (1, 2):
                ready = replace(hand_ready(b""), site_address=f"127.0.0.1:{number}")
                both.append(await site.host(number, ready=ready, num_hosts=3))
                await site.event(HostsChanged)
            site.starts(1)
            site.lays_out()
            assert site.leader.ranks is not None
            for host, of in zip(both, ((), ("w", "count")), strict=True):  # of two tensors and a count
                await host.hears(hosts.StartRanks)
                told = await host.hears(hosts.SiteLaidOut)
                assert (told.generation, told.site_id, told.manifest) == (1, SITE_ID, MANIFEST)
                assert told.chunk_elements == site.plane.layout.chunk_elements
                assert dict(zip((spec.name for spec in MANIFEST.tensors), told.dtypes, strict=True)) == DTYPES
                # Of three hosts, each with a rank, the third has none here: the site has two ranks.
                ranks = (0,) if host.number == 1 else (0, 1)
                owned = [piece for rank in ranks for piece in pieces_of_site().owned_by(rank)]
                assert [p for p in told.pieces if p.name in of] == [p for p in owned if p.name in of]
                by_host = [[p for p in pieces_of_site().owned_by(rank) if p.name != "v"] for rank in (0, 1)]
                assert told.num_pieces == ((0, 0, 0) if host.number == 1 else (*map(len, by_host), 0))
                assert told.host_addresses == ("", "127.0.0.1:1", "127.0.0.1:2")
                assert told.key == site.leader.ranks.key

    transport.run(main())


def test_a_host_takes_what_others_wrote_of_its_tensors_and_then_the_snapshot_is_shared(tmp_path: Path) -> None:
    async def main() -> None:
        async with led(tmp_path) as site:
            state_hash = await site.has_state()
            host = await site.host(ready=hand_ready(state_hash))
            await site.hosts_changed()
            site.starts(1)
            site.lays_out()
            await host.hears(hosts.StartRanks)
            told = await host.hears(hosts.SiteLaidOut)
            assert sorted(told.pieces, key=str) == sorted((*FOR_HOST_1, SHARED), key=str)
            shared = asyncio.create_task(site.leader.share(SHARE))
            assert await host.hears(hosts.TakeSnapshot) == TAKE
            site.snapshot.view[:] = random_bytes(LAYOUT.buffer_bytes)
            found = views(LAYOUT, site.snapshot.view, told.pieces, CHANGING)
            assert await host.take(TAKE) == b"".join(view.tobytes() for view in found)
            for wrong in ({"step": 11}, {"seq": 1}):
                await host.says(taken(**wrong))
            await host.says(hosts.RanksExited(generation=1, code=1, text="that word is heard"))
            await site.event(e.WorkersExited)
            assert not shared.done()
            await host.says(taken())
            await shared
            assert await site.event(SnapshotShared) == SnapshotShared(generation=1, step=10, seq=2)

    transport.run(main())


def test_what_a_host_took_of_the_next_snapshot_is_not_this_one_which_nobody_waits_for(tmp_path: Path) -> None:
    async def main() -> None:
        async with led(tmp_path) as site:
            host, _ = await site.host_at_commit_0()
            replicas, following_one = site.leader.replicas, replace(SHARE, step=20)
            first = asyncio.create_task(replicas.share_snapshot(SHARE, lambda: True))
            assert await host.hears(hosts.TakeSnapshot) == TAKE
            second = asyncio.create_task(replicas.share_snapshot(following_one, lambda: True))
            assert await host.hears(hosts.TakeSnapshot) == replace(TAKE, step=20)
            await host.says(taken(step=20))
            assert await second
            assert not await first, "it was given up: else something would wait as long as these ranks run"

    transport.run(main())


def test_where_host_0_has_no_state_nothing_is_asked_of_hosts(tmp_path: Path) -> None:
    """It makes the state of the snapshot by itself."""

    async def main() -> None:
        async with led(tmp_path) as site:
            host = await site.host()
            await site.hosts_changed()
            await site.runs(1, host)
            sharing = asyncio.create_task(site.leader.share(SHARE))
            await asyncio.sleep(0)
            assert sharing.done()
            assert await site.event(SnapshotShared) == SnapshotShared(generation=1, step=10, seq=2)
            site.leader.stop()
            await host.hears(hosts.StopRanks)  # and nothing before it

    transport.run(main())


@pytest.mark.parametrize("ends", ["the host is lost", "the ranks are stopped", "they were before"])
def test_a_snapshot_of_ranks_that_are_gone_is_not_shared(tmp_path: Path, ends: str) -> None:
    """But what a host that is lost would have sent is asked for by nobody, as the site is without one."""

    async def main() -> None:
        async with led(tmp_path) as site:
            host = await site.host(ready=hand_ready(await site.has_state()))
            await site.hosts_changed()
            await site.runs(1, host)
            if ends == "they were before":
                await site.runs(2, host)
                await site.leader.share(SHARE)
            else:
                shared = asyncio.create_task(site.leader.share(SHARE))
                await host.hears(hosts.TakeSnapshot)
                if ends == "the host is lost":
                    await host.close()
                    await site.hosts_changed(1)
                    site.leader.stop()  # as the core does
                else:
                    site.leader.stop()
                await shared
            assert site.events.empty() or ends == "the host is lost"

    transport.run(main())


@pytest.mark.parametrize(
    ("wrong", "session", "text"),
    [({}, 77, "asks for, is not wanted any more"), ({"generation": 2}, None, "slices of generation 2; generation 1")],
)
def test_slices_that_are_not_there_cannot_be_taken(
    tmp_path: Path, wrong: dict[str, int], session: int | None, text: str
) -> None:
    async def main() -> None:
        async with led(tmp_path) as site:
            host = await site.host()
            await site.hosts_changed()
            await site.runs(1, host)
            with pytest.raises(StaleError, match=text):
                await host.take(replace(TAKE, **wrong), session)

    transport.run(main())


def test_the_run_finds_hosts_at_their_addresses_with_their_first_chunks(tmp_path: Path) -> None:
    async def main() -> None:
        async with led(tmp_path, site_hosts=4) as site:
            leader, address = site.leader, "127.0.0.1:{}".format
            assert leader.endpoints(MANIFEST) == (), "nobody is here"
            for number in (1, 2):
                await site.host(number, ready=hand_ready(b"", address(number)), num_hosts=4)
                await site.event(HostsChanged)
            second = m.Endpoint(address=address(2), first_chunk=W)
            assert leader.endpoints(MANIFEST) == (second,), "the first has no chunk"
            await site.host(3, ready=hand_ready(b"", address(3)), num_hosts=4)
            await site.hosts_changed()
            assert leader.endpoints(MANIFEST) == (second, m.Endpoint(address=address(3), first_chunk=COUNT))

    transport.run(main())
