"""What a site is told that was away while the run went on."""

from __future__ import annotations

from atoll.protocol import messages as m
from tests.harness.coordinator_story import Story, some_settings


def test_a_commit_between_welcome_and_offer_is_heard_of() -> None:
    """The node of c was killed and is back at once; its workers start while the others commit."""
    story = Story(some_settings(min_sites=3, quorum=2))
    story.start("a", "b", "c")
    story.commit_one("a", "b", "c", state="s0", following="s1")
    story.drop("c")
    story.connect("c", incarnation=2, state=(1, "s1"))
    assert story.last("c", m.Welcome).last_commit == 1
    story.commit_one("a", "b", state="s1", following="s2")
    story.offer("c")
    assert story.last("c", m.Admitted).last_commit == 2
