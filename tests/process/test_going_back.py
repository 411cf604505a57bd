"""`atoll rollback --to`: whole runs of real processes go back to commits that all of them have passed."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from atoll.protocol.errors import HostError
from atoll.protocol.outer_settings import OuterSettings
from atoll.protocol.settings import RunSettings
from atoll.protocol.sync_settings import SyncSettings
from tests.harness.local_run import GUARDED, LocalRun, Process

WORKER = [sys.executable, str(Path(__file__).parents[1] / "workers" / "plain_worker.py"), "--tensors", "a=300x40,b=10"]
SLOW = [*WORKER, "--step-delay-s", "0.02"]
SETTINGS = RunSettings(
    run_id="run",
    steps=100_000,
    min_sites=2,
    data="local",
    time_limits="local",
    sync=SyncSettings(every=15, chunk_elements=1000, codec="fp32", log_commits=30, snapshots=2),
    outer=OuterSettings(learning_rate=0.7, momentum=0.5),
)
LIMIT_S = 150.0

pytestmark = pytest.mark.timeout(400)


def atoll(run: LocalRun, *arguments: str) -> Process:
    process = run.start(arguments[0], [sys.executable, *GUARDED, *arguments])
    process.wait(LIMIT_S)
    return process


def test_all_sites_go_back_and_one_that_joined_later_fetches_that_state(tmp_path: Path) -> None:
    with LocalRun(tmp_path, SETTINGS) as run:
        coordinator = run.start_coordinator()
        run.start_node("a", SLOW)
        run.start_node("b", SLOW)
        run.wait(lambda s: s["last_commit"] >= 4, LIMIT_S)
        run.start_node("c", SLOW)
        run.wait(lambda s: bool(s["commits"]) and "c" in s["commits"][-1]["contributors"], LIMIT_S)
        before = {c["commit"]: c["state_hash"] for c in run.status()["commits"] if c["state_hash"]}
        to = max(before) - 2  # c may have come late: what is in reach of a and b moves on meanwhile
        done = atoll(run, "rollback", str(run.toml), "--to", str(to), "--reason", "wrong data")
        assert done.popen.returncode == 0, done.lines
        assert any(f"the run goes on from commit {to}" in line for line in done.lines), done.lines
        coordinator.wait_for_line(rf"rolled back from commit \d+ to commit {to}, branch 1: wrong data", LIMIT_S)
        status = run.wait(lambda s: s["branch"] == 1 and s["last_commit"] > to, LIMIT_S)  # the newest 20 are shown
        after = {c["commit"]: c["state_hash"] for c in status["commits"]}
        assert after[to] == before[to], "the hash that it had"
        assert after[to + 1] != before[to + 1]
        run.nodes["c"].wait_for_line(f"the run went back to commit {to}: wrong data", LIMIT_S)
        run.wait(lambda s: sorted(s["commits"][-1]["contributors"]) == ["a", "b", "c"], LIMIT_S, "all contribute")
        changed = atoll(run, "set", str(run.toml), "outer.learning_rate=0.4")
        assert changed.popen.returncode == 0, changed.lines
        assert "outer.learning_rate = 0.4 (0.7 as the run began)" in run.status()["changed"]
        last = run.status()["last_commit"]
        run.wait(lambda s: any(c["commit"] > last + 1 and c["state_hash"] for c in s["commits"]), LIMIT_S)
        refused = atoll(run, "set", str(run.toml), "sync.every=20")
        assert refused.popen.returncode == HostError.exit_code, refused.lines
        assert atoll(run, "stop", str(run.toml)).popen.returncode == 0
        assert run.wait_all(LIMIT_S) == {"a": 0, "b": 0, "c": 0}
        status = run.status()
        held = {(s["last_commit"], s["state_hash"]) for s in status["sites"]}
        assert held == {(status["last_commit"], status["state_hash"])}


def test_a_commit_out_of_reach_is_an_error_that_names_the_oldest_and_the_run_goes_on(tmp_path: Path) -> None:
    settings = replace(SETTINGS, sync=replace(SETTINGS.sync, log_commits=4))
    with LocalRun(tmp_path, settings) as run:
        run.start_coordinator()
        run.start_node("a", SLOW)
        run.start_node("b", SLOW)
        run.wait(lambda s: s["last_commit"] >= 9, LIMIT_S)
        refused = atoll(run, "rollback", str(run.toml), "--to", "1")
        assert refused.popen.returncode == HostError.exit_code, refused.lines
        found = re.search(r"out of reach .* the oldest possible is (\d+), at [ab] ", " ".join(refused.lines))
        assert found, refused.lines
        oldest = int(found[1])
        last = run.status()["last_commit"]
        assert run.wait(lambda s: s["last_commit"] > last, LIMIT_S, "it goes on")["branch"] == 0
        ahead = atoll(run, "rollback", str(run.toml), "--to", "100000")
        assert ahead.popen.returncode == HostError.exit_code
        assert any("the newest commit is" in line for line in ahead.lines), ahead.lines
        assert oldest > 1


def test_a_coordinator_that_is_killed_on_the_way_leaves_the_run_at_one_end_or_the_other(tmp_path: Path) -> None:
    with LocalRun(tmp_path, SETTINGS) as run:
        coordinator = run.start_coordinator()
        run.start_node("a", SLOW)
        run.start_node("b", SLOW)
        run.wait(lambda s: s["last_commit"] >= 6, LIMIT_S)
        asked = run.start("rollback", [sys.executable, *GUARDED, "rollback", str(run.toml), "--to", "2"])
        coordinator.wait_for_line("going back from commit", LIMIT_S)
        coordinator.kill()
        asked.wait(LIMIT_S)
        run.start_coordinator()
        status = run.wait(lambda s: s["state_kind"] in ("training", "syncing") and s["last_commit"] >= 3, LIMIT_S)
        last = status["last_commit"]
        run.wait(lambda s: s["last_commit"] >= last + 3, LIMIT_S, "it goes on")
        assert status["branch"] in (0, 1)
        assert atoll(run, "stop", str(run.toml)).popen.returncode == 0
        assert run.wait_all(LIMIT_S) == {"a": 0, "b": 0}
        status = run.status()
        assert {s["state_hash"] for s in status["sites"]} == {status["state_hash"]}
