"""Whole runs in which hosts exchange by several processes: what all sites hold is the same, bit by bit. Their workers
have no torch."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.harness.local_run import LocalRun
from tests.process.test_endpoints import LIMIT_S, PLAIN_WORKER, SETTINGS, TENSORS, WAYS

pytestmark = pytest.mark.timeout(60)

NUM_PROCESSES = {"one": 1, "two": 2, "three": 3}


def exchanged(run: LocalRun, name: str) -> dict[int, list[int]]:
    """Of each process beside the node: chunks that it has exchanged, sync by sync."""
    found: dict[int, list[int]] = {}
    text = (run.home(name) / "node.log").read_text()
    for process, num_chunks in re.findall(r"exchange process (\d+): sync \d+: exchanged (\d+) of", text):
        found.setdefault(int(process), []).append(int(num_chunks))
    return found


@pytest.mark.parametrize("way", list(WAYS))
def test_sites_of_one_two_and_three_processes_hold_the_same_bits(tmp_path: Path, way: str) -> None:
    worker = [sys.executable, PLAIN_WORKER, "--tensors", TENSORS, "--shard", "--fingerprint", "x"]
    with LocalRun(tmp_path, replace(SETTINGS, sync=WAYS[way])) as run:
        run.start_coordinator()
        for name, num in NUM_PROCESSES.items():
            run.start_node(name, worker, extra=["--exchange-processes", str(num)])
        assert run.wait_all(LIMIT_S) == {"one": 0, "two": 0, "three": 0}
        status = run.status()
        for number in range(1, status["last_commit"] + 1):
            assert len(set(run.hashes(number).values())) == 1
        assert all(len(set(c["contributors"])) == 3 for c in status["commits"])
        for name, num in NUM_PROCESSES.items():
            parts = exchanged(run, name)
            assert sorted(parts) == list(range(1, num))
            assert all(num_chunks > 0 for of_process in parts.values() for num_chunks in of_process)
