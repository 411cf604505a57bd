"""A member that contributes as it should, and then costs each sync an attempt by what it says or keeps back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest

from atoll.protocol import messages as m
from atoll.protocol.plans import top_of, weights
from atoll.protocol.time_limits import time_limits
from tests.harness.coordinator_story import a_hash
from tests.unit.coordinator.test_hostile_members import HONEST, MEASURED_S, SYNCS_BEFORE, Play

LIMITS = time_limits("local")
NUM_CHUNKS = 5


class Contributor(Play):
    """One stranger. It does what is right where it gains nothing: so it is a member in good standing.

    withholds: from one reducer in each sync, another one each time; elsewhere: its Done names another commit;
    payload: its Done names another payload, which it does not show; shown: it shows one that nobody else has;
    pretends: it shows what all have; weights: its Done has other weights, where they came from the sites; fails: it
    says at the end of each exchange that it cannot go on; tensor: that a tensor has no average; absurd: that the
    contribution of an honest site is; leaves: it does so then, and comes back; twice: it comes back as the start that
    it was, and leaves once more.
    """

    def __init__(self, kind: str, num_strangers: int = 1) -> None:
        super().__init__(kind, num_strangers)
        self.victims: dict[int, str] = {}  # by sync
        self.num_left = 0

    def is_harmed(self, plan: m.Plan) -> bool:
        """Whether it has something to gain in this attempt."""
        story = self.story
        if not story.is_connected("x0") or not story.has_ever_contributed("x0"):
            return False
        return story.id_of("x0") in [c.site_id for c in plan.contributors]

    def lacked(self, plan: m.Plan) -> int:
        site_id = self.story.sites["x0"].site_id if "x0" in self.story.sites else 0
        return site_id if self.kind == "withholds" and plan.attempt == 1 and self.is_harmed(plan) else 0

    def exchange(self, name: str, plan: m.Plan) -> None:
        if self.lacked(plan):
            reducing = sorted({plan.contributors[top_of(t)].site_id for t in plan.trees} - {self.lacked(plan)})
            victim = self.victims.setdefault(plan.sync, HONEST[reducing[len(self.victims) % len(reducing)] - 1])
            if name != victim:  # the others wait for the payloads of the one that lacks something
                self.exchanges.setdefault((plan.sync, plan.attempt), self.story.now)
                return
        super().exchange(name, plan)
        if self.story.weighed_plan() == plan and self.story.is_asked_for_payload_list(name):
            self.story.lists(name, "p" * NUM_CHUNKS)

    def misbehave(self, name: str) -> None:
        super().misbehave(name)
        plan = self.story.weighed_plan()
        if plan is None or not self.story.is_connected(name) or not self.story.is_planned(name):
            return
        if self.story.is_done(name):
            if self.kind in ("shown", "pretends") and self.story.is_asked_for_payload_list(name):
                self.story.lists(name, ("p" if self.kind == "pretends" else "q") * NUM_CHUNKS)
            return
        if self.lacked(plan) or self.story.now < self.exchanges.get((plan.sync, plan.attempt), 1e18) + self.tick_s / 2:
            return
        done = m.Done(
            sync=plan.sync,
            attempt=plan.attempt,
            term=plan.term,
            payload_digest=a_hash("p"),
            last_commit=plan.base_commit,
            state_hash=a_hash(f"s{plan.base_commit}"),
            tokens=weights(plan),
        )
        does: dict[str, Callable[[], None]] = {
            "elsewhere": lambda: self.story.says(name, replace(done, last_commit=done.last_commit + 1)),
            "payload": lambda: self.story.says(name, replace(done, payload_digest=a_hash("q"))),
            "shown": lambda: self.story.says(name, replace(done, payload_digest=a_hash("q"))),
            "pretends": lambda: self.story.says(name, replace(done, payload_digest=a_hash("q"))),
            "weights": lambda: self.story.says(
                name, replace(done, tokens=tuple(7 for _ in done.tokens)) if plan.ahead else done
            ),
            "fails": lambda: self.story.failed(name),
            "tensor": lambda: self.story.failed(name, tensor="weight"),
            "absurd": lambda: self.story.failed(name, tensor="weight", outliers="b"),
            "leaves": lambda: self.leaves(name),
            "twice": lambda: self.leaves(name, "twice"),
        }
        if self.is_harmed(plan) and self.kind in does:
            does[self.kind]()
        else:
            self.story.says(name, done)

    def leaves(self, name: str, how: str = "") -> None:
        state = (self.commit, f"s{self.commit}")
        if how == "twice":
            self.story.leave(name)
            self.story.join(name, state=state)
        self.story.leave(name)
        self.num_left += 1
        self.story.join(name, incarnation=self.num_left + 1, state=state)


def played(kind: str, num_strangers: int = 1) -> tuple[int, int, Contributor]:
    """Commits in the measured time after ten syncs, and how many attempts they took."""
    play = Contributor(kind, num_strangers)
    play.run(600.0, until_commit=SYNCS_BEFORE)
    before, attempts = play.commit, play.story.view.num_attempts
    play.run(play.story.now + MEASURED_S)
    return play.commit - before, play.story.view.num_attempts - attempts, play


@cache
def commits_alone() -> int:
    return played("", 0)[0]


@pytest.mark.parametrize(
    "kind",
    [
        "withholds", "elsewhere", "payload", "shown", "pretends", "weights", "fails", "tensor", "absurd", "leaves",
        "twice",
    ],
)  # fmt: skip
def test_7_a_member_that_contributes_cannot_cost_each_sync_an_attempt(kind: str) -> None:
    """Honest sites of `Play` are never evicted: it asserts that."""
    num_commits, num_attempts, play = played(kind)
    assert commits_alone() > 150
    assert num_commits >= 0.8 * commits_alone(), f"{num_commits} commits beside it, {commits_alone()} without"
    assert num_attempts <= 1.05 * num_commits
    assert all(play.story.strikes_of(name) == 0 for name in HONEST)


class Denouncer(Contributor):
    """It gives nothing, and says of one honest site, always the same one, that they cannot exchange: twice in a sync,
    so that this one is to receive only."""

    victim = 1

    def __init__(self) -> None:
        super().__init__("denounces", 1)
        self.contributors: dict[int, frozenset[int]] = {}  # by commit

    def lacked(self, plan: m.Plan) -> int:
        is_planned = self.victim in [c.site_id for c in plan.contributors]
        is_aimed = is_planned and plan.attempt <= 2 and self.is_harmed(plan)
        return self.story.sites["x0"].site_id if is_aimed else 0

    def exchange(self, name: str, plan: m.Plan) -> None:
        Play.exchange(self, name, plan)

    def misbehave(self, name: str) -> None:
        self.contributors[self.commit] = self.story.contributors_to(self.commit)
        plan = self.story.weighed_plan()
        if plan is not None and self.lacked(plan):
            key = (plan.sync, plan.attempt)
            if (name, *key) not in self.reported:
                self.reported.add((name, *key))
                self.story.failed(name, HONEST[self.victim - 1], lacks=True)
            return
        super().misbehave(name)


def test_16_a_member_that_accuses_one_honest_site_again_and_again_does_not_leave_it_out() -> None:
    play = Denouncer()
    play.run(600.0, until_commit=SYNCS_BEFORE)
    before = play.commit
    play.run(play.story.now + MEASURED_S)
    measured = [play.contributors[n] for n in range(before + 1, play.commit)]
    assert len(measured) >= 0.8 * commits_alone(), f"{len(measured)} commits beside it, {commits_alone()} without"
    assert any(4 in ids for ids in play.contributors.values()), "it contributed, until it was found out"
    num = sum(play.victim in ids for ids in measured)
    assert num >= 0.95 * len(measured), f"in {num} of {len(measured)} commits"


class Starver(Contributor):
    """As a reducer it gives its payloads to all but one: to the same one each time, or to each in turn. That one says
    so after a stall; most are done then, and the commit is made. `blind`: it says that it can dial nobody, so that it
    alone reduces."""

    def __init__(self, victims: str, *, blind: bool) -> None:
        super().__init__("starves", 1)
        self.victims_of = victims
        self.blind = blind

    def misbehave(self, name: str) -> None:
        story, opened = self.story, self.story.open_sync()
        is_here = story.is_connected(name) and story.is_live(name)
        is_due = is_here and opened is not None and story.holds(name) == opened.base_commit
        if self.blind and is_due and story.has_ever_contributed(name) and not story.is_ready(name):
            story.ready(name, train=self.window_s, unreachable=",".join(HONEST))
        super().misbehave(name)

    def exchange(self, name: str, plan: m.Plan) -> None:
        site_id = self.story.sites["x0"].site_id if "x0" in self.story.sites else 0
        reduces = site_id in {plan.contributors[top_of(t)].site_id for t in plan.trees}
        if self.is_harmed(plan) and reduces and name == self.victims_of[plan.sync % len(self.victims_of)]:
            key = (plan.sync, plan.attempt)
            began = self.exchanges.setdefault(key, self.story.now)
            if self.story.now >= began + plan.stall_limit_s and (name, *key) not in self.reported:
                self.reported.add((name, *key))
                self.story.failed(name, "x0", lacks=True)
            return
        super().exchange(name, plan)


@pytest.mark.parametrize("blind", [False, True])
@pytest.mark.parametrize("victims", ["c", "abc"])
def test_7_a_reducer_that_gives_nothing_to_one_site_does_not_hold_up_each_sync(victims: str, blind: bool) -> None:
    play = Starver(victims, blind=blind)
    play.run(600.0, until_commit=SYNCS_BEFORE)
    before = play.commit
    play.run(play.story.now + MEASURED_S)
    num_commits = play.commit - before
    assert num_commits >= 0.8 * commits_alone(), f"{num_commits} commits beside it, {commits_alone()} without"
    assert all(play.story.strikes_of(name) == 0 for name in HONEST)
