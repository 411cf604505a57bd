"""Audits where what codecs lose of averages is fed back: what reducers signed, and those that give nothing of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from atoll.protocol import messages as m
from atoll.protocol.plans import reducing
from atoll.protocol.sync_settings import KEPT_SYNCS
from tests.harness.audited_story import RIGHT, TRUTH, UNKNOWN, WRONG, Audited
from tests.harness.coordinator_story import a_hash

Says = Callable[[str, m.AuditChunk], m.ChunkAudited]
FIRST = 1
"""The commit that is audited first."""


def found(asked: m.AuditChunk, outcome: m.AuditOutcome) -> m.ChunkAudited:
    return m.ChunkAudited(number=asked.number, outcome=outcome, payload_hash=TRUTH)


class Fed(Audited):
    def __init__(self) -> None:
        super().__init__(codec="int8", errors_down=1.0)
        self.withheld_from: Counter[str] = Counter()
        self.reducer = ""

    def withheld(self, name: str, asked: m.AuditChunk) -> m.ChunkAudited:
        self.withheld_from[name] += 1
        self.reducer = self.reducer_of(asked)
        return replace(found(asked, UNKNOWN), withheld=True)

    def answer(self, says: Says) -> None:
        """All that is asked: of the first commit `says`, of others that all is right."""
        while questions := [(who, x) for who, x in self.sent if isinstance(x, m.AuditChunk)][self.num_read :]:
            self.num_read += len(questions)
            for name, asked in questions:
                self.says(name, says(name, asked) if asked.commit == FIRST else found(asked, RIGHT))

    def go_on(self, num_commits: int, says: Says) -> None:
        for _ in range(num_commits):
            self.next_commit()
            self.answer(says)


def test_an_audit_says_what_its_reducer_had_signed_of_the_average_before() -> None:
    story, asked = Fed(), []

    def note(name: str, of: m.AuditChunk) -> m.ChunkAudited:
        asked.append(of)
        return found(of, RIGHT)

    story.answer(note)
    assert asked[0].before is None, "there was none"
    assert asked[0].made is not None
    assert asked[0].made.errors is not None
    story.next_commit()
    question = story.question()
    assert question is not None
    before, reducer = question[1].before, story.reducer_of(question[1])
    assert before is not None
    assert (before.sync, before.term, before.attempt) == (asked[0].sync, asked[0].term, asked[0].attempt)
    assert before.made.errors == m.SignedErrors(
        before=a_hash(f"added by {reducer}"), after=a_hash(f"left by {reducer}")
    )


def test_a_reducer_that_says_nothing_of_its_errors_is_refused() -> None:
    story = Fed()
    for name in story.names:
        story.ready(name)
    plan = story.plan()
    done = m.Done(
        sync=plan.sync, attempt=plan.attempt, term=plan.term, payload_digest=TRUTH, last_commit=1, state_hash=TRUTH,
        tokens=tuple(c.tokens for c in plan.contributors), payloads_root=TRUTH,
    )  # fmt: skip
    story.says("a", done)
    assert "no roots over the errors of what it averaged" in story.last("a", m.Refused).text


def test_a_reducer_that_is_silent_to_two_sites_in_three_rounds_is_evicted_and_the_third_time_banned() -> None:
    story = Fed()
    story.answer(story.withheld)
    assert sorted(story.withheld_from.values()) == [1, 1]
    story.go_on(1, story.withheld)
    assert sorted(story.withheld_from.values()) == [2, 2]
    assert not story.evicted(), "not before the third round"
    story.go_on(1, story.withheld)
    assert sorted(story.withheld_from.values()) == [3, 3], "the same two"
    assert story.evicted() == [story.reducer]
    assert story.reducer not in story.withheld_from
    assert "gave" in story.last(story.reducer, m.Evicted).reason
    assert story.by_cause() == {"silence": 1}
    assert not story.banned()


@pytest.mark.parametrize("outcome", [RIGHT, WRONG])
def test_what_a_reducer_gives_later_is_audited_as_ever(outcome: m.AuditOutcome) -> None:
    story = Fed()
    story.answer(story.withheld)
    story.go_on(1, lambda name, asked: found(asked, outcome))
    assert bool(story.evicted()) == (outcome is WRONG)
    assert story.by_cause().get("silence", 0) == 0


def test_one_that_was_started_again_is_not_judged_and_averages_nothing_for_a_while() -> None:
    story = Fed()
    story.answer(story.withheld)
    reducer = story.reducer
    story.back(reducer)
    story.go_on(6, story.withheld)
    assert max(story.withheld_from.values()) == 1
    assert not story.evicted()
    assert story.view.num_audits_unknown == 1
    site_id = story.sites[reducer].site_id
    plans = [p for p in story.plans().values() if site_id in {c.site_id for c in p.contributors}]
    assert any(site_id not in reducing(plan) for plan in plans)


def test_what_may_not_be_kept_any_more_is_not_asked_for_as_little_as_of_a_site_without_a_witness() -> None:
    """A reducer keeps its errors for so many syncs, and it has to have exchanged with both of them."""
    story = Fed()
    story.answer(story.withheld)
    story.drop(min(story.withheld_from))
    story.wait(60)
    story.go_on(KEPT_SYNCS, story.withheld)
    assert max(story.withheld_from.values()) == 1
    assert story.reducer not in story.evicted()
    assert story.view.num_audits_unknown == 1


def test_silence_to_one_site_or_to_sites_that_cannot_reach_it_judges_nobody() -> None:
    story = Fed()
    heard: list[str] = []

    def to_one(name: str, asked: m.AuditChunk) -> m.ChunkAudited:
        heard.append(name)
        return story.withheld(name, asked) if name == heard[0] else found(asked, UNKNOWN)

    story.answer(to_one)
    story.go_on(6, to_one)
    assert story.withheld_from[heard[0]] == 1
    assert not story.evicted()
