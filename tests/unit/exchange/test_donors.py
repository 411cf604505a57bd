"""Which donors a site that catches up asks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from atoll.node.exchange.counters import Counters
from atoll.node.exchange.donors import MAX_DONORS, Donors
from atoll.node.exchange.progress import Pace
from atoll.node.exchange.sources import Known
from atoll.protocol.errors import PeerError
from atoll.protocol.layout import Manifest
from atoll.protocol.messages import Donor, Header, Sources


def donors_of(own: int, offered: Sequence[Donor]) -> Donors:
    async def refresh() -> Sources:
        return Sources()

    known = Known(Manifest(tensors=()), ())
    known.donors = tuple(offered)
    header = Header(protocol_version=1, run_id="run", site_id=own, incarnation=1)
    return Donors(
        known,
        header=header,
        credentials=None,
        counters=Counters(),
        refresh=refresh,
        pace=Pace(stall_s=5, slowest_bytes_per_s=1),
    )


def donor(site_id: int, commit: int = 7) -> Donor:
    return Donor(site_id=site_id, incarnation=1, address=f"127.0.0.1:{9000 + site_id}", commit=commit)


def test_a_few_of_a_thousand_are_asked_and_joiners_ask_different_ones() -> None:
    async def main() -> None:
        asked = []
        for own in (10, 500, 998):
            donors = donors_of(own, [donor(i) for i in range(1000) if i != own])
            asked.append([client.donor.site_id for client in donors.usable()])
            await donors.close()
        assert asked[0] == list(range(11, 11 + MAX_DONORS))
        assert asked[1] == list(range(501, 501 + MAX_DONORS))
        assert asked[2] == [999, *range(MAX_DONORS - 1)]

    asyncio.run(main())


def test_the_newest_are_asked_first() -> None:
    async def main() -> None:
        donors = donors_of(1, [donor(i, commit=i % 30) for i in range(2, 60)])
        assert {client.donor.commit for client in donors.usable()} == {26, 27, 28, 29}
        await donors.close()

    asyncio.run(main())


def test_who_failed_gives_way_to_others_after_the_coordinator_was_asked_too() -> None:
    async def main() -> None:
        offered = tuple(donor(i) for i in range(2, 2 + 2 * MAX_DONORS))
        donors = donors_of(1, offered)
        first = donors.usable()
        for client in first:
            donors.failed(client, PeerError("gone"))
        second = {client.donor.site_id for client in donors.usable()}
        assert second == {d.site_id for d in offered} - {client.donor.site_id for client in first}
        donors._resting.clear()  # as once the coordinator has answered
        assert {client.donor.site_id for client in donors.usable()} == second
        await donors.close()

    asyncio.run(main())
