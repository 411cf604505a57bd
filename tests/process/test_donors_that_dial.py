"""Donors that cannot be dialled and dial the joiner: over real sockets, and a run in which nothing else is possible."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import grpc
import grpc.aio
import pytest

from atoll.node.exchange.catchup import donors as donor_pool
from atoll.node.exchange.catchup.expected_donors import STREAMS_PER_DONOR
from atoll.node.exchange.catchup.fetch import Fetched
from atoll.node.exchange.peers.progress import Pace
from atoll.node.exchange.peers.rpc import DONATE_METHOD
from atoll.protocol import transport, wire
from atoll.protocol.errors import PeerError
from atoll.protocol.messages import Header, Sources
from atoll.protocol.v1 import peer_pb2
from tests.harness.calls import ENDED, write
from tests.harness.local_run import LocalRun
from tests.harness.sites import OPTIMIZER, Run, Site, big_layout, small_layout, until
from tests.harness.sockets import free_address
from tests.process.test_catchup import records
from tests.process.test_runs import LIMIT_S, SETTINGS, SLOW, WORKER, assert_equal_at_the_end

pytestmark = pytest.mark.timeout(400)


class Transfer:
    """A fetch of one site whose donors have addresses that nobody can connect to, and a coordinator between them."""

    def __init__(self, run: Run, joiner: Site, donors: Sequence[Site], *, stall_s: float = 10.0) -> None:
        self.run, self.joiner, self.donors = run, joiner, donors
        self.stall_s = stall_s
        self.asked: list[tuple[int, ...]] = []
        self.undialable: tuple[int, ...] = ()
        self.on_ask: Callable[[], None] = lambda: None
        self.addresses = {site.site_id: free_address() for site in donors}

    def sources(self) -> Sources:
        found = self.run.sources(self.donors)
        return replace(
            found, donors=tuple(replace(d, address=self.addresses.get(d.site_id, d.address)) for d in found.donors)
        )

    async def refresh(self, undialled: tuple[int, ...]) -> Sources:
        self.asked.append(undialled)
        for site in self.donors:
            if site.site_id in undialled:
                site.hub.donations.dial(self.joiner.member(0))
                site.hub.donations.dial(self.joiner.member(0))  # a message may come twice
        self.on_ask()
        return self.sources()

    async def fetch(self) -> Fetched:
        return await self.joiner.hub.fetch_state(
            sources=self.sources(),
            refresh=self.refresh,
            undialable=lambda: self.undialable,
            outer=self.joiner.outer,
            log=self.joiner.log,
            optimizer=OPTIMIZER,
            pace=Pace(stall_s=self.stall_s, slowest_bytes_per_s=1 << 10),
        )


async def nothing_is_left(transfer: Transfer) -> None:
    """Nobody is expected, no donor holds a connection or a place."""
    assert transfer.joiner.hub.expected_donors._streams == {}
    for site in transfer.donors:
        await until(lambda site=site: not site.hub.donations._dialled)  # type: ignore[misc]
        assert site.hub.donor is not None
        assert not site.hub.donor.places


def test_state_and_payloads_come_from_donors_that_nobody_can_dial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(donor_pool, "MAX_BATCH_CHUNKS", 3)

    async def main() -> None:
        async with Run(tmp_path, small_layout()) as run:
            donors = await run.add(2)
            await run.sync()
            (joiner,) = await run.add(seeded=False)
            transfer = Transfer(run, joiner, donors)
            assert (await transfer.fetch()).commit == 1
            assert records(joiner) == records(donors[0])
            assert all(site.hub.counters.sent_bytes > 2 * 1000 for site in donors), "both gave"
            await nothing_is_left(transfer)
            last = await run.sync(donors)
            got = await transfer.fetch()
            assert got == Fetched(commit=2, state_hash=donors[0].outer.state_hash(), record=last)
            assert records(joiner) == records(donors[0])
            await nothing_is_left(transfer)

    asyncio.run(main())


def test_donors_that_are_silent_are_asked_to_dial_before_the_patience_ends(tmp_path: Path) -> None:
    """A firewall drops what is sent to them. Nobody waits for one after the other."""

    async def main() -> None:
        async with Run(tmp_path, small_layout()) as run:
            donors = await run.add(4)
            (joiner,) = await run.add(seeded=False)
            transfer = Transfer(run, joiner, donors, stall_s=4.0)
            with contextlib.ExitStack() as stack:
                for site in donors:
                    host = stack.enter_context(socket.create_server(("127.0.0.1", 0)))  # nobody accepts
                    transfer.addresses[site.site_id] = f"127.0.0.1:{host.getsockname()[1]}"
                assert (await transfer.fetch()).commit == 0
            assert records(joiner) == records(donors[0])
            await nothing_is_left(transfer)

    asyncio.run(main())


def test_whom_the_prober_cannot_reach_is_not_dialled_first(tmp_path: Path) -> None:
    async def main() -> None:
        async with Run(tmp_path, big_layout()) as run:
            donors = await run.add(1)
            (joiner,) = await run.add(seeded=False)
            transfer = Transfer(run, joiner, donors)
            transfer.undialable = (1,)
            assert (await transfer.fetch()).commit == 0
            assert records(joiner) == records(donors[0])
            assert transfer.asked[0] == (1,)
            await nothing_is_left(transfer)

    asyncio.run(main())


def test_a_donor_that_dies_in_mid_transfer_is_replaced_by_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(donor_pool, "MAX_BATCH_CHUNKS", 1)
    monkeypatch.setattr(donor_pool, "BATCH_BYTES", 1)

    async def main() -> None:
        async with Run(tmp_path, small_layout()) as run:
            first, second = await run.add(2)
            (joiner,) = await run.add(seeded=False)
            transfer = Transfer(run, joiner, [first])
            served = first.hub.donor
            assert served is not None
            giving = served.state
            num_given = 0

            def state(request: peer_pb2.FetchStateRequest) -> object:
                nonlocal num_given
                num_given += 1
                if num_given == 5:
                    for task in first.hub.donations._dialled.values():
                        task.cancel()
                    transfer.donors = [second]
                return giving(request)

            monkeypatch.setattr(served, "state", state)
            assert (await transfer.fetch()).commit == 0
            assert records(joiner) == records(second)
            assert second.hub.counters.sent_bytes > 1000
            await nothing_is_left(transfer)

    asyncio.run(main())


def test_if_neither_can_dial_the_other_the_reason_says_so(tmp_path: Path) -> None:
    async def main() -> None:
        async with Run(tmp_path, small_layout()) as run:
            donors = await run.add(1)
            (joiner,) = await run.add(seeded=False)
            transfer = Transfer(run, joiner, donors, stall_s=1.0)
            joiner.address = free_address()
            with pytest.raises(PeerError, match="cannot dial site 1, and asked to dial this site, none of them does"):
                await transfer.fetch()
            assert (1,) in transfer.asked

    asyncio.run(main())


def test_who_is_not_expected_is_refused_and_nothing_is_held_for_it(tmp_path: Path) -> None:
    async def main() -> None:
        async with Run(tmp_path, small_layout()) as run:
            (site,) = await run.add(1)
            hub = site.hub
            hub.site_id = 1
            channel = transport.open_channel(site.address, handshake=None, max_message_bytes=transport.MAX_FRAME_BYTES)
            method: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(DONATE_METHOD)

            def opened(who: Header, to: tuple[int, int] = (1, 1)) -> bytes:
                message = peer_pb2.DonateOpen(header=wire.to_proto(who), to_site_id=to[0], to_incarnation=to[1])
                return peer_pb2.DonateRequest(open=message).SerializeToString()

            async def refused(data: bytes) -> str:
                call = method()
                with suppress(*ENDED):
                    await write(call, data)
                with pytest.raises(grpc.aio.AioRpcError) as ended:
                    await call.read()
                return ended.value.details() or ""

            donor = replace(hub.identity(), site_id=2, incarnation=4)
            assert "not asked to dial this site" in await refused(opened(donor))
            hub.expected_donors.expect([(2, 4)])
            assert "not asked to dial this site" in await refused(opened(replace(donor, incarnation=3)))
            assert "not asked to dial this site" in await refused(opened(replace(donor, site_id=3)))
            assert "run 'other'" in await refused(opened(replace(donor, run_id="other")))
            assert "this is start 1 of site 1" in await refused(opened(donor, to=(9, 1)))
            assert "this is start 1 of site 1" in await refused(opened(donor, to=(1, 2)))
            assert "must open it" in await refused(peer_pb2.DonateRequest(frame=b"x").SerializeToString())
            assert hub.expected_donors.num_here == 0

            calls = [method() for _ in range(STREAMS_PER_DONOR)]
            for call in calls:
                await write(call, opened(donor))
            streams = hub.expected_donors._streams[2, 4]
            await until(lambda: len(streams) == STREAMS_PER_DONOR)
            assert "3 streams of site 2 are here already" in await refused(opened(donor))
            hub.expected_donors.dismiss()
            for call in calls:
                assert await call.read() is grpc.aio.EOF
            assert "not asked to dial this site, or not any more" in await refused(opened(donor))
            await channel.close()

    asyncio.run(main())


def test_a_site_joins_a_run_whose_only_state_is_behind_a_closed_port(tmp_path: Path) -> None:
    """`a` makes the starting state and cannot be dialled. `b` fetches it; `c` joins later, when only `a` is left. Two
    are needed to go on."""
    with LocalRun(tmp_path, replace(SETTINGS, min_sites=2, quorum=2)) as run:
        run.start_coordinator()
        run.start_node("a", SLOW, extra=["--advertise", free_address()])
        run.wait(lambda s: any(site["last_commit"] == 0 for site in s["sites"]), LIMIT_S, "a makes the starting state")
        second = run.start_node("b", SLOW)
        run.wait(lambda s: s["last_commit"] >= 1, LIMIT_S, "b has the state and contributes")
        second.kill()
        third = run.start_node("c", WORKER)
        third.wait_for_line("outer state complete and verified", LIMIT_S)
        del run.nodes["b"]
        assert run.wait_all(LIMIT_S) == {"a": 0, "c": 0}
        assert_equal_at_the_end(run, ["a", "c"])
