"""One bit a parameter, and one value of 64, with error feedback, as real processes: sites die and come back, and all
hold the same bits."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from atoll.coordinator import admin
from atoll.protocol.sync_settings import SyncSettings
from tests.harness.local_run import LocalRun
from tests.process.test_gradients import log_of
from tests.process.test_runs import LIMIT_S, SETTINGS, SLOW, WORKER, committed

SIGN1 = SyncSettings(every=10, chunk_elements=1000, codec="sign1", down="bf16", error_feedback=1.0)
TOPK2 = SyncSettings(every=10, chunk_elements=1000, codec="topk2", error_feedback=0.95)

pytestmark = pytest.mark.timeout(150)


def error_commits(run: LocalRun, name: str) -> list[tuple[int, list[int]]]:
    return [(line["commit"], line["error_commits"]) for line in run.journal(name, "commit")]


def test_each_commit_leaves_an_error_and_all_sites_hold_the_same_bits(tmp_path: Path) -> None:
    with LocalRun(tmp_path, replace(SETTINGS, quorum=3, sync=SIGN1)) as run:
        run.start_coordinator()
        for name in "abc":
            run.start_node(name, WORKER)
        assert run.wait_all(LIMIT_S) == {"a": 0, "b": 0, "c": 0}
        for name in "abc":
            assert error_commits(run, name) == [(n, [n]) for n in range(1, 7)]
        for number in range(1, 7):
            assert len(set(run.hashes(number).values())) == 1


@pytest.mark.parametrize("sync", [SIGN1, TOPK2], ids=lambda sync: sync.codec)
def test_a_site_that_was_killed_comes_back_with_its_error_and_the_others_keep_theirs(
    tmp_path: Path, sync: SyncSettings
) -> None:
    settings = replace(SETTINGS, steps=5000, quorum=2, sync=sync)
    with LocalRun(tmp_path, settings) as run:
        run.start_coordinator()
        for name in "abc":
            run.start_node(name, SLOW)
        run.wait(committed(3), LIMIT_S)
        run.wait(lambda status: all(site["error_share"] > 0.1 for site in status["sites"]), LIMIT_S, "it is shown")
        run.nodes["c"].kill()
        at_death = run.status()["last_commit"]
        run.wait(committed(at_death + 3), LIMIT_S)
        run.start_node("c", SLOW)
        run.wait(lambda status: "c" in status["commits"][-1]["contributors"], LIMIT_S, "c is back")
        admin.ask(run.toml.with_name("run.db"), "stop", reason="the test is over")
        assert run.wait_all(LIMIT_S) == {"a": 0, "b": 0, "c": 0}
        last = run.status()["last_commit"]
        assert len(set(run.hashes(last).values())) == 1
        log = log_of(run)  # the status has the newest commits alone
        contributors = {commit.commit: names for commit, names in log}
        for name in "abc":
            found = error_commits(run, name)
            assert found[-1][0] == last
            for number, errors in found:
                assert (errors == [number]) == (name in contributors[number]), (name, number, errors)
        assert "c" in contributors[last]
        assert any("c" not in names for names in contributors.values())
    with_c = [(commit, commit.error_commits[names.index("c")]) for commit, names in log if "c" in names]
    advanced = {number for number, errors in error_commits(run, "c") if errors == [number]}
    for (before, _), (commit, number) in pairwise(with_c):
        # It may have died before it heard of its last one, or between the write of the error and the line of it.
        possible = {before.commit} if before.commit in advanced else {0, before.commit}
        assert number in possible, (before.commit, commit.commit, advanced)
    assert sum(number == 0 for _, number in with_c) <= 2, with_c  # before its first, and after the kill
