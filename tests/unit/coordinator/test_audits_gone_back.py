"""Audits of commits that are void since the run went back."""

from __future__ import annotations

from atoll.coordinator.core.sites.conduct import Conduct
from atoll.protocol import messages as m
from atoll.protocol.plans import reducing
from tests.harness.audited_story import FALSE, RIGHT, TRUTH, WRONG, Audited
from tests.unit.coordinator.test_withheld_errors import FIRST, Fed


def go_back(story: Audited, commit: int) -> None:
    """All sites bring that commit's state back."""
    names = [name for name in story.names if story.is_live(name)]
    story.ask_to_go_back(commit)
    story.rebuilt(names[-1], f"s{commit}")
    for name in names:
        if story.is_live(name):
            again = story.sites[name].incarnation
            story.connect(name, incarnation=again, state=(commit, f"s{commit}"), branch=1, again=True)
            story.offer(name)


def test_a_rollback_ends_audits_of_what_is_void_and_who_cannot_be_asked_itself_has_not_denied() -> None:
    """One audit that nobody has answered yet, and one whose reducer is found out, and is asked itself when the payload
    is about to go from all disks. Numbers of void commits are those of others from then on."""
    story = Audited()
    story.audit((RIGHT, TRUTH))
    story.next_commit()
    reducer, _ = story.audit((WRONG, TRUTH), (WRONG, TRUTH))
    to_itself = story.question()
    assert to_itself is not None
    assert to_itself[0] == reducer
    story.next_commit()
    unheard = story.question()
    assert unheard is not None
    go_back(story, 1)
    assert story.by_cause() == {"memory": 1}
    assert "the run has gone back, so it was not asked itself" in story.last(reducer, m.Evicted).reason
    assert story.view.num_audits_wrong == 1
    for name, asked in (to_itself, unheard):
        if name != reducer:
            story.says(name, m.ChunkAudited(number=asked.number, outcome=WRONG, payload_hash=TRUTH))
    assert story.question() is None, "nobody is asked because of an answer that comes late"
    story.wrong_once_more(reducer)
    story.asked_itself(reducer, RIGHT, FALSE)
    assert story.by_cause() == {"memory": 1, "audit": 1}, "in a commit whose number was void before"


def test_what_was_wrong_in_several_commits_that_are_void_by_now_is_one_fault() -> None:
    """One memory that flips bits, whose site cannot be asked itself any more."""
    story = Audited(audits=16)
    reducer, answered = "a", set[int]()
    for _ in range(4):
        asked = [(who, message) for who, message in story.sent if isinstance(message, m.AuditChunk)]
        while left := [(w, q) for w, q in asked if w != reducer and q.number not in answered]:
            who, question = left[0]
            answered.add(question.number)
            outcome = WRONG if story.reducer_of(question) == reducer else RIGHT
            story.says(who, m.ChunkAudited(number=question.number, outcome=outcome, payload_hash=TRUTH))
            asked = [(who, message) for who, message in story.sent if isinstance(message, m.AuditChunk)]
        story.next_commit()
    to_itself = {q.commit for who, q in asked if who == reducer and story.reducer_of(q) == reducer}
    assert len(to_itself) > 2, "more commits than memory may have faults"
    go_back(story, 0)
    assert story.by_cause() == {"memory": 1}
    assert not story.view.banned


def test_what_a_site_was_found_out_for_counts_up_to_a_commit_and_no_further_once_the_run_is_back_before_it() -> None:
    conduct = Conduct()
    assert conduct.offend(48, 50)
    assert not conduct.offend(50, 51), "what was made before it was found out is one"
    conduct.went_back(10)
    assert not conduct.offend(10, 10)
    assert conduct.offend(11, 11), "of another branch"
    assert conduct.is_second_offence


def test_a_reducer_that_is_silent_as_the_run_goes_back_averages_nothing_for_a_while() -> None:
    """Nobody can be given what it had added any more: it is as if nobody were left to ask."""
    story = Fed()
    story.answer(story.withheld)
    assert len(story.withheld_from) == 2
    go_back(story, FIRST - 1)
    assert not story.evicted(), "not before the third round"
    assert story.view.num_audits_unknown == 1
    for name in story.names:
        story.ready(name)
    plan, site_id = story.plan(), story.sites[story.reducer].site_id
    assert site_id in {c.site_id for c in plan.contributors}
    assert site_id not in reducing(plan)
