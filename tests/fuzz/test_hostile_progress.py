"""A hostile member claims any progress and waits for anybody, gives something or nothing, and reports whom it likes.

Three honest sites, played by the rules of a node, keep their places whatever it says, and go on.
"""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from atoll.protocol import messages as m
from tests.harness.fuzzing import fuzz
from tests.unit.coordinator.test_hostile_members import Play

SITE_IDS = st.lists(st.sampled_from([0, 1, 2, 3, 4, 5, 77, (1 << 32) - 1]), max_size=m.MAX_WAITS).map(tuple)
"""Honest sites, itself, everybody, nobody that there is."""
NUM_PHASES = 12


class Claiming(Play):
    def __init__(self, data: st.DataObject) -> None:
        super().__init__("claiming", num_strangers=1, window_s=1.0)
        self.data = data
        self.claim: dict[str, Any] = {}
        self.gives: dict[tuple[int, int], bool] = {}
        self.say_something_else()

    def say_something_else(self) -> None:
        draw = self.data.draw
        self.claim = {
            "phase": draw(st.sampled_from(["training", "exchanging", ""])),
            "doing": draw(st.sampled_from(["", "step"])),
            "limit_s": draw(st.sampled_from([0.0, 1.0, 1e9])),
            "moved_bytes": draw(st.sampled_from([0, 1, (1 << 63) - 1])),
            "waits_for_contributions": draw(SITE_IDS),
            "waits_for_payloads": draw(SITE_IDS),
        }
        self.moves_by = draw(st.sampled_from([0, 1, 1 << 40]))
        self.reports = draw(st.sampled_from([0, 0, 1, 2, 3, 4, 77]))
        self.is_done = draw(st.booleans())
        self.excuses = draw(st.sampled_from([1, 3]))

    def claims(self, beat: m.Heartbeat) -> m.Heartbeat:
        self.claim["moved_bytes"] = (self.claim["moved_bytes"] + self.moves_by) % (1 << 63)
        return m.Heartbeat(**self.claim)

    def stalls_waited(self, plan: m.Plan) -> int:
        """Its excuses to its peers may hold for longer than the coordinator waits."""
        return int(self.excuses)

    def lacked(self, plan: m.Plan) -> int:
        """It gives all that it owes in an attempt, or nothing."""
        (name,) = self.strangers
        site_id = self.story.sites[name].site_id if name in self.story.sites else 0
        if site_id not in [c.site_id for c in plan.contributors]:
            return 0
        key = (plan.sync, plan.attempt)
        if key not in self.gives:
            self.gives[key] = self.data.draw(st.booleans())
        return 0 if self.gives[key] else site_id

    def misbehave(self, name: str) -> None:
        super().misbehave(name)
        story = self.story
        if not story.is_connected(name) or not story.is_live(name) or not story.attempt():
            return
        if not story.is_planned(name) or story.is_done(name):
            return
        plan = story.plan()
        if self.reports and (name, plan.sync, plan.attempt) not in self.reported:
            self.reported.add((name, plan.sync, plan.attempt))
            failed = m.ExchangeFailed(
                sync=plan.sync,
                attempt=plan.attempt,
                term=plan.term,
                peer_site_id=self.reports,
                direction=m.Direction.RECEIVING,
                phase="waiting for payloads",
                text="no byte",
            )
            story.says(name, failed)
        elif self.is_done and not self.lacked(plan):
            story.done(name, f"s{plan.base_commit}")


@fuzz(20)
@given(st.data())
def test_7_no_claim_of_progress_costs_an_honest_site_its_place(data: st.DataObject) -> None:
    play = Claiming(data)
    for _ in range(NUM_PHASES):
        before = play.commit
        play.say_something_else()
        play.run(play.story.now + data.draw(st.sampled_from([1.0, 8.0, 20.0])))
        assert play.commit >= before
    before = play.commit
    play.run(play.story.now + 120.0, until_commit=before + 3)
    assert play.commit == before + 3
