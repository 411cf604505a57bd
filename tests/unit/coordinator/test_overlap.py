"""How long sites may train beyond their snapshots, and which sync is the last one. Rule 44."""

from __future__ import annotations

import pytest

from atoll.coordinator.core import events as e
from atoll.protocol import messages as m
from tests.harness.coordinator_story import Story, some_settings


def a_story(**settings: object) -> Story:
    story = Story(some_settings(**{"overlap": 4, "min_sites": 1} | settings))
    story.start("a")
    return story


def opened(story: Story) -> list[tuple[int, int]]:
    """Of each sync: its steps, and those beyond it."""
    found = [x for _, x in story.sent if isinstance(x, m.Open)][:1]
    found += [x.next for _, x in story.sent if isinstance(x, m.Commit) and x.next is not None]
    return [(o.num_steps, o.overlap_steps) for o in found]


def commit_all(story: Story, first: int = 0) -> list[m.Commit]:
    for n in range(first, 20):
        if story.view.finished:
            break
        story.commit_one("a", state=f"s{n}", following=f"s{n + 1}")
    return [x for _, x in story.sent if isinstance(x, m.Commit)]


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (30, [(10, 4), (10, 4), (10, 0)]),
        (23, [(10, 4), (10, 3), (3, 0)]),
        (10, [(10, 0)]),
        (7, [(7, 0)]),
        (11, [(10, 1), (1, 0)]),
    ],
)
def test_44_beyond_a_snapshot_are_at_most_the_steps_that_the_run_has_left(
    steps: int, expected: list[tuple[int, int]]
) -> None:
    story = a_story(steps=steps)
    commits = commit_all(story)
    assert opened(story) == expected
    assert [c.final for c in commits] == [not beyond for _, beyond in expected]
    assert commits[-1].run_step == steps


def test_without_overlap_every_sync_may_be_the_last() -> None:
    story = a_story(steps=30, overlap=0)
    commit_all(story)
    assert opened(story) == [(10, 0)] * 3


@pytest.mark.parametrize("tokens", [250, 245])
def test_44_of_a_length_in_tokens_nobody_knows_at_first_whether_the_sync_is_the_last(tokens: int) -> None:
    """A step is begun for what is left of one."""
    story = a_story(steps=0, tokens=tokens)
    commit_all(story)
    assert opened(story) == [(10, 0), (10, 4), (5, 0)]


def test_44_a_run_that_has_its_tokens_before_it_was_expected_ends_with_what_sites_trained_meanwhile() -> None:
    """Sync 2 is said not to be the last one, and then its sites have more tokens than those before: sync 3 is as long
    as what they may have trained beyond it."""
    story = a_story(steps=0, tokens=310)
    story.commit_one("a", state="s0", following="s1")
    story.ready("a", tokens=210)
    story.done("a", "s1")
    second = story.last("a", m.Commit)
    assert (second.run_tokens, second.final) == (310, False)
    assert second.next is not None
    assert (second.next.num_steps, second.next.overlap_steps) == (4, 0)
    story.applied("a", 2, "s2")
    assert [c.final for c in commit_all(story, first=2)] == [False, False, True]


def test_44_a_run_that_is_stopped_ends_with_what_sites_trained_meanwhile() -> None:
    story = a_story(steps=1000)
    story.commit_one("a", state="s0", following="s1")
    story.happens(e.StopAsked("enough"))
    assert story.view.state == "training (the last sync but one)"
    commits = commit_all(story, first=1)
    assert opened(story) == [(10, 4), (10, 4), (4, 0)]
    assert [c.final for c in commits] == [False, False, True]
    assert story.view.state == "finished: enough"


def test_44_stopped_in_its_last_sync_it_ends_with_that_one() -> None:
    story = a_story(steps=10)
    story.happens(e.StopAsked("enough"))
    assert story.view.state == "training (the last sync)"
    assert [c.final for c in commit_all(story)] == [True]


def test_44_a_stop_and_what_the_sync_said_outlive_a_restart() -> None:
    story = a_story(steps=1000)
    story.happens(e.StopAsked("enough"))
    story.restart()
    story.connect("a", state=(0, "s0"))
    story.offer("a")
    assert [c.final for c in commit_all(story)] == [False, True]


def test_a_sync_that_follows_one_that_is_abandoned_says_the_same() -> None:
    story = a_story(steps=23)
    story.commit_one("a", state="s0", following="s1")
    story.ready("a", tokens=0)
    following = story.last("a", m.Abandoned).next
    assert (following.sync, following.num_steps, following.overlap_steps) == (3, 10, 3)


def test_44_a_run_that_goes_back_after_it_was_stopped_ends_with_the_sync_that_it_opens() -> None:
    """What sites have trained is void: there is nothing beyond it to count."""
    story = a_story(steps=1000)
    for n in range(2):
        story.commit_one("a", state=f"s{n}", following=f"s{n + 1}")
    story.happens(e.StopAsked("enough"))
    story.ask_to_go_back(1)
    story.rebuilt("a", "s1")
    story.connect("a", state=(1, "s1"), branch=1, again=True)
    story.offer("a")
    opened_last = story.last("a", m.Open)
    assert (opened_last.base_commit, opened_last.num_steps, opened_last.overlap_steps) == (1, 10, 0)
    story.commit_one("a", state="s1", following="t2")
    assert story.last("a", m.Commit).final
