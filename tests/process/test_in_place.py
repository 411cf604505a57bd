"""Whole runs whose workers read the outer values in the outer file: through kills, catching up and a rollback they have
the values that a site has whose workers are given copies."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from atoll.coordinator import admin
from tests.harness.chaos import LIMIT_S, PLAIN_WORKER, ChaosRun, settings
from tests.harness.data_account import LEASED

WORKER = [sys.executable, str(PLAIN_WORKER), "--tensors", "a=30x4,b=20000", "--step-delay-s", "0.02", *LEASED]
EVERY = 5

pytestmark = pytest.mark.timeout(400)


def taken(run: ChaosRun, names: str) -> dict[int, dict[str, str]]:
    """Of each commit, the digest of what a site's workers had when they had taken it in place of their own values."""
    found: dict[int, dict[str, str]] = defaultdict(dict)
    for name in names:
        mode = ""
        for line in (run.folder / f"{name}.jsonl").read_text().splitlines():
            event: dict[str, Any] = json.loads(line)
            mode = event.get("mode", mode)
            if event["event"] == "merged" and mode == "REPLACE":
                found[event["version"]][name] = event["digest"]
    return found


def are_equal(found: dict[int, dict[str, str]]) -> bool:
    return all(len(set(digests.values())) == 1 for digests in found.values())


def test_ranks_that_read_in_place_have_the_values_of_those_that_are_given_copies(tmp_path: Path) -> None:
    sync = settings(EVERY).sync
    run_settings = settings(EVERY, sync=type(sync)(every=EVERY, chunk_elements=4096, codec="int8", log_commits=60))
    with ChaosRun(tmp_path, run_settings, WORKER) as run:

        def start(name: str) -> None:
            copies = ["--takes-copies"] if name == "c" else []
            run.start_node(name, [*WORKER, "--trace", str(tmp_path / f"{name}.jsonl"), *copies])

        coordinator = run.start_coordinator()
        for name in "abc":
            start(name)
        run.wait_for_contributors("abc")
        run.kill_site("b")
        assert run.kill_below("a", PLAIN_WORKER.name)
        run.wait_for_journal("a", "WorkersFailed", 1)
        run.wait_for_commits(2)
        start("b")
        status = run.wait_for_contributors("abc")
        before = taken(run, "abc")
        assert are_equal(before), before
        assert sum(len(digests) == 3 for digests in before.values()) >= 2

        to = status["last_commit"] - 1
        admin.ask(run.store, "rollback", to=to, reason="wrong data", skip_samples=False, limit_s=LIMIT_S)
        void = int(coordinator.wait_for_line(r"rolled back from commit (\d+) to commit", LIMIT_S)[1])
        run.wait(lambda s: s["last_commit"] >= void + 2, LIMIT_S, "commits beyond the void ones")
        run.wait_for_contributors("abc")
        run.stop()
        assert run.wait_all(LIMIT_S, list("abc")) == dict.fromkeys("abc", 0)
        after = {version: digests for version, digests in taken(run, "abc").items() if version > void}
        assert are_equal(after), after
        assert any(len(digests) == 3 for digests in after.values())
        said = {name: (run.home(name) / "node.log").read_text() for name in "abc"}
        in_place = "read the outer values where they lie"
        assert {name for name, text in said.items() if in_place in text} == {"a", "b"}
