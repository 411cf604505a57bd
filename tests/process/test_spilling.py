"""Whole runs whose reducers keep nothing in memory."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from atoll.protocol.outer_settings import OuterSettings
from atoll.protocol.settings import RunSettings
from atoll.protocol.sync_settings import SyncSettings
from tests.harness.chaos import PLAIN_WORKER, ChaosRun, settings
from tests.harness.data_account import LEASED
from tests.harness.local_run import LocalRun
from tests.harness.small_disk import small_disk

WORKER = [sys.executable, str(PLAIN_WORKER), "--tensors", "a=300x40,b=10"]
SETTINGS = RunSettings(
    run_id="spill",
    steps=40,
    min_sites=3,
    data="local",
    time_limits="local",
    sync=SyncSettings(every=10, chunk_elements=1000),
)
LIMIT_S = 150.0


@pytest.mark.timeout(120)
def test_a_run_with_every_contribution_on_the_disk(tmp_path: Path) -> None:
    with LocalRun(tmp_path, SETTINGS) as run:
        run.start_coordinator()
        for name in ("a", "b", "c"):
            left = run.home(name) / "contributions" / "old"  # by a node that was killed
            run.home(name).mkdir(0o700, parents=True)
            left.parent.mkdir()
            left.write_bytes(b"old")
            node = run.start_node(name, WORKER, extra=["--reduce-buffer-mib", "0"])
            node.wait_for_line("listening for peers", LIMIT_S)
            assert not left.exists()
        assert run.wait_all(LIMIT_S) == {"a": 0, "b": 0, "c": 0}
        assert len(set(run.hashes(4).values())) == 1
        for node in run.nodes.values():
            assert any("what a reducer holds beyond 0 bytes in memory is in" in line for line in node.lines), node.lines
        assert not [name for name in run.nodes if (run.home(name) / "contributions").exists()]


@pytest.mark.root
@pytest.mark.timeout(400)
def test_a_site_whose_disk_has_no_room_contributes_and_reduces_once_there_is(tmp_path: Path) -> None:
    # The outer state takes 1 MB, the payloads of a sync half of that. As the reducer of nearly everything c would hold
    # 1 MB of contributions beside them; as a contributor it needs room for the payloads of two syncs.
    worker = [sys.executable, str(PLAIN_WORKER), "--tensors", "a=300x400,b=10", "--step-delay-s", "0.02", *LEASED]
    sync = SyncSettings(every=10, chunk_elements=1000, codec="fp32", log_commits=1, snapshots=0)
    chosen = replace(settings(outer=OuterSettings(momentum=0.0)), sync=sync)
    with ChaosRun(tmp_path, chosen) as run, small_disk(run.home("c"), 16 << 20):
        filler = run.home("c") / "filler"
        filler.write_bytes(bytes((16 << 20) - (2270 << 10)))
        coordinator = run.start_coordinator()
        for name, mbit in (("a", "1"), ("b", "1"), ("c", "1000")):
            run.start_node(name, worker, extra=["--reduce-buffer-mib", "0", "--bandwidth-mbit", mbit])
        node = run.nodes["c"]
        node.wait_for_line(r"holding contributions: .* in \S+/c/contributions.* are free there; make room", LIMIT_S)
        coordinator.wait_for_line(r"contribute \(c \(site \d\) has no room to reduce: ", LIMIT_S)
        run.wait_for_contributors("abc")
        assert not any("what a reducer holds beyond 0 bytes" in line for line in node.lines)
        filler.unlink()
        node.wait_for_line("what a reducer holds beyond 0 bytes in memory is in", LIMIT_S)
        run.wait_for_contributors("abc")
        run.end_well()
