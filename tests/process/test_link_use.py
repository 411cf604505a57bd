"""What an exchange says of links: over a thin one at most what it carries, and nothing of the time others are waited
for."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from atoll.protocol.layout import Layout, Manifest, Role, TensorSpec
from atoll.protocol.messages import Tree
from tests.harness.relay import Relay
from tests.harness.sites import Run, Site, star_plan, until

THIN_BYTES, THIN_EVERY_S = 2_000, 0.01


def layout() -> Layout:
    """60 chunks of some 1,000 bytes as they travel."""
    return Layout(Manifest.canonical([TensorSpec(name="w", shape=(60_000,), dtype="F32", role=Role.TRAINABLE)]), 1000)


def test_a_thin_link_is_seen_from_both_ends(tmp_path: Path) -> None:
    async def main() -> None:
        async with Run(tmp_path, layout()) as run:
            sites = await run.add(3)
            for site in sites:
                site.train(1)
            thin = await Relay(sites[2].address).start()
            thin.trickle(THIN_BYTES, THIN_EVERY_S)
            plan = star_plan(run.layout, sites)
            members = tuple(replace(c, address=thin.address) if c.site_id == 3 else c for c in plan.contributors)
            all_at_3 = (Tree(first_chunk=0, num_chunks=run.layout.num_sync_chunks, top=2),)
            plan = replace(plan, contributors=members, trees=all_at_3)
            results = await asyncio.gather(*(site.begin(plan).run() for site in sites))
            await thin.stop()
            rates = {
                (use.site_id, site.site_id): use.received_bytes / use.seconds
                for site, result in zip(sites, results, strict=True)
                for use in result.links
            }
            assert rates.keys() == {(1, 3), (2, 3), (3, 1), (3, 2)}
            assert max(rates.values()) < 1.2 * THIN_BYTES / THIN_EVERY_S

    asyncio.run(main())


def test_the_time_that_a_reducer_waits_for_others_is_not_the_links(tmp_path: Path) -> None:
    async def main() -> None:
        async with Run(tmp_path, layout()) as run:
            sites = await run.add(3)
            for site in sites:
                site.train(1)
            loop = asyncio.get_running_loop()
            began_at = loop.time()
            exchanges = [site.begin(star_plan(run.layout, sites)) for site in sites[:2]]
            early = [asyncio.create_task(exchange.run()) for exchange in exchanges]
            await until(lambda: all(lacks_only(exchange.reducer.missing_site_ids, sites[2]) for exchange in exchanges))
            waits_at = loop.time()
            await asyncio.sleep(0.3)  # nothing can come
            waited_s = loop.time() - waits_at
            await sites[2].begin(star_plan(run.layout, sites)).run()
            for result in [await task for task in early]:
                assert result.links
                assert all(use.seconds <= loop.time() - began_at - waited_s for use in result.links)

    asyncio.run(main())


def lacks_only(missing: list[int], site: Site) -> bool:
    return missing == [site.site_id]
