"""Whole runs in which somebody stands still, or is slow: who is to blame is found, who is not is left alone."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.harness.local_run import LocalRun, Status
from tests.harness.random_faults import PLAIN_WORKER, SETTINGS

LIMIT_S = 60.0
SLOW = [sys.executable, str(PLAIN_WORKER), "--tensors", "a=300x40,b=10", "--step-delay-s", "0.02"]

pytestmark = pytest.mark.timeout(150)


def committed(count: int) -> Callable[[Status], bool]:
    return lambda status: bool(status["last_commit"] >= count)


def assert_equal_at_the_end(run: LocalRun, names: str, commit: int) -> None:
    hashes = run.hashes(commit)
    assert sorted(hashes) == sorted(names)
    assert len(set(hashes.values())) == 1, hashes
    assert run.status()["finished"]


def test_a_coordinator_that_was_stopped_evicts_nobody(tmp_path: Path) -> None:
    with LocalRun(tmp_path, replace(SETTINGS, steps=300)) as run:
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
        assert_equal_at_the_end(run, "abc", 30)
        assert run.status()["num_evicted"] == 0
        assert {line["commit"] for line in run.journal("a", "commit")} == set(range(1, 31)), "none twice, none lost"
