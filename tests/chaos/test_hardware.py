"""Sites with torch whose processors compute differently: the outer state is the same to the bit, whatever happens."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.harness.chaos import LIMIT_S, ChaosRun, settings

pytestmark = pytest.mark.timeout(400)

TORCH_WORKER = (str(Path(__file__).parents[1] / "workers" / "torch_worker.py"), "--step-delay-s", "0.02")
HARDWARE: dict[str, tuple[dict[str, str], str]] = {
    "a": ({"ATEN_CPU_CAPABILITY": "default"}, "1"),
    "b": ({"ATEN_CPU_CAPABILITY": "avx2", "NUMBA_CPU_NAME": "generic"}, "2"),
    "c": ({}, "1"),
}
"""Environment and number of threads; numba makes the node's kernels for the processor that it is told of."""


def start(run: ChaosRun, name: str) -> None:
    environment, threads = HARDWARE[name]
    run.start_node(name, TORCH_WORKER, launcher="python", environment=environment, extra=["--threads", threads])


def capability_of(run: ChaosRun, name: str) -> str:
    """As its worker said it."""
    log = (run.home(name) / "node.log").read_text()
    found = re.search(r"\[rank 0\] capability (.*)", log)
    assert found, log
    return found[1]


def test_different_hardware_and_a_crash_of_each_kind(tmp_path: Path) -> None:
    with ChaosRun(tmp_path, settings(min_sites=3, data="numbers")) as run:
        run.start_coordinator()
        for name in HARDWARE:
            start(run, name)
        run.wait_for_contributors(HARDWARE, 2 * LIMIT_S)
        said = {name: capability_of(run, name) for name in HARDWARE}
        assert said["a"] == "DEFAULT, 1 threads"
        assert re.search(r"[2-9] threads", said["b"])
        assert len(set(said.values())) == 3, said
        # The worker of one, the node of another: both join again with their optimizer's state lost.
        assert run.kill_below("b", "torch_worker")
        run.wait_for_phase("c", "exchanging")
        run.kill_site("c")
        run.wait_for_contributors("ab", 2 * LIMIT_S)
        start(run, "c")
        run.wait_for_contributors("abc", 2 * LIMIT_S)
        run.end_well()
        assert len(run.journal("b", "WorkersFailed")) == 1
