"""Processes that are stopped and go on later: connected, silent, and of another mind about the time."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.chaos import LARGE, LARGE_WORKER, LIMIT_S, ChaosRun, settings
from tests.harness.local_run import Status

pytestmark = pytest.mark.timeout(400)


def state_of(status: Status, name: str) -> str:
    return next(str(site["state"]) for site in status["sites"] if site["name"] == name)


@pytest.mark.parametrize("phase", [pytest.param("training", marks=pytest.mark.slow), "exchanging"])
def test_a_frozen_site_is_evicted_and_comes_back(tmp_path: Path, phase: str) -> None:
    """As it exchanges it is a reducer, too, that holds contributions of the others."""
    with ChaosRun(tmp_path, LARGE, LARGE_WORKER) as run:
        run.begin("abc")
        run.wait_for_contributors("abc")
        run.wait_for_phase("c", phase)
        with run.frozen(run.nodes["c"]):
            run.wait_for_contributors("ab")  # a straggler at first, if it was in no sync
            run.wait(lambda s: state_of(s, "c").endswith("for 3 s"), LIMIT_S, "c is evicted")  # silent, or deaf
        run.nodes["c"].wait_for_line("local progress is discarded", LIMIT_S)
        run.wait_for_contributors("abc")
        run.end_well()
        assert len(run.journal("c", "exit")) == 1, "it was the same process to the end"


def test_all_sites_are_frozen(tmp_path: Path) -> None:
    with ChaosRun(tmp_path, settings(min_sites=2)) as run:
        before = run.begin("ab")["num_evicted"]
        with run.frozen(*run.nodes.values()):
            run.wait(lambda s: s["num_evicted"] >= before + 2, LIMIT_S, "both are evicted")
        run.wait_for_contributors("ab")
        run.end_well()
