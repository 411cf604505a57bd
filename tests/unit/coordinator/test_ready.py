"""Rule 11: what a site said it contributes never changes."""

from __future__ import annotations

from atoll.protocol import messages as m
from tests.harness.coordinator_story import Story, some_settings


def test_11_a_second_ready_with_other_tokens_is_not_taken() -> None:
    story = Story(some_settings())
    story.start("a", "b")
    story.ready("a", tokens=100)
    story.ready("a", tokens=900)
    story.ready("b", tokens=100)
    assert [c.tokens for c in story.plan().contributors] == [100, 100]


def test_11_the_same_ready_again_is_no_news() -> None:
    story = Story(some_settings())
    story.start("a", "b")
    story.ready("a")
    story.ready("a")
    story.ready("b")
    assert story.num("a", m.Plan) == 1
