"""A site that serves somebody who catches up while its own sync is under way: over real streams."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from atoll.node.exchange.peers.progress import Pace
from atoll.node.exchange.peers.uplink import EXCHANGE_BYTES_PER_DONOR_BYTE
from atoll.protocol import wire
from atoll.protocol.v1 import peer_pb2
from tests.harness.sites import Run, Site, big_layout, run_all, small_layout, star_plan, until
from tests.process.test_catchup import fetch, records

pytestmark = pytest.mark.timeout(120)


def requested(site: Site, chunk: int) -> peer_pb2.FetchStateRequest:
    return peer_pb2.FetchStateRequest(header=wire.to_proto(replace(site.hub.identity(), site_id=7)), chunks=[chunk])


def test_a_donor_gives_a_frame_at_a_time_while_it_sends(tmp_path: Path) -> None:
    async def main() -> None:
        async with Run(tmp_path, big_layout()) as run:
            (site,) = await run.add(1)
            donor, uplink = site.hub.donor, site.hub.uplink
            assert donor is not None
            free = [donor.state(requested(site, chunk)) for chunk in range(2)]
            frames = [await anext(request) for request in free]
            assert uplink.num_given == 2, "both are being written"
            for request in free:
                await request.aclose()
            with uplink.exchange(), uplink.sending():
                one, two = (donor.state(requested(site, chunk)) for chunk in range(2))
                await anext(one)
                second = asyncio.create_task(anext(two))
                await until(lambda: len(uplink.waiting) == 1)
                assert uplink.num_given == 1
                await one.aclose()  # written; the exchange has sent nothing since
                assert (uplink.num_given, len(uplink.waiting)) == (0, 1)
                uplink.sent(EXCHANGE_BYTES_PER_DONOR_BYTE * len(frames[0]))
                assert await second == frames[1]
                await two.aclose()

    asyncio.run(main())


def test_a_joiner_catches_up_from_a_site_whose_sync_hangs(tmp_path: Path) -> None:
    """Its peer never answers and its link is never free: frames go at their limit."""

    async def main() -> None:
        async with Run(tmp_path, small_layout()) as run:
            first, second = await run.add(2)
            await run.sync()
            pace = Pace(stall_s=0.4, slowest_bytes_per_s=1 << 10)
            first.hub.serve(first.layout, lambda: first.outer, first.log, pace)
            plan = star_plan(run.layout, [first, second], sync=2)
            for site in (first, second):
                site.train(2)
            hanging = asyncio.create_task(first.begin(plan).run())
            await until(lambda: first.hub.uplink._num_exchanges > 0)
            with first.hub.uplink.sending():
                (joiner,) = await run.add(seeded=False)
                await fetch(run, joiner, [first])
                assert records(joiner) == records(first)
            hanging.cancel()
            await asyncio.gather(hanging, return_exceptions=True)

    asyncio.run(main())


def test_an_exchange_says_when_it_is_in_flight_and_when_it_sends(tmp_path: Path) -> None:
    async def main() -> None:
        async with Run(tmp_path, big_layout()) as run:
            sites = await run.add(2)
            plan = star_plan(run.layout, sites)
            for site in sites:
                site.train(1)
            seen: list[tuple[int, int]] = []
            uplink = sites[0].hub.uplink
            count = uplink.sent

            def sent(num_bytes: int) -> None:
                if num_bytes > 10_000:  # chunks
                    seen.append((min(uplink._num_exchanges, 1), min(uplink._num_sending, 1)))
                count(num_bytes)

            uplink.sent = sent  # type: ignore[method-assign]
            await run_all(plan, sites)
            for site in sites:
                site.hub.drop_sync(1)
            assert set(seen) == {(1, 1)}
            await until(lambda: (uplink._num_exchanges, uplink._num_sending) == (0, 0))

    asyncio.run(main())
