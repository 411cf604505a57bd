"""Rule 22: one site that wants the run to stand still while it is found out whose state is right."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.coordinator.core import events as e
from atoll.coordinator.core.log.disputes import Dispute, Need
from atoll.protocol import messages as m
from atoll.protocol.layout import Role
from atoll.protocol.messages import Evidence
from atoll.protocol.outer_settings import OuterSettings
from tests.harness.coordinator_story import Story, some_settings
from tests.harness.data_plane import step_of
from tests.unit.coordinator.test_disputes import before_it, evicted


def test_who_says_one_hash_and_then_another_is_found_out() -> None:
    """Each other hash would be another dispute, with all its time."""
    story = before_it("abc", silent="c")
    story.applied("a", 1, "s1")
    story.applied("b", 1, "s1")
    for i in range(100):
        story.applied("c", 1, f"made-up {i}")
        story.wait(1.0)
        if evicted(story):
            break
    assert evicted(story) == "c"
    assert i < 3
    assert not story.disputed()
    assert story.attested(1) == story.state("s1", 1)


@pytest.mark.parametrize("away_s", [0.0, 1.0])
def test_who_opens_a_new_stream_instead_of_an_answer_is_found_out(away_s: float) -> None:
    story = before_it("abc", silent="c")
    story.applied("a", 1, "s1")
    story.applied("b", 1, "s1")
    story.applied("c", 1, "made-up")
    limit_s, begun = story.idle_limit_s(), story.now
    while not evicted(story) and story.now < begun + 4 * limit_s:
        story.wait(limit_s / 8)
        if not evicted(story):
            story.drop("c")
            story.wait(away_s)
            story.connect("c", state=(1, "made-up"))
    assert evicted(story) == "c"
    assert story.now - begun < 2 * limit_s


def test_who_shows_it_byte_by_byte_is_found_out() -> None:
    story = before_it("abc", silent="c")
    story.applied("a", 1, "s1")
    story.applied("b", 1, "s1")
    story.sites["c"].part_bytes = 1
    story.applied("c", 1, "wrong")
    limit_s, begun = story.idle_limit_s(), story.now
    while not evicted(story) and story.now < begun + 6 * limit_s:
        story.wait(limit_s / 2)
        if not evicted(story):
            site = story.sites["c"]
            story.says("c", story.shown(replace(site, shows=True), story.last("c", m.Show)))
    assert evicted(story) == "c"
    assert story.now - begun < 2 * limit_s


def test_who_shows_all_that_it_is_asked_for_late_holds_up_the_run_once() -> None:
    """It was asked first for each part of the evidence, and held up the run for five times that long."""
    story = before_it("abc", silent="c")
    story.applied("c", 1, "wrong")
    story.applied("a", 1, "s1")
    story.applied("b", 1, "s1")
    limit_s, begun, num_shown = story.idle_limit_s(), story.now, 0
    while not evicted(story) and story.now < begun + 10 * limit_s:
        story.wait(0.9 * limit_s)
        if story.asked_for_evidence() == "c":
            num_shown += 1
            story.says("c", story.shown(replace(story.sites["c"], shows=True), story.last("c", m.Show)))
    assert evicted(story) == "c"
    assert num_shown == 1
    assert story.now - begun < 2 * limit_s


def test_who_takes_its_word_back_before_it_is_found_out_is_found_out() -> None:
    """A receiver's word of a commit counts when it has come there from the one before."""
    story = before_it("ab", receiver="c", silent="c")
    story.applied("a", 1, "s1")
    story.applied("b", 1, "s1")
    story.applied("c", 1, "made-up")
    story.applied("c", 1, "s1")
    assert evicted(story) == "c"
    assert not story.disputed()


@pytest.mark.parametrize("is_new_stream", [False, True])
def test_who_goes_back_to_an_older_commit_is_found_out(is_new_stream: bool) -> None:
    story = before_it("ab", receiver="c", silent="c")
    story.applied("a", 1, "s1")
    story.applied("b", 1, "s1")
    story.applied("c", 1, "made-up")
    if is_new_stream:
        story.drop("c")
        story.connect("c", state=(0, "s0"))
    else:
        story.applied("c", 0, "s0")
    assert evicted(story) == "c"
    assert not story.disputed()


def test_who_leaves_instead_of_an_answer_has_it_held_against() -> None:
    story = before_it("abc", silent="c")
    story.applied("a", 1, "s1")
    story.applied("b", 1, "s1")
    for strikes in (1, 2, 3):
        story.applied("c", 1, "made-up")
        assert story.disputed()
        story.leave("c")
        assert not story.disputed()
        assert story.strikes_of("c") == strikes
        story.join("c", state=(1, "made-up"))
    assert story.waits_for_admission("c"), "it is let in again later, and later each time"


def test_a_claim_counts_no_longer_than_its_site_holds_that_state() -> None:
    """It is evicted as it stays silent, comes back with nothing, and fetches nothing."""
    story = before_it("abc", silent="c")
    story.applied("a", 1, "s1")
    story.applied("b", 1, "s1")
    story.applied("c", 1, "made-up")
    story.wait(story.idle_limit_s() + 0.1)
    assert evicted(story) == "c"
    story.connect("c", again=True)
    story.offer("c")
    assert story.last("c", m.Admitted).admitted_as is m.AdmittedAs.JOINER
    assert not story.disputed()
    for name in "ab":
        story.ready(name)
    for name in "ab":
        story.done(name, "s1")
    assert story.view.last_commit == 2


@pytest.mark.parametrize("order", ["ca", "ac"])
def test_who_computed_a_state_while_its_stream_was_away_is_a_party(order: str) -> None:
    """c has the commit and applies it; its stream breaks before it has said so."""
    story = before_it("a", receiver="c")
    story.drop("c")
    for name in order:
        if name == "a":
            story.applied("a", 1, "wrong")
        else:
            story.connect("c", state=(1, "s1"))
    assert evicted(story) == "a"
    assert story.attested(1) == story.state("s1", 1)


@pytest.mark.parametrize("order", ["dcab", "dacb", "abcd"])
def test_however_many_sides_show_nothing_those_who_do_are_left(order: str) -> None:
    story = before_it("abcd")
    for name in order:
        story.applied(name, 1, "s1" if name in "ab" else f"made-up {name}")
    assert evicted(story) == "cd"
    assert not story.disputed()
    assert story.attested(1) == story.state("s1", 1)


@pytest.mark.parametrize("order", ["dcab", "cdab", "abcd", "cabd"])
def test_a_side_that_shows_nothing_and_one_that_shows_a_wrong_state_are_both_found_out(order: str) -> None:
    story = before_it("abcd")
    for name in order:
        story.applied(name, 1, {"c": "made-up", "d": "wrong"}.get(name, "s1"))
    assert evicted(story) == "cd"
    assert story.attested(1) == story.state("s1", 1)


def test_what_was_found_out_of_two_sides_is_not_taken_for_two_others() -> None:
    one, two, three = (bytes([i]) * 32 for i in range(3))
    dispute = Dispute(2, (one, two, three), until=0.0)
    lists = [
        Need(evidence=Evidence.CHUNK_HASHES, commit=n, expected=expected, most_bytes=32)
        for n, expected in ((2, one), (2, two), (1, three))
    ]
    same, hashes = bytes(32), {claim: claim for claim in (one, two, three)}
    assert dispute.compare({one: same + hashes[one], two: same + hashes[two]}) == 1
    dispute.found = dict.fromkeys(lists, b"")
    dispute.computed, dispute.problem = one, "it cannot be read"
    dispute.computing = e.Recompute(
        role=Role.FROZEN, dtype="float32", num_elements=0, outer=step_of(OuterSettings()), record=b"", payload=b""
    )
    assert dispute.compare({one: b"", two: b""}) == 1, "as it was found"
    assert (dispute.computed, list(dispute.found)) == (one, lists)
    assert dispute.compare({two: hashes[two], three: hashes[three]}) == 0
    assert not [name for name in ("computed", "computing", "problem") if getattr(dispute, name)]
    assert list(dispute.found) == lists[1:]


@pytest.mark.parametrize("wrong", ["made-up", "wrong"])
def test_who_is_alone_with_its_word_does_not_outvote_those_who_fetched_what_a_contributor_said(wrong: str) -> None:
    """a has said what the state is, and b fetched that; a is gone when c says something else."""
    story = before_it("ac")
    story.applied("a", 1, "s1")
    story.join("b")
    story.applied("b", 1, "s1")
    story.leave("a")
    story.applied("c", 1, wrong)
    assert evicted(story) == "c"
    assert story.attested(1) == story.state("s1", 1)


def test_the_time_for_evidence_does_not_grow_with_the_model() -> None:
    story = before_it("abc", silent="c")
    story.set_state_bytes(1 << 50)
    story.applied("a", 1, "s1")
    story.applied("b", 1, "s1")
    story.applied("c", 1, "made-up")
    assert story.idle_limit_s() == story.settings.max_busy_s
    story.wait(5 * story.limits.stall_s)
    assert evicted(story) == "c"


def test_it_grows_with_what_is_asked_for_and_with_what_that_is_put_together_from() -> None:
    story = before_it("ab")
    stalls_s, link = 4 * story.limits.stall_s, story.limits.slowest_bytes_per_s
    size = 32 << 20  # a second of a slow disk
    once_s = stalls_s + size / link + 1
    assert story.evidence_limit_s(Evidence.CHUNK_HASHES, size) == once_s
    assert story.evidence_limit_s(Evidence.RECORD, size) == once_s + story.settings.sync.log_commits


# --- a party that is at an older commit than the others


def late(state: str) -> Story:
    """a and b have come to commit 2 without c, which contributed to commit 1 and says only then what it holds of it."""
    story = Story(some_settings(min_sites=3), real=True)
    story.start("a", "b", "c")
    for name in "abc":
        story.ready(name)
    for name in "abc":
        story.done(name, "s0")
    for name in "ab":
        story.applied(name, 1, "s1")
    for name in "ab":
        story.ready(name)
    story.wait(story.limits.sync_wait_s)
    for name in "ab":
        story.done(name, "s1")
    for name in "ab":
        story.applied(name, 2, "s2")
    assert story.view.last_commit == 2
    assert not evicted(story)
    story.sites["c"].shows = None
    story.applied("c", 1, state)
    return story


def answers(story: Story, name: str, withheld: Evidence, *, silent: bool) -> None:
    """Whatever it is asked for, but what it withholds."""
    site, num_shown = story.sites[name], 0
    while (num := story.num(name, m.Show)) > num_shown:
        asked, num_shown = story.last(name, m.Show), num
        if asked.evidence is not withheld:
            story.says(name, story.shown(replace(site, shows=True), asked))
        elif not silent:
            story.says(name, story.shown(replace(site, shows=False), asked))
        else:
            story.wait(story.idle_limit_s() + 1.0)


@pytest.mark.parametrize("silent", [False, True])
@pytest.mark.parametrize("withheld", [what for what in Evidence if what is not Evidence.UNSPECIFIED])
def test_a_late_liar_that_withholds_evidence_is_found_out_by_what_the_others_show(
    withheld: Evidence, silent: bool
) -> None:
    story = late("wrong")
    answers(story, "c", withheld, silent=silent)
    assert evicted(story) == "c"
    assert not story.disputed()
    assert story.attested(1) == story.state("s1", 1)


@pytest.mark.parametrize("order", ["cb", "bc"])
@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize("shows", [False, True])
def test_two_colluders_at_two_commits_are_found_out_one_after_the_other(order: str, same: bool, shows: bool) -> None:
    """b says a wrong hash of commit 2, and c, which is late, of commit 1."""
    story = Story(some_settings(min_sites=4), real=True)
    story.start("a", "b", "c", "d")
    for name in "abcd":
        story.ready(name)
    for name in "abcd":
        story.done(name, "s0")
    for name in "abd":
        story.applied(name, 1, "s1")
        story.ready(name)
    story.wait(story.limits.sync_wait_s)
    for name in "abd":
        story.done(name, "s1")
    for name in "ad":
        story.applied(name, 2, "s2")
    for name in "bc":
        story.sites[name].shows = shows
    for name in order:
        story.applied(name, 2 if name == "b" else 1, "wrong" if same else f"wrong {name}")
    assert evicted(story) == "bc"
    assert not story.disputed()
    assert story.attested(1) == story.state("s1", 1)
    assert story.attested(2) == story.state("s2", 2)


def gone_on(*late_ones: str, states: str = "", b_shows: bool | None = True) -> Story:
    """b fetched commit 1 and came to commit 2 with a, which leaves. The others contributed to commit 1, and say only
    then what they hold of it."""
    story = Story(some_settings(min_sites=1 + len(late_ones)), real=True)
    story.start("a", *late_ones)
    for name in ("a", *late_ones):
        story.ready(name)
    for name in ("a", *late_ones):
        story.done(name, "s0")
    story.applied("a", 1, "s1")
    story.join("b")
    story.sources("b")
    story.applied("b", 1, "s1")
    for name in "ab":
        story.ready(name)
    story.wait(story.limits.sync_wait_s)
    for name in "ab":
        story.done(name, "s1")
    for name in "ab":
        story.applied(name, 2, "s2")
    assert story.view.last_commit == 2
    story.sites["b"].shows = b_shows
    story.leave("a")
    for name, state in zip(late_ones, states.split(","), strict=True):
        story.applied(name, 1, state)
    return story


@pytest.mark.parametrize("wrong", ["made-up", "wrong"])
def test_who_is_late_does_not_outvote_those_who_went_on_from_what_a_contributor_said(wrong: str) -> None:
    story = gone_on("c", states=wrong)
    assert evicted(story) == "c"
    assert story.attested(1) == story.state("s1", 1)
    assert not story.disputed()


def test_two_who_are_late_do_not_stand_against_each_other_alone() -> None:
    story = gone_on("c", "d", states="wrong,also wrong")
    assert evicted(story) == "cd"
    assert story.attested(1) == story.state("s1", 1)
    assert not story.disputed()


def test_where_those_who_went_on_cannot_show_it_the_run_pauses_and_says_what_to_type() -> None:
    story = gone_on("c", states="wrong", b_shows=False)
    assert not evicted(story)
    assert story.attested(1) == story.state("s1", 1)
    assert "not every side shows what its hash is made of" in story.view.state
    assert "atoll ban NAME" in story.view.state
    story.ban("c")
    assert not story.disputed()
    assert story.attested(1) == story.state("s1", 1)


def test_who_is_away_does_not_outvote_a_contributor_that_is_being_started_anew() -> None:
    story = before_it("ab", silent="ab")
    story.applied("a", 1, "s1")
    story.applied("b", 1, "wrong")
    assert story.disputed()
    story.drop("b")
    story.connect("a", incarnation=2, state=(1, "s1"))
    assert story.attested(1) == story.state("s1", 1)
    for name in "ab":
        story.sites[name].shows = True
    story.offer("a")
    story.connect("b", state=(1, "wrong"))
    assert evicted(story) == "b"
    assert story.attested(1) == story.state("s1", 1)


def test_a_liar_that_takes_its_word_back_when_it_is_started_anew_outvotes_nobody() -> None:
    story = before_it("ab", silent="ab")
    story.applied("b", 1, "wrong")
    story.applied("a", 1, "s1")
    story.connect("b", incarnation=2, state=(1, "s1"))
    assert story.attested(1) == story.state("s1", 1)
    story.offer("b")
    assert story.last("b", m.Admitted).admitted_as is m.AdmittedAs.MEMBER


def test_a_lie_is_not_attested_again_when_the_log_has_gone_on() -> None:
    """What is attested is kept for no fewer commits than reports are."""
    settings = some_settings(min_sites=2)
    story = Story(replace(settings, sync=replace(settings.sync, log_commits=1)), real=True)
    story.start("a", "b")
    for name in "ab":
        story.ready(name)
    for name in "ab":
        story.done(name, "s0")
    for name in "ab":
        story.sites[name].shows = None
    story.applied("b", 1, "wrong")
    story.applied("a", 1, "s1")
    story.leave("b")
    assert story.attested(1) == story.state("s1", 1)
    for commit in (2, 3, 4):
        story.ready("a")
        story.done("a", f"s{commit - 1}")
        story.applied("a", commit, f"s{commit}")
        assert story.store.read_commits(1, 1)[1] == (e.AttestationRecord(1, story.state("s1", 1)),)
        assert story.attested(commit - 1) == story.state(f"s{commit - 1}", commit - 1)
