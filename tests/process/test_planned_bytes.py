"""What `atoll plan` says that a site sends, beside what the sites of an exchange count."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from atoll.node.dataplane.sync_data import SyncData
from atoll.node.plan.syncs import Link, sync_plans
from atoll.protocol.layout import Layout, Manifest, Role, TensorSpec
from atoll.protocol.spec import spec_of
from atoll.protocol.sync_settings import SyncSettings
from tests.harness.sites import DTYPES, Run, star_plan

CHUNK_ELEMENTS, NUM_CHUNKS = 1 << 16, 12
"""As many chunks to reduce at each site, of 2, 3 and 4."""
MANIFEST = Manifest.canonical(
    [TensorSpec(name="w", shape=(NUM_CHUNKS * CHUNK_ELEMENTS,), dtype="F32", role=Role.TRAINABLE)]
)
WITHIN = 0.03
"""Headers of frames and openings, which a plan leaves out."""
SIZES_KNOWN = [
    SyncSettings(codec="int8"),
    SyncSettings(codec="fp16"),
    SyncSettings(codec="int2", up="sign1", error_feedback=1.0),
    SyncSettings(codec="topk2", error_feedback=0.95),
]
"""Nothing of it goes through zstd."""
MADE_SMALLER = [SyncSettings(codec="fp32"), SyncSettings(codec="int8", up="int4")]


def planned_and_sent(folder: Path, settings: SyncSettings, num_sites: int) -> tuple[int, list[int]]:
    """By each site, in one sync."""
    settings = replace(settings, chunk_elements=CHUNK_ELEMENTS)
    link = Link(bits_per_s=1e9, rtt_s=0.0, num_sites=num_sites)
    (planned,) = sync_plans("this", settings, MANIFEST, link, step_s=1.0)
    layout, travels = Layout(MANIFEST, CHUNK_ELEMENTS), spec_of(settings, 0, 0)

    async def main() -> list[int]:
        async with Run(folder, layout) as run:
            sites = await run.add(num_sites)
            for site in sites:
                site.train(1)
            plan = star_plan(layout, sites)
            data = [SyncData(layout, travels, site.outer, site.snapshot, DTYPES) for site in sites]
            exchanges = [site.begin(plan, mine) for site, mine in zip(sites, data, strict=True)]
            await asyncio.gather(*(exchange.run() for exchange in exchanges))
            return [site.hub.counters.sent_bytes for site in sites]

    return planned.sent_bytes, asyncio.run(main())


def named(settings: SyncSettings) -> str:
    return f"{settings.codec_up}-{settings.codec_down}"


@pytest.mark.parametrize("num_sites", [2, 4])
@pytest.mark.parametrize("settings", SIZES_KNOWN, ids=named)
def test_sites_send_what_is_planned(tmp_path: Path, settings: SyncSettings, num_sites: int) -> None:
    planned, sent = planned_and_sent(tmp_path, settings, num_sites)
    assert sent == pytest.approx([planned] * num_sites, rel=WITHIN), "each has as much to reduce"


@pytest.mark.parametrize("settings", MADE_SMALLER, ids=named)
def test_behind_zstd_sites_send_less_than_is_planned(tmp_path: Path, settings: SyncSettings) -> None:
    planned, sent = planned_and_sent(tmp_path, settings, 3)
    assert planned / 2 < min(sent) <= max(sent) < planned
