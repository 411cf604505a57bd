"""A step that may not follow on those before it is told with its story, and refused."""

from __future__ import annotations

import itertools
import logging

import pytest

from atoll.node.core import events as e
from atoll.node.core import outputs as out
from atoll.node.core.disk import IllegalStep
from atoll.node.core.lanes import snapshots
from atoll.node.core.lanes.lane import SnapshotPhase, SnapshotStep
from tests.unit.node_core.test_site import at_boundary, started

ILLEGAL = sorted(set(itertools.product(SnapshotPhase, SnapshotStep)) - snapshots.TRANSITIONS.keys(), key=str)


@pytest.mark.parametrize(("phase", "step"), ILLEGAL)
def test_an_illegal_step_of_the_snapshot_is_told_with_its_story_and_changes_nothing(
    phase: SnapshotPhase, step: SnapshotStep
) -> None:
    drive = started()
    at_boundary(drive)
    free, write, seal, consume = SnapshotStep.FREE, SnapshotStep.WRITE, SnapshotStep.SEAL, SnapshotStep.CONSUME
    ways = {"free": (), "writing": (write,), "sealed": (write, seal), "consumed": (write, seal, consume)}
    drive.take_snapshot_steps(free, *ways[phase.value])
    told = f"the snapshot {step.value} while it is {phase.value}: is to be written; is sealed; is free"
    with pytest.raises(IllegalStep, match=told):
        drive.take_snapshot_steps(step)
    assert drive.snapshot_phase() == phase.value


def test_in_production_the_workers_are_started_anew_and_a_person_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    drive = started()
    sealed_event = e.SnapshotSealed(
        generation=drive.generation, step=10, tokens=100, num_steps=10, mean_loss=1.0, train_s=1.0
    )
    drive.ask(10)
    assert drive.snapshot_phase() == "writing"
    monkeypatch.delitem(snapshots.TRANSITIONS, (SnapshotPhase.WRITING, SnapshotStep.SEAL))
    drive.out = drive.core.handle(sealed_event, drive.now)
    told = [o.text for o in drive.out if isinstance(o, out.Report) and o.level == logging.ERROR]
    assert "a fault of this node: the snapshot is sealed while it is writing" in told[0]
    assert out.StopWorkers(1) in drive.out
    assert drive.wants(out.StartWorkers)
    assert drive.snapshot_phase() == "free"
