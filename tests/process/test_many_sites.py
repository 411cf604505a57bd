"""200 simulated sites on one coordinator process, over real gRPC: every commit reaches all of them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from atoll.protocol.settings import RunSettings
from atoll.protocol.sync_settings import SyncSettings
from atoll.protocol.time_limits import time_limits
from tests.harness.load_sites import Fleet, hash_of, manifest
from tests.harness.local_run import LocalRun

NUM_SITES = 200
NUM_SYNCS = 4
LIMIT_S = 150.0


@pytest.mark.timeout(400)
def test_all_of_many_sites_get_every_commit(tmp_path: Path) -> None:
    settings = RunSettings(
        run_id="load",
        steps=NUM_SYNCS,
        min_sites=NUM_SITES,
        quorum=NUM_SITES,
        data="local",
        time_limits="wan",
        sync=SyncSettings(every=1),
    )
    with LocalRun(tmp_path, settings) as run:
        run.start_coordinator()
        fleet = Fleet(
            address=run.address,
            run_id="load",
            manifest=manifest(256 << 20),
            heartbeat_s=time_limits("lan").heartbeat_s,
            train_s=0.5,
        )

        async def play() -> None:
            async with asyncio.timeout(LIMIT_S):
                sites = await fleet.run(NUM_SITES)
            for site in sites:
                assert site.commits == list(range(1, NUM_SYNCS + 1))
                assert site.finished

        asyncio.run(play())
        status = run.status()
        assert status["finished"]
        assert status["num_attempts"] == NUM_SYNCS, "each at the first attempt"
        assert status["num_evicted"] == fleet.num_evicted == 0
        assert fleet.num_whole_commits == 0, "each site knows whom a commit comes from"
        assert [len(commit["contributors"]) for commit in status["commits"]] == [NUM_SITES] * NUM_SYNCS
        held = {(site["last_commit"], site["state_hash"]) for site in status["sites"]}
        assert held == {(NUM_SYNCS, hash_of(f"state {NUM_SYNCS}").hex())}
