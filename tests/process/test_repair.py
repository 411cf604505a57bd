"""Bits that flip in a site's outer state while the run goes on: found out, repaired, and equal in the end."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from atoll.protocol.outer_settings import OuterSettings
from atoll.protocol.settings import RunSettings
from atoll.protocol.sync_settings import SyncSettings
from tests.harness.local_run import GUARDED, LocalRun, Status

WORKER = [sys.executable, str(Path(__file__).parents[1] / "workers" / "plain_worker.py"), "--tensors", "a=300x40,b=10"]
SLOW = [*WORKER, "--step-delay-s", "0.02"]
SETTINGS = RunSettings(
    run_id="run",
    steps=100_000,
    min_sites=3,
    data="local",
    time_limits="local",
    sync=SyncSettings(every=10, chunk_elements=1000, codec="fp32", log_commits=30, snapshots=2),
    outer=OuterSettings(learning_rate=0.7, momentum=0.5),
)
LIMIT_S = 150.0

pytestmark = pytest.mark.timeout(400)


def committed(count: int) -> Callable[[Status], bool]:
    return lambda status: bool(status["last_commit"] >= count)


def flip_bits(run: LocalRun, name: str) -> None:
    """One bit in every place for a record of chunk size, in force or spare: the next commit is computed from it."""
    path = run.home(name) / "state" / "outer.chunks"
    descriptor = os.open(path, os.O_RDWR)
    try:
        for offset in range(100, os.fstat(descriptor).st_size, 8000):
            byte = os.pread(descriptor, 1, offset)[0]
            os.pwrite(descriptor, bytes([byte ^ 0x10]), offset)
    finally:
        os.close(descriptor)


def assert_all_equal(run: LocalRun, names: str, commit: int) -> None:
    assert run.wait_all(LIMIT_S, list(names)) == dict.fromkeys(names, 0)
    status = run.status()
    held = {site["name"]: (site["last_commit"], site["state_hash"]) for site in status["sites"]}
    assert held == dict.fromkeys(names, (commit, status["state_hash"]))


def end_once_in(run: LocalRun, name: str) -> int:
    """Stops a run that is long enough for a late site, once it contributes to a sync that begins from now on; the last
    commit."""
    under_way = run.status()["last_commit"] + 1

    def contributes(status: Status) -> bool:
        newest = status["commits"][-1]
        return bool(newest["commit"] > under_way and name in newest["contributors"])

    run.wait(contributes, LIMIT_S, f"{name} contributes")
    stop = run.start("stop", [sys.executable, *GUARDED, "stop", str(run.toml)])
    assert stop.wait(LIMIT_S) == 0, stop.lines
    return int(run.wait(lambda s: bool(s["finished"]), LIMIT_S)["last_commit"])


def test_a_wrong_state_is_found_out_by_the_others_and_repaired_from_them(tmp_path: Path) -> None:
    with LocalRun(tmp_path, SETTINGS) as run:
        run.start_coordinator()
        for name in "abc":
            run.start_node(name, SLOW)
        run.wait(committed(3), LIMIT_S)
        flip_bits(run, "c")
        run.wait(lambda s: s["num_wrong_states"] > 0, LIMIT_S, "c is found out")
        node = run.nodes["c"]
        node.wait_for_line(r"the state of commit \d+ here has hash .*, the run's is .*; repairing it", LIMIT_S)
        repaired = node.wait_for_line(r"at commit \d+ after fetching (\d+) chunks", LIMIT_S)
        assert 0 < int(repaired.group(1)) <= 21
        last = end_once_in(run, "c")
        assert_all_equal(run, "abc", last)
        wrong = {site["name"]: site["num_wrong_states"] for site in run.status()["sites"]}
        assert wrong["a"] == wrong["b"] == 0
        assert wrong["c"] >= 1
        assert run.journal("c", "commit")[-1]["commit"] == last, "it takes part again"


def test_of_two_the_wrong_one_is_found_out_by_its_first_wrong_chunk(tmp_path: Path) -> None:
    with LocalRun(tmp_path, replace(SETTINGS, min_sites=2)) as run:
        run.start_coordinator()
        run.start_node("a", SLOW)
        run.start_node("b", SLOW)
        run.wait(committed(3), LIMIT_S)
        flip_bits(run, "b")
        for name in "ab":
            run.nodes[name].wait_for_line("of which this is one: whose is right is being found out", LIMIT_S)
        named = run.nodes["b"].wait_for_line(
            r"evicted \(its state of commit \d+ .*chunk \d+ of commit \d+, in '[ab]', has hash \w+ there", LIMIT_S
        )
        assert named
        assert_all_equal(run, "ab", end_once_in(run, "b"))
        assert {site["name"]: site["num_wrong_states"] > 0 for site in run.status()["sites"]} == {"a": False, "b": True}


def test_where_nobody_has_the_record_before_the_run_is_paused_and_names_both(tmp_path: Path) -> None:
    settings = replace(SETTINGS, min_sites=2, sync=replace(SETTINGS.sync, snapshots=0))
    with LocalRun(tmp_path, settings) as run:
        run.start_coordinator()
        run.start_node("a", SLOW)
        run.start_node("b", SLOW)
        run.wait(committed(3), LIMIT_S)
        flip_bits(run, "b")
        paused = run.wait(lambda s: "nobody here can show chunk" in s["state"], LIMIT_S, "the run is paused")
        assert "a (site" in paused["state"]
        assert "b (site" in paused["state"]
        commit = paused["last_commit"]
        run.nodes["b"].kill()
        run.wait(committed(commit + 1), LIMIT_S, "a goes on")
        run.start_node("b", SLOW)
        assert_all_equal(run, "ab", end_once_in(run, "b"))
