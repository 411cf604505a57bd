"""Two members that mean harm in a run of real processes: no honest site pays for it with its place.

What it costs in commits a second: `python -m benchmarks hostile`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.harness.chaos import LIMIT_S, WORKER, ChaosRun, settings

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


@pytest.mark.parametrize(
    ("kind", "found_out"),
    [
        ("scale", r"x \(site \d\) is left out of sync \d+: its contribution to 'a' has norm 1.7e\+38"),
        ("narrow", r"x \(site \d\) could not exchange with .*64 columns, the layout's chunk has 128"),
    ],
)
def test_33_a_contribution_that_would_spoil_its_bundle_stops_no_run_and_its_site_is_named(
    tmp_path: Path, kind: str, found_out: str
) -> None:
    sparse = settings(quorum=3, min_sites=3)
    sparse = replace(sparse, sync=replace(sparse.sync, codec="topk2", chunk_elements=1 << 14))
    worker = (*WORKER[:3], "a=320x128,b=10", *WORKER[4:])
    with ChaosRun(tmp_path, sparse, worker) as run:
        run.begin("abc", 2)
        coordinator = run.coordinator
        assert coordinator is not None
        run.killed.add(run.start_node("x", run.worker, program=(HOSTILE_NODE, kind)))
        coordinator.wait_for_line(found_out, 2 * LIMIT_S)
        run.wait_for_commits(10, 2 * LIMIT_S)
        assert not [line for line in coordinator.lines if any(f"evicted {name} (" in line for name in "abc")]
        contributors = [set(commit["contributors"]) for commit in run.wait_for_commits(1)["commits"][-10:]]
        assert all(found == {"a", "b", "c"} for found in contributors), contributors
        run.end_well("abc", 2 * LIMIT_S)
