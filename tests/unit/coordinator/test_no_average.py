"""A tensor whose average is not finite: no fault of the reducer that says so, and not believed of one alone."""

from __future__ import annotations

from atoll.protocol import messages as m
from tests.harness.coordinator_story import Story, some_settings


def syncing(*names: str) -> Story:
    story = Story(some_settings(quorum=1, min_sites=len(names)))
    story.start(*names)
    for name in names:
        story.ready(name)
    return story


def test_another_site_averages_it_again_with_the_same_contributors() -> None:
    story = syncing("a", "b", "c")
    assert story.reducer_ids() == {1, 2, 3}
    story.failed("b", tensor="mask", text="a value is not finite")
    assert story.plan().attempt == 2
    assert story.contributor_ids() == [1, 2, 3]
    assert story.reducer_ids() == {1, 3}
    for name in "abc":
        story.done(name, "s0")
    assert story.view.last_commit == 1


def test_the_sync_is_abandoned_by_name_once_two_say_so() -> None:
    story = syncing("a", "b", "c")
    story.failed("b", tensor="mask", text="a value is not finite")
    story.failed("a", tensor="mask", text="a value is not finite")
    abandoned = story.last("c", m.Abandoned)
    assert abandoned.reason == "a (site 1) cannot average 'mask': a value is not finite"
    assert abandoned.next.base_commit == 0
    for name in "abc":
        assert not story.num(name, m.Evicted)
        story.ready(name)
    story.wait(story.limits.heartbeat_s)
    assert story.contributor_ids() == [1, 2, 3]


def test_a_run_of_one_site_does_not_try_it_again() -> None:
    story = syncing("a")
    story.failed("a", tensor="mask", text="a value is not finite")
    assert story.num("a", m.Abandoned) == 1


def test_it_is_said_before_all_are_ready() -> None:
    """Of a plan that came with the commit."""
    story = syncing("a", "b", "c")
    story.commit_one("a", "b", "c", state="s0", following="s1")
    assert story.plan().attempt == 1
    story.failed("b", tensor="mask", text="a value is not finite")
    for name in "abc":
        story.ready(name)
    assert story.plan().attempt == 2
    assert story.reducer_ids() == {1, 3}


def test_who_does_not_reduce_cannot_end_a_sync() -> None:
    """It said so in each attempt of each sync: no commit was made."""
    story = Story(some_settings(min_sites=4, steps=1000))
    story.start("a", "b", "c", "d")
    for name in "abcd":
        story.ready(name)
    for _ in range(3):
        if 4 in story.contributor_ids():
            story.failed("d", tensor="weight")
    assert story.plan().sync == 1
    assert story.contributor_ids() == [1, 2, 3]
    for name in "abc":
        story.done(name, "s0")
    assert story.view.last_commit == 1
