"""The phase of a sync: a step that it does not have, in tests and in production. To decide changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from atoll.coordinator.core.sync import deciding
from atoll.coordinator.core.sync.decision import Abandon, CollectAgain, Commit, Decision, Fail, GiveWay, Propose, Weigh
from atoll.coordinator.core.sync.syncs import TRANSITIONS, Phase, Step
from tests.harness.coordinator_story import Story, play, some_settings
from tests.harness.snapshots import snapshot

STORIES = sorted((Path(__file__).resolve().parents[2] / "golden/transcripts").glob("coordinator_*.txt"))


def without(monkeypatch: pytest.MonkeyPatch, phase: Phase, step: Step) -> None:
    """As if the core took a step that the phase does not have."""
    monkeypatch.delitem(TRANSITIONS, (phase, step))


def of_two() -> Story:
    """In the first sync, which has no plan that came with a commit."""
    story = Story(some_settings())
    story.start("a", "b")
    story.ready("a")
    return story


def test_nothing_follows_the_end_of_a_sync() -> None:
    assert all(phase is not Phase.ENDED for phase, _ in TRANSITIONS)


def test_in_tests_a_step_that_the_phase_does_not_have_is_raised_with_what_happened_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    story = of_two()
    story.ready("b")
    story.done("a", "s0")
    without(monkeypatch, Phase.EXCHANGING, Step.COMMIT)
    told = r"sync 1 is committed while it is exchanging: has an attempt proposed \(everybody who is expected is ready\)"
    with pytest.raises(AssertionError, match=told):
        story.done("b", "s0")


def test_in_production_the_sync_is_abandoned_for_it_and_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    story = of_two()
    story.expects_a_fault = True
    with monkeypatch.context() as within:
        without(within, Phase.COLLECTING, Step.PROPOSE)
        story.ready("b")
    assert "sync 1 is abandoned: a fault of the coordinator: sync 1 has an attempt proposed" in "".join(story.log)
    assert (story.view.last_commit, story.newest_sync()) == (0, 2)
    story.ready("a")
    story.ready("b")
    story.wait(story.limits.heartbeat_s)
    for name in "ab":
        story.done(name, "s0")
    assert story.view.last_commit == 1


def test_to_decide_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Decision] = []
    decide = deciding.decide

    def watched(run: Any, sync: Any) -> Decision:
        before = snapshot(run)
        found.append(decide(run, sync))
        assert snapshot(run) == before, f"{found[-1]} was not only decided"
        return found[-1]

    monkeypatch.setattr(deciding, "decide", watched)
    for path in STORIES:
        play(path.read_text(encoding="utf-8"))
    assert {type(decision) for decision in found} >= {Abandon, CollectAgain, Commit, Fail, GiveWay, Propose, Weigh}
