"""Averages by influence over real gRPC, and in a run of real processes in which one site sends two hundred times the
opposite of what it learned."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atoll.coordinator.core.sync.geometric_median import matrix_of
from atoll.node.dataplane.sync_data import SyncData
from atoll.node.exchange.sync.exchange import Exchange
from atoll.protocol.codecs import kernels
from atoll.protocol.layout import Role
from atoll.protocol.plans import influences, with_weights
from atoll.protocol.settings import RunSettings
from atoll.protocol.spec import spec_of
from atoll.protocol.sync_settings import SyncSettings
from benchmarks.robust import settings_of
from tests.harness.chaos import PLAIN_WORKER
from tests.harness.commit_records import commits_of
from tests.harness.local_run import GUARDED, LocalRun
from tests.harness.sites import DTYPES, Run, Site, small_layout, star_plan, until

pytestmark = pytest.mark.timeout(180)
BY_INFLUENCE = spec_of(SyncSettings(robust="gram"), 0, 0)
INFLUENCES: tuple[int, ...] = (1 << 29, 1 << 28, 7)
GROW = -200
"""Of a thousand on a contribution is left out of the sync by name."""


def test_reducers_say_the_products_of_all_chunks_and_average_with_what_is_said_then(tmp_path: Path) -> None:
    async def main() -> None:
        async with Run(tmp_path, small_layout()) as run:
            sites = await run.add(3)
            plan = star_plan(run.layout, sites)
            said: dict[int, tuple[float, ...]] = {}
            data = {site.site_id: data_of(site) for site in sites}

            def begin(site: Site) -> Exchange:
                site.train(1)
                mine, share = data[site.site_id], site.hub.share(plan, data[site.site_id])()
                tokens = tuple(c.tokens for c in plan.contributors)
                own = tokens[plan.contributors.index(site.member(tokens[site.site_id - 1]))]

                def hear(products: tuple[float, ...]) -> None:
                    assert site.site_id not in said
                    said[site.site_id] = products

                return site.hub.begin(plan, mine, share, tokens=own, weights=tokens, multiplied=hear)

            exchanges = [begin(site) for site in sites]
            running = [asyncio.create_task(exchange.run()) for exchange in exchanges]
            await until(lambda: len(said) == 3 or any(task.done() for task in running))
            assert not any(task.done() for task in running)
            assert not any(exchange.reducer.payloads for exchange in exchanges)

            vectors = [[np.zeros(0)] for _ in sites]
            for chunk in data[1].chunks:
                if run.layout.chunks[chunk].role is Role.TRAINABLE:
                    for parts, site in zip(vectors, sites, strict=True):
                        out = np.empty(run.layout.chunks[chunk].num_elements, np.float32)
                        kernels.decode(data[site.site_id].contribution(chunk), "int8", out.size, out)
                        parts.append(out.astype(np.float64))
            whole = np.stack([np.concatenate(parts) for parts in vectors])
            summed = [sum(of) for of in zip(*said.values(), strict=True)]
            np.testing.assert_allclose(matrix_of(summed), whole @ whole.T, rtol=1e-9)

            for exchange in exchanges:
                exchange.influence(INFLUENCES)
                exchange.influence((1, 1, 1))  # it never changes
            results = await asyncio.gather(*running)
            log = sites[0].log.begin(plan.sync, plan.term, plan.attempt)
            tokens = tuple(c.tokens for c in plan.contributors)
            for chunk in data[1].chunks:
                counts = INFLUENCES if run.layout.chunks[chunk].role is Role.TRAINABLE else tokens
                given = [(n, data[s.site_id].contribution(chunk)) for n, s in zip(counts, sites, strict=True)]
                assert log.read(chunk) == data[1].reduce(chunk, given)
            known = with_weights(plan, tokens, INFLUENCES)
            assert {result.payload_digest for result in results} == {log.digest(known)}

    asyncio.run(main())


def data_of(site: Site) -> SyncData:
    return SyncData(site.layout, BY_INFLUENCE, site.outer, site.snapshot, DTYPES)


def test_one_of_four_sites_does_not_spoil_a_run_and_counts_next_to_nothing_in_its_commits(tmp_path: Path) -> None:
    settings: RunSettings = replace(settings_of("gram", 1, 5), min_sites=4, quorum=3)
    worker = [sys.executable, str(PLAIN_WORKER), "--tensors", "a=60x40,b=10"]
    with LocalRun(tmp_path, settings, GUARDED) as run:
        run.start_coordinator()
        for name in "abc":
            run.start_node(name, worker, extra=["--exchange-processes", "2"] if name == "a" else [])
        run.start_node("hostile", [*worker, "--grow", str(GROW)])
        ids: dict[str, int] = {}

        def is_over(status: dict[str, Any]) -> bool:
            ids.update({site["name"]: site["site_id"] for site in status["sites"]})
            return bool(status["finished"])

        status = run.wait(is_over, 120, "the run is over")
        assert set(run.wait_all(60).values()) == {0}
        losses = [loss for *_, loss in status["losses"]]
        assert losses[-1] < 0.2 * losses[0]
        last = len(losses)
        hashes = run.hashes(last)
        assert len(hashes) == 4
        assert len(set(hashes.values())) == 1, "all sites hold the same"
    commits = [record.commit for record in commits_of(run.store_path)]
    assert len(commits) == last
    for commit in commits:
        counts = dict(zip([c.site_id for c in commit.contributors], influences(commit), strict=True))
        whole = sum(counts.values())
        assert counts.pop(ids["hostile"]) < 0.02 * whole
        assert min(counts.values()) > 0.1 * whole
