"""In a run with audits what a site of two hosts contributes is kept by both: there is one root over it, each host
proves what it keeps, and host 0 gives what either has."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from atoll.node import host_protocol as hosts
from atoll.node.core.events import ContributionsKept, Values
from atoll.node.core.outputs import KeepContributions
from atoll.node.daemon.disk_jobs import DiskJobs
from atoll.node.dataplane.kept_contributions import Kept, KeptContributions, own_places
from atoll.node.dataplane.sync_data import SyncData
from atoll.node.exchange.auditing import Auditor
from atoll.node.exchange.peers.frames import Encoded, PartAssembler, parse
from atoll.protocol import transport, wire
from atoll.protocol.errors import InvalidMessage, NotYetError, StateError
from atoll.protocol.hash_tree import HashTree, check_proof
from atoll.protocol.plans import payload_hash
from atoll.protocol.v1 import peer_pb2
from tests.harness.data_plane import filled
from tests.harness.following import Following, an_older_state, attached, following, hosts_meet_at_once
from tests.harness.host_exchanges import begun
from tests.harness.hosts import PACE, Led, led
from tests.harness.model_on_hosts import COUNT, LAYOUT, SETTINGS, V, W

AUDITED = replace(SETTINGS, sync=replace(SETTINGS.sync, audits=2))
JOB = KeepContributions(5, 0, 0, ())
CHUNKS = (V, W, COUNT)


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts_meet_at_once(monkeypatch)


def kept_by_host_0(site: Led) -> tuple[KeptContributions, Kept]:
    """Of its own chunks."""
    kept, data = KeptContributions(site.home.kept_folder), site.plane.sync_data(0, 0, ())
    return kept, kept.keep(JOB.sync, data.chunks, data.contribution_on_base, None, site.plane.own)


def parts_of(site: Led) -> list[range]:
    return [own_places(LAYOUT.chunks_of(0), own) for own in site.plane.of_hosts]


async def kept_by_both(site: Led) -> KeptContributions:
    """Of host 0, once there is one root over what both hosts keep."""
    kept, own = kept_by_host_0(site)
    said = await site.leader.replicas.keep(JOB, lambda: True)
    await said.put_together(own.tree, parts_of(site))
    return kept


async def both_are_laid_out(site: Led, host: Following) -> None:
    """With a state, and the same in both SNAPSHOTs, so that host 0 can say what host 1 is to contribute."""
    await attached(site, host)
    await site.has_state()
    site.lays_out()
    await site.follows(0)
    await has_followed(site)
    assert host.plane.snapshot is not None
    host.plane.snapshot.view[:] = filled(LAYOUT, seed=3)
    site.snapshot.view[:] = filled(LAYOUT, seed=3)


async def has_followed(site: Led) -> None:
    """What the hosts were told before."""
    await site.leader.publish(site.leader.ranks, Values(0))


async def asked(site: Led, chunk: int, of_incarnation: int | None = None) -> Encoded:
    """As another site asks host 0; what that start of the site kept, or this one."""
    header = replace(site.hub.identity(), site_id=9)
    if of_incarnation is None:
        of_incarnation = site.hub.identity().incarnation
    request = peer_pb2.FetchPayloadsRequest(
        header=wire.to_proto(header), of_sync=JOB.sync, of_incarnation=of_incarnation, chunks=[chunk]
    )
    assembler, found = PartAssembler(lambda chunk: 1 << 16), list[Encoded]()
    async for frame in site.hub.served_donor().payloads(request):
        parts = parse(peer_pb2.FetchPayloadsResponse, frame).parts
        found += [item for part in parts if (item := assembler.add(part)) is not None]
    (item,) = found
    return item


def test_both_hosts_prove_what_they_keep_by_one_root_and_host_0_gives_what_either_has(tmp_path: Path) -> None:
    async def main() -> None:
        async with led(tmp_path, settings=AUDITED) as site, following(site.address, tmp_path) as host:
            await both_are_laid_out(site, host)
            kept, own = kept_by_host_0(site)
            assert kept.of(JOB.sync) is None, "nobody is given what has no proof yet"
            said = await site.leader.replicas.keep(JOB, lambda: True)
            await said.put_together(own.tree, parts_of(site))
            data = site.plane.sync_data(0, 0, ())
            expected = {chunk: payload_hash(data.contribution(chunk)) for chunk in data.chunks}
            root = HashTree(data.chunks, [expected[chunk] for chunk in data.chunks]).root
            assert kept.of(JOB.sync) is own
            assert own.root == root
            with pytest.raises(StateError, match="not here"):
                own.proof(W)
            client = site.leader.kept_elsewhere.client
            assert client(V) is None
            site.hub.serve(site.plane.layout, lambda: site.plane.outer, site.plane.log, PACE, elsewhere=client)
            with pytest.raises(StateError, match="sync 5 is not kept here"):
                await asked(site, W)  # in a run without audits no host is bothered
            site.hub.serve(site.plane.layout, lambda: site.plane.outer, site.plane.log, PACE, kept, elsewhere=client)
            await has_followed(site)
            for chunk in CHUNKS:
                item = await asked(site, chunk)
                assert payload_hash(item.data) == item.hash == expected[chunk]
                check_proof(root, len(CHUNKS), bisect_left(data.chunks, chunk), chunk, item.hash, item.proof)
            at_host_1 = client(W)
            assert at_host_1 is not None
            with pytest.raises(StateError):
                await at_host_1.contribution(JOB.sync, V, 1 << 16)
            with pytest.raises(StateError, match="sync 6 is not kept"):
                await at_host_1.contribution(6, W, 1 << 16)
            host.task.cancel()
            await asyncio.wait([host.task])
            await site.hosts_changed(1)
            with pytest.raises(NotYetError, match="host 1 of this site, which keeps chunk 1, is not here"):
                await asked(site, W)
            assert (await asked(site, V)).hash == expected[V]

    transport.run(main())


def test_the_connection_to_a_host_ends_with_the_last_request(tmp_path: Path) -> None:
    async def main() -> None:
        async with led(tmp_path, settings=AUDITED) as site, following(site.address, tmp_path) as host:
            await both_are_laid_out(site, host)
            await kept_by_both(site)
            await has_followed(site)
            dialer = site.hub.dialer
            before = len(dialer._channels)
            first, second = (site.leader.kept_elsewhere.client(W) for _ in range(2))
            assert first is not None
            assert second is not None
            header = wire.to_proto(site.hub.identity())
            request = peer_pb2.FetchPayloadsRequest(
                header=header, of_sync=JOB.sync, of_incarnation=site.hub.incarnation, chunks=[W]
            )
            frames = first.passed_on(request)
            await anext(frames)
            assert (await second.contribution(JOB.sync, W, 1 << 16)).proof
            with pytest.raises(StateError, match="sync 6 is not kept"):
                await second.contribution(6, W, 1 << 16)
            assert len(dialer._channels) == before + 1, "the other request lasts"
            await frames.aclose()
            assert len(dialer._channels) == before
            for _ in range(8):  # no pace for a host that has answered
                await second.contribution(JOB.sync, W, 1 << 16)
                assert len(dialer._channels) == before

    transport.run(main())


def test_nobody_is_given_what_this_start_contributed_as_what_another_one_did(tmp_path: Path) -> None:
    """It does not have the root that the start before said in the same sync: both would seem to lie."""

    async def main() -> None:
        async with led(tmp_path, settings=AUDITED) as site, following(site.address, tmp_path) as host:
            await both_are_laid_out(site, host)
            kept = await kept_by_both(site)
            client = site.leader.kept_elsewhere.client
            site.hub.serve(site.plane.layout, lambda: site.plane.outer, site.plane.log, PACE, kept, elsewhere=client)
            await has_followed(site)
            start = site.hub.incarnation
            for chunk in CHUNKS:
                assert (await asked(site, chunk, start)).proof == (await asked(site, chunk)).proof
                with pytest.raises(StateError, match=f"sync 5: start {start + 1} of this site is over"):
                    await asked(site, chunk, start + 1)
                with pytest.raises(InvalidMessage, match="sync 5: of which start is not said"):
                    await asked(site, chunk, 0)
            at_host_1 = client(W)
            assert at_host_1 is not None
            at_host_1.donor = replace(at_host_1.donor, incarnation=start + 1)
            with pytest.raises(StateError, match=f"start {start + 1} of this site is over, this is {start}"):
                await at_host_1.contribution(JOB.sync, W, 1 << 16)

    transport.run(main())


def test_a_host_counts_what_host_0_passes_on_for_the_site_that_has_asked(tmp_path: Path) -> None:
    """Else all auditors of the site share the places of one."""

    async def main() -> None:
        async with led(tmp_path, settings=AUDITED) as site, following(site.address, tmp_path) as host:
            await both_are_laid_out(site, host)
            kept = await kept_by_both(site)
            client = site.leader.kept_elsewhere.client
            site.hub.serve(site.plane.layout, lambda: site.plane.outer, site.plane.log, PACE, kept, elsewhere=client)
            await has_followed(site)
            assert host.follower._endpoint is not None
            donor, counted = host.follower._endpoint._hub.served_donor(), list[int]()

            def admitted(site_id: int) -> AbstractContextManager[None]:
                counted.append(site_id)
                return nullcontext()

            donor._admitted = admitted  # type: ignore[method-assign, assignment]
            await asked(site, W)
            at_host_1 = client(W)
            assert at_host_1 is not None
            await at_host_1.contribution(JOB.sync, W, 1 << 16)
            header = wire.to_proto(replace(site.hub.identity(), site_id=8))
            request = peer_pb2.FetchPayloadsRequest(
                header=header, of_sync=JOB.sync, of_incarnation=site.hub.incarnation, for_site_id=7, chunks=[W]
            )
            assert [frame async for frame in donor.payloads(request)]
            assert counted == [9, site.hub.site_id, 8], "and takes nobody else's word for that"

    transport.run(main())


def node_of(site: Led, lane: Any) -> DiskJobs:
    """What encodes for the core of host 0, where that has this lane."""
    core = SimpleNamespace(settings=AUDITED, site=SimpleNamespace(lanes=[lane], disk=SimpleNamespace(outer=None)))
    shell: Any = SimpleNamespace(core=core, leader=site.leader, hub=site.hub, words=None)
    disk = DiskJobs(shell, site.plane)
    disk.kept = KeptContributions(site.home.kept_folder)
    return disk


def sealed(seq: int) -> Any:
    return SimpleNamespace(kept_for=JOB.sync, generation=1, step=10, seq=seq)


def test_the_core_hears_the_root_of_all_hosts(tmp_path: Path) -> None:
    async def main() -> None:
        async with led(tmp_path, settings=AUDITED) as site, following(site.address, tmp_path) as host:
            await both_are_laid_out(site, host)
            said = await node_of(site, SimpleNamespace(snapshot=sealed(1))).keep_contributions(JOB)
            data = site.plane.sync_data(0, 0, ())
            root = HashTree(data.chunks, [payload_hash(data.contribution(chunk)) for chunk in data.chunks]).root
            assert said == ContributionsKept(JOB.sync, JOB.fragment, root)

    transport.run(main())


@pytest.mark.parametrize("ends", ["well", "without a host", "at a site of one host"])
def test_of_a_snapshot_that_is_given_up_while_it_is_encoded_nothing_is_said(tmp_path: Path, ends: str) -> None:
    """Else its root would be that of the next one, if that is for the same sync."""

    async def main() -> None:
        async with led(tmp_path, settings=AUDITED, site_hosts=1 + (ends != "at a site of one host")) as site:
            lane = SimpleNamespace(snapshot=sealed(1))
            disk = node_of(site, lane)
            if ends == "at a site of one host":
                await site.has_state()
                sync_data = site.plane.sync_data

                def given_up(*args: Any) -> SyncData:
                    lane.snapshot = sealed(2)
                    return sync_data(*args)

                site.plane.sync_data = given_up  # type: ignore[method-assign, assignment]
                assert await disk.keep_contributions(JOB) is None
                return
            host, _ = await site.host_at_commit_0()
            task = asyncio.create_task(disk.keep_contributions(JOB))
            word = await host.hears(hosts.KeepAtHost)
            lane.snapshot = sealed(2)
            if ends == "well":
                other = HashTree(range(3), [b"x" * 32] * 2, range(1, 3))
                await host.says(hosts.HostKept(number=word.number, cover=tuple(other.cover())))
            else:
                await host.close()
            assert await task is None

    transport.run(main())


def test_a_site_audits_with_what_its_other_host_keeps(tmp_path: Path) -> None:
    """Host 0 asks it for that, as it does for what other sites contributed."""

    async def main() -> None:
        async with led(tmp_path, settings=AUDITED) as site, following(site.address, tmp_path) as host:
            await both_are_laid_out(site, host)
            kept = await kept_by_both(site)
            await has_followed(site)
            nothing: Any = None
            auditor = Auditor(
                settings=AUDITED,
                layout=site.plane.layout,
                log=site.plane.log,
                kept=kept,
                elsewhere=site.leader.kept_elsewhere.client,
                errors=nothing,
                header=site.hub.identity,
                dialer=nothing,
                expected=nothing,
                undialable=nothing,
                counters=site.hub.counters,
                pace=PACE,
                pool=site.hub.pool,
            )
            me, data = begun(site).plan.contributors[0], site.plane.sync_data(0, 0, ())
            for chunk in (V, W):
                audit: Any = SimpleNamespace(sync=JOB.sync, chunk=chunk, base_commit=0, fragment=0)
                item = await auditor._given(audit, me)
                assert item.data == data.contribution(chunk)

    transport.run(main())


def test_a_host_begins_no_exchange_without_what_it_is_to_prove(tmp_path: Path) -> None:
    async def main() -> None:
        async with led(tmp_path, settings=AUDITED) as site, following(site.address, tmp_path) as host:
            await both_are_laid_out(site, host)
            wanted = replace(begun(site, alone=True), error_commits=())
            endpoint = host.follower._endpoint
            assert endpoint is not None
            began = asyncio.get_running_loop().create_future()
            endpoint._hub.begin = lambda *args, **options: began.set_result(args[1])  # type: ignore[assignment]
            attached_host = site.leader._hosts[1]
            failed: list[str] = []
            site.leader.exchanges.heard_failed = lambda _, said: failed.append(said.text)  # type: ignore[method-assign, assignment]
            attached_host.say(wanted)
            await has_followed(site)
            assert failed == ["what this host contributes to sync 1 is not kept here"]
            assert not began.done()

    transport.run(main())


def test_what_a_host_keeps_is_shown_to_nobody_before_what_the_others_keep_is_known(tmp_path: Path) -> None:
    async def main() -> None:
        async with led(tmp_path, settings=AUDITED) as site, following(site.address, tmp_path) as host:
            await both_are_laid_out(site, host)
            said = await site.leader.replicas.keep(JOB, lambda: True)
            again = await site.leader.replicas.keep(JOB, lambda: True)
            assert again.covers == said.covers
            _, own = kept_by_host_0(site)
            await said.put_together(own.tree, parts_of(site))  # under the number before, which does not count any more
            await has_followed(site)
            at_host_1 = site.leader.kept_elsewhere.client(W)
            assert at_host_1 is not None
            with pytest.raises(StateError, match="sync 5 is not kept"):
                await at_host_1.contribution(JOB.sync, W, 1 << 16)
            await again.put_together(own.tree, parts_of(site))
            await has_followed(site)
            assert (await at_host_1.contribution(JOB.sync, W, 1 << 16)).proof

    transport.run(main())


def test_a_host_that_came_back_without_what_it_trained_or_is_beyond_the_base_keeps_nothing(tmp_path: Path) -> None:
    an_older_state(tmp_path, seed=0)

    async def main() -> None:
        async with led(tmp_path, settings=AUDITED) as site, following(site.address, tmp_path) as host:
            await site.hosts_changed()
            await site.has_state()
            with pytest.raises(StateError, match=r"host 1 .*: this host came back without what the site trained"):
                await site.leader.replicas.keep(JOB, lambda: True)
            site.starts(1)
            await host.starts_ranks(1)
            site.lays_out()
            await site.commits(1, host.plane)
            with pytest.raises(StateError, match=r"host 1 .*: chunk \d is at commit 1 already, and its base is gone"):
                await site.leader.replicas.keep(JOB, lambda: True)

    transport.run(main())


def test_a_root_needs_every_host_and_what_each_says_under_its_number(tmp_path: Path) -> None:
    async def main() -> None:
        async with led(tmp_path, settings=AUDITED) as site:
            host, _ = await site.host_at_commit_0()
            task = asyncio.create_task(site.leader.replicas.keep(JOB, lambda: True))
            word = await host.hears(hosts.KeepAtHost)
            assert word == hosts.KeepAtHost(number=1, sync=5, fragment=0, base_commit=0)
            await host.says(hosts.HostKept(number=2, cover=(b"x" * 32,)))
            await site.has_heard(host)
            assert not task.done()
            await host.says(hosts.HostKept(number=1, cover=(b"x" * 32,)))
            said = await task
            assert (said.number, list(said.covers)) == (1, [(b"x" * 32,)])
            _, own = kept_by_host_0(site)
            with pytest.raises(InvalidMessage, match=r"host 1 .*: 1 hashes over what it contributes, 2 are expected"):
                await said.put_together(own.tree, parts_of(site))

            task = asyncio.create_task(site.leader.replicas.keep(JOB, lambda: True))
            assert (await host.hears(hosts.KeepAtHost)).number == 2, "what it has said of that before does not count"
            await host.says(hosts.HostKept(number=2, problem="no base"))
            with pytest.raises(StateError, match="no base"):
                await task

            task = asyncio.create_task(site.leader.replicas.keep(JOB, lambda: True))
            await host.hears(hosts.KeepAtHost)
            await host.close()
            with pytest.raises(StateError, match="it was lost"):
                await task
            with pytest.raises(StateError, match="host 1 of this site is not here"):
                await site.leader.replicas.keep(JOB, lambda: True)

    transport.run(main())


def test_nobody_is_waited_for_once_a_snapshot_is_given_up(tmp_path: Path) -> None:
    async def main() -> None:
        async with led(tmp_path, settings=AUDITED) as site:
            host, _ = await site.host_at_commit_0()
            wanted = [True]
            task = asyncio.create_task(site.leader.replicas.keep(JOB, lambda: wanted[0]))
            await host.hears(hosts.KeepAtHost)
            wanted.clear()
            wanted.append(False)
            await host.says(hosts.SourcesWanted())
            with pytest.raises(StateError, match="or is late"):
                await task

    transport.run(main())
