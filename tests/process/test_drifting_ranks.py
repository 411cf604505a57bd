"""A whole run of one site whose two ranks are data parallel, and drift apart in its middle."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.node.core.ranks.group import REPLICAS_EVERY_SYNCS
from atoll.protocol.errors import WorkerError
from atoll.protocol.settings import RunSettings
from atoll.protocol.sync_settings import SyncSettings
from tests.harness.local_run import LocalRun

LIMIT_S = 150.0
RANKS = Path(__file__).parents[1] / "workers" / "parallel_ranks.py"
pytestmark = pytest.mark.timeout(400)


def test_the_site_stops_with_the_tensor_and_the_ranks(tmp_path: Path) -> None:
    """They are equal at the first sync, where they are compared, and differ from the fourth step on."""
    settings = RunSettings(
        run_id="drift", steps=100, min_sites=1, data="local", time_limits="local", sync=SyncSettings(every=1)
    )
    with LocalRun(tmp_path, settings) as run:
        run.start_coordinator()
        node = run.start_node("one", [str(RANKS), "ddp", "4"], launcher="python", extra=["--ranks", "2"])
        node.wait_for_line(
            r"the copies of 'first.bias' \[0:5\] have drifted apart at step \d+: rank 0 .* differs from rank 1", LIMIT_S
        )
        assert run.wait_all(LIMIT_S) == {"one": WorkerError.exit_code}
        commits = [line["commit"] for line in run.journal("one", "commit")]
        assert max(commits) == REPLICAS_EVERY_SYNCS, "found at the first comparison after that"
