"""Curves at the coordinator: what sites log and lose, bounded whoever says it, thinned, kept, and cut where a run goes
back."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from itertools import pairwise
from math import nan
from typing import Any

from atoll.coordinator.core import curves as curves_module
from atoll.coordinator.core import events as e
from atoll.coordinator.core.curves import (
    KEEP_EVERY_S,
    MAX_CURVES,
    MAX_POINTS,
    TRAINING_LOSS,
    UTILIZATION,
    Curve,
    Curves,
    Point,
    Series,
)
from atoll.coordinator.curves_shown import CurvesShown
from atoll.coordinator.metrics import METRICS
from atoll.coordinator.sync_timeline import SHOWN_SYNCS, SyncTimeline
from atoll.coordinator.web import in_json
from atoll.protocol import messages as m
from atoll.protocol import pages
from atoll.protocol.logged import MAX_NAMES
from atoll.protocol.metrics import families
from tests.harness.coordinator_story import Story, some_settings
from tests.unit.coordinator.test_store_contract import a_commit, a_plan, an_open, some_weights


def at(step: int, value: float = 0.0) -> Point:
    return Point(step, 0, 0.0, value)


def logged(name: str, step: int, value: float, *, of_outer: bool = False) -> m.Logged:
    return m.Logged(values=(m.LoggedValue(name=name, step=step, value=value, of_outer=of_outer),))


def a_story() -> Story:
    story = Story(some_settings(min_sites=2))
    story.start("a", "b")
    story.says("a", m.Heartbeat(phase="training", train_s=9.0, wait_s=1.0))
    story.commit_one("a", "b", state="s0", following="s1")
    return story


def points(story: Story) -> dict[tuple[str, str, bool], list[tuple[int, float]]]:
    return {
        (view.site, view.name, view.of_outer): [(point[0], point[3]) for point in view.points]
        for view in story.core.curves()
    }


def test_what_a_site_logs_is_a_curve_and_what_it_logs_of_the_outer_parameters_another_one() -> None:
    story = a_story()
    story.says("a", logged("val_loss", 12, 2.5))
    story.says("a", logged("val_loss", 15, 2.25))
    story.says("b", logged("val_loss", 10, 2.0, of_outer=True))
    found = points(story)
    assert found["a", "val_loss", False] == [(12, 2.5), (15, 2.25)]
    assert found["b", "val_loss", True] == [(10, 2.0)]
    assert found["a", TRAINING_LOSS, False] == [(10, 2.0)], "of its commit"
    assert found["a", UTILIZATION, False] == [(10, 0.9)]
    told = {site.name: [asdict(one) for one in site.logged] for site in story.view.sites}
    assert told["a"] == [{"name": "val_loss", "of_outer": False, "step": 15, "value": 2.25}]
    document = asdict(story.view) | {"atoll_version": "1"}
    scraped = pages.metrics(families(METRICS, document)).body.decode()
    assert 'atoll_site_logged{name="val_loss",of="outer",site="b"} 2.0' in scraped
    assert 'atoll_site_logged{name="val_loss",of="local",site="a"} 2.25' in scraped


def test_whoever_looks_at_curves_costs_no_copy_of_each_point() -> None:
    """It is made in the event loop, in which the coordinator decides: half a second for a run's 130,000 points."""
    story = a_story()
    story.says("a", logged("val_loss", 12, 2.5))

    async def shown() -> dict[str, Any]:
        return await CurvesShown(story.core, asyncio.Lock(), {1: 7.0}).recent()

    document = asyncio.run(shown())
    named = {(curve["site"], curve["name"]): curve for curve in document["sites"]}
    logged_points = next(view.points for view in story.core.curves() if view.name == "val_loss")
    assert named["a", "val_loss"]["points"][0] is logged_points[0]
    assert document["run"] == [(10, 200, 7.0, 2.0)]
    assert in_json(document) == json.dumps(document)
    assert in_json({}) == "{}"


def test_a_site_outside_the_run_has_no_curve_and_a_name_that_is_none_ends_its_stream() -> None:
    story = a_story()
    story.join("c")
    story.leave("c")
    story.connect("d")
    story.says("d", logged("val_loss", 1, 2.0))
    assert "d" not in {site for site, _, _ in points(story)}
    before = story.view.num_refused
    story.says("b", logged('"}\nfake 1', 1, 2.0))
    assert story.view.num_refused == before + 1
    assert {name for site, name, _ in points(story) if site == "b"} <= {TRAINING_LOSS, UTILIZATION}


def test_one_site_cannot_take_the_room_of_all() -> None:
    curves = Curves((), 0.0)
    for of_outer in (False, True):
        for i in range(MAX_CURVES):
            curves.note(Series(1, f"n{i}", of_outer), at(1))
        assert {series.name for series, _ in curves.all()} == {f"n{i}" for i in range(MAX_NAMES)}
    assert len(curves.all()) == 2 * MAX_NAMES, "each name is of the outer parameters, too"
    assert curves.num_left_out == 2 * (MAX_CURVES - MAX_NAMES)
    curves.note(Series(1, TRAINING_LOSS), at(1))
    assert len(curves.all()) == 2 * MAX_NAMES + 1, "its loss has a place of its own"
    for site_id in range(2, 2 + MAX_CURVES):
        curves.note(Series(site_id, "n"), at(1))
    assert len(curves.all()) == MAX_CURVES
    curves.forget(1)
    curves.note(Series(7000, "n"), at(1))
    assert Series(7000, "n") in dict(curves.all()), "whoever is forgotten makes room"


def test_a_curve_for_which_there_is_no_room_is_said_once() -> None:
    story = a_story()
    for number in range(MAX_NAMES + 3):
        story.says("a", logged(f"n{number}", 12, 1.0))
    said = [text for _, text in story.reports if "no room" in text]
    assert len(said) == 1
    assert said[0].startswith(f"no room for the curve 'n{MAX_NAMES}' of a")


def test_a_long_curve_is_thinned_evenly_and_ends_with_its_newest_point() -> None:
    curve = Curve()
    for step in range(10_001):
        curve.add(at(step))
        assert len(curve.points) <= MAX_POINTS
    steps = [point.step for point in curve.all()]
    assert steps[-1] == 10_000
    assert {b - a for a, b in pairwise(steps[:-1])} == {64}
    assert steps[0] == 0


def test_of_one_step_the_last_value_counts_and_the_curve_grows_on() -> None:
    """Several ranks may log at one step."""
    curve = Curve()
    for step in range(1000):
        for value in (1.0, 2.0):
            curve.add(at(step, value))
    found = curve.all()
    assert {point.value for point in found} == {2.0}
    assert len(found) > MAX_POINTS // 2
    assert found[-1].step == 999
    assert max(b.step - a.step for a, b in pairwise(found)) <= 8


def test_a_site_that_went_back_says_the_later_steps_anew() -> None:
    curves = Curves((), 0.0)
    for step in (1, 2, 3, 4, 3):
        curves.note(Series(1, "n"), at(step, 10.0 * step))
    curves.note(Series(1, "n"), at(5, nan))
    assert dict(curves.all())[Series(1, "n")] == (at(1, 10.0), at(2, 20.0), at(3, 30.0))
    curves.go_back(2)
    assert dict(curves.all())[Series(1, "n")] == (at(1, 10.0), at(2, 20.0)), "a rollback"


def test_a_node_that_is_started_anew_has_spent_no_time_yet() -> None:
    curves = Curves((), 0.0)
    for step, train_s, wait_s in ((1, 8.0, 2.0), (2, 9.0, 3.0), (3, 3.0, 1.0)):
        curves.note_spent(1, train_s, wait_s, at(step))
    assert [point.value for point in dict(curves.all())[Series(1, UTILIZATION)]] == [0.8, 0.5, 0.75]


def test_curves_are_kept_now_and_then_and_are_there_after_a_restart() -> None:
    story = a_story()
    story.says("a", logged("val_loss", 12, 2.5))
    assert not [kind for kind, _, _ in story.kept if "curve" in kind], "not with each value"
    story.wait(KEEP_EVERY_S)
    story.says("a", logged("val_loss", 14, 2.0))
    before = points(story)
    assert len(before) == 5
    story.restart()
    assert points(story) == before


def test_points_of_void_commits_do_not_come_back_with_a_start_of_the_coordinator() -> None:
    """Nobody cuts the curve of a site that has gone."""
    story = a_story()
    story.commit_one("a", "b", state="s1", following="s2")
    story.wait(KEEP_EVERY_S)
    story.says("b", logged("val_loss", story.view.commits[-1].run_step, 2.0))
    assert any("curve" in kind for kind, _, _ in story.kept)
    story.leave("b")
    story.ask_to_go_back(1)
    story.rebuilt("a", "s1")
    assert points(story)["b", "val_loss", False] == []
    story.restart()
    assert points(story).get(("b", "val_loss", False), []) == []


def test_a_curve_that_has_not_changed_is_not_written_again() -> None:
    curves = Curves((), 0.0)
    curves.note(Series(1, "n"), at(1))
    assert not list(curves.due(KEEP_EVERY_S - 1, is_over=False))
    assert len(list(curves.due(KEEP_EVERY_S, is_over=False))) == 1
    curves.note(Series(2, "n"), at(1))
    assert [record.site_id for record in curves.due(2 * KEEP_EVERY_S, is_over=False)] == [2]
    curves.note(Series(1, "n"), at(2))
    assert [record.site_id for record in curves.due(2 * KEEP_EVERY_S, is_over=True)] == [1], "the run's end"
    assert curves_module.MAX_POINTS * 4 * 24 < 1 << 16, "a record stays small"


def test_a_sync_is_seen_from_its_opening_until_its_state_is_attested() -> None:
    timeline = SyncTimeline()
    timeline.kept([an_open(7), a_plan(7, 1)], 100.0)  # a plan that came with the commit before
    timeline.kept([some_weights(7, 1)], 104.0)
    (span,) = timeline.document({})
    assert (span["opened_s"], span["ready_s"], span["ended_s"]) == (100.0, 104.0, None)
    timeline.kept([a_plan(7, 2)], 105.0)
    (span,) = timeline.document({})
    assert (span["ready_s"], span["attempts"]) == (None, 2), "again"
    timeline.kept([some_weights(7, 2)], 106.0)
    timeline.kept([a_commit(7), an_open(8)], 107.0)
    timeline.kept([e.AttestationRecord(7, b"")], 108.0)
    first, second = timeline.document({})
    assert (first["ready_s"], first["ended_s"], first["attested_s"], first["commit"]) == (106.0, 107.0, 108.0, 7)
    assert second["ready_s"] is None
    timeline.kept([e.AbandonRecord(sync=8, reason="", num_abandoned=1)], 109.0)
    assert (timeline.document({})[1]["ended_s"], timeline.document({})[1]["commit"]) == (109.0, None)
    timeline.kept([an_open(9), e.FinishedRecord(7, "stopped")], 109.5)
    assert (timeline.document({})[2]["ended_s"], timeline.document({})[2]["commit"]) == (109.5, None), "the run is over"
    for sync in range(10, 10 + 2 * SHOWN_SYNCS):
        timeline.kept([an_open(sync), a_commit(sync)], 110.0)
    assert len(timeline.document({})) == SHOWN_SYNCS
