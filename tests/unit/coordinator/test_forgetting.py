"""Sites that came, never contributed and have gone fill neither the store nor the status; their ids stay theirs."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from atoll.coordinator.core import events as e
from atoll.coordinator.core.sites import forgetting
from atoll.coordinator.core.view.run_view import SHOWN_GONE
from atoll.coordinator.sqlite_store import SqliteStore
from atoll.coordinator.store import Store
from atoll.protocol import PROTOCOL_VERSION
from atoll.protocol import messages as m
from atoll.protocol.messages import RefusedKind
from tests.harness.coordinator_story import Story, a_hash, some_settings
from tests.harness.memory_store import MemoryStore

NUM = 3 * forgetting.KEPT_GONE


def come_and_go(story: Story, number: int, first: int = 0) -> None:
    for i in range(first, first + number):
        story.join(f"passer-{i}")
        story.drop(f"passer-{i}")
        story.lose(f"passer-{i}", "its stream closed")
        story.happens(e.Tick())


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_who_came_and_went_is_forgotten_but_for_the_last_and_ids_are_not_given_again(kind: str, tmp_path: Path) -> None:
    store: Store = MemoryStore() if kind == "memory" else SqliteStore(tmp_path / "run.db")
    story = Story(some_settings(data="local"), store=store)
    story.start("a", "b")
    come_and_go(story, NUM)
    known = story.known_sites()
    assert len(known) == 2 + forgetting.KEPT_GONE
    assert f"passer-{NUM - 1}" in known
    assert "passer-0" not in known
    assert story.view.num_gone == forgetting.KEPT_GONE
    assert len(story.view.sites) == 2 + SHOWN_GONE
    size = len(json.dumps(asdict(story.view)))
    come_and_go(story, NUM, first=NUM)
    assert len(json.dumps(asdict(story.view))) < 1.1 * size
    last = story.last_site_id()
    assert last == 2 + 2 * NUM
    story.restart()
    assert len(story.known_sites()) == 2 + forgetting.KEPT_GONE
    story.join("c")
    assert story.last("c", m.Admitted).site_id == last + 1
    store.close()


def test_ids_are_not_given_again_though_the_highest_is_forgotten() -> None:
    story = Story(some_settings())
    story.start("a", "b")
    come_and_go(story, 1)
    story.forget_who_is_gone()
    story.join("c")
    assert story.last("c", m.Admitted).site_id == 4


def test_a_site_that_contributed_comes_back_as_the_one_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forgetting, "KEPT_GONE", 0)
    story = Story(some_settings())
    story.start("a", "b")
    story.commit_one("a", "b", state="s0", following="s1")
    story.says("b", m.Leave(reason="enough"))
    story.drop("b")
    story.join("c")
    story.drop("c")
    story.commit_one("a", state="s1", following="s2")  # the next sync does not name b
    story.wait(10)
    assert 2 not in story.expected_ids()
    assert story.known_sites() == {"a", "b"}
    story.restart()
    story.connect("b", state=(1, "s1"))
    assert story.last("b", m.Welcome).site_id == 2


def test_a_site_that_the_sync_under_way_names_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forgetting, "KEPT_GONE", 0)
    story = Story(some_settings(min_sites=2, quorum=1))
    story.start("a", "b")
    story.ready("a")
    story.ready("b")
    story.drop("b")
    story.wait(5)
    assert story.standing_of("b") == "out"
    assert story.view.syncs


def test_a_site_that_an_earlier_attempt_named_is_known_when_the_sync_is_committed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was demoted, then started again, and has gone; the attempt that is committed never had it."""
    monkeypatch.setattr(forgetting, "KEPT_GONE", 0)
    monkeypatch.setattr(forgetting, "KEPT_STRUCK", 0)
    story = Story(some_settings(min_sites=4, quorum=2))
    story.start("a", "b", "c", "x")
    for name in "abcx":
        story.ready(name)
    for name in "ab":
        story.failed(name, "x", lacks=True)
    story.wait(story.limits.reconnect_grace_s)
    assert (story.attempt(), story.contributor_ids()) == (2, [1, 2, 3])
    story.connect("x", incarnation=2)
    story.drop("x")
    story.leave("c")
    assert (story.attempt(), story.contributor_ids()) == (3, [1, 2])
    for name in "ab":
        story.done(name, "s0")
    assert story.view.last_commit == 1
    assert story.known_sites() == {"a", "b"}


def test_a_coordinator_comes_back_though_a_site_that_its_sync_expected_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It left before it was planned, and others came and went since."""
    monkeypatch.setattr(forgetting, "KEPT_GONE", 0)
    story = Story(some_settings())
    story.start("a", "b")
    story.join("c")
    story.applied("c", 0, "s0")
    story.commit_one("a", "b", state="s0", following="s1")
    assert story.expected_ids() == {1, 2, 3}
    story.leave("c")
    assert not story.is_known("c")
    story.restart()
    assert story.expected_ids() == {1, 2}
    assert story.view.syncs


def test_a_coordinator_comes_back_with_all_whom_a_plan_names_that_was_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store has the plan until the sync ends; that it was given up is in no record."""
    monkeypatch.setattr(forgetting, "KEPT_GONE", 0)
    story = Story(some_settings(quorum=2))
    story.start("a", "b")
    for name in "cd":
        story.join(name)
        story.applied(name, 0, "s0")
    for name in "ab":
        story.ready(name)
    assert [r.site_id for r in story.plan().receivers] == [3, 4]
    story.failed("b")
    assert story.attempt() == 0, "too few are left, and d may come"
    story.leave("c")
    assert story.attempt() == 0
    story.restart()
    for name in "ab":
        story.connect(name, state=(0, "s0"))
        story.offer(name)
    assert story.view.syncs
    assert story.view.syncs[0].receivers == ("c", "d")
    for name in "ab":
        story.done(name, "s0")
    assert story.view.last_commit == 1


def test_a_forgotten_site_that_still_has_its_id_is_told_to_start_again() -> None:
    story = Story(some_settings())
    story.start("a", "b")
    stream = story.open_stream("old")
    header = m.Header(protocol_version=PROTOCOL_VERSION, run_id="run", site_id=9, incarnation=1)
    story.happens(e.Received(stream, header, m.Hello(name="old", key=a_hash("key old"), address="old:1")))
    refused = story.last("old", m.Refused)
    assert (refused.kind, "start the node again" in refused.text) == (RefusedKind.STALE, True)


def test_lines_of_positions_go_with_their_sites(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forgetting, "KEPT_GONE", 0)
    store = MemoryStore()
    story = Story(some_settings(data="local"), store=store)
    story.start("a", "b")
    story.join("c")
    story.applied("c", 0, "s0")
    story.wants("c", 5, of=10)
    assert 3 in story.lines()
    story.says("c", m.Leave(reason="enough"))
    story.drop("c")
    story.happens(e.Tick())
    assert 3 not in story.lines()
    story.restart()
    assert 3 not in story.lines()


def found_out(story: Story, name: str, strikes: int) -> None:
    """It came, was found out so often, and has gone."""
    story.join(name)
    story.set_strikes(name, strikes - 1)
    story.drop(name)
    story.evict_for(name, "it cost the others attempts")
    story.happens(e.Tick())


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_25_a_crowd_of_passers_by_does_not_clear_the_name_of_who_was_found_out(kind: str, tmp_path: Path) -> None:
    store: Store = MemoryStore() if kind == "memory" else SqliteStore(tmp_path / "run.db")
    story = Story(some_settings(), store=store)
    story.start("a", "b")
    found_out(story, "liar", 5)
    for number in range(2):
        story.commit_one("a", "b", state=f"s{number}", following=f"s{number + 1}")
    come_and_go(story, forgetting.KEPT_GONE + 3)
    site_id = story.sites["liar"].site_id
    assert not story.is_known("passer-0")
    story.restart()
    story.connect("liar", incarnation=2)
    story.offer("liar")
    assert (story.id_of("liar"), story.strikes_of("liar")) == (site_id, 5)
    assert not story.is_live("liar"), "it waits for its time"
    store.close()


def test_25_of_those_that_were_found_out_so_many_stay_known_who_cost_the_most_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(forgetting, "KEPT_GONE", 0)
    monkeypatch.setattr(forgetting, "KEPT_STRUCK", 3)
    story = Story(some_settings())
    story.start("a", "b")
    found_out(story, "often", 4)
    for i in range(9):
        found_out(story, f"once-{i}", 1)
    assert story.known_sites() == {"a", "b", "often", "once-7", "once-8"}
