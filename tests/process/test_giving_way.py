"""The threads of a real node beside its workers."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from tests.harness.chaos import PLAIN_WORKER, ChaosRun, descendants, settings
from tests.harness.data_account import LEASED

LIMIT_S = 60.0


@pytest.mark.timeout(120)
def test_all_threads_of_a_node_that_compute_give_way_and_its_workers_do_not(tmp_path: Path) -> None:
    worker = [sys.executable, str(PLAIN_WORKER), "--tensors", "a=300x40", "--step-delay-s", "0.01", *LEASED]
    chosen = settings(min_sites=2)
    with ChaosRun(tmp_path, replace(chosen, sync=replace(chosen.sync, chunk_elements=1000)), worker) as run:
        run.start_coordinator()
        nodes = [run.start_node(name, worker, extra=["--nice", "7", "--threads", "2"]) for name in "ab"]
        run.wait(lambda s: s["last_commit"] >= 2 and len(s["commits"][-1]["contributors"]) == 2, LIMIT_S)
        own = os.getpriority(os.PRIO_PROCESS, 0)
        for node in nodes:
            pid = node.popen.pid
            found = threads_of(pid)
            assert found.pop(pid)[1] == own, "the event loop"
            for pool in ("exchange", "disk"):
                assert {value for name, value in found.values() if name == pool} == {own + 7}, pool
            assert all(value == own for worker in descendants(pid) for _, value in threads_of(worker).values())


def threads_of(pid: int) -> dict[int, tuple[str, int]]:
    """Name and niceness of each; threads of libraries come and go."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):
            name = (task / "comm").read_text().strip()
            found[int(task.name)] = name, os.getpriority(os.PRIO_PROCESS, int(task.name))
    return found
