"""Whole runs in which somebody stands still, or is slow: who is to blame is found, who is not is left alone."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.harness.chaos import PLAIN_WORKER, SETTINGS
from tests.harness.local_run import LocalRun, Status

LIMIT_S = 150.0
SLOW = [sys.executable, str(PLAIN_WORKER), "--tensors", "a=300x40,b=10", "--step-delay-s", "0.02"]

pytestmark = pytest.mark.timeout(400)


def committed(count: int) -> Callable[[Status], bool]:
    return lambda status: bool(status["last_commit"] >= count)


def assert_equal_at_the_end(run: LocalRun, names: str, commit: int) -> None:
    hashes = run.hashes(commit)
    assert sorted(hashes) == sorted(names)
    assert len(set(hashes.values())) == 1, hashes
    assert run.status()["finished"]


def test_a_coordinator_that_was_stopped_evicts_nobody(tmp_path: Path) -> None:
    settings = replace(SETTINGS, steps=300, data="local", sync=replace(SETTINGS.sync, every=30))
    with LocalRun(tmp_path, settings) as run:
        coordinator = run.start_coordinator()
        for name in "abc":
            run.start_node(name, SLOW)
        before = run.wait(committed(2), LIMIT_S)
        coordinator.popen.send_signal(signal.SIGSTOP)
        for name in "abc":  # after a lease, 3 s
            run.nodes[name].wait_for_line("lost the coordinator .*(heard nothing|does not answer)", LIMIT_S)
        coordinator.popen.send_signal(signal.SIGCONT)
        coordinator.wait_for_line("this coordinator stood still for", LIMIT_S)
        run.wait(committed(before["last_commit"] + 2), LIMIT_S)
        assert run.wait_all(LIMIT_S) == {"a": 0, "b": 0, "c": 0}
        assert_equal_at_the_end(run, "abc", 10)
        assert run.status()["num_evicted"] == 0
        assert {line["commit"] for line in run.journal("a", "commit")} == set(range(1, 11)), "none twice, none lost"


@pytest.mark.slow
def test_workers_that_hang_are_named_and_started_again_and_nobody_waits_for_them(tmp_path: Path) -> None:
    """60 s is the least limit of a step that any preset has."""
    with LocalRun(tmp_path, replace(SETTINGS, steps=1000, data="local")) as run:
        run.start_coordinator()
        worker = [*SLOW, "--step-delay-s", "0.1"]
        run.start_node("a", worker)
        run.start_node("b", worker)
        node = run.start_node("c", [*worker, "--hang-at", "25"])
        stuck = run.wait(committed(4), LIMIT_S, "a and b go on")
        doing = next(s for s in stuck["sites"] if s["name"] == "c")
        assert doing["connected"]
        assert doing["doing"] == "training"
        text = (
            r"workers crashed, restarting them.*rank 0 \(pid \d+\) has got no further for 60 s \(training, step 2\d; "
        )
        node.wait_for_line(text + r"its steps take up to 0\.\d+ s\)", 2 * LIMIT_S)
        assert run.status()["last_commit"] > 30, "60 s are about 55 windows"
        run.wait(lambda s: "c" in s["commits"][-1]["contributors"], LIMIT_S, "c is back")
        assert run.wait_all(2 * LIMIT_S) == {"a": 0, "b": 0, "c": 0}
        assert_equal_at_the_end(run, "abc", 100)
        assert run.status()["num_evicted"] == 0
