"""Three honest sites go on at their pace whatever two strangers say: none of it is progress that anybody else saw.

Honest sites are played by the rules of a node: they train, exchange, and report whom they lack something of. Time is
simulated; nothing here waits.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from atoll.coordinator.core import events as e
from atoll.coordinator.core.audit import COORDINATOR
from atoll.coordinator.core.sites import conduct as conduct_module
from atoll.coordinator.sqlite_store import SqliteStore
from atoll.coordinator.store import Store
from atoll.protocol import messages as m
from atoll.protocol.messages import RefusedKind
from atoll.protocol.plans import top_of
from tests.harness.coordinator_story import Story, some_settings
from tests.harness.memory_store import MemoryStore

HONEST = ("a", "b", "c")
SYNCS_BEFORE = 10
MEASURED_S = 100.0


class Silent(Story):
    """A long one, of which nobody reads the words."""

    def _in_words(self, message: m.CoordinatorMessage) -> str:
        return ""


class Play:
    """`kind`: what the strangers do once they were admitted with a state hash that they copied.

    mute: heartbeats that say that they train; ready: Ready, and never a byte; waiting: they contribute, and as reducers
    say for ever that they wait for all others; together: for each other; liar: Ready, and reports against honest sites.
    """

    def __init__(self, kind: str, num_strangers: int = 2, window_s: float = 0.25) -> None:
        self.kind = kind
        self.window_s = window_s
        self.tick_s = window_s / 3
        self.story = Silent(some_settings(min_sites=3, steps=1 << 30))
        self.story.start(*HONEST)
        self.strangers = [f"x{i}" for i in range(num_strangers)]
        self.beaten_at = 0.0
        self.num_beats = 0
        self.trained_at: dict[str, tuple[int, float]] = {}  # the sync that it trains for, and since when
        self.exchanges: dict[tuple[int, int], float] = {}  # since when all honest sites can exchange in that attempt
        self.reported: set[tuple[str, int, int]] = set()

    @property
    def commit(self) -> int:
        return self.story.last_commit()

    def run(self, until_s: float, until_commit: int = 1 << 30) -> None:
        story = self.story
        while story.now < until_s and self.commit < until_commit:
            deadline = story.core.next_deadline()
            story.now = min(
                story.now + self.tick_s, deadline if deadline is not None and deadline > story.now else 1e18
            )
            self.beat()
            for name in HONEST:
                self.behave(name)
            for name in self.strangers:
                self.misbehave(name)
            story.log.clear()
            del story.sent[:-50]

    def beat(self) -> None:
        """Heartbeats. Who exchanges gets or gives something, unless it waits for a stranger and says so; strangers say
        what they like."""
        story = self.story
        if story.now < self.beaten_at + story.limits.heartbeat_s:
            return
        self.beaten_at, self.num_beats = story.now, self.num_beats + 1
        ids = [story.sites[name].site_id for name in self.strangers if name in story.sites]
        plan = story.weighed_plan()
        lacked = self.lacked(plan) if plan is not None else 0
        for name in (*HONEST, *self.strangers):
            if not story.is_connected(name):
                continue
            beat = m.Heartbeat(phase="training", doing="step", inner_step=self.num_beats, limit_s=1000)
            if name in self.strangers:
                beat = self.claims(replace(beat, phase=f"exchanging {self.num_beats}", moved_bytes=self.num_beats))
                if self.kind == "together":
                    beat = replace(beat, waits_for_contributions=tuple(i for i in ids if i != story.id_of(name)))
            elif story.attempt() and not story.is_done(name):
                beat = replace(beat, moved_bytes=0 if lacked else self.num_beats, inner_step=0)
                beat = replace(beat, waits_for_payloads=(lacked,) if lacked else ())
            story.says(name, beat)

    # --- honest sites

    def behave(self, name: str) -> None:
        story = self.story
        assert story.is_connected(name), f"{name} was ended"
        assert story.standing_of(name) == "member", f"{name} was evicted: {story.evicted_because(name)}"
        if story.holds(name) != self.commit:
            story.applied(name, self.commit, f"s{self.commit}")
        opened = story.open_sync()
        assert opened is not None
        number, since = self.trained_at.setdefault(name, (opened.sync, story.now))
        if number != opened.sync:
            self.trained_at[name] = (opened.sync, story.now if opened.base_commit != number - 1 else since)
            return
        if not story.is_ready(name) and story.now >= since + self.window_s:
            story.ready(name, train=self.window_s)
        plan = story.weighed_plan()
        if plan is not None and story.is_planned(name):
            self.exchange(name, plan)

    def exchange(self, name: str, plan: m.Plan) -> None:
        """It is through if no stranger contributes. Else it finds that, as nodes do."""
        story = self.story
        key = (plan.sync, plan.attempt)
        took_s = story.now - self.exchanges.setdefault(key, story.now)
        if not story.attempt() or story.is_done(name) or (name, *key) in self.reported:
            return
        stranger = self.lacked(plan)
        if not stranger:
            if took_s >= self.tick_s:
                story.done(name, f"s{plan.base_commit}")
            return
        if took_s >= plan.stall_limit_s * self.stalls_waited(plan):
            self.reported.add((name, *key))
            peer = next(n for n in self.strangers if self.story.sites[n].site_id == stranger)
            story.failed(name, peer, lacks=True)

    def stalls_waited(self, plan: m.Plan) -> int:
        """After how many an honest site reports what it lacks."""
        return 2 if self.kind == "together" and len(plan.contributors) == 5 else 1

    def lacked(self, plan: m.Plan) -> int:
        """The first contributor that gives nothing; a liar exchanges as it should."""
        ids = {self.story.sites[name].site_id for name in self.strangers if name in self.story.sites}
        strangers = [c.site_id for c in plan.contributors if c.site_id in ids]
        reducing = {plan.contributors[top_of(t)].site_id for t in plan.trees}
        if self.kind == "liar":
            return 0
        if self.kind in ("waiting", "together"):  # its contributions arrive
            strangers = [i for i in strangers if i in reducing]
        return next(iter(strangers), 0)

    # --- strangers

    def claims(self, beat: m.Heartbeat) -> m.Heartbeat:
        """What a stranger says of itself."""
        return beat

    def misbehave(self, name: str) -> None:
        story, state = self.story, (self.commit, f"s{self.commit}")
        stream = story.sites[name].stream if name in story.sites else None
        if stream is None or story.stream_of(name) != stream:
            story.connect(name, state=state)
        elif story.evicted_because(name):
            story.connect(name, state=state, again=True)
        elif not story.is_live(name):
            if not story.waits_for_admission(name):
                story.offer(name)
        elif story.holds(name) != self.commit:
            story.applied(name, *state)
        elif story.open_sync() is not None and self.kind != "mute":
            if not story.is_ready(name):
                story.ready(name, train=self.window_s)
            plan = story.weighed_plan()
            if self.kind == "liar" and plan is not None:
                key = (plan.sync, plan.attempt)
                if story.is_planned(name) and (name, *key) not in self.reported:
                    self.reported.add((name, *key))
                    story.failed(name, HONEST[len(self.reported) % 3], lacks=True)


def commits(kind: str, num_strangers: int) -> int:
    """In the measured time after ten syncs."""
    play = Play(kind, num_strangers)
    play.run(1e9, until_commit=SYNCS_BEFORE)
    before = play.commit
    play.run(play.story.now + MEASURED_S)
    return play.commit - before


@cache
def commits_alone() -> int:
    return commits("", 0)


@pytest.mark.parametrize("kind", ["mute", "ready", "waiting", "together", "liar"])
def test_7_three_honest_sites_keep_their_pace_beside_two_strangers(kind: str) -> None:
    beside = commits(kind, 2)
    assert commits_alone() > 150
    assert beside >= 0.8 * commits_alone(), f"{beside} commits beside strangers, {commits_alone()} without"


def test_7_a_stranger_that_is_found_out_again_and_again_is_banned_with_the_reason() -> None:
    play = Play("ready", 1, window_s=5.0)
    play.run(3000.0)
    assert play.story.is_banned("x0")
    (banned,) = [entry for entry in play.story.audit_log() if entry.what == "ban name='x0'"]
    assert banned.by == COORDINATOR
    assert "it was found out 6 times" in banned.outcome
    play.story.restart()
    play.story.connect("x0", state=(0, "s0"))
    refused = play.story.last("x0", m.Refused)
    assert refused.kind is RefusedKind.BANNED
    assert "x0 is banned from run 'run': it was found out 6 times without contributing, the last time because" in (
        refused.text
    )
    assert "could not be exchanged" in refused.text
    assert play.story.lift_ban("x0") == ""
    play.story.sent.clear()
    play.story.connect("x0", state=(0, "s0"))
    assert play.story.num("x0", m.Refused) == 0


def test_7_nobody_waits_for_a_site_that_was_found_out_until_it_contributes() -> None:
    story = Story(some_settings(min_sites=3))
    story.start(*HONEST)
    story.commit_one(*HONEST, state="s0", following="s1")
    story.join("x", state=(1, "s1"))
    story.sites["x"].trains = False
    story.wait(30.0)
    assert story.view.num_evicted == 1, "it says nothing new"
    story.join("x", state=(1, "s1"))
    story.connect("x", state=(1, "s1"), again=True)
    story.offer("x")
    assert story.standing_of("x") == "member"
    story.commit_one(*HONEST, state="s1", following="s2")
    story.applied("x", 2, "s2")
    for name in HONEST:
        story.ready(name)
    assert story.contributor_ids() == [1, 2, 3]
    assert all(c.tokens for c in story.plan().contributors), "at once"


def test_7_a_site_that_waits_for_its_time_and_goes_is_not_waited_for() -> None:
    """Its time comes without it: a core that went on looking at that would look at nothing else."""
    story = Story(some_settings())
    story.start("a", "b")
    for _ in range(3):
        story.evict_for("b", "its payload is not the reducer's")
        story.join("b", again=True)
    assert story.waits_for_admission("b")
    story.drop("b")
    story.wait(story.admitted_again_at("b") - story.now + 1)
    story.join("b")
    story.join("b", again=True)
    assert story.is_live("b")


def test_an_offer_whose_time_comes_after_the_end_of_the_run_is_answered_once() -> None:
    """A node leaves when it hears that the run is over. One that stays does not have the core look at it for ever."""
    story = Story(some_settings())
    story.start("a", "b")
    for _ in range(3):
        story.evict_for("b", "its payload is not the reducer's")
        story.join("b", again=True)
    story.happens(e.StopAsked("enough"))
    story.ready("a")
    story.done("a", "s0")
    assert story.view.finished
    assert story.waits_for_admission("b")
    before = story.num("b", m.Finished)
    story.wait(story.admitted_again_at("b") - story.now + 1)
    assert story.num("b", m.Finished) == before + 1


def test_each_word_of_many_sites_in_an_attempt_costs_one_look_at_each_of_them() -> None:
    names = [f"n{i}" for i in range(60)]
    story = Silent(some_settings(min_sites=len(names)))
    story.start(*names)
    for name in names:
        story.ready(name)
    looks = story.count_looks_at_traffic()
    story.done(names[0], "s0")
    assert 0 < looks.num <= 4 * len(names)


def committed_and_restarted() -> Story:
    """`a` and `b` contributed, `c` has joined since; then the coordinator is started again."""
    story = Story(some_settings(steps=1000))
    story.start("a", "b")
    story.commit_one("a", "b", state="s0", following="s1")
    story.join("c")
    story.applied("c", 1, "s1")
    story.restart()
    return story


def test_7_after_a_restart_a_newcomer_still_reduces_nothing() -> None:
    story = committed_and_restarted()
    for name in "abc":
        story.join(name, state=(1, "s1"))
    for name in "cab":
        story.ready(name)
    plan = story.plan()
    assert len(plan.contributors) == 3
    assert {plan.contributors[top_of(tree)].site_id for tree in plan.trees} == {1, 2}


def test_7_who_contributed_and_is_late_after_a_restart_was_not_found_out() -> None:
    story = committed_and_restarted()
    story.join("a", state=(1, "s1"))
    story.wait(2 * story.limits.lease_s)
    assert not story.is_live("b")
    assert story.strikes_of("b") == 0


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_7_who_contributed_longer_ago_than_the_log_goes_back_was_not_found_out_after_a_restart(
    kind: str, tmp_path: Path
) -> None:
    """It receives since, as a slow site does: its absence is no strike."""
    store: Store = MemoryStore() if kind == "memory" else SqliteStore(tmp_path / "run.db")
    story = Story(some_settings(steps=1000, min_sites=2), store=store)
    story.start("a", "b")
    story.commit_one("a", "b", state="s0", following="s1")
    story.put_on_probation("receive_only", "b", sync=1, times=6)
    for number in range(1, 20):
        story.commit_one("a", state=f"s{number}", following=f"s{number + 1}")
        story.applied("b", number + 1, f"s{number + 1}")
    story.restart()
    for name in "ab":
        story.join(name, state=(20, "s20"))
    assert story.has_contributed("b")
    lost(story, "b")
    assert story.strikes_of("b") == 0
    story.restart()
    assert not story.has_contributed("b"), "it has left since"
    store.close()


def found_out(story: Story, name: str, times: int) -> None:
    """It is a member that never contributes, and comes again each time that it may."""
    for _ in range(times):
        while story.is_known(name) and story.now < story.admitted_again_at(name):
            story.wait(story.admitted_again_at(name) - story.now + 0.1)
        story.join(name, incarnation=story.sites[name].incarnation + 1 if name in story.sites else 1, state=(1, "s1"))
        story.evict_for(name, "it makes no progress")
        story.happens(e.Tick())
        story.drop(name)


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_25_what_is_held_against_a_site_survives_the_coordinator(kind: str, tmp_path: Path) -> None:
    store: Store = MemoryStore() if kind == "memory" else SqliteStore(tmp_path / "run.db")
    story = Story(some_settings(steps=1000), store=store)
    story.start("a", "b")
    story.commit_one("a", "b", state="s0", following="s1")
    found_out(story, "x", 4)
    story.restart()
    assert story.strikes_of("x") == 4
    assert story.admitted_again_at("x") == story.now + 64 * story.limits.lease_s, "by a clock that began anew"
    for name in "ab":
        story.join(name, state=(1, "s1"))
    found_out(story, "x", 1)
    assert not story.is_banned("x")
    found_out(story, "x", 1)
    assert story.is_banned("x")
    assert story.lift_ban("x") == ""
    story.restart()
    assert (story.strikes_of("x"), story.admitted_again_at("x")) == (0, story.now), "a person let it in"
    store.close()


def test_25_strikes_that_were_forgiven_stay_so_after_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conduct_module, "FORGIVEN_LEASES", 0)
    story = Story(some_settings(steps=1000))
    story.start("a", "b")
    story.commit_one("a", "b", state="s0", following="s1")
    story.set_strikes("b", 2)
    story.commit_one("a", "b", state="s1", following="s2")
    assert story.strikes_of("b") == 1
    story.restart()
    assert story.strikes_of("b") == 1


def lost(story: Story, name: str) -> None:
    story.drop(name)
    story.wait(story.limits.lease_s + 1)
    assert not story.is_live(name)


def test_25_a_joiner_on_a_link_that_flaps_is_not_banned() -> None:
    """Nobody waits for it while it fetches its first state."""
    story = Story(some_settings(steps=1000))
    story.start("a", "b")
    story.commit_one("a", "b", state="s0", following="s1")
    for number in range(10):
        story.join("c", incarnation=number + 1)
        assert story.standing_of("c") == "joining"
        lost(story, "c")
    assert story.strikes_of("c") == 0


def test_25_absence_alone_keeps_no_member_out_for_good() -> None:
    """It costs the run little: it is admitted after the longest wait each time."""
    story = Story(some_settings(steps=1000))
    story.start("a", "b")
    story.commit_one("a", "b", state="s0", following="s1")
    for number in range(10):
        if story.is_known("c"):
            story.wait(max(0.0, story.admitted_again_at("c") - story.now) + 0.1)
        story.join("c", incarnation=number + 1, state=(1, "s1"))
        assert story.standing_of("c") == "member"
        lost(story, "c")
    assert story.strikes_of("c") == 5
    assert story.admitted_again_at("c") - story.now > 250 * story.limits.lease_s
    assert not story.is_banned("c")
