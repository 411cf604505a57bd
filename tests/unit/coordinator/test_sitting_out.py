"""A site whose link is thin sits syncs out: nobody waits for it then, and at its turn all that it trained counts."""

from __future__ import annotations

from typing import Any

from atoll.coordinator.core import events as e
from atoll.protocol import messages as m
from atoll.protocol.plans import weights
from tests.harness.coordinator_story import Story, some_settings

NAMES = ("a", "b", "c", "d", "e")
THIN = "c"
TRAIN_S = 1.0
EXTRA_S = 0.5
"""That the thin link takes longer: its site contributes to one sync of 8."""
EVERY = 8


class ThinLink:
    """A run of sites that do what they should."""

    def __init__(self, **settings: Any) -> None:
        self.story = Story(some_settings(**{"min_sites": 5, "steps": 10_000} | settings))
        self.story.start(*NAMES)
        self.thin_bytes_per_s = 60.0

    @property
    def opened(self) -> m.Open:
        found = self.story.open_sync()
        assert found is not None
        return found

    def rests(self) -> bool:
        return self.story.id_of(THIN) in self.opened.resting

    def uses(self, name: str, contributors: tuple[str, ...]) -> tuple[m.LinkUse, ...]:
        found = []
        for other in contributors:
            rate = self.thin_bytes_per_s if THIN in (name, other) else 1000.0
            if other != name:
                found.append(m.LinkUse(site_id=self.story.id_of(other), received_bytes=100, seconds=100 / rate))
        return tuple(found)

    def sync(self, *, misses: bool = False, is_behind: bool = False, tokens: int = 100) -> m.Plan:
        """One commit; `misses`: the thin site is not ready, whether it is its turn or not; `is_behind`: it does not
        apply the commit."""
        story, last = self.story, self.story.last_commit()
        story.wait(TRAIN_S)
        contributors = tuple(n for n in NAMES if n != THIN or not (misses or self.rests()))
        for name in contributors:
            story.ready(name, tokens if name == THIN else 100, train=TRAIN_S)
        if misses and not self.rests():
            story.wait(TRAIN_S + story.limits.lease_s)
        plan = story.plan()
        if THIN in contributors and self.thin_bytes_per_s < 1000:
            story.wait(EXTRA_S)
        for name in contributors:
            story.done(name, f"s{last}", links=self.uses(name, contributors))
        for name in NAMES:
            if name != THIN or not is_behind:
                story.applied(name, last + 1, f"s{last + 1}")
        return plan

    def sync_until_its_turn(self) -> None:
        """The sync that is open is the thin site's turn, after some in which it rested."""
        while not self.rests():
            self.sync()
        while self.rests():
            self.sync()

    def names(self, members: tuple[m.Member, ...]) -> set[str]:
        ids = {member.site_id for member in members}
        return {name for name in NAMES if self.story.id_of(name) in ids}


def test_while_a_site_rests_the_plan_comes_with_the_commit_and_lists_it_as_a_receiver() -> None:
    run = ThinLink()
    run.sync_until_its_turn()
    turn = run.sync(tokens=800)
    assert not turn.ahead, "the others see that it is ready first"
    assert run.names(turn.contributors) == set(NAMES)
    assert run.rests()
    plan = run.sync()
    assert plan.ahead
    assert run.names(plan.contributors) == set(NAMES) - {THIN}
    assert run.names(plan.receivers) == {THIN}


def test_every_eighth_sync_is_its_turn() -> None:
    run = ThinLink()
    run.sync_until_its_turn()
    turns = []
    for _ in range(3 * EVERY):
        plan = run.sync()
        if THIN in run.names(plan.contributors):
            turns.append(plan.sync)
    assert turns == [EVERY, 2 * EVERY, 3 * EVERY]


def test_all_that_it_trained_counts_however_many_windows_it_was_told_to_rest_for() -> None:
    run = ThinLink(ratio=2)
    run.sync_until_its_turn()
    run.sync()
    run.sync_until_its_turn()
    plan = run.sync(tokens=EVERY * 100)
    assert dict(zip([c.site_id for c in plan.contributors], weights(plan), strict=True))[3] == EVERY * 100


def test_its_pace_is_bounded_all_the_same() -> None:
    run = ThinLink(ratio=2)
    run.sync_until_its_turn()
    run.sync()
    run.sync_until_its_turn()
    plan = run.sync(tokens=100 * EVERY * 100)
    assert max(weights(plan)) == 2 * EVERY * 100


def test_after_a_restart_the_log_says_for_how_long_it_rested() -> None:
    run = ThinLink(ratio=2)
    run.sync_until_its_turn()
    run.sync()
    run.sync_until_its_turn()
    last = run.story.last_commit()
    run.story.restart()
    for name in NAMES:
        run.story.join(name, state=(last, f"s{last}"))
    plan = run.sync(tokens=EVERY * 100)
    assert max(weights(plan)) == EVERY * 100


def test_a_restart_in_between_waits_for_nobody_who_rests() -> None:
    run = ThinLink()
    run.sync_until_its_turn()
    run.sync()
    last = run.story.last_commit()
    run.story.restart()
    for name in NAMES:
        run.story.join(name, state=(last, f"s{last}"))
    assert run.rests()
    plan = run.sync()
    assert run.names(plan.contributors) == set(NAMES) - {THIN}
    assert not run.rests(), "links are to be learnt anew"


def test_a_site_that_is_ready_though_it_rests_is_not_heard() -> None:
    run = ThinLink()
    run.sync_until_its_turn()
    run.sync()
    run.story.ready(THIN)
    assert not run.story.is_ready(THIN)
    assert run.names(run.sync().contributors) == set(NAMES) - {THIN}


def test_a_turn_that_is_missed_is_used_and_the_next_one_is_waited_for_again() -> None:
    run = ThinLink()
    run.sync_until_its_turn()
    assert THIN not in run.names(run.sync(misses=True).contributors)
    assert run.rests(), "it has had its turn"
    run.sync_until_its_turn()
    for name in set(NAMES) - {THIN}:
        run.story.ready(name, train=TRAIN_S)
    assert not run.story.attempt(), "nothing is planned without it at once"


def test_at_its_turn_it_is_waited_for_though_it_fetches() -> None:
    run = ThinLink()
    run.sync_until_its_turn()
    run.sync()
    while run.opened.sync % EVERY < EVERY - 2:
        run.sync()
    held = run.story.last_commit()
    run.sync(is_behind=True)
    run.story.sources(THIN, after=held)
    run.sync(is_behind=True)
    assert not run.rests()
    for name in set(NAMES) - {THIN}:
        run.story.ready(name, train=TRAIN_S)
    assert not run.story.attempt()
    assert run.story.view.syncs
    assert run.story.view.syncs[0].wait == f"not ready yet: {THIN} (site {run.story.id_of(THIN)})"
    run.story.wait(TRAIN_S + run.story.limits.lease_s)
    assert run.story.attempt(), "for a bounded time"


def test_nobody_rests_in_the_last_sync() -> None:
    run = ThinLink(steps=120)
    found = []
    while not run.story.view.finished:
        found.append(run.names(run.sync().contributors))
    assert len(found) == 12
    assert THIN not in found[-2]
    assert THIN in found[-1]


def test_a_run_that_is_to_stop_while_a_site_rests_has_one_more_sync_with_it() -> None:
    run = ThinLink()
    run.sync_until_its_turn()
    run.sync()
    run.story.happens(e.StopAsked("enough"))
    assert run.rests()
    assert run.story.view.state.endswith("(the last sync but one)")
    run.sync()
    assert not run.story.view.finished
    assert run.opened.num_steps == 1
    assert run.names(run.sync(tokens=200).contributors) == set(NAMES)
    assert run.story.view.finished


def test_nobody_rests_where_the_others_are_no_quorum() -> None:
    run = ThinLink(quorum=5)
    for _ in range(6):
        assert not run.rests()
        run.sync()
    assert {s.name: s.contributes_every for s in run.story.view.sites}[THIN] == EVERY


def test_where_others_are_lost_the_sync_is_opened_again_for_all() -> None:
    run = ThinLink(quorum=4)
    run.sync_until_its_turn()
    run.sync()
    assert run.rests()
    run.story.leave("a")
    for name in ("b", "d", "e"):
        run.story.ready(name)
    assert not run.rests()
    assert run.opened.base_commit == run.story.last_commit()


def test_where_only_sites_that_rest_are_left_they_are_asked() -> None:
    run = ThinLink(quorum=1)
    run.sync_until_its_turn()
    run.sync()
    for name in ("a", "b", "d", "e"):
        run.story.leave(name)
    assert not run.rests()


def test_a_site_that_rests_and_has_trained_as_far_as_may_count_is_not_lost_for_it() -> None:
    """The others evaluate, and say so."""
    run = ThinLink()
    run.sync_until_its_turn()
    run.sync()
    assert run.rests()
    story = run.story
    for name in NAMES:
        busy = (0.0, "") if name == THIN else (600.0, "busy: evaluation")
        story.beats(name, phase="training", doing=busy[1], step=30, limit=busy[0])
    for _ in range(30):
        story.wait(1.0)
    assert story.is_live(THIN)


def test_the_status_says_how_often_it_contributes_and_why() -> None:
    run = ThinLink()
    run.sync_until_its_turn()
    run.sync()
    found = {s.name: (s.contributes_every, s.extra_s) for s in run.story.view.sites}
    assert found[THIN] == (EVERY, 0.5)
    assert {found[name] for name in NAMES if name != THIN} == {(1, 0.0)}
    assert any(f"{THIN} (site 3) contributes to one sync of" in line for line in run.story.log)
