"""Audits of commits that are void since the run went back."""

from __future__ import annotations

from atoll.coordinator.core.sites.conduct import Conduct
from atoll.protocol import messages as m
from tests.harness.audited_story import FALSE, RIGHT, TRUTH, WRONG, Audited


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


def test_what_a_site_was_found_out_for_counts_up_to_a_commit_and_no_further_once_the_run_is_back_before_it() -> None:
    conduct = Conduct()
    assert conduct.offend(48, 50)
    assert not conduct.offend(50, 51), "what was made before it was found out is one"
    conduct.went_back(10)
    assert not conduct.offend(10, 10)
    assert conduct.offend(11, 11), "of another branch"
    assert conduct.is_second_offence
