"""Messages that are refused change nothing but their own stream. Each of these was found by tests/fuzz."""

from __future__ import annotations

from atoll.coordinator.core.membership import Standing
from atoll.protocol import messages as m
from atoll.protocol.messages import RefusedKind
from tests.harness.coordinator_story import Story, some_settings


def test_a_second_name_on_one_stream_is_refused() -> None:
    story = Story(some_settings())
    story.start("a", "b")
    story.sites["c"] = story.sites["a"]  # says Hello as c where a speaks
    story.connect("c", again=True)
    assert story.last("a", m.Refused).kind is RefusedKind.INVALID
    assert "c" not in story.core.run.members.sites
    story.connect("a", state=(0, "s0"))  # the name is still its own
    assert story.core.run.members.sites["a"].standing is Standing.MEMBER


def test_a_start_with_a_state_ahead_of_the_log_does_not_end_the_one_that_is_in_the_run() -> None:
    story = Story(some_settings())
    story.start("a", "b")
    story.ready("a")
    old = story.sites.pop("a")
    story.connect("a", incarnation=2, state=(7, "s7"))
    assert story.last("a", m.Refused).kind is RefusedKind.STATE
    site = story.core.run.members.sites["a"]
    assert (site.incarnation, site.stream, site.live) == (1, old.stream, True)
    assert site.site_id in story.core.run.sync.ready  # type: ignore[union-attr]
