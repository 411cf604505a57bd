"""Crashes of a site's workers are events of its run."""

from __future__ import annotations

import logging

from atoll.protocol import messages as m
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
