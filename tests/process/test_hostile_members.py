"""Two members that mean harm in a run of real processes: no honest site pays for it with its place.

What it costs in commits a second: `python -m benchmarks hostile`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.chaos import LIMIT_S, ChaosRun, settings

HOSTILE_NODE = str(Path(__file__).parents[1] / "workers" / "hostile_node.py")
FOUND_OUT = {
    "mute": r"evicted {0} \(site \d\): it is connected, but for \d+ s it has neither trained nor been ready",
    "ready": r"could not exchange with {0} |evicted {0} ",  # who is a receiver first is found as one that hangs
    "waiting": r"could not exchange with {0} .*it says that it waits for sites",
}

pytestmark = pytest.mark.timeout(400)


@pytest.mark.parametrize(
    "kinds", [("mute", "ready"), pytest.param(("waiting", "waiting"), marks=pytest.mark.slow)], ids="-".join
)
def test_7_three_honest_sites_go_on_beside_two_hostile_members(tmp_path: Path, kinds: tuple[str, str]) -> None:
    hostile = dict(zip("xy", kinds, strict=True))
    with ChaosRun(tmp_path, settings(quorum=3)) as run:
        run.begin("abc", 2)
        coordinator = run.coordinator
        assert coordinator is not None
        for name, kind in hostile.items():
            run.killed.add(run.start_node(name, run.worker, program=(HOSTILE_NODE, kind)))
        for name, kind in hostile.items():
            coordinator.wait_for_line(FOUND_OUT[kind].format(name), 2 * LIMIT_S)
        run.wait_for_commits(10, 2 * LIMIT_S)
        assert not [line for line in coordinator.lines if any(f"evicted {name} (" in line for name in "abc")]
        status = run.wait_for_commits(1)
        contributors = [set(commit["contributors"]) for commit in status["commits"][-10:]]
        assert all({"a", "b", "c"} <= found for found in contributors), contributors
        if "waiting" not in kinds:
            assert not [found for found in contributors if found & {"x", "y"}]
        run.end_well("abc", 2 * LIMIT_S)
