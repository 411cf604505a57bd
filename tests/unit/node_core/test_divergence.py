"""A loss that is not finite right after a commit does not end a site whose loss was finite before it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.node.core import events as e
from atoll.node.core import outputs as out
from atoll.node.core.events import AnswerKind
from atoll.protocol import messages as m
from atoll.protocol.errors import ConfigError, NonFiniteError
from tests.unit.node_core.test_crashes import LIMITS, reconnected, starts, wait
from tests.unit.node_core.test_gradients import GRADIENTS
from tests.unit.node_core.test_in_flight import Story, committed, of, ranges
from tests.unit.node_core.test_site import HASH, Driver, at_boundary, commit, exchanged, opened, plan, started


def diverge(drive: Driver, exit_code: int = NonFiniteError.exit_code, *, by_script: bool = False) -> None:
    drive(
        e.WorkersFailed(
            generation=drive.generation,
            kind=e.FailureKind.FATAL,
            text="the loss became nan",
            exit_code=exit_code,
            num_steps=3,
            by_script=by_script,
        )
    )


def after_commit(drive: Driver) -> Driver:
    """Its workers train from commit 1; in the window before it their loss was finite."""
    at_boundary(drive)
    drive.receive(plan(1))
    exchanged(drive, 1)
    drive.receive(commit(1, 1))
    drive(e.CommitApplied(commit=1, state_hash=HASH))
    drive(e.Published(e.Values(1)))
    answer = drive.answer()
    assert (answer.kind, answer.version) == (AnswerKind.APPLY, 1)
    drive.merged(1)
    return drive


def test_workers_hear_of_a_new_length_with_a_commit() -> None:
    drive = started()
    at_boundary(drive)
    drive.receive(plan(1))
    exchanged(drive, 1)
    drive.receive(replace(commit(1, 1), changed_json='{"run.steps": 900}'))
    drive(e.CommitApplied(commit=1, state_hash=HASH))
    drive(e.Published(e.Values(1)))
    answer = drive.answer()
    assert (answer.version, answer.run_length) == (1, 900)


def merge(story: Story, step: int, version: int, fragment: int) -> None:
    """They train on while it is written for them."""
    story.asks(step)
    assert story.wants(out.PublishState) == out.PublishState(e.Values(version, fragment))
    story(e.Published(e.Values(version, fragment)))
    story.asks(step + 1)
    assert story.answer().mode is e.MergeMode.MERGE
    story.merged(version)
    story.asks(step + 1)


@pytest.fixture(name="in_flight")
def _in_flight() -> Story:
    """Ranks have taken commit 1 and train for sync 3, sync 2 is in flight."""
    two = Story()
    two.seal(10, 0)
    two.receive(of(1, 2))
    two.seal(20, 1)
    two.exchanges(1, 0)
    two.exchanges(2, 1)
    two.applies(committed(1, 1, 0, done=ranges((0, 20))))
    two.receive(of(2, 3, base=1))
    merge(two, 21, 1, 0)
    return two


def test_a_commit_that_is_applied_while_ranks_write_a_snapshot_is_none_on_which_their_loss_was_finite(
    in_flight: Story,
) -> None:
    in_flight.asks(30)
    assert in_flight.answer().kind is AnswerKind.SNAPSHOT
    in_flight.applies(committed(2, 2, 1, done=ranges((20, 40))))
    in_flight.sealed_at(30, 60)
    merge(in_flight, 31, 2, 1)
    diverge(in_flight)
    assert [s for s in in_flight.sent() if isinstance(s, m.Leave)] == []
    assert [s.commit for s in in_flight.sent() if isinstance(s, m.Diverged)] == [2]


def test_a_commit_that_the_ranks_have_not_taken_is_not_the_one_that_spoiled_their_loss(in_flight: Story) -> None:
    in_flight.applies(committed(2, 2, 1, done=ranges((20, 40))))
    diverge(in_flight)
    assert [s.commit for s in in_flight.sent() if isinstance(s, m.Diverged)] == [1]


def test_the_site_stays_says_so_and_its_workers_wait_for_the_run_to_go_back() -> None:
    drive = after_commit(started())
    diverge(drive)
    assert [s for s in drive.sent() if isinstance(s, m.Leave)] == []
    assert [s for s in drive.sent() if isinstance(s, m.Diverged)] == [m.Diverged(commit=1, text="the loss became nan")]
    drive.wants(out.StopWorkers)
    assert not starts(drive)
    reconnected(drive)
    drive.receive(m.Admitted(site_id=1, admitted_as=m.AdmittedAs.MEMBER, run_seed=7))
    assert any(isinstance(s, m.Diverged) for s in drive.sent()), "on a new stream it is said again"


def test_the_workers_begin_anew_when_the_run_has_gone_back() -> None:
    drive = after_commit(started())
    diverge(drive)
    drive.receive(m.RolledBack(branch=1, commit=0, reason="most of them"))
    drive.wants(out.RollBack)
    drive(e.DiskRolledBack(branch=1, held=(0, HASH)))
    deadline = drive.deadline()
    assert deadline is not None
    assert deadline <= drive.now
    drive(e.Tick())
    assert starts(drive)


def test_without_that_they_begin_anew_from_the_runs_state_after_a_lease() -> None:
    drive = after_commit(started())
    diverge(drive)
    assert wait(drive) == LIMITS.lease_s
    assert starts(drive)


def test_once_more_without_a_finite_window_is_its_own() -> None:
    drive = after_commit(started())
    diverge(drive)
    wait(drive)
    drive.joined()
    drive.ask(0)
    answer = drive.answer()
    assert (answer.kind, answer.version) == (AnswerKind.APPLY, 1)
    drive.merged(1)
    diverge(drive)
    assert drive.wants(out.Exit) == out.Exit(NonFiniteError.exit_code, "the loss became nan")


def test_a_loss_that_was_not_finite_before_or_another_failure_ends_the_site() -> None:
    drive = started()
    diverge(drive)
    assert drive.wants(out.Exit) == out.Exit(NonFiniteError.exit_code, "the loss became nan")
    drive = started()
    at_boundary(drive)  # finite, from the same commit
    diverge(drive)
    assert drive.wants(out.Exit) == out.Exit(NonFiniteError.exit_code, "the loss became nan")
    drive = after_commit(started())
    diverge(drive, ConfigError.exit_code)
    assert drive.wants(out.Exit) == out.Exit(ConfigError.exit_code, "the loss became nan")


def test_where_the_script_seems_at_fault_the_site_says_so_to_the_run_too_and_waits_for_nothing() -> None:
    drive = after_commit(started())
    diverge(drive, by_script=True)
    assert [s for s in drive.sent() if isinstance(s, (m.Leave, m.Diverged))] == [
        m.Diverged(commit=1, text="the loss became nan")
    ], "what only looks like the script's doing at each site may be the commit's"
    (said,) = [o.text for o in drive.out if isinstance(o, out.Report)]
    assert said == (
        "workers end since commit 1, maybe by steps of their own script, restarting them from the outer state: "
        "the loss became nan"
    )
    assert starts(drive), "at once: nothing is waited for"
    drive.joined()
    drive.ask(0)
    assert drive.answer().kind is AnswerKind.APPLY
    drive.merged(1)
    diverge(drive, by_script=True)
    assert drive.wants(out.Exit) == out.Exit(NonFiniteError.exit_code, "the loss became nan")


def test_where_the_script_seemed_at_fault_and_the_run_goes_back_its_new_workers_take_the_state_before() -> None:
    drive = after_commit(started())
    diverge(drive, by_script=True)
    drive.joined()
    drive.receive(m.RolledBack(branch=1, commit=0, reason="most of them"))
    drive.wants(out.RollBack)
    drive(e.DiskRolledBack(branch=1, held=(0, HASH)))
    assert not drive.blames_commit()
    assert [o for o in drive.out if isinstance(o, out.Exit)] == []


def next_commit(drive: Driver, number: int, *, num_steps: int, tokens: int = 100) -> None:
    """A window of which so many steps count, `num_steps` with a loss, and the commit after it."""
    drive.receive(opened(number, number - 1))
    step = 10 * number
    drive.ask(step)
    assert drive.answer().kind is AnswerKind.SNAPSHOT
    drive.sealed(step, tokens=tokens, num_steps=num_steps)
    drive.receive(plan(number, base=number - 1))
    exchanged(drive, number)
    drive.receive(commit(number, number))
    drive(e.CommitApplied(commit=number, state_hash=HASH))
    drive(e.Published(e.Values(number)))
    drive.ask(step, 1)
    assert drive.answer().kind is AnswerKind.APPLY
    drive.merged(number)


def test_a_row_of_bad_losses_that_began_commits_ago_is_not_blamed_on_the_last_one() -> None:
    drive = started()
    next_commit(drive, 1, num_steps=10)
    for number in (2, 3):
        next_commit(drive, number, num_steps=0)
    diverge(drive)
    assert [s for s in drive.sent() if isinstance(s, m.Diverged)] == []
    assert drive.wants(out.Exit) == out.Exit(NonFiniteError.exit_code, "the loss became nan")


def test_a_row_within_one_commit_is_still_held_against_that() -> None:
    """No site has tokens after it: no other commit comes, and windows go on from this one."""
    drive = started()
    next_commit(drive, 1, num_steps=10)
    next_commit(drive, 2, num_steps=10)
    drive.receive(opened(3, 2))
    drive.ask(30)
    drive.sealed(30, tokens=0, num_steps=0)
    diverge(drive)
    assert [s.commit for s in drive.sent() if isinstance(s, m.Diverged)] == [2]


def test_after_another_finite_window_a_row_that_is_over_counts_no_more() -> None:
    drive = started()
    for number, num_steps in enumerate((10, 0, 0, 10), start=1):
        next_commit(drive, number, num_steps=num_steps)
    diverge(drive)
    assert [s.commit for s in drive.sent() if isinstance(s, m.Diverged)] == [4]


@pytest.mark.parametrize(("tokens", "blamed"), [(100, [3]), (0, [])])
def test_where_the_nodes_do_the_steps_those_without_a_loss_count_as_bad_if_nothing_is_in_them(
    tokens: int, blamed: list[int]
) -> None:
    """A script may give a loss now and then."""
    drive = started(settings=GRADIENTS)
    next_commit(drive, 1, num_steps=1)
    for number in (2, 3):
        next_commit(drive, number, num_steps=0, tokens=tokens)
    diverge(drive)
    assert [s.commit for s in drive.sent() if isinstance(s, m.Diverged)] == blamed
