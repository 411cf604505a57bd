"""Crashes of a site's workers are events of its run."""

from __future__ import annotations

import logging

from atoll.coordinator.happenings import Happenings
from atoll.protocol import messages as m
from atoll.protocol.figures import MAX_CRASH_CHARACTERS
from tests.harness.coordinator_story import Story, some_settings


def crashes_said(story: Story) -> list[tuple[int, str]]:
    return [said for said in story.reports if "crashed" in said[1]]


def test_each_is_said_once_with_its_reason() -> None:
    story = Story(some_settings(min_sites=2))
    story.start("a", "b")
    story.says("a", m.Telemetry(num_crashes=0))
    assert crashes_said(story) == []
    for _ in range(2):
        story.says("a", m.Telemetry(num_crashes=1, last_crash="exit code 1: KeyError: 'x'"))
        story.wait(6.0)
    story.says("a", m.Telemetry(num_crashes=2))
    assert [level for level, _ in crashes_said(story)] == [logging.WARNING] * 2
    first, second = (text for _, text in crashes_said(story))
    assert first == "a (site 1): its workers crashed once since its node started, last: exit code 1: KeyError: 'x'"
    assert second == "a (site 1): its workers crashed 2 times since its node started, last: its log says why"


def test_a_member_that_says_so_all_the_time_does_not_fill_the_log() -> None:
    story = Story(some_settings(min_sites=2))
    story.start("a", "b")
    for number in range(50):
        story.says("a", m.Telemetry(num_crashes=number))
    assert len(crashes_said(story)) == 1
    story.wait(6.0)
    story.says("a", m.Telemetry(num_crashes=50))
    assert "crashed 50 times" in crashes_said(story)[-1][1]


def test_what_a_member_says_forges_no_event_and_drives_no_terminal() -> None:
    story = Story(some_settings(min_sites=2))
    story.start("a", "b")
    story.says("a", m.Telemetry(num_crashes=1, last_crash="x\nthe run is over\u2028\x1b[2J\x1b]0;owned\x07"))
    ((_, said),) = crashes_said(story)
    shown = "the run is over\\u2028\\x1b[2J\\x1b]0;owned\\x07"
    assert said == f"a (site 1): its workers crashed once since its node started, last: {shown}"
    assert story.view.sites[0].telemetry.last_crash == shown
    story.says("b", m.Telemetry(num_crashes=1, last_crash="\x07" * MAX_CRASH_CHARACTERS))
    assert len(story.view.sites[1].telemetry.last_crash) == MAX_CRASH_CHARACTERS


def test_a_number_that_falls_is_no_news_when_it_rises_again() -> None:
    story = Story(some_settings(min_sites=2))
    story.start("a", "b")
    for number in (1, 0, 1, 0, 1):
        story.says("a", m.Telemetry(num_crashes=number))
        story.wait(6.0)
    assert len(crashes_said(story)) == 1
    story.connect("a", again=True, incarnation=9)
    story.offer("a")
    story.says("a", m.Telemetry(num_crashes=1))
    assert len(crashes_said(story)) == 2, "another start of its node counts anew"


def test_of_a_site_at_the_door_nothing_is_said_until_it_is_in_the_run() -> None:
    story = Story(some_settings(min_sites=2))
    story.start("a", "b")
    story.connect("c")
    story.says("c", m.Telemetry(num_crashes=1, last_crash="a stranger's words"))
    assert crashes_said(story) == []
    story.offer("c")
    story.says("c", m.Telemetry(num_crashes=1, last_crash="exit code 1"))
    assert len(crashes_said(story)) == 1


def test_an_event_begins_with_whose_it_is_whatever_a_member_says() -> None:
    happenings = Happenings()
    reason = "rank 0\nTraceback\nthe run is over"
    happenings.note(logging.ERROR, f"a (site 1) leaves: {reason}", 0.0)
    happenings.note(logging.ERROR, f"a (site 1) leaves: {'x' * 4000}\r\n{'y' * 4000}\r\n", 0.0)
    happenings.note(logging.ERROR, "commit 1\n", 0.0)
    told = [event["text"] for event in happenings.document()]
    assert told[0] == "a (site 1) leaves: rank 0 ... the run is over"
    assert told[1] == f"a (site 1) leaves: {'x' * 181} ... {'y' * 195}"
    assert told[2] == "commit 1"
