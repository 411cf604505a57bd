"""Shards of a stream are counted once a pass, whatever is killed: real processes."""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from atoll.protocol.sample_order import SampleOrder
from tests.harness import chaos
from tests.harness.chaos import LIMIT_S, ChaosRun
from tests.harness.commit_records import commits_of

SCRIPT = Path(__file__).parents[1] / "workers" / "shard_worker.py"
NUM_SHARDS = 5
EVERY = chaos.SETTINGS.sync.every
STEPS = 2 * EVERY + 2
"""Of each shard at least: it is in progress over two windows."""
TOKENS_A_STEP = 2

pytestmark = pytest.mark.timeout(400)


def begun(trace: Path) -> list[tuple[int, int]]:
    """(site, shard), in order."""
    lines = trace.read_text().splitlines() if trace.exists() else []
    return [(line["site"], line["shard"]) for line in map(json.loads, lines)]


def listed(store: Path) -> Counter[int]:
    """Positions in commits. A shard in progress is in none: all that are listed have had their steps by then."""
    found: Counter[int] = Counter()
    for record in commits_of(store):
        found.update(p for part in record.commit.done for r in part.ranges for p in range(r.first, r.end))
        assert found.total() * STEPS * TOKENS_A_STEP <= record.commit.run_tokens
    return found


def test_a_killed_sites_shard_is_drawn_again_and_each_is_listed_once_a_pass(tmp_path: Path) -> None:
    trace = tmp_path / "begun.jsonl"
    command = [sys.executable, str(SCRIPT), str(NUM_SHARDS), str(STEPS), str(trace)]
    sync = replace(chaos.SETTINGS.sync, max_tokens_per_sample=TOKENS_A_STEP)
    settings = replace(chaos.SETTINGS, min_sites=2, sync=sync)
    order = SampleOrder(settings.seed, 0, NUM_SHARDS)
    with ChaosRun(tmp_path, settings, command) as run:
        run.begin("abc")
        before = run.wait_for_contributors("abc")
        assert before["data"][0]["num_leased"] <= 3 * 3, "a site leases the shard in progress and the next one"
        of_c = next(site["site_id"] for site in before["sites"] if site["name"] == "c")
        run.kill_site("c")
        known = begun(trace)
        lost = [shard for site, shard in known if site == of_c][-1]
        run.wait_for_contributors("ab")
        run.wait(lambda s: bool(s["data"][0]["num_passes_done"] >= 1), LIMIT_S, "a pass is done")
        run.wait(lambda _: lost in {shard for _, shard in begun(trace)[len(known) :]}, LIMIT_S, "it is begun again")
        run.stop()
        assert run.wait_all(LIMIT_S, ["a", "b"]) == {"a": 0, "b": 0}
        status = run.status()
        assert run.coordinator is not None
        run.coordinator.interrupt()
        assert run.coordinator.wait(LIMIT_S) == 0
        done = listed(run.store)
        assert set(done.values()) == {1}, "a position is listed once"
        assert len(done) == status["data"][0]["num_done"]
        of_pass = [order.sample(p) for p in range(NUM_SHARDS) if p in done]
        assert sorted(of_pass) == list(range(NUM_SHARDS))
        ever = Counter(shard for _, shard in begun(trace))
        assert not Counter(order.sample(p) for p in done) - ever, "a shard is listed that nobody was given so often"
