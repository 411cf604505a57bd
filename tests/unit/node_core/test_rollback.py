"""A site and commits that nobody can reach: it tries its own log, says so, and goes back when it is told to."""

from __future__ import annotations

from atoll.node.core import events as e
from atoll.node.core import outputs as out
from atoll.node.core.disk import Outer
from atoll.protocol import messages as m
from atoll.protocol.settings import settings_to_json
from tests.unit.node_core.test_site import HASH, SETTINGS, Driver, commit, exchanged, opened, plan, sources_of, started

ATTESTED = (m.Attestation(commit=0, state_hash=HASH),)


def behind() -> Driver:
    """Started again at commit 0 of a run that is at commit 2; nobody else is there."""
    drive = Driver(Outer(commit=0, state_hash=HASH, run_step=0, run_tokens=0))
    drive(e.SessionOpened())
    drive.receive(m.Welcome(settings_json=settings_to_json(SETTINGS), last_commit=2))
    drive.joined()
    drive.receive(m.Admitted(site_id=1, admitted_as=m.AdmittedAs.MEMBER, run_seed=7))
    assert m.FindSources(has_state=True, after_commit=0) in drive.sent()
    return drive


def test_without_a_donor_the_own_log_is_tried_once_and_the_coordinator_hears_of_it() -> None:
    drive = behind()
    nobody = m.Sources(attested=ATTESTED, commits=(commit(1, 1), commit(2, 2)))
    drive.receive(nobody)
    assert drive.wants(out.ApplyCommit) == out.ApplyCommit(commit(1, 1))
    drive(e.CommitApplied(commit=1, state_hash=HASH))
    assert drive.wants(out.ApplyCommit) == out.ApplyCommit(commit(2, 2))
    drive(e.ApplyFailed(2, "not in the log"))
    assert m.FindSources(has_state=True, after_commit=1, lacks_commit=2) in drive.sent()
    drive.receive(m.Sources(attested=ATTESTED, commits=(commit(2, 2),)))
    assert not [o for o in drive.out if not isinstance(o, out.Report)], "it waits"


def test_a_site_at_the_commit_that_the_run_goes_back_to_keeps_its_state() -> None:
    drive = behind()
    drive.receive(m.Sources(attested=ATTESTED, commits=(commit(1, 1), commit(2, 2))))
    drive(e.ApplyFailed(1, "not in the log"))
    drive.receive(m.RolledBack(branch=1, commit=0, reason="a power cut"))
    assert drive.wants(out.RollBack) == out.RollBack(0, 1)
    drive.receive(opened(4, 0))
    drive.receive(m.RolledBack(branch=1, commit=0, reason="again"))
    assert not [o for o in drive.out if isinstance(o, out.RollBack)]
    drive(e.DiskRolledBack(branch=1, held=(0, HASH)))
    assert not drive.sent(), "nothing has changed for the coordinator"
    drive.ask(0)
    drive(e.Published(e.Values(0)))
    assert drive.answer().kind is e.AnswerKind.APPLY


def test_a_site_too_far_behind_to_go_on_by_itself_asks_when_its_disk_is_rolled_back() -> None:
    """Its question was put off, and nothing that it could hear again brings it up."""
    drive = behind()
    drive.receive(m.RolledBack(branch=1, commit=2, reason="asked by a person"))
    drive.receive(commit(2, 2))  # the coordinator's log begins there
    assert not drive.sent()
    drive(e.DiskRolledBack(branch=1, held=(0, HASH)))
    assert drive.sent() == [m.FindSources(has_state=True, after_commit=0)]


def test_a_contribution_to_a_commit_that_stays_is_not_sent_again() -> None:
    """The site is behind the commit that the run goes back to."""
    drive = started()
    drive.ask(10)
    drive.sealed(10)
    drive.receive(plan(1))
    exchanged(drive, 1)
    drive.receive(commit(1, 1))
    drive(e.ApplyFailed(1, "not in the log"))
    drive.receive(m.RolledBack(branch=1, commit=1, reason="a power cut"))
    drive(e.DiskRolledBack(branch=1, held=(0, HASH)))
    drive.receive(sources_of(1))
    drive(e.StateFetched(commit=1, state_hash=HASH, run_step=10, run_tokens=100))
    assert drive.has_contributed()


def in_a_commit_that_cannot_be_applied() -> Driver:
    """A site that contributed leased samples to commit 1, whose payloads are not in its log."""
    drive = started()
    drive(e.DataAnnounced(generation=1, num_samples=1000, round_samples=10, rounds_ahead=0))
    drive.receive(m.Leases(ranges=(m.DataRange(first=0, num_samples=300),)))
    drive.ask(10)
    drive(
        e.SnapshotSealed(generation=1, step=10, tokens=100, num_steps=10, mean_loss=1.0, train_s=1.0, samples_used=100)
    )
    drive.receive(plan(1))
    drive.receive(commit(1, 1, done=drive.snapshot_samples()))
    drive(e.ApplyFailed(1, "not in the log"))
    return drive


def test_what_was_contributed_to_a_void_commit_is_not_leased_any_more() -> None:
    """The samples are open again, for others too: what the ranks trained on them must not be in a contribution."""
    drive = in_a_commit_that_cannot_be_applied()
    drive.receive(m.RolledBack(branch=1, commit=0, reason="a power cut"))
    drive.receive(opened(4, 0))
    drive(e.DiskRolledBack(branch=1, held=(0, HASH)))
    assert not drive.leased_samples(), "the coordinator says what is left of them"
    assert drive.discards_local()


def test_what_was_contributed_to_a_commit_that_nobody_had_any_more_is_void_with_it() -> None:
    """The donor of commit 1 was gone before it gave it: the fetch ends at commit 0."""
    drive = in_a_commit_that_cannot_be_applied()
    drive.receive(sources_of(1, commit(1, 1)))
    drive(e.StateFetched(commit=0, state_hash=HASH, run_step=0, run_tokens=0))
    assert not drive.has_contributed(), "what it holds is not in that commit"
    drive.receive(m.RolledBack(branch=1, commit=0, reason="a power cut"))
    drive.receive(opened(4, 0))
    drive(e.DiskRolledBack(branch=1, held=(0, HASH)))
    assert not drive.leased_samples(), "the coordinator says what is left of them"
    assert drive.discards_local()


def test_nothing_is_begun_in_a_log_from_which_void_attempts_are_about_to_be_removed() -> None:
    drive = started()
    drive.ask(10)
    drive.sealed(10)
    drive.receive(commit(1, 1, contributors=(2,)))
    drive.wants(out.ApplyCommit)
    drive.receive(m.RolledBack(branch=1, commit=0, reason="a power cut"))
    drive.receive(opened(4, 0))
    assert not drive.sent(), "a Ready would be followed by a plan"
    drive.receive(plan(4, contributors=(2,), receivers=(1,)))
    assert not [o for o in drive.out if isinstance(o, out.BeginExchange)]
    drive(e.ApplyFailed(1, "not in the log"))
    assert drive.wants(out.RollBack) == out.RollBack(0, 1)
    drive(e.DiskRolledBack(branch=1, held=(0, HASH)))
    (ready,) = drive.sent()
    assert isinstance(ready, m.Ready)
    assert ready.sync == 4


def test_a_site_with_void_commits_rolls_its_disk_back_and_says_hello_anew() -> None:
    drive = Driver(Outer(commit=2, state_hash=HASH, run_step=0, run_tokens=0))
    drive(e.SessionOpened())
    drive.receive(m.Welcome(settings_json=settings_to_json(SETTINGS), last_commit=5))
    drive.receive(m.RolledBack(branch=3, commit=1, reason="a power cut"))
    assert drive.wants(out.RollBack) == out.RollBack(1, 3)
    drive(e.DiskRolledBack(branch=3, held=(1, HASH)))
    (hello,) = drive.sent()
    assert isinstance(hello, m.Hello)
    assert (hello.last_commit, hello.branch) == (1, 3)


def test_a_second_rollback_while_the_first_is_carried_out_follows_it() -> None:
    drive = Driver(Outer(commit=2, state_hash=HASH, run_step=0, run_tokens=0))
    drive(e.SessionOpened())
    drive.receive(m.Welcome(settings_json=settings_to_json(SETTINGS), last_commit=5))
    drive.receive(m.RolledBack(branch=1, commit=1, reason="a power cut"))
    assert drive.wants(out.RollBack) == out.RollBack(1, 1)
    drive.receive(m.RolledBack(branch=2, commit=0, reason="another"))
    drive(e.DiskRolledBack(branch=1, held=(1, HASH)))
    assert drive.wants(out.RollBack) == out.RollBack(0, 2)
    drive(e.DiskRolledBack(branch=2, held=(0, HASH)))
    (hello,) = drive.sent()
    assert isinstance(hello, m.Hello)
    assert (hello.last_commit, hello.branch) == (0, 2)


def test_what_the_first_rollback_voids_is_void_although_the_second_goes_back_less_far() -> None:
    """The disk is still busy when the run, which has gone on meanwhile, goes back again."""
    drive = Driver(Outer(commit=2, state_hash=HASH, run_step=0, run_tokens=0))
    drive.up_to_admitted(m.AdmittedAs.MEMBER, 1)
    drive.receive(commit(3, 3, contributors=(2, 3)))
    assert drive.wants(out.ApplyCommit) == out.ApplyCommit(commit(3, 3, contributors=(2, 3)))
    drive.receive(m.RolledBack(branch=1, commit=0, reason="what followed is of no use"))
    drive.receive(m.RolledBack(branch=2, commit=2, reason="asked by a person"))
    drive(e.CommitApplied(commit=3, state_hash=HASH))
    assert drive.wants(out.RollBack) == out.RollBack(0, 2), "commits 1 and 2 on this disk are of the first branch"


def test_a_void_commit_that_cannot_be_applied_is_not_lacking_in_the_new_branch() -> None:
    drive = started()
    drive.receive(commit(1, 1))
    assert drive.wants(out.ApplyCommit) == out.ApplyCommit(commit(1, 1))
    drive.receive(m.RolledBack(branch=1, commit=0, reason="a power cut"))
    drive(e.ApplyFailed(1, "not in the log"))
    assert drive.lacks() == 0


def test_a_commit_of_the_new_branch_is_not_taken_for_the_void_one_of_its_number() -> None:
    """The void one is still being applied when the new one is here. Its hash is nobody's to hear."""
    for applied in (True, False):
        drive = started()
        drive.receive(commit(1, 1, contributors=(2, 3)))
        assert drive.wants(out.ApplyCommit) == out.ApplyCommit(commit(1, 1, contributors=(2, 3)))
        drive.receive(m.RolledBack(branch=1, commit=0, reason="what followed is of no use"))
        drive.receive(opened(2, 0))
        new = commit(1, 2, contributors=(2, 3))
        drive.receive(new)
        drive(e.CommitApplied(commit=1, state_hash=HASH) if applied else e.ApplyFailed(1, "not in the log"))
        assert drive.wants(out.RollBack) == out.RollBack(0, 1)
        assert not drive.sent(), "the void commit is of no use to anybody"
        drive(e.DiskRolledBack(branch=1, held=(0, HASH)))
        assert drive.wants(out.ApplyCommit) == out.ApplyCommit(new), f"applied: {applied}"
        drive(e.CommitApplied(commit=1, state_hash=bytes(32)))
        assert m.Applied(commit=1, state_hash=bytes(32)) in drive.sent()


def test_the_end_of_the_run_waits_until_void_commits_are_off_the_disk() -> None:
    drive = Driver(Outer(commit=5, state_hash=HASH, run_step=0, run_tokens=0))
    drive(e.SessionOpened())
    drive.receive(m.Welcome(settings_json=settings_to_json(SETTINGS), last_commit=4))
    drive.receive(m.RolledBack(branch=1, commit=1, reason="a power cut"))
    assert drive.wants(out.RollBack) == out.RollBack(1, 1)
    drive.receive(m.Finished(commit=4, reason="its length is reached", run_step=40, run_tokens=400))
    assert not [o for o in drive.out if isinstance(o, out.Exit)]
    drive(e.DiskRolledBack(branch=1, held=(1, HASH)))
    (end,) = [o for o in drive.out if isinstance(o, out.Exit)]
    assert (end.code, "the run is over at commit 4" in end.text) == (0, True)


def test_with_nothing_left_on_its_disk_it_fetches() -> None:
    drive = Driver(Outer(commit=2, state_hash=HASH, run_step=0, run_tokens=0))
    drive(e.SessionOpened())
    drive.receive(m.Welcome(settings_json=settings_to_json(SETTINGS), last_commit=5))
    drive.receive(m.RolledBack(branch=1, commit=1, reason="a power cut"))
    drive.joined()
    drive.receive(m.Admitted(site_id=1, admitted_as=m.AdmittedAs.JOINER, run_seed=7))
    assert not [s for s in drive.sent() if isinstance(s, m.FindSources)], "its disk is not ready"
    drive(e.DiskRolledBack(branch=1, held=None))
    assert drive.sent() == [m.FindSources(has_state=False, after_commit=0)]


def test_a_commit_that_is_being_applied_is_waited_for_and_does_not_count() -> None:
    drive = started()
    drive.ask(10)
    drive.sealed(10)
    drive.receive(plan(1))
    exchanged(drive, 1)
    drive.receive(commit(1, 1))
    drive.wants(out.ApplyCommit)
    drive.receive(m.RolledBack(branch=1, commit=0, reason="a power cut"))
    assert not [o for o in drive.out if isinstance(o, out.RollBack)]
    drive(e.CommitApplied(commit=1, state_hash=HASH))
    assert drive.wants(out.RollBack) == out.RollBack(0, 1)
    assert drive.holds() == 0


def test_nothing_is_written_for_the_workers_from_a_state_that_is_about_to_be_rolled_back() -> None:
    """The disk is at the void commit although the site holds the one before; new workers ask meanwhile."""
    drive = started()
    drive.receive(commit(1, 1, contributors=(2, 3)))
    drive.wants(out.ApplyCommit)
    drive(e.WorkersFailed(generation=1, kind=e.FailureKind.CRASHED, text="killed", num_steps=1))
    drive.joined()
    drive.ask(0)
    drive.receive(m.RolledBack(branch=1, commit=0, reason="a power cut"))
    drive.receive(opened(3, 0))
    drive(e.CommitApplied(commit=1, state_hash=HASH))
    assert drive.wants(out.RollBack) == out.RollBack(0, 1)
    assert not [o for o in drive.out if isinstance(o, out.PublishState)], "the disk holds commit 1"
    drive(e.Tick())
    assert not [o for o in drive.out if isinstance(o, out.PublishState)], "or nothing"
    drive(e.DiskRolledBack(branch=1, held=(0, HASH)))
    assert drive.wants(out.PublishState) == out.PublishState(e.Values(0))
    drive(e.Published(e.Values(0)))
    assert drive.answer().kind is e.AnswerKind.APPLY


def test_going_back_does_not_wait_for_ever_for_a_difference_that_nobody_takes_any_more() -> None:
    """The workers were to shift; they take whole values, as the run is over, and the disk goes back after that."""
    drive = started()
    drive.receive(commit(1, 1, contributors=(2, 3)))
    drive(e.CommitApplied(commit=1, state_hash=HASH))
    drive.ask(10)
    assert drive.wants(out.PublishState) == out.PublishState(e.Difference(0, 1))
    drive.receive(m.Finished(commit=1, reason="complete", run_step=10, run_tokens=300))
    drive.receive(m.RolledBack(branch=1, commit=1, reason="asked by a person"))
    drive(e.Published(e.Difference(0, 1)))
    assert drive.wants(out.PublishState) == out.PublishState(e.Values(1))
    drive(e.Published(e.Values(1)))
    assert drive.wants(out.RollBack) == out.RollBack(1, 1)


# --- back to a commit that sites have passed


def test_it_puts_an_older_state_together_and_says_what_came_of_it() -> None:
    drive = started()
    asked = m.RebuildCommit(commit=0, state_hash=HASH, last_commit=7)
    drive.receive(asked)
    assert drive.wants(out.Fulfil) == out.Fulfil(asked)
    assert drive.holds() is not None, "nothing is given up for it"
    rebuilt = m.CommitRebuilt(commit=0, state_hash=HASH, has_oldest=True)
    drive(e.Fulfilled(rebuilt))
    assert drive.sent() == [rebuilt]


def test_a_site_without_a_state_cannot_and_says_so_at_once() -> None:
    drive = Driver()
    drive(e.SessionOpened())
    drive.receive(m.Welcome(settings_json=settings_to_json(SETTINGS), last_commit=5))
    drive.receive(m.RebuildCommit(commit=1, state_hash=HASH, last_commit=5))
    assert drive.sent() == [m.CommitRebuilt(commit=1, text="it holds no state")]
    assert not [o for o in drive.out if isinstance(o, out.Fulfil)]
