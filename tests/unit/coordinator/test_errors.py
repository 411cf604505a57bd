"""What sites say of their error feedback is in the commit's record, and nothing else is taken."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest

from atoll.coordinator.core import events as e
from atoll.protocol import messages as m
from atoll.protocol.messages import RefusedKind
from atoll.protocol.time_limits import time_limits
from tests.harness.coordinator_questions import decisions
from tests.harness.coordinator_story import Story, some_settings

LIMITS = time_limits("local")


def a_run(*names: str, beta: float = 1.0, fragments: int = 1) -> Story:
    base = some_settings(min_sites=len(names), quorum=2)
    sync = replace(base.sync, codec="sign1", error_feedback=beta, fragments=fragments)
    story = Story(replace(base, sync=sync))
    story.start(*names)
    return story


@pytest.mark.parametrize("restarts", [False, True])
def test_a_commit_keeps_what_each_contributor_says_of_its_error(restarts: bool) -> None:
    story = a_run("a", "b", "c")
    story.ready("a", errors=(0,))
    story.ready("b", errors=(0,))
    story.ready("c", errors=(0,))
    for name in "abc":
        story.done(name, "s0")
    for name in "abc":
        story.applied(name, 1, "s1")
    assert story.last("a", m.Commit).error_commits == (0, 0, 0)
    for name, number in (("a", 1), ("b", 0), ("c", 1)):
        story.ready(name, errors=(number,))
    if restarts:
        story.restart()
        for name in "abc":
            story.connect(name, state=(1, "s1"))
            story.offer(name)
    for name in "abc":
        story.done(name, "s1")
    assert story.last("a", m.Commit).error_commits == (1, 0, 1)


def test_a_second_ready_with_another_error_is_not_taken() -> None:
    story = a_run("a", "b")
    story.ready("a", errors=(0,))
    story.ready("a", errors=(3,))
    story.ready("b", errors=(0,))
    for name in "ab":
        story.done(name, "s0")
    assert story.last("a", m.Commit).error_commits == (0, 0)


@pytest.mark.parametrize(("beta", "said"), [(1.0, ()), (1.0, (0, 0)), (0.0, (0,))])
def test_a_ready_that_says_too_much_or_too_little_is_refused(beta: float, said: tuple[int, ...]) -> None:
    story = a_run("a", "b", beta=beta)
    without, stream = copy.deepcopy(story.core), story.stream_of("a")
    assert stream is not None
    story.ready("a", errors=said, unreachable="b")
    refused = story.last("a", m.Refused)
    assert refused.kind is RefusedKind.INVALID
    assert "error feedback" in refused.text
    without.handle([e.StreamClosed(stream, "refused")], story.now, story.wall_s)
    assert decisions(story.core) == decisions(without), "nor is it believed whom it cannot dial"


def test_of_a_sync_of_all_fragments_each_has_its_number() -> None:
    story = a_run("a", "b", fragments=2)
    story.ready("a", errors=(0, 0))
    assert "error feedback of 2 fragments" in story.last("a", m.Refused).text


def test_what_was_said_counts_in_the_next_attempt_after_the_coordinator_came_back() -> None:
    story = a_run("a", "b", "c")
    for name in "abc":
        story.ready(name, errors=(0,))
    for name in "abc":
        story.done(name, "s0")
    for name in "abc":
        story.applied(name, 1, "s1")
    for name, number in (("a", 1), ("b", 0), ("c", 1)):
        story.ready(name, errors=(number,))
    story.restart()
    for name in "bc":
        story.connect(name, state=(1, "s1"))
        story.offer(name)
        story.ready(name, errors=(0 if name == "b" else 1,))
    story.wait(LIMITS.lease_s + LIMITS.heartbeat_s)  # a is lost
    for name in "bc":
        story.done(name, "s1")
    made = story.last("b", m.Commit)
    assert ([c.site_id for c in made.contributors], made.error_commits) == ([2, 3], (0, 1))


def test_a_start_of_a_site_hears_which_commit_holds_it_last() -> None:
    story = a_run("a", "b", "c")
    assert story.last("a", m.Welcome).error_commits == (0,)
    for number, names in ((0, "abc"), (1, "bc")):
        for name in names:
            story.ready(name, errors=(number,))
        if number:
            story.drop("a")
            story.wait(LIMITS.lease_s + LIMITS.heartbeat_s)
        for name in names:
            story.done(name, f"s{number}")
        for name in names:
            story.applied(name, number + 1, f"s{number + 1}")
    for name, last in (("a", 1), ("b", 2), ("d", 0)):
        story.connect(name, incarnation=2, state=(1, "s1") if name != "d" else None)
        assert story.last(name, m.Welcome).error_commits == (last,)


def test_without_error_feedback_a_welcome_says_nothing_of_it() -> None:
    assert a_run("a", "b", beta=0.0).last("a", m.Welcome).error_commits == ()
