"""A whole run whose reducers keep nothing in memory."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from atoll.protocol.settings import RunSettings, SyncSettings
from tests.harness.local_run import LocalRun

WORKER = [sys.executable, str(Path(__file__).parents[1] / "workers" / "plain_worker.py"), "--tensors", "a=300x40,b=10"]
SETTINGS = RunSettings(
    run_id="spill",
    steps=40,
    min_sites=3,
    data="local",
    time_limits="local",
    sync=SyncSettings(every=10, chunk_elements=1000),
)
LIMIT_S = 60.0


@pytest.mark.timeout(120)
def test_a_run_with_every_contribution_on_the_disk(tmp_path: Path) -> None:
    with LocalRun(tmp_path, SETTINGS) as run:
        run.start_coordinator()
        for name in ("a", "b", "c"):
            left = run.home(name) / "contributions" / "old"  # by a node that was killed
            left.parent.mkdir(parents=True)
            left.write_bytes(b"old")
            node = run.start_node(name, WORKER, extra=["--reduce-buffer-mib", "0"])
            node.wait_for_line("listening for peers", LIMIT_S)
            assert not left.exists()
        assert run.wait_all(LIMIT_S) == {"a": 0, "b": 0, "c": 0}
        assert len(set(run.hashes(4).values())) == 1
        for node in run.nodes.values():
            assert any("contributions beyond 0 bytes in memory are in" in line for line in node.lines), node.lines
        assert not [name for name in run.nodes if (run.home(name) / "contributions").exists()]
