"""Two-sided error feedback over real streams: every payload is what the averages before it, and who made them, say."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from atoll.node.dataplane.sync_data import SyncData
from atoll.protocol.codecs import kernels
from atoll.protocol.codecs.arithmetic import Floats
from atoll.protocol.layout import Role
from atoll.protocol.messages import Plan
from atoll.protocol.plans import reducers
from atoll.protocol.spec import spec_of
from atoll.protocol.sync_settings import SyncSettings
from tests.harness.sites import DTYPES, Run, Site, commit_of, next_attempt, small_layout, star_plan

BETA = np.float32(0.5)
SETTINGS = SyncSettings(codec="sign1", up="int8", error_feedback_down=0.5, chunk_elements=1000)
Left = dict[int, tuple[int, Floats]]
"""Of each chunk: the site that averaged it last, and what was lost."""


def data_of(site: Site) -> SyncData:
    return SyncData(site.layout, spec_of(SETTINGS, 0, 0), site.outer, site.snapshot, DTYPES)


def average_of(plan: Plan, sites: Sequence[Site], chunk: int) -> Floats:
    found = np.zeros(sites[0].layout.chunks[chunk].num_elements, np.float32)
    total = sum(member.tokens for member in plan.contributors)
    for member, site in zip(plan.contributors, sites, strict=True):
        arrived = np.empty_like(found)
        kernels.decode(data_of(site).contribution(chunk), "int8", found.size, arrived)
        found = found + np.float32(member.tokens / total) * arrived
    return found


def check(plan: Plan, sites: Sequence[Site], left: Left) -> tuple[Left, int]:
    """What the payloads of this attempt leave; and how many of them have an error in them."""
    layout, after, num_added = sites[0].layout, dict(left), 0
    tops = reducers(plan, layout.num_sync_chunks)
    for place, chunk in enumerate(data_of(sites[0]).chunks):
        spec = layout.chunks[chunk]
        if spec.role is not Role.TRAINABLE:
            continue
        value, top = average_of(plan, sites, chunk), tops[chunk].site_id
        if left.get(chunk, (0, value))[0] == top:
            value, num_added = value + BETA * left[chunk][1], num_added + 1
        payload = kernels.encode("sign1", value)
        for site in sites:
            assert site.payloads(plan)[place] == payload, (plan.sync, plan.attempt, chunk, site.site_id)
        decoded = np.empty_like(value)
        kernels.decode(payload, "sign1", value.size, decoded)
        after[chunk] = top, value - decoded
    return after, num_added


async def exchanged(plan: Plan, sites: Sequence[Site]) -> bytes:
    exchanges = [site.begin(plan, data_of(site)) for site in sites]
    results = await asyncio.gather(*(exchange.run() for exchange in exchanges))
    return results[0].payload_digest


def test_each_reducer_adds_what_it_lost_of_its_last_average_that_was_committed(tmp_path: Path) -> None:
    async def main() -> None:
        async with Run(tmp_path, small_layout()) as run:
            sites, left = await run.add(3), Left()
            num_trained = sum(c.role is Role.TRAINABLE and c.num_elements > 0 for c in run.layout.chunks)
            found = []
            for sync in range(1, 6):
                for site in sites:
                    site.train(sync)
                plan = star_plan(run.layout, sites, sync=sync)
                if sync == 4:  # most chunks change hands
                    turned = (replace(tree, first_chunk=i) for i, tree in enumerate(reversed(plan.trees)))
                    plan = replace(plan, trees=tuple(turned))
                if sync == 2:  # nobody commits this attempt: what it leaves counts for nothing
                    await exchanged(plan, sites)
                    check(plan, sites, left)
                    plan = next_attempt(plan, run.layout, sites)
                digest = await exchanged(plan, sites)
                left, num_added = check(plan, sites, left)
                found.append(num_added)
                for site in sites:
                    site.apply(commit_of(plan, digest))
            assert found[0] == 0
            assert found[1:3] == [num_trained] * 2
            assert 0 < found[3] < num_trained
            assert sum(site.hub.average_errors.num_dropped for site in sites) > 0

    asyncio.run(main())
