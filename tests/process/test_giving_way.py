"""The threads of a real node beside its workers."""

from __future__ import annotations

import os
import sys
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
            found = niceness_of_threads(pid)
            assert found.pop(pid) == own, "the event loop"
            for pool in ("exchange", "disk"):
                assert {found[thread] for thread in threads_of(pid, pool)} == {own + 7}, pool
            assert all(value == own for worker in descendants(pid) for value in niceness_of_threads(worker).values())


def threads_of(pid: int, pool: str) -> list[int]:
    named = Path(f"/proc/{pid}/task").glob("*/comm")
    return [int(comm.parent.name) for comm in named if comm.read_text().strip() == pool]


def niceness_of_threads(pid: int) -> dict[int, int]:
    return {int(tid): os.getpriority(os.PRIO_PROCESS, int(tid)) for tid in os.listdir(f"/proc/{pid}/task")}
