"""A site keeps the model that commits say is the best so far, and none of a void commit."""

from __future__ import annotations

from dataclasses import replace

from atoll.node.core import events as e
from atoll.node.core import outputs as out
from atoll.protocol import messages as m
from tests.unit.node_core.test_site import HASH, SETTINGS, Driver, at_boundary, commit, exchanged, opened, plan, started


def applied(drive: Driver, number: int, best: int | None) -> list[out.Output]:
    """A commit that says so; what the site wants then of its models."""
    said = None if best is None else m.Best(commit=best, run_step=10 * best, site_id=2, value=2.5)
    drive.receive(replace(commit(number, number), best=said, next=opened(number + 1, number)))
    found = drive(e.CommitApplied(commit=number, state_hash=HASH))
    drive(e.Published(e.Values(number)))
    return [one for one in found if isinstance(one, out.KeepBest | out.SaveModel | out.DropBest)]


def a_site_at_commit_1() -> Driver:
    drive = started(settings=replace(SETTINGS, best_by="val_loss", save_every=1))
    at_boundary(drive)
    drive.receive(plan(1))
    exchanged(drive, 1)
    assert [type(one) for one in applied(drive, 1, None)] == [out.SaveModel]
    drive(e.ModelSaved(commit=1))
    drive(e.ModelKept(commit=1))
    return drive


def test_it_is_kept_before_the_next_one_takes_its_place_and_once() -> None:
    drive = a_site_at_commit_1()
    first, second = applied(drive, 2, 1)
    assert (first, type(second)) == (out.KeepBest(1), out.SaveModel)
    assert not any(isinstance(one, out.KeepBest) for one in applied(drive, 3, 1))


def test_one_of_a_void_commit_is_removed_and_the_one_before_is_asked_for_again() -> None:
    drive = a_site_at_commit_1()
    applied(drive, 2, 1)
    found = drive.receive(m.RolledBack(branch=1, commit=1, reason="atoll rollback"))
    assert out.DropBest(1) in found
    drive(e.DiskRolledBack(branch=1, held=(1, HASH)))
    drive.receive(opened(4, 1))
    assert out.KeepBest(1) not in drive.out, "no commit has said so"
