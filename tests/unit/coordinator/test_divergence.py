"""Sites whose loss is not finite since a commit, and was before: the run goes back by itself, once, if most say so."""

from __future__ import annotations

import logging

from atoll.protocol import messages as m
from atoll.protocol.plans import weights
from tests.harness.coordinator_story import Story, a_hash, some_settings


def run_of(names: str, num_commits: int, stood_out: dict[str, m.Outlier] | None = None) -> Story:
    """At commit `num_commits`, whose reducers say whose contribution stood out."""
    story = Story(some_settings(quorum=1, min_sites=len(names), steps=200))
    story.start(*names)
    for number in range(num_commits):
        for name in names:
            story.ready(name)
        plan = story.plan()
        for name in names:
            story.says(
                name,
                m.Done(
                    sync=plan.sync,
                    attempt=plan.attempt,
                    term=plan.term,
                    payload_digest=a_hash("p"),
                    last_commit=number,
                    state_hash=a_hash(f"s{number}"),
                    tokens=weights(plan),
                    stood_out=(stood_out or {}).get(name),
                ),
            )
        for name in names:
            story.applied(name, number + 1, f"s{number + 1}")
    return story


def diverge(story: Story, names: str, commit: int) -> None:
    for name in names:
        story.says(name, m.Diverged(commit=commit, text="the loss became nan"))


def rebuild(story: Story, names: str, commit: int) -> None:
    for name in names:
        story.says(name, m.CommitRebuilt(commit=commit, state_hash=a_hash(f"s{commit}"), has_oldest=True, text=""))


def back_at(story: Story, names: str, commit: int) -> None:
    """They have rolled back their disks, and say Hello."""
    for name in names:
        story.connect(name, again=True, state=(commit, f"s{commit}"), branch=story.view.branch)


def test_a_restart_does_not_forget_whose_contribution_stood_out() -> None:
    story = run_of("abc", 2, {"a": m.Outlier(site_id=3, norm=500.0, limit=1000.0)})
    story.restart()
    for name in "abc":
        story.connect(name, state=(2, "s2"))
    diverge(story, "ab", 2)
    rebuild(story, "abc", 1)
    assert story.last("a", m.RolledBack).reason.endswith("without c (site 3), whose contribution to it stood out")


def test_what_is_said_of_a_void_commit_is_not_held_against_the_new_one_of_its_number() -> None:
    """c applied commit 2 late, and has not heard that the run went back to 1, nor of the other commit 2."""
    story = run_of("ab", 1)
    story.join("c")
    story.applied("c", 0, "s0")
    for number in (1, 2):
        story.commit_one("a", "b", state=f"s{number}", following=f"s{number + 1}")
    story.sites["c"].hears = False
    story.ask_to_go_back(1)
    story.rebuilt("a", "s1")
    back_at(story, "ab", 1)
    for name in "ab":
        story.offer(name)
    story.commit_one("a", "b", state="s1", following="t2")
    assert story.view.last_commit == 2
    diverge(story, "c", 2)
    assert not story.diverged_ids()


def test_the_run_goes_back_once_most_say_so_without_whose_contribution_stood_out() -> None:
    out = m.Outlier(site_id=3, norm=500.0, limit=1000.0)
    little = m.Outlier(site_id=1, norm=30.0, limit=1000.0)
    story = run_of("abc", 2, {"a": out, "b": little})
    diverge(story, "a", 2)
    assert not story.num("a", m.RebuildCommit)
    diverge(story, "ab", 2)
    assert story.last("c", m.RebuildCommit).commit == 1
    rebuild(story, "abc", 1)
    rolled_back = story.last("a", m.RolledBack)
    assert rolled_back.commit == 1
    assert rolled_back.reason == (
        "the loss of a (site 1), b (site 2) is not finite since commit 2, and was before, without c (site 3), whose "
        "contribution to it stood out"
    )
    back_at(story, "abc", 1)
    for name in "abc":
        story.ready(name)
    assert story.contributor_ids() == [1, 2]
    assert story.view.excluded[-1] == "c (site 3) is left out of sync 4: its contribution to commit 2 stood out"


def test_where_nothing_stood_out_all_contribute_again() -> None:
    story = run_of("ab", 1, {"a": m.Outlier(site_id=2, norm=9.0, limit=1000.0)})
    diverge(story, "ab", 1)
    rebuild(story, "ab", 0)
    back_at(story, "ab", 0)
    for name in "ab":
        story.ready(name)
    assert story.contributor_ids() == [1, 2]
    assert not story.view.excluded


def test_it_does_so_once() -> None:
    story = run_of("ab", 2)
    diverge(story, "ab", 2)
    rebuild(story, "ab", 1)
    back_at(story, "ab", 1)
    story.commit_one("a", "b", state="s1", following="s2")
    diverge(story, "ab", 2)
    assert story.view.branch == 1
    assert story.num("a", m.RebuildCommit) == 1
    story.commit_one("a", "b", state="s2", following="s3")
    diverge(story, "ab", 3)  # another commit's doing
    assert story.num("a", m.RebuildCommit) == 2


def test_strangers_have_no_word_on_it() -> None:
    """They say that they hold the commit, and contributed to none: however many they are, they neither send the run
    back nor keep it from going back."""
    story = run_of("abc", 2)
    for name in "vwxyz":
        story.join(name, state=(2, "s2"))
    diverge(story, "vwxyz", 2)
    assert story.goes_back_to() is None
    diverge(story, "ab", 2)
    assert story.goes_back_to() == 1


def test_of_one_site_that_says_so_its_own_words_are_told_and_the_commit_is_not_called_bad() -> None:
    story = run_of("abc", 2)
    story.says("a", m.Diverged(commit=2, text="the loss is not finite (the script may be at fault)"))
    assert story.reports[-1] == (
        logging.ERROR,
        "a (site 1): since commit 2 the loss is not finite (the script may be at fault)",
    )
    assert story.goes_back_to() is None


def test_half_of_them_are_not_most_and_an_old_word_is_none() -> None:
    story = run_of("abcd", 2)
    diverge(story, "ab", 2)
    diverge(story, "cd", 1)
    assert not story.num("a", m.RebuildCommit)


def test_if_nobody_has_the_commit_before_the_run_goes_on() -> None:
    story = run_of("ab", 1)
    diverge(story, "ab", 1)
    for name in "ab":
        story.says(name, m.CommitRebuilt(commit=0, state_hash=b"", text="gone"))
    assert story.view.branch == 0
    story.commit_one("a", "b", state="s1", following="s2")
    assert story.view.last_commit == 2


def test_who_is_left_out_stays_so_when_the_coordinator_is_started_again() -> None:
    story = run_of("abc", 2, {"a": m.Outlier(site_id=3, norm=500.0, limit=1000.0)})
    diverge(story, "ab", 2)
    rebuild(story, "abc", 1)
    story.restart()
    for name in "abc":
        story.join(name, state=(1, "s1"), branch=1)
    for name in "abc":
        story.ready(name)
    assert story.contributor_ids() == [1, 2]
