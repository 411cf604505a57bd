"""Rule 22: what is left of words about commits that sites have passed: of a site that was started anew since, that is
found out, that stands at the door, or that never held the commit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.coordinator.core import events as e
from atoll.coordinator.core.log.commits import CommitLog
from atoll.protocol import messages as m
from atoll.protocol.messages import Evidence
from tests.harness.coordinator_story import Story, some_settings, three_layers
from tests.harness.memory_store import MemoryStore
from tests.unit.coordinator.test_disputes import before_it, evicted
from tests.unit.coordinator.test_disputes_in_flight import all_show, say, two_commits


def test_what_a_site_said_of_later_commits_that_is_found_out_stands_against_nobody_after_a_restart() -> None:
    """b says both wrong hashes; it is found out in the first before a says what it holds of the second."""
    story = two_commits()
    say(story, 1, b="wrong")
    say(story, 2, b="wrong")
    say(story, 1, a="s1")
    all_show(story)
    assert evicted(story) == "b"
    story.restart()
    story.connect("a", state=(2, "s2"), term=1)
    story.wait(2 * story.limits.lease_s)
    assert not story.num("a", m.Evicted)
    assert story.attested(2) == story.state("s2", 2)


def test_what_it_said_stands_against_nobody_who_is_started_anew_either() -> None:
    story = two_commits()
    say(story, 1, b="wrong")
    say(story, 2, b="wrong")
    say(story, 1, a="s1")
    all_show(story)
    assert evicted(story) == "b"
    assert story.attested(2) is None


def test_what_it_said_is_found_out_as_well_where_others_have_fetched_it() -> None:
    """c holds what b said of the second commit; a's word alone does not say what that is, nor c's."""
    story = two_commits()
    say(story, 1, b="wrong")
    say(story, 2, b="wrong")
    story.join("c")
    story.applied("c", 2, "wrong")
    say(story, 1, a="s1")
    all_show(story)
    assert evicted(story) == "b"
    assert story.attested(2) == story.state("wrong", 2)
    assert story.store.read_commits(2, 2)[1] == (e.AttestationRecord(2, b""),)
    say(story, 2, a="s2")
    assert evicted(story) == "bc"
    assert story.store.read_commits(2, 2)[1] == (e.AttestationRecord(2, story.state("s2", 2)),)


@pytest.mark.parametrize(
    ("fragments", "of_commits", "oldest"),
    [
        (1, [0, 0, 0], 2),
        (3, [0, 1, 2], 0),
        (3, [0, 1, 2, 0], 1),
        (3, [0, 1, 0], 1),
        (3, [0, 1, 3], 2),
        (3, [2, 3, 0], 2),
    ],
)
def test_of_its_own_words_those_count_that_its_disk_can_show(
    fragments: int, of_commits: list[int], oldest: int
) -> None:
    """Its index has two entries a chunk. It comes anew with the last commit; `oldest`: of which it has the hashes."""
    settings = some_settings(fragments=fragments, every=9, overlap=9)
    log = CommitLog(MemoryStore().begin(settings, ""), settings.sync, 0, 0)
    for commit, fragment in enumerate(of_commits, 1):
        record = m.Commit(
            commit=commit,
            sync=commit,
            attempt=1,
            term=1,
            contributors=(),
            payload_digest=bytes(32),
            fragment=fragment,
            run_step=commit,
            run_tokens=commit,
        )
        log.append(e.CommitRecord(commit=record, mean_loss=None, median_loss=None))
        log.note(commit, 1, b"a")
    log.forget(1, since=len(of_commits))
    assert [n for n in range(len(of_commits) + 1) if log.is_heard(n, 1)] == list(range(max(oldest, 1), len(of_commits)))


@pytest.mark.parametrize("says_now", ["s1", "wrong"])
@pytest.mark.parametrize("lies", ["a", "c"])
def test_a_receiver_that_is_started_anew_in_a_dispute_is_a_party_as_before(lies: str, says_now: str) -> None:
    """It was told to repair its state from the liar's, or the liar's word against it was forgotten."""
    story = before_it("a", receiver="c", silent="ac")
    story.applied("a", 1, "wrong" if lies == "a" else "s1")
    story.applied("c", 1, "wrong" if lies == "c" else "s1")
    assert story.disputed()
    says_now = says_now if lies == "c" else "s1"
    story.connect("c", incarnation=2, state=(1, says_now))
    story.offer("c")
    assert story.last("c", m.Admitted).admitted_as is m.AdmittedAs.MEMBER
    all_show(story)
    assert evicted(story) == (lies if lies == "a" or says_now == "wrong" else "")
    assert story.attested(1) == story.state("s1", 1)
    assert not story.disputed()


def late_witness(num_commits: int) -> Story:
    """a has made all commits alone; c, which receives, is at commit 0 still."""
    story = Story(some_settings(), real=True)
    story.start("a", "c")
    for commit in range(num_commits):
        story.ready("a")
        if commit == 0:
            story.ready("c", tokens=0)
        while not story.attempt():
            story.wait(1.0)
        story.done("a", f"s{commit}")
        story.applied("a", commit + 1, f"s{commit + 1}")
    assert story.last_commit() == num_commits
    assert story.is_live("c")
    return story


@pytest.mark.parametrize("num_after", [1, 2])
def test_who_cannot_show_what_it_said_before_it_was_started_anew_is_not_found_out(num_after: int) -> None:
    """a is at commit 3 when it is started anew: of that and of the one before its disk has the hashes."""
    story = late_witness(3)
    story.connect("a", incarnation=2, state=(3, "s3"))
    story.offer("a")
    for name in "ac":
        story.sites[name].shows = None
    commit = 3 - num_after
    story.applied("c", commit, "wrong")
    while name := story.asked_for_evidence():
        asked, site = story.last(name, m.Show), story.sites[name]
        has_it = name == "c" or asked.evidence is not Evidence.CHUNK_HASHES or asked.commit in (0, 2, 3)
        story.says(name, story.shown(replace(site, shows=has_it), asked))
    assert not story.num("a", m.Evicted)
    assert story.attested(commit) == story.state(f"s{commit}", commit)
    assert ("atoll ban NAME" in story.view.state) == (num_after == 2)
    assert evicted(story) == ("c" if num_after == 1 else "")


@pytest.mark.parametrize("fragments", [1, 3])
def test_a_liar_at_the_door_does_not_say_what_the_state_is_that_is_computed_from(fragments: int) -> None:
    """b says a wrong hash first, is started anew, and never offers. c says the right one, and a wrong one of the next
    commit, which follows from what b said."""
    story = Story(some_settings(min_sites=3, fragments=fragments, every=9), real=True, manifest=three_layers())
    story.start("a", "b", "c")
    for name in "abc":
        story.ready(name)
    for name in "abc":
        story.done(name, "s0")
    story.applied("b", 1, "wrong")
    story.connect("b", incarnation=2, state=(1, "wrong"))
    story.applied("a", 1, "s1")
    story.applied("c", 1, "s1")
    for name in "ac":
        story.ready(name)
    for name in "ac":
        story.done(name, "s1")
    assert story.last_commit() == 2
    story.sites["c"].was_at[1] = "wrong"
    story.applied("c", 2, "wrong")
    story.applied("a", 2, "s2")
    assert evicted(story) == "c"
    assert story.attested(2) == story.state("s2", 2)


def test_who_fetched_a_later_commit_does_not_let_a_late_liar_say_what_the_one_before_was() -> None:
    """d never held commit 1, which came to be before it came; a said what it is, and is gone. Without d's side c would
    say what it is alone, and be right by that in the dispute over commit 2."""
    story = Story(some_settings(), real=True)
    story.start("a", "c")
    for name in "ac":
        story.ready(name)
    for name in "ac":
        story.done(name, "s0")
    story.applied("a", 1, "s1")
    story.ready("a")
    story.wait(story.limits.sync_wait_s)
    story.done("a", "s1")
    story.applied("a", 2, "s2")
    story.join("d")
    story.sources("d")
    story.applied("d", 2, "s2")
    story.leave("a")
    story.sites["d"].was_at[1] = "unknown"
    story.applied("c", 1, "wrong")
    assert story.attested(1) == story.state("s1", 1)
    assert "atoll ban NAME" in story.view.state
    story.ban("c")
    assert not evicted(story)
    assert not story.disputed()
    assert story.attested(1) == story.state("s1", 1)
