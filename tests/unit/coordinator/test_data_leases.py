"""Leases in the core: what becomes of positions when sites, syncs and the coordinator are lost. Numbers in names are
those of the design's invariants and rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import pytest

from atoll.coordinator.core import events as e
from atoll.protocol import messages as m
from atoll.protocol.messages import Deposit, RefusedKind
from tests.harness.coordinator_story import Story, ranges_of, some_settings


def a_story(*names: str, **settings: object) -> Story:
    story = Story(some_settings(**settings))
    story.start(*names)
    return story


def two_planned() -> Story:
    """a used 0-9 of 0-49, b 50-59 of 50-99; both are planned."""
    story = a_story("a", "b")
    story.wants("a", 50)
    story.wants("b", 50)
    story.ready("a", data=ranges_of("0-9"))
    story.ready("b", data=ranges_of("50-59"))
    story.plan()
    return story


def test_9_a_contributor_lost_after_everybody_is_done_is_in_the_commit_and_so_is_its_data() -> None:
    story = two_planned()
    story.done("b", "s0")
    story.leave("b")
    assert story.leased_by("b") == ()
    story.done("a", "s0")
    commit = story.last("a", m.Commit)
    assert [c.site_id for c in commit.contributors] == [1, 2]
    assert commit.done == (m.LineRanges(line=0, ranges=ranges_of("0-9,50-59")),)
    assert story.done_samples() == ranges_of("0-9,50-59")
    assert story.wants("a", 100) == ranges_of("10-49,60-119"), "only the rest of b's lease went to a"


def test_9_the_data_of_a_start_that_is_over_is_open_again_if_the_next_attempt_has_the_site_with_other_data() -> None:
    story = a_story("a", "b", "c", min_sites=3, quorum=3)
    for name in "abc":
        story.wants(name, 50)
    for name, text in ("a", "0-9"), ("b", "50-59"), ("c", "100-109"):
        story.ready(name, data=ranges_of(text))
    story.drop("b")  # it may be lost as well: the next attempt waits for that
    story.connect("c", incarnation=2, state=(0, "s0"))
    story.offer("c")
    story.wants("c", 20)
    story.ready("c", data=ranges_of("110-119"))
    story.connect("b", state=(0, "s0"))
    assert [(c.site_id, c.incarnation) for c in story.plan().contributors] == [(1, 1), (2, 1), (3, 2)]
    for name in "abc":
        story.done(name, "s0")
    assert story.done_samples() == ranges_of("0-9,50-59,110-119")
    assert story.wants("a", 50) == ranges_of("10-49,100-109")


def test_9_what_becomes_of_a_later_start_is_no_matter_for_the_contribution_of_one_that_left_when_it_was_done() -> None:
    story = a_story("a", "b", "c", min_sites=3, quorum=2)
    story.wants("c", 50)
    for name, text in ("a", ""), ("b", ""), ("c", "0-9"):
        story.ready(name, data=ranges_of(text))
    story.done("c", "s0")
    story.leave("c")
    story.connect("c", incarnation=2, state=(0, "s0"))
    story.offer("c")
    story.drop("c")
    story.wait(story.limits.reconnect_grace_s)
    assert not story.is_live("c")
    for name in "ab":
        story.done(name, "s0")
    commit = story.last("a", m.Commit)
    assert (commit.attempt, [(c.site_id, c.incarnation) for c in commit.contributors]) == (1, [(1, 1), (2, 1), (3, 1)])
    assert story.done_samples() == ranges_of("0-9")


def test_9_the_data_of_a_plan_survives_the_coordinator() -> None:
    story = two_planned()
    story.restart()
    assert story.planned_samples() == (ranges_of("0-9"), ranges_of("50-59"))
    for name, data in (("a", "0-9"), ("b", "50-59")):
        story.connect(name, state=(0, "s0"), term=1)
        story.ready(name, data=ranges_of(data))
        story.done(name, "s0")
    assert story.done_samples() == ranges_of("0-9,50-59")


def test_9_a_lost_contribution_is_open_again_once_its_plan_is_replaced() -> None:
    story = two_planned()
    story.done("b", "s0")
    story.leave("b")
    assert story.outlived_contributions() == [(0, 2)], "the commit of this plan may list it"
    story.restart()
    assert story.plan().attempt == 2, "nobody knows what it was done with"
    story.connect("a", state=(0, "s0"), term=1)
    assert story.wants("a", 60) == ranges_of("0-59")
    assert not story.outlived_contributions()


def test_5_leases_come_back_with_the_coordinator() -> None:
    story = a_story("a", "b")
    before = story.wants("a", 30)
    story.restart()
    story.connect("a", state=(0, "s0"), term=1)
    assert story.wants("a", 30) == before
    assert story.wants("a", 31) == ranges_of("0-30")


def test_5_a_commit_and_its_data_are_one_transaction() -> None:
    story = two_planned()
    transactions: list[Sequence[e.Record]] = []
    keep = story.store.persist

    def persist(term: int, records: Sequence[e.Record], wall_time_s: float) -> tuple[Deposit, ...]:
        transactions.append(records)
        return keep(term, records, wall_time_s)

    story.store.persist = persist  # type: ignore[method-assign]
    story.done("a", "s0")
    story.done("b", "s0")
    (records,) = [r for r in transactions if any(isinstance(x, e.CommitRecord) for x in r)]
    assert e.DoneRecord(line=0, ranges=ranges_of("0-9,50-59")) in records
    assert e.LeaseRecord(line=0, site_id=1, incarnation=1, ranges=ranges_of("10-49")) in records


def test_an_abandoned_sync_leaves_the_leases_where_they_are() -> None:
    story = two_planned()
    story.failed("a", text="disk full")
    story.failed("b", text="disk full")
    assert story.num("a", m.Abandoned) == 1
    assert (story.leased_by("a"), story.leased_by("b")) == (ranges_of("0-49"), ranges_of("50-99"))
    story.wait(3)
    story.ready("a", data=ranges_of("0-12"))
    story.ready("b", data=ranges_of("50-59"))
    story.done("a", "s0")
    story.done("b", "s0")
    assert story.done_samples() == ranges_of("0-12,50-59")


def test_25_a_ready_with_data_of_others_is_refused_and_the_site_discards_it() -> None:
    for wrong in ("50-59", "0-50", "0-9,30-60"):
        story = a_story("a", "b")
        story.wants("a", 50)
        story.wants("b", 50)
        story.ready("a", data=ranges_of(wrong))
        assert not any(story.is_ready(name) for name in "ab")
        assert "does not lease" in story.last("a", m.Evicted).reason
        assert story.leased_by("a") == ()
        assert story.leased_by("b") == ranges_of("50-99")


@pytest.mark.parametrize("wrong", ["10-19,0-9", "0-9,10-19", "0-9,5-12"])
def test_25_ranges_are_ascending_and_merged(wrong: str) -> None:
    story = a_story("a", "b")
    story.wants("a", 50)
    story.ready("a", data=ranges_of(wrong))
    assert story.num("a", m.Evicted) == 1


def test_25_a_new_start_leases_nothing_of_the_old_one() -> None:
    story = a_story("a", "b")
    story.wants("a", 50)
    story.join("a", incarnation=2, state=(0, "s0"))
    assert story.leased_by("a") == ()
    assert story.wants("b", 60) == ranges_of("0-59"), "it is open at once"
    story.ready("a", data=ranges_of("0-9"))
    assert story.num("a", m.Evicted) == 1


def test_another_number_of_samples_is_refused_with_both() -> None:
    story = a_story("a", "b")
    story.wants("a", 10, of=1000)
    story.says("b", m.LeaseRequest(num_samples=999, wanted=10))
    refused = story.last("b", m.Refused)
    assert refused.kind is RefusedKind.DATA
    assert "cuts the run's data into 999 samples, the sites before it into 1000" in refused.text


@pytest.mark.parametrize(("num_samples", "wanted"), [(0, 1), (1 << 49, 1), (10, 1 << 41)])
def test_impossible_requests_are_refused(num_samples: int, wanted: int) -> None:
    story = a_story("a", "b")
    story.says("a", m.LeaseRequest(num_samples=num_samples, wanted=wanted))
    assert story.last("a", m.Refused).kind is RefusedKind.INVALID
    assert not story.lines()


def test_local_data_has_a_line_for_each_site_that_outlives_its_starts() -> None:
    story = a_story("a", "b", data="local")
    assert story.wants("a", 20, of=15) == story.wants("b", 20, of=1000) == ranges_of("0-19")
    story.ready("a", data=ranges_of("0-9"))
    story.ready("b", data=ranges_of("0-4"))
    story.done("a", "s0")
    story.done("b", "s0")
    assert story.last("a", m.Commit).done == (
        m.LineRanges(line=1, ranges=ranges_of("0-9")),
        m.LineRanges(line=2, ranges=ranges_of("0-4")),
    )
    story.join("b", incarnation=2, state=(1, "s1"))
    assert story.wants("b", 3, of=1000) == ranges_of("5-7")
    story.says("b", m.LeaseRequest(num_samples=999, wanted=3))
    assert "another --name" in story.last("b", m.Refused).text


def test_the_account_balances_pass_by_pass_and_range_by_range() -> None:
    story = a_story("a", "b", steps=10)
    story.wants("a", 25, of=10)
    story.wants("b", 10, of=10)
    story.ready("a", data=ranges_of("0-11"))
    story.ready("b", data=ranges_of("25-27"))
    (line,) = story.view.data
    assert (line.num_passes_begun, line.num_passes_done, line.num_done, line.num_leased, line.num_open) == (
        4, 0, 0, 35, 5,
    )  # fmt: skip
    story.done("a", "s0")
    story.done("b", "s0")
    (line,) = story.view.data
    assert story.view.finished
    assert (line.num_passes_done, line.num_done, line.num_leased, line.num_open) == (1, 15, 0, 25)
    assert [(p.number, p.num_done, p.num_open) for p in line.passes] == [(1, 2, 8), (2, 3, 7), (3, 0, 10)]
    ranges = [(r.first, r.num_samples, r.state) for r in story.core.data_ranges()]
    assert ranges == [(0, 12, "done"), (12, 13, "open"), (25, 3, "done"), (28, 12, "open")]


def test_what_is_in_flight_is_named_by_site() -> None:
    story = a_story("a", "b")
    story.wants("a", 25, of=20)
    story.wants("b", 5, of=20)
    (line,) = story.view.data
    assert [[asdict(held) for held in p.leased] for p in line.passes] == [
        [{"site": "a", "num_samples": 20}],
        [{"site": "a", "num_samples": 5}, {"site": "b", "num_samples": 5}],
    ]
    assert [(r.state, r.site) for r in story.core.data_ranges()] == [("leased", "a"), ("leased", "b"), ("open", "")]


def test_9_what_was_discarded_stays_so_when_the_coordinator_starts_again() -> None:
    """a was evicted and is back with the same start: the plan that lists it is the last one in the store, but counts no
    longer. Its samples went to another."""
    story = a_story("a", "b", "c", quorum=2)
    story.wants("a", 50)
    story.ready("a", data=ranges_of("0-9"))
    story.ready("b")
    while not story.attempt():
        story.wait(1.0)  # c is not ready
    old = story.plan()
    story.drop("a")
    story.wait(1.1)
    assert not story.attempt(), "given up, waiting for c"
    story.connect("a", state=(0, "s0"))
    story.connect("a", state=(0, "s0"), again=True)
    story.offer("a")
    assert story.wants("b", 50) == ranges_of("0-49")
    story.restart()
    for name in ("a", "b"):
        story.connect(name, state=(0, "s0"), term=1)
    for name in ("a", "b"):
        story.done(name, "s0", plan=old)
    assert story.num("a", m.Commit) == 0
    assert story.done_samples() == ()


def test_9_a_done_that_comes_with_a_restart_commits_no_data_that_is_open_again() -> None:
    """The plan that was given up is in the store, and that it was given up is not."""
    story = a_story("a", "b", quorum=2)
    story.wants("a", 50)
    story.wants("b", 50)
    story.ready("a", data=ranges_of("0-9"))
    story.ready("b", data=ranges_of("50-59"))
    story.leave("b")
    assert story.attempt() == 0
    with story.together():
        story.restart()
        story.connect("a", state=(0, "s0"))
        story.done("a", "s0")
    assert story.view.last_commit == 0
    assert story.done_samples() == ()
