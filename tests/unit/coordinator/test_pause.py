"""What an operator does to a run that goes on: a pause, and sites that are asked to leave."""

from __future__ import annotations

import pytest

from atoll.coordinator.core import events as e
from atoll.protocol import messages as m
from tests.harness.coordinator_story import Story, some_settings


def training(*names: str) -> Story:
    story = Story(some_settings(min_sites=2))
    story.start(*names)
    return story


def asked(story: Story, event: e.Asked) -> str:
    """Why it is not done."""
    (answer,) = [o for o in story.happens(event) if isinstance(o, e.Answer)]
    return answer.problem


def pause(story: Story, reason: str = "the cluster is moved") -> str:
    return asked(story, e.PauseAsked(reason, request=900))


def resume(story: Story) -> str:
    return asked(story, e.ResumeAsked(request=901))


@pytest.mark.parametrize("restarted", [False, True])
def test_a_run_that_is_paused_makes_no_commit_until_it_is_resumed(restarted: bool) -> None:
    story = training("a", "b")
    assert pause(story) == ""
    if restarted:
        story.restart()
        for name in "ab":
            story.connect(name, state=(0, "s0"))
            story.offer(name)
    for name in "ab":
        story.ready(name)
    story.wait(3 * story.limits.sync_wait_s)
    assert story.view.last_commit == 0
    assert not story.num("a", m.Plan)
    assert story.view.state == "paused: a person has paused the run: the cluster is moved (atoll resume)"
    assert story.view.num_evicted == 0, "whoever waits is not held to anything"
    assert resume(story) == ""
    assert story.contributor_ids() == [1, 2]
    for name in "ab":
        story.done(name, "s0")
    assert story.view.last_commit == 1
    story.restart()
    assert not story.is_paused()


def test_an_exchange_that_is_under_way_ends_in_its_commit() -> None:
    story = training("a", "b")
    for name in "ab":
        story.ready(name)
    assert pause(story) == ""
    for name in "ab":
        story.done(name, "s0")
    assert story.view.last_commit == 1
    for name in "ab":
        story.applied(name, 1, "s1")
        story.ready(name)
    assert story.view.state.startswith("paused: a person has paused the run")


def test_sites_come_and_go_while_it_is_paused() -> None:
    story = training("a", "b")
    pause(story)
    story.join("c")
    assert story.standing_of("c") == "joining"
    story.leave("b")
    assert resume(story) == ""


def test_a_paused_run_that_is_stopped_takes_its_last_sync() -> None:
    story = training("a", "b")
    pause(story)
    for name in "ab":
        story.ready(name)
    story.happens(e.StopAsked("enough"))
    assert story.contributor_ids() == [1, 2]
    for name in "ab":
        story.done(name, "s0")
    for name in "ab":
        story.applied(name, 1, "s1")
    assert story.view.finished
    assert story.view.last_commit == 1
    assert "the run is over" in pause(story)


def test_what_makes_no_sense_is_said() -> None:
    story = training("a", "b")
    assert "no person has paused the run" in resume(story)
    story.ready("a")
    story.happens(e.StopAsked("enough"))
    assert "the run is to stop" in pause(story)
    assert "that is here is called 'x'" in asked(story, e.DrainAsked(name="x", reason="?", request=902))
    story.drop("b")
    assert "b (site 2) is away" in asked(story, e.DrainAsked(name="b", reason="?", request=903))


def test_a_site_is_asked_to_leave() -> None:
    story = training("a", "b", "c")
    assert asked(story, e.DrainAsked(name="c", reason="new disks", request=902)) == ""
    assert story.last("c", m.Drain).reason == "new disks"
    assert not story.num("a", m.Drain)
    assert story.view.num_evicted == 0, "it leaves by itself"
