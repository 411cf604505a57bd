"""Members that list their samples in many pieces: no commit gets larger than a message may be. Sites could not read it,
nor the coordinator when it is started again."""

from __future__ import annotations

from dataclasses import fields

import pytest

from atoll.protocol import messages as m
from tests.harness.coordinator_story import Story, some_settings

NAMES = "abxyz"
MOST = 20
PIECES = 8
"""Of x, y and z: with one each of a and b, those of two fit."""


def test_the_bound_is_that_of_the_message() -> None:
    bounds = {field.name: field.metadata.get("max") for field in fields(m.LineRanges)}
    assert bounds["ranges"] == m.MAX_RANGES_OF_COMMIT
    assert m.MAX_RANGES_OF_SITE < m.MAX_RANGES_OF_COMMIT, "somebody can always contribute"


def a_story(**settings: object) -> Story:
    story = Story(some_settings(min_sites=len(NAMES), steps=1000, **settings))
    story.start(*NAMES)
    return story


def all_ready(story: Story) -> None:
    """x, y and z with every second position of what they lease."""
    for name in NAMES:
        (lease,) = story.wants(name, 2 * PIECES)
        pieces = [m.DataRange(first=lease.first + 2 * i, num_samples=1) for i in range(PIECES)]
        story.ready(name, data=[lease] if name in "ab" else pieces)


def num_pieces_committed(story: Story) -> int:
    base = story.last_commit()
    for name in NAMES:
        if story.is_planned(name):
            story.done(name, f"s{base}")
    assert story.last_commit() == base + 1
    commit: m.Commit = story.last("a", m.Commit)
    return sum(len(line.ranges) for line in commit.done)


@pytest.mark.parametrize("data", ["shared", "local"])
def test_9_who_lists_the_most_pieces_is_left_out_of_a_commit_that_could_not_list_them(
    monkeypatch: pytest.MonkeyPatch, data: str
) -> None:
    monkeypatch.setattr(m, "MAX_RANGES_OF_COMMIT", MOST)
    story = a_story(data=data)
    all_ready(story)
    assert story.contributor_ids() == [1, 2, 3, 4]
    assert "without z (site 5): a commit cannot list samples in so many pieces" in "\n".join(story.log)
    assert num_pieces_committed(story) <= MOST
    for name in NAMES:
        story.applied(name, 1, "s1")
    assert len(story.leased_by("z", 5 if data == "local" else 0)) == 1, "they are its own until a commit has them"


def test_9_nor_does_a_plan_that_came_with_the_commit_before_list_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(m, "MAX_RANGES_OF_COMMIT", MOST)
    story = a_story()
    story.commit_one(*NAMES, state="s0", following="s1")
    assert story.contributor_ids() == [1, 2, 3, 4, 5], "the next plan is here"
    all_ready(story)
    assert story.contributor_ids() == [1, 2, 3, 4]
    assert num_pieces_committed(story) <= MOST


def test_9_without_a_quorum_of_those_whose_samples_fit_nothing_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(m, "MAX_RANGES_OF_COMMIT", MOST)
    story = a_story(quorum=5)
    all_ready(story)
    assert story.attempt() == 0
    assert story.view.state.startswith("paused: there is no quorum without z (site 5)")
