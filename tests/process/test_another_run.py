"""A coordinator that another run's replaces on the same port, as when a run is resumed: real processes."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from atoll.protocol.errors import RefusedError
from atoll.protocol.settings import RunSettings
from atoll.protocol.sync_settings import SyncSettings
from tests.harness.local_run import LocalRun

WORKER = [sys.executable, str(Path(__file__).parents[1] / "workers" / "plain_worker.py"), "--step-delay-s", "0.02"]
SETTINGS = RunSettings(
    run_id="run",
    steps=1_000_000,
    min_sites=2,
    data="local",
    time_limits="local",
    sync=SyncSettings(every=10, chunk_elements=1000, codec="fp32"),
)
LIMIT_S = 60.0

pytestmark = pytest.mark.timeout(150)


def test_a_node_whose_coordinator_is_another_runs_now_ends_and_says_so(tmp_path: Path) -> None:
    folder = tmp_path / "another"
    folder.mkdir()
    with LocalRun(tmp_path, SETTINGS) as run, LocalRun(folder, replace(SETTINGS, run_id="another")) as another:
        coordinator = run.start_coordinator()
        for name in "ab":
            run.start_node(name, WORKER)
        run.wait(lambda status: bool(status["last_commit"] >= 2), LIMIT_S)
        coordinator.kill()
        another.start_coordinator(run.address)
        assert run.wait_all(LIMIT_S) == {"a": RefusedError.exit_code, "b": RefusedError.exit_code}
        for name in "ab":
            (ended,) = run.journal(name, "exit")
            assert f"{name} belongs to run 'run', this coordinator has run 'another'" in ended["text"]
            assert ended["text"] in "\n".join(run.nodes[name].lines), "and on the terminal"
