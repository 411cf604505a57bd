"""Contributions that stand out, as one reducer says: left out at once and by name, believed for good only of two."""

from __future__ import annotations

import pytest

from atoll.protocol import messages as m
from atoll.protocol.plans import top_of
from tests.harness.coordinator_story import Story, some_settings


def syncing(*names: str, quorum: int = 1) -> Story:
    story = Story(some_settings(quorum=quorum, min_sites=len(names)))
    story.start(*names)
    ready(story, *names)
    return story


def ready(story: Story, *names: str) -> None:
    for name in names:
        story.ready(name)


def finish(story: Story, *names: str, state: str, following: str) -> None:
    """`names` contribute, everybody applies."""
    for name in names:
        story.done(name, state)
    for name in story.sites:
        story.applied(name, story.last_commit(), following)


def test_the_accused_receives_and_the_reducer_that_says_so_reduces_nothing() -> None:
    story = syncing("a", "b", "c")
    story.failed("b", tensor="weight", outliers="c")
    assert story.plan().attempt == 2
    assert (story.contributor_ids(), story.reducer_ids()) == ([1, 2], {1})
    assert [r.site_id for r in story.plan().receivers] == [3]
    finish(story, "a", "b", state="s0", following="s1")
    assert story.view.last_commit == 1
    assert not story.num("c", m.Evicted)
    assert story.view.excluded == (
        "c (site 3) is left out of sync 1: its contribution to 'weight' has norm 1e+30, above 2.5, as b (site 2) finds",
    )


def test_in_the_next_sync_it_contributes_and_others_judge_it() -> None:
    story = syncing("a", "b", "c")
    story.failed("b", tensor="weight", outliers="c")
    finish(story, "a", "b", state="s0", following="s1")
    ready(story, "a", "b", "c")
    assert (story.contributor_ids(), story.reducer_ids()) == ([1, 2, 3], {1})
    finish(story, "a", "b", "c", state="s1", following="s2")
    assert story.view.last_commit == 2
    # Nobody else found it absurd: what was said of it before does not count when it is said again.
    ready(story, "a", "b", "c")
    story.failed("a", tensor="weight", outliers="c")
    assert story.contributor_ids() == [1, 2]
    assert not story.num("c", m.Evicted)


@pytest.mark.parametrize("restart", [False, True])
def test_who_is_left_out_twice_in_a_row_begins_anew(restart: bool) -> None:
    story = syncing("a", "b", "c")
    story.failed("b", tensor="weight", outliers="c")
    finish(story, "a", "b", state="s0", following="s1")
    if restart:
        story.restart()
        for name in "abc":
            story.connect(name, state=(1, "s1"))
    ready(story, "a", "b", "c")
    story.failed("a", tensor="bias", outliers="c")
    assert (story.contributor_ids(), story.reducer_ids()) == ([1, 2], {2})
    assert "left out of two syncs in a row" in story.last("c", m.Evicted).reason
    for name in "ab":
        story.done(name, "s1")
    assert story.view.last_commit == 2
    assert len(story.view.excluded) == 2


def test_a_restart_does_not_bring_the_accused_back_into_the_sync() -> None:
    story = syncing("a", "b", "c")
    story.failed("b", tensor="weight", outliers="c")
    story.restart()
    for name in "abc":
        story.connect(name, state=(0, "s0"))
    ready(story, "a", "b", "c")
    assert story.contributor_ids() == [1, 2]
    assert len(story.view.excluded) == 1


def test_who_does_not_reduce_has_no_word_on_what_others_contribute() -> None:
    """The second word, for which a site is evicted, would be the same site's as the first."""
    story = syncing("a", "b", "c")
    story.failed("b", tensor="weight", outliers="c")
    finish(story, "a", "b", state="s0", following="s1")
    ready(story, "a", "b", "c")
    assert story.sites["b"].site_id not in story.reducer_ids()
    story.failed("b", tensor="weight", outliers="c")
    assert not story.num("c", m.Evicted)
    assert story.contributor_ids() == [1, 3], "it cannot go on, as it says"
    finish(story, "a", "c", state="s1", following="s2")
    assert story.view.last_commit == 2


def test_of_two_the_one_that_is_named_is_left_out() -> None:
    story = syncing("a", "b")
    story.failed("a", tensor="weight", outliers="b")
    assert (story.contributor_ids(), story.reducer_ids()) == ([1], {1})
    story.done("a", "s0")
    assert story.view.last_commit == 1


def test_a_reducer_names_itself() -> None:
    story = syncing("a", "b", "c")
    story.failed("b", tensor="weight", outliers="b")
    assert story.contributor_ids() == [1, 3]


def test_who_names_most_contributors_is_not_believed_alone() -> None:
    for names, liar, named in (("abc", "b", "a,c"), ("abcd", "d", "a,b,c"), ("ab", "a", "a,b")):
        story = syncing(*names)
        everybody = story.contributor_ids()
        story.failed(liar, tensor="weight", outliers=named)
        assert story.contributor_ids() == everybody
        assert story.sites[liar].site_id not in story.reducer_ids()
        assert not story.view.excluded
        finish(story, *names, state="s0", following="s1")
        assert story.view.last_commit == 1


def test_most_contributions_are_absurd_if_two_say_so() -> None:
    story = syncing("a", "b", "c")
    story.failed("b", tensor="weight", outliers="b,c")
    story.failed("c", tensor="weight", outliers="b,c")
    assert (story.contributor_ids(), story.reducer_ids()) == ([1], {1})
    assert len(story.view.excluded) == 2
    story = syncing("a", "b")
    story.failed("b", tensor="weight", outliers="a,b")
    story.failed("a", tensor="weight", outliers="a,b")
    assert "is left out of sync 1" in story.last("a", m.Abandoned).reason


def test_a_liar_that_names_one_site_in_each_sync_cannot_keep_it_out() -> None:
    story, num_left_out = syncing("a", "b", "c"), 0
    for number in range(6):
        if {2} <= story.reducer_ids():
            story.failed("b", tensor="weight", outliers="c")
        num_left_out += 3 not in story.contributor_ids()
        finish(story, *[n for i, n in enumerate("abc", 1) if i in story.contributor_ids()], state=f"s{number}",
               following=f"s{number + 1}")  # fmt: skip
        if story.view.finished:
            break
        ready(story, "a", "b", "c")
    assert story.view.last_commit >= 4
    assert num_left_out <= 2
    assert not story.num("c", m.Evicted)


def test_a_sync_that_the_accused_is_needed_for_is_abandoned_with_the_reason() -> None:
    story = syncing("a", "b", quorum=2)
    story.failed("a", tensor="weight", outliers="b")
    assert "is left out of sync 1" in story.last("a", m.Abandoned).reason
    ready(story, "a", "b")
    story.wait(story.limits.heartbeat_s)
    story.failed("a", tensor="weight", outliers="b")
    assert story.num("b", m.Evicted) == 1


def test_an_accusation_of_a_site_that_is_not_in_the_plan_is_not_one() -> None:
    story = syncing("a", "b", "c")
    plan = story.plan()
    story.says(
        "b",
        m.ExchangeFailed(
            sync=plan.sync, attempt=plan.attempt, term=plan.term, peer_site_id=0, direction=m.Direction.UNSPECIFIED,
            phase="averaging", text="x", tensor="w", outliers=(m.Outlier(site_id=77, norm=1.0, limit=0.5),),
        ),
    )  # fmt: skip
    assert story.plan().attempt == 2
    assert story.contributor_ids() == [1, 2, 3]
    assert story.reducer_ids() == {1, 3}


def test_who_was_evicted_for_it_begins_anew_though_the_coordinator_is_started_again() -> None:
    story = Story(some_settings(min_sites=3, quorum=2, steps=1000))
    story.start("a", "b", "c")

    def leave_out(base: int) -> None:
        for name in "cab":
            story.ready(name)
        plan = story.plan()
        assert len(plan.contributors) == 3
        reducer = plan.contributors[top_of(plan.trees[0])].site_id
        story.failed("abc"[reducer - 1], tensor="weight", outliers="c")
        for name in "ab":
            story.done(name, f"s{base}")
        for name in "ab":
            story.applied(name, base + 1, f"s{base + 1}")

    leave_out(0)
    story.applied("c", 1, "s1")
    leave_out(1)
    assert "two syncs in a row" in story.evicted_because("c")
    story.restart()
    for name in "ab":
        story.join(name, state=(2, "s2"))
    story.connect("c")
    story.connect("c", again=True)
    story.offer("c")
    story.applied("c", 2, "s2")
    leave_out(2)
    assert story.is_live("c"), "it was found for the first time since"
