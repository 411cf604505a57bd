"""Disks that are full for a while: whoever has one ends and says so, the others go on, it comes back. Needs root."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from atoll.protocol.errors import HostError
from tests.harness.chaos import LIMIT_S, ChaosRun, settings
from tests.harness.small_disk import small_disk

pytestmark = [
    pytest.mark.root,
    pytest.mark.timeout(400),
    pytest.mark.skipif(os.geteuid() != 0, reason="mounting a file system needs root"),
]


def test_a_site_whose_disk_was_full_comes_back_when_there_is_room(tmp_path: Path) -> None:
    with ChaosRun(tmp_path, settings(min_sites=3)) as run, small_disk(run.home("c"), 8 << 20) as fill:
        run.begin("abc")
        run.wait_for_contributors("abc")
        filler = fill()
        assert run.nodes["c"].wait(LIMIT_S) == HostError.exit_code
        assert any("no space is left" in line for line in run.nodes["c"].lines), run.nodes["c"].lines
        run.wait_for_contributors("ab")
        filler.unlink()
        run.start_site("c")
        run.wait_for_contributors("abc")
        run.end_well()


def test_a_coordinator_whose_disk_was_full_goes_on_when_there_is_room(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    with ChaosRun(tmp_path, settings(min_sites=2)) as run, small_disk(folder, 8 << 20) as fill:
        run.store = folder / "run.db"
        coordinator = run.start_coordinator(extra=["--store", str(run.store)])
        for name in "ab":
            run.start_site(name)
        before = run.wait_for_contributors("ab")
        filler = fill()
        assert coordinator.wait(LIMIT_S) == HostError.exit_code
        assert any("the disk is full" in line for line in coordinator.lines), coordinator.lines
        for name in "ab":
            run.nodes[name].wait_for_line("lost the coordinator", LIMIT_S)
        filler.unlink()
        run.start_coordinator(extra=["--store", str(run.store)])
        after = run.wait_for_contributors("ab")
        assert after["term"] == before["term"] + 1
        run.end_well()
