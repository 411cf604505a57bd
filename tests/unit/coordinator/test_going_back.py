"""Back to a commit that sites have passed: nothing is given up before one of them has it on its disk again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.coordinator.core import events as e
from atoll.protocol import messages as m
from tests.harness.coordinator_story import Story, a_hash, ranges_in_words, ranges_of, some_settings


def committed(*names: str, count: int = 3, log_commits: int = 8) -> Story:
    """These sites at commit `count`."""
    settings = some_settings(min_sites=len(names), steps=1000)
    story = Story(replace(settings, sync=replace(settings.sync, log_commits=log_commits)))
    story.start(*names)
    for number in range(count):
        story.commit_one(*names, state=f"s{number}", following=f"s{number + 1}")
    return story


def on_new_branch(story: Story, name: str, commit: int | None, branch: int = 1) -> None:
    """Its disk is rolled back: it says what is left."""
    incarnation = story.sites[name].incarnation
    state = None if commit is None else (commit, f"s{commit}")
    story.connect(name, incarnation=incarnation, state=state, branch=branch, again=True)
    story.offer(name)


def test_all_sites_go_back_and_train_on_from_there_with_the_hash_that_it_had() -> None:
    story = committed("a", "b")
    tokens = story.view.commits[0].run_tokens
    request = story.ask_to_go_back(1)
    for name in "ab":
        asked = story.last(name, m.RebuildCommit)
        assert (asked.commit, asked.state_hash, asked.last_commit) == (1, a_hash("s1"), 3)
    assert story.view.last_commit == 3
    assert "going back to commit 1 (atoll rollback --to): a (site 1), b (site 2) put its state" in story.view.state
    story.rebuilt("b", "s1")
    assert story.answers[request] == ""
    assert (story.view.last_commit, story.view.branch, story.view.run_tokens) == (1, 1, tokens)
    assert [story.last(name, m.RolledBack).commit for name in "ab"] == [1, 1]
    assert not story.num("a", m.Evicted)
    assert story.view.state == "paused: a (site 1), b (site 2) bring the state of commit 1 back"
    on_new_branch(story, "b", 1)
    on_new_branch(story, "a", 1)
    assert story.last("a", m.Open).base_commit == 1
    story.commit_one("a", "b", state="s1", following="t2")
    assert story.last("a", m.Commit).branch == 1
    assert story.attested(1) == a_hash("s1")


def test_nothing_is_planned_or_committed_while_sites_are_asked() -> None:
    story = committed("a", "b")
    for name in "ab":
        story.ready(name)
    story.done("a", "s3")
    story.ask_to_go_back(1)
    story.done("b", "s3")
    assert story.view.last_commit == 3
    story.rebuilt("a")
    story.rebuilt("b")
    assert story.view.last_commit == 4, "it goes on where it was"


@pytest.mark.parametrize("moment", ["asked", "answered"])
def test_a_crash_of_the_coordinator_leaves_the_run_at_one_end_or_the_other(moment: str) -> None:
    story = committed("a", "b")
    story.ask_to_go_back(1)
    if moment == "answered":
        story.rebuilt("a", "s1")
    story.restart()
    expected = (1, 1) if moment == "answered" else (3, 0)
    assert (story.view.last_commit, story.view.branch) == expected
    for name in "ab":
        story.connect(name, state=(3, "s3"))  # neither heard of it
        assert story.num(name, m.RolledBack) == (2 if moment == "answered" else 0)
        story.offer(name)
    if moment == "answered":
        for name in "ab":
            on_new_branch(story, name, 1)
    base = expected[0]
    story.ready("a")
    story.ready("b")
    for name in sorted(name for sync in story.view.syncs for name in sync.contributors):
        story.done(name, f"s{base}")
    assert story.view.last_commit == base + 1


def test_a_site_that_cannot_rebuild_it_fetches_it_from_one_that_can() -> None:
    story = committed("a", "b")
    story.ask_to_go_back(1)
    story.rebuilt("a", oldest=2)
    assert story.view.branch == 0
    story.rebuilt("b", "s1")
    on_new_branch(story, "a", None)
    story.sources("a")
    assert not story.last("a", m.Sources).donors, "b is not back yet"
    on_new_branch(story, "b", 1)
    assert [(d.site_id, d.commit) for d in story.last("a", m.Sources).donors] == [(2, 1)]
    story.applied("a", 1, "s1")
    story.commit_one("a", "b", state="s1", following="t2")


def test_a_state_with_another_hash_than_it_had_is_not_gone_back_to() -> None:
    story = committed("a", "b")
    request = story.ask_to_go_back(1)
    story.rebuilt("a", "other")
    assert story.view.branch == 0
    story.rebuilt("b")
    assert story.view.branch == 0
    assert "a (site 1): it has another state of it" in story.answers[request]


def test_a_commit_out_of_reach_names_the_oldest_that_is_possible() -> None:
    story = committed("a", "b", count=5)
    request = story.ask_to_go_back(1)
    story.rebuilt("a", oldest=3)
    story.rebuilt("b", oldest=4)
    assert story.answers[request].endswith("; the oldest possible is 3, at a (site 1)")
    assert (story.view.last_commit, story.view.branch, story.view.state) == (5, 0, "training")


@pytest.mark.parametrize(
    ("commit", "words"),
    [(3, "the newest commit is 3"), (4, "the newest commit is 3"), (-1, "down to 0")],
)
def test_a_commit_that_is_not_before_the_newest_is_refused(commit: int, words: str) -> None:
    story = committed("a", "b")
    assert words in story.answers[story.ask_to_go_back(commit)]
    assert story.goes_back_to() is None


def test_it_is_refused_before_training_after_the_end_without_sites_and_twice() -> None:
    story = Story(some_settings())
    assert "training has not started" in story.answers[story.ask_to_go_back(0)]
    story = committed("a", "b")
    story.ask_to_go_back(1)
    assert "going back to commit 1 already" in story.answers[story.ask_to_go_back(2)]
    story.leave("a")
    story.leave("b")
    assert "no site is here" in story.answers[1]
    assert "no site is here" in story.answers[story.ask_to_go_back(1)]
    story.happens(e.StopAsked("stop"))
    assert "the run is over" in story.answers[story.ask_to_go_back(1)]


def test_a_site_that_comes_back_on_another_stream_is_asked_again() -> None:
    story = committed("a", "b")
    story.ask_to_go_back(1)
    story.rebuilt("a")
    story.drop("b")
    story.connect("b", state=(3, "s3"))
    assert story.num("b", m.RebuildCommit) == 2
    story.rebuilt("b", "s1")
    assert story.view.branch == 1


def test_a_site_that_is_lost_is_not_waited_for() -> None:
    story = committed("a", "b")
    request = story.ask_to_go_back(1)
    story.rebuilt("a")
    story.drop("b")
    assert request not in story.answers
    story.wait(story.limits.reconnect_grace_s)
    assert "a (site 1): no snapshot here is as old as commit 1" in story.answers[request]


def test_a_site_that_never_answers_is_not_waited_for_without_end() -> None:
    story = committed("a", "b")
    request = story.ask_to_go_back(1)
    story.rebuilt("a")
    story.wait(story.limits.give_up_s)
    assert "no site has put it together within" in story.answers[request]
    story.says("b", m.CommitRebuilt(commit=1, state_hash=a_hash("s1")))
    assert story.view.branch == 0, "too late"


def test_where_the_hash_was_never_attested_all_have_to_agree() -> None:
    for said, branch in (("s1", 1), ("other", 0)):
        story = committed("a", "b")
        story.forget_hash(1)
        story.ask_to_go_back(1)
        assert story.last("a", m.RebuildCommit).state_hash == b""
        story.rebuilt("a", "s1")
        assert story.view.branch == 0, "b may have another"
        story.rebuilt("b", said)
        assert story.view.branch == branch
        if branch:
            assert story.attested(1) == a_hash("s1")


def test_commits_older_than_the_log_are_read_from_the_store_and_their_samples_are_open_again() -> None:
    story = committed("a", "b", count=0)
    for number in range(12):
        for name in "ab":
            story.ready(name, data=story.wants(name, 10))
        for name in "ab":
            story.done(name, f"s{number}")
        for name in "ab":
            story.applied(name, number + 1, f"s{number + 1}")
    story.ask_to_go_back(2)
    assert story.last("a", m.RebuildCommit).state_hash == a_hash("s2")
    story.rebuilt("a", "s2")
    (record,) = story.rollbacks
    assert (record.commit, record.voided) == (2, tuple(range(3, 13)))
    assert story.done_samples() == ranges_of("0-39")


@pytest.mark.parametrize("moment", ["at once", "after a restart"])
def test_samples_of_what_is_given_up_stay_done_if_a_person_wants_that(moment: str) -> None:
    story = committed("a", "b", count=0)

    def commit(number: int) -> None:
        for name in "ab":
            story.ready(name, data=story.wants(name, 10))
        for name in "ab":
            story.done(name, f"s{number}", commit=story.view.last_commit)
        for name in "ab":
            story.applied(name, story.view.last_commit, f"s{number + 1}")

    for number in range(4):
        commit(number)
    seen = story.done_samples()
    story.ask_to_go_back(1, skip_samples=True)
    story.rebuilt("a", "s1")
    (record,) = story.rollbacks
    assert ranges_in_words(record.skipped[0].ranges) == "20-79", "of commits 2 to 4"
    if moment == "after a restart":
        story.restart()
        for name in "ab":
            story.connect(name, state=(4, "s4"))
    for name in "ab":
        on_new_branch(story, name, 1)
        assert not any(one.first < 80 for one in story.wants(name, 10)), "nobody draws them again"
    assert story.done_samples() == seen
    account = story.view.data[0]
    assert (account.num_done, account.num_done + account.num_leased + account.num_open) == (
        80,
        account.num_passes_begun * account.num_samples,
    )


def test_the_starting_state_is_known_however_long_the_log_is_and_after_a_restart() -> None:
    story = committed("a", "b", count=9, log_commits=2)
    story.restart()
    for name in "ab":
        story.join(name, state=(9, "s9"))
    story.ask_to_go_back(0)
    assert story.last("a", m.RebuildCommit).state_hash == a_hash("s0")
    story.rebuilt("b", "other")
    story.rebuilt("a", "s0")
    assert (story.view.last_commit, story.view.branch) == (0, 1)


def test_a_site_that_holds_just_that_commit_stays_a_member_and_the_others_are_waited_for() -> None:
    story = committed("a", "b", "c")
    story.drop("c")
    story.connect("c", incarnation=2, state=(1, "s1"))
    story.offer("c")
    story.ask_to_go_back(1)
    story.rebuilt("a", "s1")
    assert [story.num(name, m.Open) for name in "abc"] == [1, 1, 2]
    assert story.last("c", m.Open).base_commit == 1
    assert story.expected_ids() == {1, 2, 3}
    story.ready("c")
    on_new_branch(story, "b", None)
    assert not story.attempt(), "a is about to come back"
    on_new_branch(story, "a", 1)
    story.ready("a")
    assert story.contributor_ids() == [1, 3], "b has to fetch it, and is not waited for"


def test_what_a_site_said_before_it_heard_of_it_does_not_count() -> None:
    story = committed("a", "b")
    story.ask_to_go_back(1)
    story.sites["b"].hears = False
    story.rebuilt("a", "s1")
    story.applied("b", 3, "s3")
    assert not story.num("b", m.Refused)
    assert story.holds("b") is None


def test_the_core_itself_may_go_back() -> None:
    story = committed("a", "b")
    assert story.go_back(2, "the loss of most sites is not finite") == ""
    story.happens(e.Tick())
    story.rebuilt("a", "s2")
    assert (story.view.last_commit, story.view.branch) == (2, 1)
    assert story.last("b", m.RolledBack).reason == "the loss of most sites is not finite"
    assert not story.answers


def test_a_site_that_has_said_hello_and_waits_to_be_admitted_does_not_bring_a_void_commit() -> None:
    story = committed("a", "b")
    story.connect("c", state=(3, "s3"))
    story.ask_to_go_back(1)
    story.rebuilt("a", "s1")
    story.offer("c")
    assert story.holds("c") is None


def test_it_is_given_up_when_the_run_goes_back_farther_meanwhile() -> None:
    story = committed("a", "b")
    for name in "ab":
        story.drop(name)
    story.wait(story.limits.lease_s)
    story.join("a", incarnation=2, state=(1, "s1"))
    story.sources("a", after=1, lacks=2)
    request = story.ask_to_go_back(2)
    story.happens(e.RollbackAsked("atoll rollback"))
    assert (story.view.last_commit, story.goes_back_to()) == (1, None)
    assert "rolled back otherwise" in story.answers[request]


def test_it_is_given_up_when_the_run_ends_before_the_store_was_read() -> None:
    story = committed("a", "b", count=6, log_commits=2)
    with story.together():
        request = story.ask_to_go_back(1)
        story.happens(e.StopAsked("atoll stop"))
        story.leave("a")
        story.leave("b")
    assert "the run is over" in story.answers[request]
    assert story.core.next_deadline() is None


def test_what_a_sync_waits_for_is_true_while_the_run_goes_back() -> None:
    story = committed("a", "b")
    story.ready("a")
    assert story.view.syncs[0].wait == "not ready yet: b (site 2)"
    story.ask_to_go_back(1)
    story.ready("b")
    (sync,) = story.view.syncs
    assert sync.ready == ("a", "b")
    assert "put its state together" in sync.wait


def test_a_commit_that_the_store_keeps_no_longer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.coordinator.core.persisted.KEPT_COMMITS", 10)
    story = committed("a", "b", count=12)
    request = story.ask_to_go_back(2)
    assert "it is older than those that the store keeps" in story.answers[request]
    assert story.view.last_commit == 12
    request = story.ask_to_go_back(3)
    story.rebuilt("a", "s3")
    assert story.answers[request] == ""
    assert story.view.last_commit == 3
    for start in ("this", "the next"):
        on_new_branch(story, "a", 3)
        request = story.ask_to_go_back(2)
        assert "it is older than those that the store keeps" in story.answers[request], f"{start} start knows"
        story.restart()
        story.join("a", state=(3, "s3"), branch=1)


@pytest.mark.parametrize("moment", ["it was away", "its stream breaks after that"])
def test_a_site_that_contributed_to_a_void_commit_of_which_it_has_not_heard_is_not_struck(moment: str) -> None:
    """Its snapshot lists samples that are open again, and no lease of its own any more."""
    story = committed("a", "b", count=1)
    samples = {name: story.wants(name, 10) for name in "ab"}
    for name in "ab":
        story.ready(name, data=samples[name])
    story.done("a", "s1")
    story.done("b", "s1")
    story.applied("a", 2, "s2")
    if moment == "it was away":
        story.drop("b")
    story.ask_to_go_back(1)
    story.rebuilt("a", "s1")
    on_new_branch(story, "a", 1)
    story.drop("b")
    story.connect("b", state=(1, "s1"))
    assert story.num("b", m.RolledBack)
    assert "commit 1" in story.last("b", m.Evicted).reason
    story.offer("b")
    story.ready("b", data=samples["b"])
    assert story.strikes_of("b") == 0
    on_new_branch(story, "b", 1)
    assert story.holds("b") == 1
    story.drop("b")
    story.connect("b", state=(1, "s1"))
    assert story.num("b", m.Evicted) == 1, "once: what it lists now is of leases that it took since"
    story.offer("b")
    story.ready("b", data=samples["b"])
    assert story.strikes_of("b") == 1
