"""The ranks have a copy of each fragment: a commit changes those that it is of. The values are checked with torch, in
tests/process/test_fragments.py, and in the simulator."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.node.core import events as e
from atoll.node.core import outputs as out
from atoll.node.core.disk import Outer
from atoll.node.core.events import AnswerKind, Difference, MergeMode, Values
from atoll.protocol import messages as m
from atoll.protocol.sync_settings import SyncSettings
from tests.unit.node_core.test_site import HASH, SETTINGS, Driver, commit, exchanged, opened, plan

TWO = replace(SETTINGS, sync=SyncSettings(every=20, fragments=2))
ALL = 2


def of(fragment: int, sync: int, base: int, num_steps: int = 10) -> m.Open:
    return replace(opened(sync, base, num_steps), fragment=fragment)


def commit_of(fragment: int, number: int, following: int, contributors: tuple[int, ...] = (1, 2)) -> m.Commit:
    made = commit(number, number, contributors=contributors)
    return replace(made, fragment=fragment, next=of(following, number + 1, number))


def starting() -> Driver:
    """A member at commit 0 whose sync is of fragment 0. Its ranks ask."""
    drive = Driver(Outer(commit=0, state_hash=HASH, run_step=0, run_tokens=0), settings=TWO)
    drive.up_to_admitted(m.AdmittedAs.MEMBER)
    drive.ask(0)
    drive.receive(of(0, 1, 0))
    return drive


def take(drive: Driver, content: e.Content, step: int, seq: int) -> e.Answer:
    """PUBLISH is filled with it, and the ranks take it and ask again."""
    assert drive.wants(out.PublishState) == out.PublishState(content)
    drive(e.Published(content))
    answer = drive.answer()
    assert (answer.kind, answer.fragment, answer.version) == (AnswerKind.APPLY, content.fragment, content.version)
    drive.merged(content.version)
    if isinstance(content, Difference):
        values = Values(content.version, content.fragment)
        assert drive.wants(out.PublishState) == out.PublishState(values), "the next difference starts from them"
        drive(e.Published(values))
    if answer.next_step == step:
        drive.ask(step, seq)
    return answer


def started() -> Driver:
    drive = starting()
    first = take(drive, Values(0, 0), 0, 1)
    second = take(drive, Values(0, 1), 0, 2)
    assert (first.fresh, first.next_step) == (True, 0), "not before all are taken"
    assert (second.fresh, second.next_step) == (False, 10)
    return drive


def seal(drive: Driver, step: int, fragment: int, sync: int) -> None:
    drive.ask(step)
    assert drive.answer() == e.Answer(kind=AnswerKind.SNAPSHOT, fragment=fragment)
    drive.sealed(step)
    assert [s.sync for s in drive.sent() if isinstance(s, m.Ready)] == [sync]
    drive.ask(step, 1)


def exchange(drive: Driver, found: m.Commit) -> None:
    """The site contributes to it, and applies it."""
    drive.receive(replace(plan(found.sync, base=found.commit - 1), fragment=found.fragment))
    exchanged(drive, found.sync)
    applied(drive, found)


def applied(drive: Driver, found: m.Commit) -> None:
    drive.receive(found)
    drive(e.CommitApplied(commit=found.commit, state_hash=HASH))


def test_values_of_all_fragments_come_before_the_first_step() -> None:
    started()


def test_syncs_take_turns_and_only_what_a_commit_touched_is_taken() -> None:
    drive = started()
    seal(drive, 10, fragment=0, sync=1)
    exchange(drive, commit_of(0, 1, following=1))
    assert take(drive, Values(1, 0), 10, 2).next_step == 20
    seal(drive, 20, fragment=1, sync=2)
    exchange(drive, commit_of(1, 2, following=0))
    assert take(drive, Values(2, 1), 20, 2).next_step == 30
    seal(drive, 30, fragment=0, sync=3)


def test_a_commit_without_this_site_is_a_difference_to_what_its_copy_of_the_fragment_took_last() -> None:
    drive = started()
    for number in (1, 2, 3):  # the others are ahead
        applied(drive, commit_of((number + 1) % 2, number, following=number % 2, contributors=(2, 3)))
    drive.ask(5)
    assert take(drive, Difference(0, 3, 0), 5, 1).next_step == 5, "and the other fragment"
    last = take(drive, Difference(0, 3, 1), 5, 2)
    assert (last.mode, last.next_step) == (MergeMode.SHIFT, 10)
    applied(drive, commit_of(1, 4, following=0, contributors=(2, 3)))
    drive.ask(6)
    take(drive, Difference(3, 4, 1), 6, 1)
    applied(drive, commit_of(0, 5, following=1, contributors=(2, 3)))
    drive.ask(7)
    take(drive, Difference(3, 5, 0), 7, 1)


def test_a_snapshot_of_all_is_in_the_copy_of_each_fragment() -> None:
    """As the last sync is, though it turns out not to be the last."""
    drive = started()
    drive.receive(of(ALL, 2, 0, num_steps=5))
    drive.ask(5)
    assert drive.answer() == e.Answer(kind=AnswerKind.SNAPSHOT, fragment=ALL)
    drive.sealed(5, num_steps=5)
    drive.ask(5, 1)
    found = replace(commit_of(ALL, 1, following=0), sync=2, next=of(0, 3, 1))
    exchange(drive, found)
    for fragment in range(2):
        assert take(drive, Values(1, fragment), 5, 2 + fragment).mode is MergeMode.REPLACE
        assert (drive.snapshot_phase() == "free") == (fragment == 1), "kept until all copies have merged it"
    seal(drive, 15, fragment=0, sync=3)


def test_the_starting_state_is_made_of_a_snapshot_of_all() -> None:
    drive = Driver(settings=TWO)
    drive.up_to_admitted(m.AdmittedAs.SEEDER)
    drive.ask(0)
    assert drive.answer() == e.Answer(kind=AnswerKind.SNAPSHOT, fragment=ALL)
    drive.sealed(0, tokens=0, num_steps=0)
    drive.wants(out.SeedState)


def test_a_run_is_over_when_the_ranks_have_taken_all_fragments() -> None:
    drive = started()
    drive.receive(of(ALL, 2, 0))
    drive.ask(10)
    drive.sealed(10)
    drive.ask(10, 1)
    exchange(drive, replace(commit_of(ALL, 1, following=0), sync=2, next=None, final=True))
    take(drive, Values(1, 0), 10, 2)
    take(drive, Values(1, 1), 10, 3)
    assert drive.answer().kind is AnswerKind.STOP


@pytest.mark.parametrize("fragment", [3, 1 << 31])
def test_a_fragment_that_the_run_does_not_have_ends_the_site(fragment: int) -> None:
    drive = started()
    drive.receive(of(fragment, 2, 0))
    found = drive.wants(out.Exit)
    assert isinstance(found, out.Exit)
    assert found.text == f"Open of fragment {fragment}: this run has 2, from 0 on"
