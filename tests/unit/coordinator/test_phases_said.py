"""What sites say that syncs took: of the newest syncs alone, of few sites, and shown as the median's."""

from __future__ import annotations

import asyncio

from atoll.coordinator.core.sync.phases_said import KEPT_SYNCS, MAX_SITES, PhasesSaid
from atoll.coordinator.curves_shown import CurvesShown
from atoll.coordinator.sync_timeline import SyncTimeline
from atoll.protocol import messages as m
from atoll.protocol.figures import SyncPhases
from tests.harness.coordinator_story import Story, some_settings
from tests.unit.coordinator.test_store_contract import an_open


def said(train_s: float, *, sync: int = 1) -> m.Heartbeat:
    return m.Heartbeat(phase="training", phases=(SyncPhases(sync=sync, train_s=train_s, wait_s=1.0),))


def test_each_sites_word_is_shown_by_its_name_and_the_median_in_the_timeline() -> None:
    story = Story(some_settings(min_sites=3))
    story.start("a", "b", "c")
    for name, train_s in (("a", 2.0), ("b", 3.0), ("c", 1e9)):
        story.says(name, said(train_s))
    story.says("a", said(-5.0, sync=2))  # was not opened yet

    async def shown() -> object:
        return (await CurvesShown(story.core, asyncio.Lock(), {}).recent())["phases"]

    of_sites = {"a": (2.0, 0.0, 0.0, 0.0, 1.0), "b": (3.0, 0.0, 0.0, 0.0, 1.0), "c": (1e9, 0.0, 0.0, 0.0, 1.0)}
    assert asyncio.run(shown()) == [{"sync": 1, "sites": of_sites}]
    timeline = SyncTimeline()
    timeline.kept((an_open(1), an_open(2)), 1.0)
    found = {span["sync"]: span["phases"] for span in timeline.document(story.core.median_phases())}
    assert found == {1: {"train": 3.0, "snapshot": 0.0, "exchange": 0.0, "apply": 0.0, "wait": 1.0}, 2: None}


def test_what_no_sync_can_take_is_no_infinite_median() -> None:
    """Of which there is no JSON."""
    phases = PhasesSaid()
    for site_id in (1, 2):
        phases.note(site_id, SyncPhases(sync=1, train_s=1.7e308), 1)
    assert phases.medians()[1]["train"] == 1e9


def test_a_site_outside_the_run_is_not_heard() -> None:
    story = Story(some_settings(min_sites=2))
    story.start("a", "b")
    story.connect("c")
    story.says("c", said(2.0))
    assert story.core.phases() == []


def test_it_is_bounded_whatever_sites_say() -> None:
    phases = PhasesSaid()
    for site_id in range(2 * MAX_SITES):
        phases.note(site_id, SyncPhases(sync=1, train_s=-1.0), 1)
    assert phases.of_sites() == [(1, dict.fromkeys(range(MAX_SITES), (0.0,) * 5))]
    for last in range(1, 2 * KEPT_SYNCS + 1):
        phases.note(1, SyncPhases(sync=last), last)
        phases.note(1, SyncPhases(sync=last + 1), last)
        phases.note(1, SyncPhases(sync=1 << 62), last)
    assert [sync for sync, _ in phases.of_sites()] == list(range(KEPT_SYNCS + 1, 2 * KEPT_SYNCS + 1))
