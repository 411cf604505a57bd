"""Commits that nobody can reach: who is waited for, what goes back, what is told to whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from atoll.coordinator.core import events as e
from atoll.coordinator.core.log import commits
from atoll.node.dataplane.outer_state import MOST_HASH_LISTS
from atoll.protocol import messages as m
from atoll.protocol.messages import AdmittedAs, Deposit
from tests.harness.coordinator_story import Story, ranges_of, some_settings


def committed(*names: str, count: int = 2, log_commits: int = 8) -> Story:
    """These sites at commit `count`."""
    settings = some_settings(min_sites=len(names), steps=1000)
    story = Story(replace(settings, sync=replace(settings.sync, log_commits=log_commits)))
    story.start(*names)
    for number in range(count):
        story.commit_one(*names, state=f"s{number}", following=f"s{number + 1}")
    return story


def power_cut(story: Story, *names: str) -> None:
    for name in names:
        story.drop(name)
    story.wait(story.limits.lease_s)


def back(story: Story, name: str, commit: int, *, incarnation: int = 2, lacks: bool = True, branch: int = 0) -> None:
    """Started again with this commit, and without the payloads of the next one."""
    story.connect(name, incarnation=incarnation, state=(commit, f"s{commit}"), branch=branch)
    story.offer(name)
    story.sources(name, after=commit, lacks=commit + 1 if lacks else 0)


def test_everybody_back_with_less_goes_on_from_there_and_the_coordinators_restart_changes_nothing() -> None:
    story = committed("a", "b", count=3)
    tokens_at_1 = story.view.commits[0].run_tokens
    power_cut(story, "a", "b")
    back(story, "a", 1)
    assert story.view.last_commit == 3, "b may have it"
    assert "b (site 2) may have them" in story.view.state
    back(story, "b", 1)
    assert (story.view.last_commit, story.view.branch, story.view.state) == (1, 1, "training")
    (record,) = story.rollbacks
    assert (record.commit, record.voided) == (1, (2, 3))
    assert story.last("a", m.Open).run_tokens == tokens_at_1
    before = story.view
    story.restart()
    assert (story.view.last_commit, story.view.branch, story.view.run_tokens) == (1, 1, before.run_tokens)
    for name in "ab":
        story.connect(name, incarnation=2, state=(1, "s1"), branch=1)
        story.offer(name)
    story.commit_one("a", "b", state="s1", following="t2")
    assert story.last("a", m.Commit).branch == 1
    assert story.view.commits[-1].commit == 2


def test_going_back_and_the_sync_that_follows_are_one_transaction() -> None:
    """Between them the coordinator may die; then nothing would ever open a sync again."""
    story = committed("a")
    transactions: list[tuple[e.Record, ...]] = []
    keep = story.store.persist

    def persist(term: int, records: Sequence[e.Record], wall_time_s: float) -> tuple[Deposit, ...]:
        transactions.append(tuple(records))
        return keep(term, records, wall_time_s)

    story.store.persist = persist  # type: ignore[method-assign]
    power_cut(story, "a")
    back(story, "a", 1)
    (found,) = [t for t in transactions if any(isinstance(r, e.RollbackRecord) for r in t)]
    assert any(isinstance(r, e.OpenRecord) for r in found)


def test_a_site_that_has_not_tried_its_own_log_is_waited_for() -> None:
    story = committed("a", "b")
    power_cut(story, "a", "b")
    back(story, "a", 1)
    back(story, "b", 1, lacks=False)
    assert (story.view.branch, story.view.state) == (0, "training")
    story.applied("b", 2, "s2")
    assert [d.commit for d in story.last("a", m.Sources).donors] == [2]
    assert story.view.last_commit == 2


def test_a_site_whose_workers_are_starting_is_waited_for() -> None:
    story = committed("a", "b")
    power_cut(story, "a", "b")
    back(story, "a", 1)
    story.connect("b", incarnation=2, state=(1, "s1"))
    assert "b (site 2) (starting) may have them" in story.view.state
    story.offer("b")
    story.sources("b", after=1, lacks=2)
    assert story.view.branch == 1


def test_a_run_that_is_to_stop_waits_for_those_who_may_have_its_newest_commit_and_says_what_to_do() -> None:
    """Ending it there would leave it without a model; what the others may have is an operator's to give up."""
    story = committed("a", "b")
    power_cut(story, "a", "b")
    back(story, "a", 1)
    story.happens(e.StopAsked("atoll stop"))
    story.wait(10 * story.limits.lease_s)
    assert not story.view.finished
    assert "give the later commits up with `atoll rollback`" in story.view.state
    story.happens(e.RollbackAsked("atoll rollback"))
    story.commit_one("a", state="s1", following="t2")
    assert story.view.finished
    assert story.view.last_commit == 2


def test_a_site_whose_workers_are_starting_hears_that_an_operator_gave_commits_up() -> None:
    """Else it would say the old branch in its next Hello, and be told to destroy what it has done since."""
    story = committed("a", "b")
    power_cut(story, "a", "b")
    back(story, "a", 1)
    story.connect("b", incarnation=2, state=(1, "s1"))
    story.happens(e.RollbackAsked("atoll rollback"))
    assert story.last("b", m.RolledBack) == m.RolledBack(branch=1, commit=1, reason="atoll rollback")
    story.offer("b")
    story.commit_one("a", state="s1", following="t2")
    story.applied("b", 2, "t2")
    story.drop("a")
    story.drop("b")
    story.connect("b", state=(2, "t2"), branch=1)
    assert story.num("b", m.RolledBack) == 1
    assert story.holds("b") == 2


def test_a_site_that_is_starting_and_holds_more_is_waited_for_whoever_asks() -> None:
    story = committed("a", "b")
    power_cut(story, "a", "b")
    back(story, "a", 1)
    story.connect("b", incarnation=2, state=(2, "s2"))
    assert "b (site 2) is starting, and holds commit 2" in story.view.state
    story.happens(e.RollbackAsked("atoll rollback"))
    assert story.view.branch == 0
    story.offer("b")
    assert (story.view.last_commit, story.view.state) == (2, "training")


@pytest.fixture
def few_attestations(monkeypatch: pytest.MonkeyPatch) -> None:
    """In an answer: fewer than the stories have commits."""
    monkeypatch.setattr(commits, "ATTESTATIONS_IN_SOURCES", 8)


def lost_disk_and_long_way_back() -> Story:
    """The power cut left `a` far behind the newest attested commits, and `b` with nothing."""
    story = committed("a", "b", count=12, log_commits=32)
    power_cut(story, "a", "b")
    back(story, "a", 1)
    story.connect("b", incarnation=2)
    story.offer("b")
    story.sources("b")
    return story


@pytest.mark.usefixtures("few_attestations")
def test_whoever_comes_without_a_state_gets_what_is_left_and_the_run_goes_on_from_there() -> None:
    story = lost_disk_and_long_way_back()
    found = story.last("b", m.Sources)
    assert [d.commit for d in found.donors] == [1]
    assert [a.commit for a in found.attested] == [1, *range(5, 13)], "what the donor holds, and the newest"
    assert [c.commit for c in found.commits] == [*range(2, 13)], "its own log may lead on"
    story.applied("b", 1, "s1")
    assert story.view.branch == 0, "it has not tried its own log"
    story.sources("b", after=1, lacks=2)
    assert (story.view.branch, story.view.last_commit, story.view.state) == (1, 1, "training")


@pytest.mark.usefixtures("few_attestations")
def test_old_states_are_attested_to_joiners_only_while_there_is_nothing_newer() -> None:
    story = committed("a", "b", "c", count=12, log_commits=32)
    story.drop("c")
    story.connect("c", incarnation=2, state=(1, "s1"))
    story.offer("c")
    story.join("d")
    story.sources("d")
    assert [a.commit for a in story.last("d", m.Sources).attested] == [*range(5, 13)]


def test_whoever_fetches_hears_of_all_states_that_donors_know_the_chunks_of() -> None:
    """A chunk that is on its way while 63 commits are made is checked by the list of hashes that a donor still has,
    and that list by what is attested."""
    story = committed("a", count=70, log_commits=80)
    story.join("b")
    story.sources("b")
    attested = story.last("b", m.Sources).attested
    assert [a.commit for a in attested] == [*range(71 - MOST_HASH_LISTS, 71)] == [*range(7, 71)]


def test_who_fetches_is_waited_for_in_plain_words_and_an_operator_need_not_wait() -> None:
    story = lost_disk_and_long_way_back()
    assert "b (site 2) (fetching state) may have them" in story.view.state
    story.join("c")
    story.applied("c", 0, "s0")
    assert "c (site 3) (catching up) may have them" in story.view.state
    story.happens(e.RollbackAsked("atoll rollback"))
    assert (story.view.branch, story.view.last_commit, story.view.state) == (1, 1, "training")
    assert [story.last(name, m.RolledBack).commit for name in "abc"] == [1, 1, 1]
    assert [story.num(name, m.Open) for name in "abc"] == [2, 1, 0], "who is not there yet hears of the sync later"
    assert story.last("c", m.Commit).commit == 1
    story.sources("b")
    assert [d.commit for d in story.last("b", m.Sources).donors] == [1, 0]
    story.applied("b", 1, "s1")
    story.applied("c", 1, "s1")
    story.commit_one("a", state="s1", following="t2")
    assert [story.last(name, m.Commit).branch for name in "bc"] == [1, 1]


def test_a_site_within_its_lease_is_waited_for_after_a_restart_of_the_coordinator() -> None:
    story = committed("a", "b")
    story.restart()
    back(story, "a", 1)
    assert not story.view.unreachable, "b may be about to say Hello"
    story.wait(story.limits.lease_s)
    assert "b (site 2) may have them" in story.view.unreachable
    assert story.view.branch == 0


def test_a_site_that_left_before_is_not_waited_for() -> None:
    story = committed("a", "b", "c")
    story.leave("c")
    story.commit_one("a", "b", state="s2", following="s3")
    power_cut(story, "a", "b")
    back(story, "a", 2)
    back(story, "b", 2)
    assert (story.view.branch, story.view.last_commit) == (1, 2)


def test_a_site_that_left_with_a_commit_is_waited_for_until_an_operator_says_otherwise() -> None:
    story = committed("a", "b")
    story.leave("b")
    power_cut(story, "a")
    back(story, "a", 1)
    assert "b (site 2) may have them" in story.view.state
    outputs = story.happens(e.RollbackAsked("atoll rollback", request=7))
    (answer,) = [o for o in outputs if isinstance(o, e.Answer)]
    assert (answer.request, answer.problem) == (7, "")
    assert answer.found.startswith("nobody who is here can reach commit 2"), "why it had to"
    assert (story.view.branch, story.view.last_commit) == (1, 1)
    outputs = story.happens(e.RollbackAsked("again", request=8))
    (answer,) = [o for o in outputs if isinstance(o, e.Answer)]
    assert answer == e.Answer(8, "no need for it: the newest commit is held, or may still be reached")
    assert story.view.branch == 1


def test_a_site_that_left_when_it_was_done_may_have_the_commit_that_followed() -> None:
    """Done means that all payloads are on its disk."""
    story = committed("a", "b", "c")
    for name in "abc":
        story.ready(name)
    story.done("b", "s2")
    story.leave("b")
    for name in "ac":
        story.done(name, "s2")
    for name in "ac":
        story.applied(name, 3, "s3")
    power_cut(story, "a", "c")
    back(story, "a", 2)
    back(story, "c", 2)
    assert "b (site 2) may have them" in story.view.state
    story.restart()
    back(story, "a", 2)
    back(story, "c", 2)
    assert "b (site 2) may have them" in story.view.state
    back(story, "b", 2, lacks=False)
    story.applied("b", 3, "s3")  # its own log leads on
    assert (story.view.last_commit, story.view.branch) == (3, 0)


def test_a_site_that_was_lost_before_its_done_was_heard_may_have_the_commit_that_followed() -> None:
    story = committed("a", "b", "c")
    for name in "abc":
        story.ready(name)
    for name in "ac":
        story.done(name, "s2")
    story.drop("b")
    story.wait(story.limits.reconnect_grace_s)
    assert story.view.last_commit == 3
    power_cut(story, "a", "c")
    back(story, "a", 2)
    back(story, "c", 2)
    assert "b (site 2) may have them" in story.view.state


def test_what_a_site_has_of_void_commits_is_not_what_a_later_rollback_waits_for() -> None:
    story = committed("a", "b", "c", count=3)
    story.leave("c")
    power_cut(story, "a", "b")
    back(story, "a", 1)
    back(story, "b", 1)
    story.happens(e.RollbackAsked("the disk of c is gone"))
    story.commit_one("a", "b", state="s1", following="s2")
    assert (story.view.branch, story.view.last_commit) == (1, 2)
    story.restart()
    power_cut(story, "a", "b")
    back(story, "a", 1, incarnation=3, branch=1)
    back(story, "b", 1, incarnation=3, branch=1)
    assert (story.view.branch, story.view.last_commit) == (2, 1)


def test_a_site_that_says_a_void_commit_before_it_hears_that_it_is_void_is_not_refused() -> None:
    story = committed("a", "b", "c", count=3)
    power_cut(story, "a", "b", "c")
    back(story, "a", 1)
    back(story, "b", 1)
    back(story, "c", 0, lacks=False)  # and its own log leads on
    story.sites["c"].hears = False
    story.happens(e.RollbackAsked("c lost the others"))
    assert (story.view.branch, story.view.last_commit) == (1, 1)
    story.applied("c", 1, "s1")
    story.applied("c", 2, "s2")
    assert not story.num("c", m.Refused)
    assert story.holds("c") == 1
    story.sites["c"].hears = True
    story.drop("c")
    story.connect("c", incarnation=2, state=(1, "s1"), branch=1)
    story.commit_one("a", "b", state="s1", following="t2")
    story.applied("c", 2, "t2")
    assert story.holds("c") == 2


def test_one_that_came_back_without_it_and_left_again_is_accounted_for() -> None:
    story = committed("a", "b")
    power_cut(story, "a", "b")
    back(story, "a", 1)
    story.leave("a")
    back(story, "b", 1)
    assert (story.view.branch, story.view.last_commit) == (1, 1)


def test_holders_that_disagree_are_not_gone_back_to() -> None:
    """What the state of that commit is was never said, and no contributor to it is here."""
    story = committed("a", "b", "c", "d", count=0)
    for number in range(2):
        for name in "abcd":
            story.ready(name, tokens=100 if name in "ab" else 0)
        for name in "ab":
            story.done(name, f"s{number}")
        for name in "abcd":
            story.applied(name, number + 1, f"s{number + 1}")
    power_cut(story, "a", "b", "c", "d")
    story.forget_hash(1)
    back(story, "c", 1)
    story.connect("d", incarnation=2, state=(1, "other"))
    story.offer("d")
    story.sources("d", after=1, lacks=2)
    assert "they do not agree on the state of commit 1" in story.view.state
    story.happens(e.RollbackAsked("atoll rollback"))
    assert story.view.branch == 0
    story.leave("d")
    story.happens(e.RollbackAsked("atoll rollback"))
    assert (story.view.branch, story.view.last_commit) == (1, 1)


def test_what_sites_found_out_about_a_void_commit_does_not_count_for_the_next_of_its_number() -> None:
    story = committed("a", "b", count=0)
    for branch in (0, 1):
        for name in "ab":
            story.ready(name)
        for name in "ab":
            story.done(name, "s0")
        for name in "ab":
            story.applied(name, 1, f"s1 of {name}")
        assert "not every side shows what its hash is made of" in story.view.state
        power_cut(story, "a", "b")
        for name in "ab":
            back(story, name, 0, incarnation=branch + 2, branch=branch)
        assert (story.view.last_commit, story.view.branch) == (0, branch + 1)


def test_a_site_that_comes_with_void_commits_is_told_and_joins_anew() -> None:
    story = committed("a", "b", "c")
    power_cut(story, "a", "b", "c")
    back(story, "a", 1)
    back(story, "b", 1)
    story.happens(e.RollbackAsked("atoll rollback"))
    story.commit_one("a", "b", state="s1", following="t2")
    back(story, "c", 2, branch=0)
    assert story.last("c", m.RolledBack).commit == 1
    assert story.last("c", m.Admitted).admitted_as is AdmittedAs.JOINER
    # Once its disk is rolled back it says what it has left.
    story.connect("c", incarnation=2, state=(1, "s1"), branch=1, again=True)
    assert story.num("c", m.RolledBack) == 1
    assert story.holds("c") == 1
    assert story.last("c", m.Commit).commit == 2


def test_a_site_that_comes_with_void_commits_holds_nothing_while_no_commit_has_taken_their_numbers() -> None:
    """What it holds is of no number that the run has now, and nobody has said another state of it."""
    story = committed("a", "b", "c")
    power_cut(story, "a", "b", "c")
    back(story, "a", 1)
    back(story, "b", 1)
    story.happens(e.RollbackAsked("atoll rollback"))
    back(story, "c", 2, branch=0)
    assert story.last("c", m.RolledBack).commit == 1
    assert story.last("c", m.Admitted).admitted_as is AdmittedAs.JOINER
    assert story.holds("c") is None


def test_a_member_that_only_lost_its_stream_and_holds_a_void_commit_is_removed_first() -> None:
    story = committed("a", "b")
    story.drop("b")
    story.restart()
    back(story, "a", 1)
    story.wait(story.limits.lease_s)
    story.happens(e.RollbackAsked("atoll rollback"))
    story.connect("b", state=(2, "s2"))
    assert story.last("b", m.RolledBack).commit == 1
    assert not story.is_live("b")


@pytest.mark.parametrize(("commit", "branch"), [(3, 0), (1, 1)])
def test_a_site_ahead_of_the_log_is_refused(commit: int, branch: int) -> None:
    story = committed("a", "b")
    story.drop("b")
    story.connect("b", incarnation=2, state=(commit, "x"), branch=branch)
    refused = story.last("b", m.Refused)
    assert refused.kind is m.RefusedKind.STATE
    assert "old or a wrong store" in refused.text


def test_the_data_of_void_commits_is_open_again() -> None:
    story = committed("a", "b", count=1)
    for name in "ab":
        story.ready(name, data=story.wants(name, 10))
    for name in "ab":
        story.done(name, "s1")
    assert story.done_samples() == ranges_of("0-19")
    power_cut(story, "a", "b")
    back(story, "a", 1)
    back(story, "b", 1)
    assert story.view.branch == 1
    for _ in range(2):
        assert not story.done_samples()
        story.restart()
    story.connect("a", incarnation=2, state=(1, "s1"), branch=1)
    assert story.wants("a", 30) == ranges_of("0-29")


# --- further back than the log, which holds 8 commits


@pytest.mark.parametrize("commit", [4, 3, 2, 0])
def test_the_run_goes_back_to_what_is_left_however_old(commit: int) -> None:
    story = committed("a", "b", count=12)
    power_cut(story, "a", "b")
    for name in "ab":
        story.connect(name, incarnation=2, state=(commit, f"s{commit}"))
        story.offer(name)
        assert story.last(name, m.Admitted).admitted_as is AdmittedAs.MEMBER, "it keeps what nobody else has"
    assert story.last("a", m.Commit).commit == min(commit + 8, 12), "it tries its own log"
    story.sources("b", after=commit)
    assert story.last("b", m.Sources).commits[0].commit == commit + 1
    for name in "ab":
        story.sources(name, after=commit, lacks=commit + 1)
    assert (story.view.branch, story.view.last_commit, story.view.state) == (1, commit, "training")
    (record,) = story.rollbacks
    assert record.voided == tuple(range(commit + 1, 13))
    story.restart()
    assert story.view.last_commit == commit
    for name in "ab":
        story.connect(name, incarnation=2, state=(commit, f"s{commit}"), branch=1)
        story.offer(name)
    story.commit_one("a", "b", state=f"s{commit}", following="t")
    assert story.view.commits[-1].commit == commit + 1


def test_who_asks_for_a_rollback_beyond_the_log_before_it_was_read_waits_for_that() -> None:
    story = committed("a", "b", count=12)
    power_cut(story, "a", "b")
    with story.together():
        for name in "ab":
            back(story, name, 2)
        story.happens(e.RollbackAsked("test"))
    assert any("reads what followed commit 2 from its store" in line for line in story.log)
    (record,) = story.rollbacks
    assert (record.commit, record.voided) == (2, tuple(range(3, 13)))


def test_the_data_of_commits_that_are_older_than_the_log_is_open_again() -> None:
    story = committed("a", "b", count=0)
    for number in range(12):
        for name in "ab":
            story.ready(name, data=story.wants(name, 10))
        for name in "ab":
            story.done(name, f"s{number}")
        for name in "ab":
            story.applied(name, number + 1, f"s{number + 1}")
    assert story.done_samples() == ranges_of("0-239")
    power_cut(story, "a", "b")
    back(story, "a", 2)
    back(story, "b", 2)
    assert story.view.branch == 1
    assert story.done_samples() == ranges_of("0-39")


def test_a_site_whose_own_log_leads_on_from_an_old_commit_brings_the_next_to_the_others() -> None:
    story = committed("a", "b", count=12)
    power_cut(story, "a", "b")
    back(story, "a", 2)
    story.connect("b", incarnation=2, state=(2, "s2"))
    story.offer("b")
    story.applied("b", 3, "s3")
    assert story.view.branch == 0
    assert [(d.site_id, d.commit) for d in story.last("a", m.Sources).donors] == [(2, 3)]
    story.applied("a", 3, "s3")
    for name in "ab":
        story.sources(name, after=3, lacks=4)
    assert (story.view.branch, story.view.last_commit) == (1, 3)


def test_a_state_that_is_older_than_the_log_is_replaced_where_somebody_has_a_newer_one() -> None:
    story = committed("a", "b", count=12)
    story.drop("b")
    story.wait(story.limits.lease_s)
    story.connect("b", incarnation=2, state=(3, "s3"))
    story.offer("b")
    assert story.last("b", m.Admitted).admitted_as is AdmittedAs.JOINER


def test_a_site_that_is_as_many_commits_behind_as_the_log_holds_replays_them() -> None:
    story = committed("a", "b", count=12)
    story.drop("b")
    story.wait(story.limits.lease_s)
    story.connect("b", incarnation=2, state=(4, "s4"))
    story.offer("b")
    assert story.last("b", m.Admitted).admitted_as is AdmittedAs.MEMBER
    story.sources("b", after=4)
    assert [c.commit for c in story.last("b", m.Sources).commits] == list(range(5, 13))


def test_an_old_state_that_is_not_what_was_attested_then_is_not_gone_back_to() -> None:
    story = committed("a", "b", count=12)
    power_cut(story, "a", "b")
    story.connect("a", incarnation=2, state=(2, "other"))
    story.offer("a")
    assert "the run's is" in story.last("a", m.Evicted).reason
    story.connect("a", incarnation=2, state=(2, "other"), again=True)
    story.offer("a")
    assert story.last("a", m.Admitted).admitted_as is AdmittedAs.JOINER
    story.happens(e.RollbackAsked("atoll rollback"))
    assert story.view.branch == 0


def test_what_a_site_says_of_void_commits_is_void_until_it_has_heard_of_every_rollback_since() -> None:
    """The second goes back less far than the first: commit 2 is another one then, and the site means the void one."""
    story = committed("a", "b", count=1)
    story.join("c")
    story.applied("c", 0, "s0")
    for number in (1, 2):
        story.commit_one("a", "b", state=f"s{number}", following=f"s{number + 1}")
    assert (story.view.last_commit, story.holds("c")) == (3, 0)
    story.sites["c"].hears = False
    story.ask_to_go_back(1)
    story.rebuilt("a", "s1")
    for name in "ab":
        story.connect(name, state=(1, "s1"), branch=1, again=True)
        story.offer(name)
    story.commit_one("a", "b", state="s1", following="t2")
    story.commit_one("a", "b", state="t2", following="t3")
    story.ask_to_go_back(2)
    story.rebuilt("a", "t2")
    assert (story.view.last_commit, story.view.branch, story.last("c", m.RolledBack).commit) == (2, 2, 2)
    story.applied("c", 2, "s2")
    assert story.holds("c") == 0, "it says so before it has heard of either"
    assert not story.num("c", m.Evicted)
    stream = story.sites["c"].stream
    assert stream is not None
    said = [message for name, message in story.sent if name == "c"]
    first = next(i for i, message in enumerate(said) if isinstance(message, m.RolledBack))
    story.sites["c"].received[stream] = first + 1
    story.applied("c", 2, "t2")
    assert story.holds("c") == 2, "it has heard of the first, which made commit 2 void"
    assert story.state_of("c") == story.state("t2", 2)


def test_23_what_a_site_lacked_of_a_void_commit_it_does_not_lack_of_the_new_one() -> None:
    """b asks once more before it hears of the rollback. The commit that it makes alone then was void at once, because
    b was taken to lack it."""
    story = committed("a", "b")
    power_cut(story, "a", "b")
    back(story, "b", 1)
    story.sites["b"].hears = False
    story.happens(e.RollbackAsked("atoll rollback"))
    assert (story.view.branch, story.view.last_commit) == (1, 1)
    story.sources("b", after=1, lacks=2)
    (stream,) = story.streams()
    story.sites["b"].hears = True
    story.sites["b"].received[stream] = story.num_sent_on(stream)
    story.commit_one("b", state="s1", following="t2")
    assert (story.view.branch, story.view.last_commit) == (1, 2)


def test_a_state_that_is_older_than_the_store_s_commits_is_not_gone_back_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.coordinator.core.persisted.KEPT_COMMITS", 10)
    story = committed("a", "b", count=12)
    power_cut(story, "a", "b")
    for name in "ab":
        back(story, name, 2)
    for name in "ab":
        story.sources(name, after=2, lacks=3)
    assert not story.rollbacks
    assert "commit 2 is older than those that the store keeps; bring the newest state back" in story.view.state
