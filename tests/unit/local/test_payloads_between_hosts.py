"""Payloads of a site of several hosts: each host passes on those of its own chunks, and takes the others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from atoll.node import host_protocol as hosts
from atoll.node.core import events as e
from atoll.node.core.host_events import SnapshotShared
from atoll.node.core.outputs import ShareSnapshot
from atoll.node.dataplane.slices import Wanted
from atoll.node.exchange.peers.frames import Encoded, pack_frames
from atoll.node.exchange.sync.sharing import take_file
from atoll.node.tasks import end
from atoll.protocol import transport, wire
from atoll.protocol.errors import (
    AtollError,
    AverageError,
    DigestMismatch,
    InvalidMessage,
    NonFiniteError,
    NoRoomError,
    NotYetError,
    PeerError,
    StaleError,
    StateError,
)
from atoll.protocol.plans import payload_hash
from atoll.protocol.v1 import hosts_pb2
from tests.harness.data_plane import commit_record, filled, tensor
from tests.harness.following import Following, an_older_state, following, hosts_meet_at_once
from tests.harness.hand_host import HandHost
from tests.harness.host_exchanges import begun, on_host_0, sharing
from tests.harness.hostile_hosts import NotRead
from tests.harness.hosts import LIMITS, Led, led
from tests.harness.model_on_hosts import COUNT, FOR_HOST_1, LAYOUT, MANIFEST, V, W, copied, payloads_of
from tests.harness.peer_streams import Aborted

CHANGING = Wanted(fragment=0, with_frozen=False)
SHARE = ShareSnapshot(generation=1, fragment=0, step=10, seq=2)


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts_meet_at_once(monkeypatch)


def of(host: HandHost, **changes: int) -> hosts.PayloadsOf:
    return replace(hosts.PayloadsOf(session=host.session, sync=1, term=1, attempt=1), **changes)


def test_a_host_gives_payloads_of_its_own_chunks_alone(tmp_path: Path) -> None:
    async def main() -> None:
        async with led(tmp_path) as site:
            host, wanted = await sharing(site), begun(site, alone=True)
            site.leader.exchanges.begin(wanted)
            running = on_host_0(site, wanted)
            data = site.plane.sync_data(0, 0, ())
            found = {chunk: data.reduce(chunk, [(100, data.contribution(chunk))]) for chunk in data.chunks}

            def frames(*chunks: int) -> list[bytes]:
                items = [Encoded(chunk, found[chunk], data.payload_hash(found[chunk])) for chunk in chunks]
                return list(pack_frames(items, 1 << 16, wrapped=False))

            with pytest.raises(InvalidMessage, match="gives the payload of chunk 0, which is not its own"):
                await host.put_payloads(of(host), *frames(V))
            with pytest.raises(StaleError, match="not wanted any more"):
                await host.put_payloads(of(host, session=77), *frames(W))
            with pytest.raises(NotYetError):
                await host.put_payloads(of(host, attempt=2), *frames(W))
            assert not running.done()
            await host.put_payloads(of(host), *frames(W, COUNT))
            result = await running
            assert [found[chunk] for chunk in data.chunks] == [
                site.plane.log.begin(1, 1, 1).read(chunk) for chunk in data.chunks
            ]
            assert (await host.take_payloads(of(host))) == frames(V)
            with pytest.raises(StaleError):
                await host.take_payloads(of(host, session=77))
            site.hub.drop_sync(1)
            with pytest.raises(StaleError, match="over here"):
                await host.take_payloads(of(host))
            assert result.tokens == (100,)

    transport.run(main())


def test_all_payloads_of_a_commit_are_given_to_a_host_that_is_here(tmp_path: Path) -> None:
    async def main() -> None:
        async with led(tmp_path) as site:
            host, _ = await site.host_at_commit_0()
            await site.commits(1)
            payloads, wanted = {chunk: site.plane.log.read(1, chunk) for chunk in (V, W, COUNT)}, of(host, attempt=0)
            items = [Encoded(chunk, payload, payload_hash(payload)) for chunk, payload in payloads.items()]
            assert await host.take_payloads(wanted, is_committed=True) == list(pack_frames(items, wrapped=False))
            with pytest.raises(StateError, match="not in the log"):
                await host.take_payloads(replace(wanted, sync=7), is_committed=True)
            with pytest.raises(StaleError):
                await host.take_payloads(replace(wanted, session=77), is_committed=True)

    transport.run(main())


@pytest.mark.parametrize("is_here", [True, False])
def test_a_host_that_does_not_take_the_payloads_of_a_commit_is_not_waited_for(tmp_path: Path, is_here: bool) -> None:
    async def main() -> None:
        async with led(tmp_path) as site:
            host, _ = await site.host_at_commit_0()
            await site.commits(1)
            moving = site.leader._moving
            asked = hosts_pb2.TakePayloadsRequest(of=wire.to_proto(of(host, attempt=0)), is_committed=True)
            stream = NotRead([])
            if is_here:
                moving.limits = replace(LIMITS, lease_s=0.1)  # of what it takes; it stays here
                with pytest.raises(Aborted, match="does not take the payloads that it asked for"):
                    await moving.take_payloads(asked, stream)
                return
            async with site.leader._hosts[1].giving:
                giving = asyncio.create_task(moving.take_payloads(asked, stream))
                await host.close()
                await site.hosts_changed(1)
            with pytest.raises(Aborted, match="is not here any more"):
                await giving

    transport.run(main())


def test_payloads_of_a_commit_have_their_hashes(tmp_path: Path) -> None:
    async def main() -> None:
        async with led(tmp_path) as site:
            await site.has_state()
            plane = site.plane
            commit, payloads = payloads_of(plane, 1)
            payload = payloads[V]
            changed = payload[:-1] + bytes((payload[-1] ^ 1,))
            item = Encoded(V, changed, plane.sync_data(0, 0, ()).payload_hash(payload))
            frames = pack_frames([item], wrapped=False)

            async def read() -> bytes | None:
                return next(frames, None)

            file = plane.log.open_commit(commit)
            with pytest.raises(DigestMismatch, match="the payload of chunk 0 does not have its hash"):
                await take_file(file, commit, plane.layout, site.hub.pool, read)
            assert V in file.missing()

    transport.run(main())


@asynccontextmanager
async def both(folder: Path) -> AsyncIterator[tuple[Led, Following]]:
    """Two hosts that run, and of which each has what it is to send of a snapshot."""
    async with led(folder) as site:
        await site.has_state()
        async with following(site.address, folder) as host:
            await site.hosts_changed()
            site.starts(1)
            site.lays_out()
            await site.follows(0)
            site.snapshot.view[:] = filled(LAYOUT, seed=3)
            assert host.plane.snapshot is not None
            mine = filled(LAYOUT, seed=4)
            host.plane.snapshot.view[:] = mine
            await site.leader.share(SHARE)
            await site.event(SnapshotShared)
            assert bytes(host.plane.snapshot.view) == copied(site.snapshot.view, bytes(mine), FOR_HOST_1, CHANGING)
            yield site, host


def test_two_hosts_exchange_their_own_chunks_and_end_at_the_same_commit(tmp_path: Path) -> None:
    """From what ranks of either have sealed to what they merge."""

    async def main() -> None:
        async with both(tmp_path) as (site, host):
            wanted = begun(site, alone=True)
            assert site.leader.exchanges.begin(wanted)
            running = on_host_0(site, wanted)
            site.leader.exchanges.hurry(1)
            result = await site.leader.exchanges.done(wanted.plan, await running)
            assert result.tokens == (100,)
            logs = [plane.log.begin(1, 1, 1) for plane in (site.plane, host.plane)]
            for chunk in (V, W, COUNT):
                assert logs[0].read(chunk) == logs[1].read(chunk)
            data = host.plane.sync_data(0, 0, ())
            assert logs[0].read(W) == data.reduce(W, [(100, data.contribution(W))]), "of the snapshot of host 1"
            record = replace(
                commit_record(1, attempt=1),
                contributors=tuple(replace(c, tokens=100) for c in wanted.plan.contributors),
                payload_digest=result.payload_digest,
            )
            await site.leader.replicas.apply(record)
            await site.publishes(1)
            assert host.plane.held() == site.plane.held() != None  # noqa: E711 two pairs
            site.leader.exchanges.drop(1)

    transport.run(main())


def test_an_exchange_that_began_without_weights_hears_them_on_every_host(tmp_path: Path) -> None:
    async def main() -> None:
        async with both(tmp_path) as (site, host):
            wanted = begun(site)
            site.leader.exchanges.begin(wanted)
            endpoint = host.follower._endpoint
            assert endpoint is not None
            there = await endpoint._hub.running(1, 1, 1)
            assert not there.weights.are_known
            site.leader.exchanges.weigh(replace(wanted.plan, attempt=2), (1, 2), ())  # of which nothing has begun
            site.leader.exchanges.weigh(wanted.plan, (100, 50), ())
            await site.publishes(0)  # after it
            assert there.weights.vector() == (100, 50)

    transport.run(main())


def test_an_attempt_takes_the_place_of_the_one_before_on_all_hosts(tmp_path: Path) -> None:
    """The first waits for a site that never answers."""

    async def main() -> None:
        async with both(tmp_path) as (site, host):
            first, second = begun(site), begun(site, alone=True, attempt=2)
            site.leader.exchanges.begin(first)
            running = on_host_0(site, first)
            site.leader.exchanges.begin(second)
            result = await site.leader.exchanges.done(second.plan, await on_host_0(site, second))
            assert result.tokens == (100,)
            with pytest.raises(asyncio.CancelledError):
                await running
            assert len(host.plane.log.hashes(1, 1, 2)) == 3 * 32
            site.leader.exchanges.drop(1)  # it has become no commit
            await site.publishes(0)
            with pytest.raises(StateError):
                host.plane.log.hashes(1, 1, 2)

    transport.run(main())


def test_what_is_not_finite_on_another_host_ends_the_site_with_the_reason(tmp_path: Path) -> None:
    async def main() -> None:
        async with both(tmp_path) as (site, host):
            assert host.plane.snapshot is not None
            tensor(LAYOUT, host.plane.snapshot.view, "w")[0] = np.nan
            wanted = begun(site, alone=True)
            site.leader.exchanges.begin(wanted)
            running = on_host_0(site, wanted)
            event = asyncio.create_task(site.event(e.NodeFailed))
            await asyncio.wait({event, running}, return_when=asyncio.FIRST_COMPLETED)
            assert event.done(), running.exception()
            failed = event.result()
            assert failed.exit_code == NonFiniteError.exit_code
            assert "'w'" in failed.text
            await end([running])

    transport.run(main())


@pytest.mark.parametrize(
    "error",
    [
        PeerError("site 2 is silent", 2, sending=True, phase="contribute"),
        AverageError("'w' has no average", "w", ((2, 3.5, 1.0),)),
        NoRoomError("no room"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_why_another_host_failed_is_known_on_host_0(tmp_path: Path, error: AtollError) -> None:
    """And no peer is spared because payloads between the hosts ended with it."""

    async def main() -> None:
        async with both(tmp_path) as (site, host):
            wanted = begun(site)
            site.leader.exchanges.begin(wanted)
            running = on_host_0(site, wanted)
            endpoint = host.follower._endpoint
            assert endpoint is not None
            there = await endpoint._hub.running(1, 1, 1)
            await there.collection.arrived(0, or_open=True)
            there.attempt.fail(error)
            with pytest.raises(type(error)) as caught:
                await running
            for name in ("peer_site_id", "sending", "phase", "tensor", "outliers"):
                assert getattr(caught.value, name, None) == getattr(error, name, None)

    transport.run(main())


def test_a_host_without_what_the_site_trained_refuses_its_part(tmp_path: Path) -> None:
    """It was started again since."""
    an_older_state(tmp_path, seed=0)

    async def main() -> None:
        async with led(tmp_path) as site:
            await site.has_state()
            async with following(site.address, tmp_path):
                await site.hosts_changed()
                wanted = begun(site, alone=True)
                site.leader._hosts[1].snapshots[0] = (1, 10, 2)  # as if it were here since
                site.leader.endpoints(MANIFEST)
                site.leader.exchanges.begin(wanted)
                with pytest.raises(StateError, match="this host lacks what the site trained, or its state"):
                    await on_host_0(site, wanted)

    transport.run(main())
