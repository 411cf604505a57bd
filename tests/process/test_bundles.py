"""Bundles between hubs over real gRPC: all contributions reach all sites as they were sent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atoll.node.dataplane.sync_data import SyncData
from atoll.protocol.codecs import bundles, kernels
from atoll.protocol.errors import PeerError
from atoll.protocol.layout import Role
from atoll.protocol.plans import weights
from atoll.protocol.spec import spec_of
from atoll.protocol.sync_settings import SyncSettings
from tests.harness.sites import DTYPES, Run, Site, commit_of, small_layout, star_plan

TRAVELS = spec_of(SyncSettings(codec="topk2"), 0, 0)


class Bundled(SyncData):
    def __init__(self, site: Site) -> None:
        super().__init__(site.layout, TRAVELS, site.outer, site.snapshot, DTYPES)


async def three(run: Run) -> list[Site]:
    sites = await run.add(3)
    for site in sites:
        site.train(1)
    return sites


def test_all_sites_hold_what_each_has_sent_and_the_same_state(tmp_path: Path) -> None:
    async def main() -> None:
        async with Run(tmp_path, small_layout()) as run:
            sites = await three(run)
            plan, data = star_plan(run.layout, sites), [Bundled(site) for site in sites]
            results = await asyncio.gather(
                *(site.begin(plan, used).run() for site, used in zip(sites, data, strict=True))
            )
            assert len({result.payload_digest for result in results}) == 1
            for place, chunk in enumerate(data[0].chunks):
                if run.layout.chunks[chunk].role is not Role.TRAINABLE:
                    continue
                sent = [used.contribution(chunk) for used in data]
                for site in sites:
                    found = bundles.split(site.payloads(plan)[place], run.layout.chunks[chunk].num_elements)
                    assert [bytes(part) for part in found.contributions] == sent
            for site in sites:
                site.apply(commit_of(plan, results[0].payload_digest))
            assert len({site.outer.state_hash() for site in sites}) == 1
            assert all(all(weights(plan)) and site.hub.counters.refused.total() == 0 for site in sites)

    asyncio.run(main())


def another_one(site: Site) -> Callable[[int, list[Any]], list[Any]]:
    """In the place of what the first site sent; by its own signs nobody could tell."""

    def changed(chunk: int, contributions: list[Any]) -> list[Any]:
        tokens, read = contributions[2]
        return [(contributions[0][0], read), contributions[1], (tokens, read)]

    return changed


def one_missing(site: Site) -> Callable[[int, list[Any]], list[Any]]:
    return lambda chunk, contributions: contributions[:2]


@pytest.mark.parametrize(
    ("lie", "text", "finders"),
    [
        (another_one, "this site's contribution is another one", (0,)),
        (one_missing, "2 contributions, 3 are expected", (0, 2)),
    ],
)
def test_a_reducer_that_changes_a_bundle_is_named(
    tmp_path: Path, lie: Callable[[Site], Callable[[int, list[Any]], list[Any]]], text: str, finders: tuple[int, ...]
) -> None:
    class Lying(Bundled):
        def __init__(self, site: Site) -> None:
            super().__init__(site)
            self.changed = lie(site)

        def reduce(self, chunk: int, contributions: Any, *errors: Any) -> bytes:
            if self.layout.chunks[chunk].role is not Role.TRAINABLE:
                return super().reduce(chunk, contributions)
            return super().reduce(chunk, self.changed(chunk, list(contributions)))

    async def main() -> None:
        async with Run(tmp_path, small_layout()) as run:
            sites = await three(run)
            plan = star_plan(run.layout, sites)
            data = [Bundled(sites[0]), Lying(sites[1]), Bundled(sites[2])]
            running = [
                asyncio.ensure_future(site.begin(plan, used).run()) for site, used in zip(sites, data, strict=True)
            ]
            for place in finders:
                with pytest.raises(PeerError, match=text) as found:
                    await running[place]
                assert found.value.peer_site_id == 2
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    asyncio.run(main())


def test_a_contribution_that_was_sent_before_is_known_again(tmp_path: Path) -> None:
    async def main() -> None:
        async with Run(tmp_path, small_layout()) as run:
            sites = await three(run)
            data = [Bundled(site) for site in sites]
            chunk = next(c for c in data[0].chunks if run.layout.chunks[c].role is Role.TRAINABLE)
            payload = data[0].reduce(chunk, [(7, used.contribution(chunk)) for used in data])
            kernels.check(payload, "bundle", run.layout.chunks[chunk].num_elements)
            for place, site in enumerate(sites):
                Bundled(site).check_payload(chunk, payload, 3, place)

    asyncio.run(main())
