"""What keeps a site from a sync is kept once, however often it is said."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.harness.coordinator_questions import decisions
from tests.harness.coordinator_story import Story, some_settings


def planned_ahead() -> Story:
    story = Story(some_settings(min_sites=3))
    story.start("a", "b", "c")
    story.commit_one("a", "b", "c", state="s0", following="s1")
    assert 3 in story.reducer_ids()
    return story


def receiving_only() -> Story:
    """c contributes, and reduces nothing."""
    story = Story(some_settings(min_sites=3))
    story.start("a", "b", "c")
    story.put_on_probation("reduce_nothing", "c", sync=0)
    for name in "abc":
        story.ready(name)
    assert story.reducer_ids() == {1, 2}
    return story


@pytest.mark.parametrize(
    ("begin", "peer", "tensor"), [(planned_ahead, "", "weight"), (receiving_only, "c", "")], ids=["average", "room"]
)
def test_what_a_contributor_says_again_changes_nothing(begin: Callable[[], Story], peer: str, tensor: str) -> None:
    """It may say so as long as the others train, or exchange: the coordinator keeps none of it, and looks at none of
    it in each step."""
    story = begin()
    story.failed("c", peer, tensor=tensor)
    before = decisions(story.core)
    for i in range(5):
        story.failed("c", peer, f"{i} " * 500, tensor=tensor)
    assert decisions(story.core) == before
