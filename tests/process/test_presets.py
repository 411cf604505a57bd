"""A run.toml that leaves its outer step to be chosen, as a real coordinator: it says what it chose, and keeps it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from atoll.protocol.outer_settings import AUTO, OuterSettings
from tests.harness.local_run import LocalRun
from tests.process.test_runs import LIMIT_S, SETTINGS, WORKER

pytestmark = pytest.mark.timeout(120)


def outer_of(run: LocalRun) -> dict[str, object]:
    found = run.status()["settings"]["outer"]
    assert isinstance(found, dict)
    return found


def test_a_run_that_is_too_short_for_its_preset_is_told_so_as_its_coordinator_starts(tmp_path: Path) -> None:
    outer = OuterSettings(learning_rate=0.7, momentum=0.9)
    with LocalRun(tmp_path, replace(SETTINGS, preset="diloco", outer=outer)) as run:
        lines = run.start_coordinator().lines
        assert any("which does not settle in fewer than 50" in line for line in lines), lines


def test_what_is_left_to_be_chosen_is_said_and_kept(tmp_path: Path) -> None:
    settings = replace(SETTINGS, min_sites=2, outer=OuterSettings(optimizer=AUTO))
    with LocalRun(tmp_path, settings) as run:
        coordinator = run.start_coordinator()
        text = f"outer.optimizer = auto: a plain mean, for {settings.steps // settings.sync.every} syncs"
        assert any(text in line for line in coordinator.lines)
        assert outer_of(run)["optimizer"] == "sgd"
        for name in "ab":
            run.start_node(name, WORKER)
        assert run.wait_all(LIMIT_S) == {"a": 0, "b": 0}
        assert len(set(run.hashes(run.status()["last_commit"]).values())) == 1
        coordinator.kill()
        run.start_coordinator()
        assert outer_of(run)["optimizer"] == "sgd"
