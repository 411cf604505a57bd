"""Rule 22 with several syncs in flight: commits follow each other before sites have said what they made of the first,
so sites that disagree about one go on to the next before it is known whose state is right."""

from __future__ import annotations

import pytest

from atoll.coordinator.core import events as e
from atoll.coordinator.core.log.commits import CommitLog
from atoll.protocol import messages as m
from atoll.protocol.layout import Layout
from tests.harness.coordinator_story import Story, some_settings, three_layers
from tests.harness.memory_store import MemoryStore
from tests.unit.coordinator.test_disputes import evicted


def two_commits(names: str = "ab", *, damaged_in: int = 0) -> Story:
    """Commits 1 and 2, of fragments 0 and 1, and nobody has said yet what it holds of them; nobody shows anything. A
    wrong state is so in a chunk of fragment `damaged_in`."""
    settings = some_settings(min_sites=len(names), fragments=3, every=9, overlap=6, steps=900)
    story = Story(settings, real=True, manifest=three_layers())
    story.start(*names)
    for fragment in (0, 1):
        for name in names:
            story.ready(name, fragment=fragment)
    plans = [story.plan(fragment) for fragment in (0, 1)]
    assert [plan.base_commit for plan in plans] == [0, 0]
    assert story.model is not None
    layout = Layout(three_layers(), settings.sync.chunk_elements, 3)
    story.model.damaged = layout.chunks_of(damaged_in)[0]
    for plan in plans:
        for name in names:
            story.done(name, "s0", plan=plan)
    assert story.last_commit() == 2
    for name in names:
        story.sites[name].shows = None
    return story


def say(story: Story, commit: int, **states: str) -> None:
    for name, state in states.items():
        story.applied(name, commit, state)


def all_show(story: Story) -> None:
    for site in story.sites.values():
        site.shows = True
    if asked := story.asked_for_evidence():
        story.says(asked, story.shown(story.sites[asked], story.last(asked, m.Show)))


def is_settled(story: Story) -> bool:
    """b is found out, and what is attested is right."""
    states = [story.attested(n) == story.state(f"s{n}", n) for n in (1, 2)]
    return evicted(story) == "b" and not story.disputed() and all(states)


@pytest.mark.parametrize("first", ["a", "b"])
@pytest.mark.parametrize("damaged_in", [0, 1, 2])
def test_a_wrong_state_is_found_out_where_it_came_to_be_though_sites_have_gone_on(first: str, damaged_in: int) -> None:
    """b reports the first wrong state before a does, or after it, and computes the next commit from that."""
    story = two_commits(damaged_in=damaged_in)
    for commit in (1, 2):
        for name in sorted("ab", key=lambda n: n != first):
            story.applied(name, commit, "wrong" if name == "b" else f"s{commit}")
    assert not evicted(story)
    assert "sites hold different states of commit 1" in story.disputed(), "the older one is settled first"
    all_show(story)
    assert is_settled(story)
    assert "of commit 1, in" in story.last("b", m.Evicted).reason


@pytest.mark.parametrize("wrong", ["wrong", "made-up"])
@pytest.mark.parametrize("first", ["a", "b"])
def test_a_lie_about_one_commit_is_not_forgotten_with_the_next_one(wrong: str, first: str) -> None:
    story = two_commits()
    for name in sorted("ab", key=lambda n: n != first):
        story.applied(name, 1, wrong if name == "b" else "s1")
    say(story, 2, a="s2", b="s2")
    all_show(story)
    assert is_settled(story)


def test_who_is_wrong_in_the_second_alone_is_found_out_there() -> None:
    story = two_commits(damaged_in=1)
    say(story, 1, a="s1", b="s1")
    say(story, 2, b="wrong", a="s2")
    all_show(story)
    assert is_settled(story)
    assert "of commit 2, in" in story.last("b", m.Evicted).reason


def test_sites_that_have_gone_on_hear_that_what_they_hold_is_disputed() -> None:
    story = two_commits()
    say(story, 1, b="wrong", a="s1")
    assert [story.last(name, m.Disputed) for name in "ab"] == [m.Disputed(commit=1)] * 2
    say(story, 2, a="s2")
    assert [story.last(name, m.Disputed).commit for name in "ab"] == [2, 1]
    say(story, 2, b="wrong")
    assert [story.last(name, m.Disputed).commit for name in "ab"] == [2, 2]


def test_who_does_not_answer_is_found_out_though_it_has_gone_on() -> None:
    story = two_commits()
    say(story, 1, b="made-up", a="s1")
    say(story, 2, b="s2", a="s2")
    story.sites["a"].shows = True
    story.wait(story.idle_limit_s() + 0.1)
    assert is_settled(story)
    assert "has not answered" in story.last("b", m.Evicted).reason


# --- and is started anew, or the coordinator is


@pytest.mark.parametrize("wrong", ["wrong", "made-up"])
@pytest.mark.parametrize("says_now", ["s2", "wrong"])
def test_a_liar_that_is_started_anew_at_the_next_commit_is_held_to_its_word(wrong: str, says_now: str) -> None:
    story = two_commits()
    say(story, 1, b=wrong, a="s1")
    say(story, 2, b="s2", a="s2")
    story.sites["b"].was_at.clear()
    story.connect("b", incarnation=2, state=(2, says_now))
    story.offer("b")
    all_show(story)
    if not evicted(story):  # its word was against what is attested
        assert story.last("b", m.Admitted).admitted_as is m.AdmittedAs.JOINER
    assert not story.num("a", m.Evicted)
    assert story.attested(1) == story.state("s1", 1)
    assert story.attested(2) == story.state("s2", 2)
    assert not story.disputed()


def test_a_liar_does_not_outvote_an_honest_site_that_is_started_anew() -> None:
    story = two_commits()
    say(story, 1, b="wrong", a="s1")
    say(story, 2, b="wrong", a="s2")
    story.connect("a", incarnation=2, state=(2, "s2"))
    assert story.attested(1) != story.state("s1", 1), "it was not found out yet"
    story.offer("a")
    assert story.last("a", m.Admitted).admitted_as is m.AdmittedAs.MEMBER
    all_show(story)
    assert is_settled(story)


def test_one_that_is_started_anew_before_the_newest_commit_is_a_party() -> None:
    """Its word is not held against what a liar said first of that commit."""
    story = two_commits()
    say(story, 1, b="wrong")
    story.connect("a", incarnation=2, state=(1, "s1"))
    story.offer("a")
    assert story.last("a", m.Admitted).admitted_as is m.AdmittedAs.MEMBER
    all_show(story)
    assert evicted(story) == "b"
    assert story.attested(1) == story.state("s1", 1)


@pytest.mark.parametrize("damaged_in", [0, 1, 2])
@pytest.mark.parametrize("order", ["ab", "ba"])
def test_after_a_restart_of_the_coordinator_it_is_computed_from_the_last_state_that_all_agreed_on(
    order: str, damaged_in: int
) -> None:
    """What sites said of commit 1 is gone, and it is not attested: it was disputed."""
    story = two_commits(damaged_in=damaged_in)
    say(story, 1, b="wrong", a="s1")
    say(story, 2, b="wrong", a="s2")
    story.restart()
    for name in order:
        story.sites[name].shows = True
        story.connect(name, state=(2, f"{'wrong' if name == 'b' else 's2'}"), term=1)
    assert evicted(story) == "b"
    assert story.attested(2) == story.state("s2", 2)
    assert not story.disputed()


@pytest.mark.parametrize("damaged_in", [0, 1])
def test_what_one_side_alone_said_of_the_commit_before_is_nothing_to_compute_from(damaged_in: int) -> None:
    """a applied both commits while its stream was away, so b's word alone attests the first."""
    story = two_commits(damaged_in=damaged_in)
    story.drop("a")
    say(story, 1, b="wrong")
    say(story, 2, b="wrong")
    story.connect("a", state=(2, "s2"))
    all_show(story)
    assert evicted(story) == "b"
    assert story.attested(2) == story.state("s2", 2)


def test_what_came_of_a_disputed_state_is_not_attested_to_those_who_come_anew() -> None:
    """b reports both wrong states first; after a restart of the coordinator only a is there."""
    story = two_commits()
    say(story, 1, b="wrong", a="s1")
    say(story, 2, b="wrong", a="s2")
    story.restart()
    story.connect("a", state=(2, "s2"), term=1)
    story.wait(2 * story.limits.lease_s)
    assert not story.is_live("b")
    assert not evicted(story)
    assert story.attested(2) == story.state("s2", 2)


def test_what_came_of_it_is_kept_again_when_it_is_settled() -> None:
    story = two_commits()
    say(story, 1, b="wrong", a="s1")
    say(story, 2, a="s2", b="s2")
    assert [record.state_hash for record in story.store.read_commits(1, 2)[1]] == [b"", b""]
    all_show(story)
    kept = story.store.read_commits(1, 2)[1]
    assert kept == tuple(e.AttestationRecord(n, story.state(f"s{n}", n)) for n in (1, 2))


def test_who_fetched_a_state_that_came_of_it_waits_until_it_is_settled() -> None:
    story = two_commits()
    say(story, 1, b="wrong", a="s1")
    say(story, 2, b="wrong", a="s2")
    story.join("c")
    story.applied("c", 2, "s2")
    assert not evicted(story)
    all_show(story)
    assert is_settled(story)


def test_what_a_contributor_said_stands_while_it_is_started_anew_at_the_next_commit() -> None:
    story = two_commits()
    say(story, 1, a="s1", b="wrong")
    say(story, 2, a="s2", b="s2")
    story.connect("a", incarnation=2, state=(2, "s2"))
    assert not story.is_live("a")
    assert story.attested(1) == story.state("s1", 1)
    story.offer("a")
    all_show(story)
    assert is_settled(story)


def test_who_was_evicted_for_its_silence_and_comes_back_at_the_next_commit_is_not_asked_again() -> None:
    story = two_commits()
    say(story, 1, b="made-up", a="s1")
    say(story, 2, b="s2", a="s2")
    story.sites["a"].shows = True
    story.wait(story.idle_limit_s() + 0.1)
    assert is_settled(story)
    story.connect("b", state=(2, "s2"), again=True)
    story.offer("b")
    assert story.last("b", m.Admitted).admitted_as is m.AdmittedAs.MEMBER
    assert not story.disputed()


@pytest.mark.parametrize(("overlap", "num_kept"), [(3, 3), (6, 4), (9, 5)])
def test_what_sites_said_is_kept_of_as_many_commits_as_may_follow_each_other(overlap: int, num_kept: int) -> None:
    settings = some_settings(fragments=3, every=9, overlap=overlap)
    log = CommitLog(MemoryStore().begin(settings, ""), settings.sync, 0, 0)
    for commit in range(1, 8):
        log.note(commit, 1, b"a")
        log.witness(commit, 2, b"b")
    heard = [n for n in range(1, 8) if log.is_heard(n, 1) and log.is_heard(n, 2)]
    assert heard == list(range(8 - num_kept, 8))
