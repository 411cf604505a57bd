"""Rule 22: sites that hold different states of one commit, without a majority."""

from __future__ import annotations

from atoll.protocol import messages as m
from atoll.protocol.messages import AdmittedAs
from tests.harness.coordinator_story import Story, a_hash, some_settings


def differing(*, first: str = "b") -> Story:
    """Two sites at commit 1; b's state is another. `first` reports first, and so is attested."""
    story = Story(some_settings(min_sites=2))
    story.start("a", "b")
    for name in "ab":
        story.ready(name)
    for name in "ab":
        story.done(name, "s0")
    for name in sorted("ab", key=lambda n: n != first):
        story.applied(name, 1, "s1" if name == "a" else "wrong")
    return story


def verified(story: Story, name: str, num_damaged: int) -> None:
    story.says(name, m.Verified(commit=1, num_damaged=num_damaged))


def test_in_a_tie_the_run_is_paused_and_both_check_their_bytes() -> None:
    story = differing()
    assert story.num("a", m.Verify) == story.num("b", m.Verify) == 1
    assert "paused: sites hold different states of commit 1 (a (site 1)" in story.view.state
    assert "their bytes are being checked" in story.view.state
    for name in "ab":
        story.ready(name)
    assert story.core.run.sync is not None
    attempt = story.core.run.sync.attempt
    assert attempt is not None
    assert not attempt.is_weighed, "nothing is planned meanwhile"


def test_the_one_whose_bytes_are_damaged_is_wrong_whoever_was_first() -> None:
    for first in "ab":
        story = differing(first=first)
        verified(story, "a", 0)
        verified(story, "b", 3)
        assert story.view.state == "training"
        assert story.core.run.log.attested[1] == a_hash("s1")
        assert story.num("b", m.Evicted) == 1
        story.connect("b", state=(1, "wrong"), again=True)
        story.offer("b")
        admitted = story.last("b", m.Admitted)
        assert (admitted.admitted_as, admitted.state_hash) == (AdmittedAs.JOINER, a_hash("s1"))
        story.applied("b", 1, "s1")
        story.ready("a")
        story.done("a", "s1")
        view = story.view
        assert view.last_commit == 2
        assert view.num_wrong_states == 1
        assert {s.name: s.num_wrong_states for s in view.sites} == {"a": 0, "b": 1}


def test_without_damage_the_run_stays_paused_and_names_both_until_one_is_stopped() -> None:
    for num_damaged in (0, 2):
        story = differing()
        verified(story, "a", num_damaged)
        verified(story, "b", num_damaged)
        assert "a (site 1)" in story.view.state
        assert "b (site 2)" in story.view.state
        assert "keep those out that you do not trust" in story.view.state
        for name in "ab":
            story.ready(name)
        story.wait(2 * story.core.run.limits.sync_wait_s)
        assert story.view.last_commit == 1
        story.leave("b")
        assert story.core.run.log.attested[1] == a_hash("s1")
        assert not story.core.run.disputed
        story.done("a", "s1")
        assert story.view.last_commit == 2


def test_a_site_that_lost_its_stream_is_asked_again() -> None:
    story = differing()
    story.drop("b")
    story.connect("b", state=(1, "wrong"))
    assert story.num("b", m.Verify) == 2
    assert story.num("a", m.Verify) == 1
    verified(story, "b", 1)
    verified(story, "a", 0)
    assert story.view.state == "training"


def test_a_third_report_decides_a_tie() -> None:
    story = Story(some_settings(min_sites=3))
    story.start("a", "b", "c")
    for name in "abc":
        story.ready(name)
    for name in "abc":
        story.done(name, "s0")
    story.applied("b", 1, "wrong")
    story.applied("a", 1, "s1")
    assert not story.core.run.disputed, "c has not said anything yet"
    story.applied("c", 1, "s1")
    assert story.num("b", m.Evicted) == 1
    assert story.num("a", m.Verify) == 0


# --- sites that are no party: they applied the commit without contributing to it


def with_a_witness(*, first: str, witness: str, contributors: str = "ab") -> Story:
    """`contributors` commit 1 without c, which receives. All of them but a say "wrong" of it; c says `witness`."""
    story = Story(some_settings(min_sites=len(contributors)))
    story.start(*contributors, "c")
    for name in contributors:
        story.ready(name)
    story.ready("c", tokens=0)
    assert [r.site_id for r in story.plan().receivers] == [len(contributors) + 1]
    for name in contributors:
        story.done(name, "s0")
    said = dict.fromkeys(contributors, "wrong") | {"a": "s1", "c": witness}
    for name in sorted(said, key=lambda name: name != first):
        if story.sites[name].stream is not None:
            story.applied(name, 1, said[name])
    return story


def test_a_site_that_is_no_party_settles_a_dispute_whoever_says_it_first() -> None:
    for first in "abc":
        for witness, evicted in (("s1", "b"), ("wrong", "a")):
            story = with_a_witness(first=first, witness=witness)
            assert story.core.run.log.attested[1] == a_hash(witness), (first, witness)
            assert [story.num(name, m.Evicted) for name in "abc"] == [int(name == evicted) for name in "abc"]
            assert not story.view.state.startswith("paused")


def test_one_that_agrees_with_neither_is_heard_with_them() -> None:
    story = with_a_witness(first="c", witness="a third")
    assert not story.num("c", m.Evicted)
    assert [story.num(name, m.Verify) for name in "abc"] == [1, 1, 1]
    assert "paused: sites hold different states of commit 1" in story.view.state


def test_one_that_is_no_party_does_not_outvote_contributors_that_agree() -> None:
    story = Story(some_settings(min_sites=1))
    story.start("a")
    story.join("c")
    story.applied("c", 0, "s0")
    story.ready("a")
    story.ready("c", tokens=0)
    story.done("a", "s0")
    story.applied("c", 1, "wrong")
    assert not story.num("c", m.Evicted), "the contributor has not said what it has"
    story.applied("a", 1, "s1")
    assert story.num("c", m.Evicted) == 1
    assert not story.num("a", m.Verify)


def test_who_fetched_the_state_is_no_witness_of_it() -> None:
    story = differing(first="b")
    story.join("c")
    story.applied("c", 1, "wrong")
    assert story.view.state.startswith("paused: sites hold different states")
    assert story.num("a", m.Evicted) == story.num("b", m.Evicted) == 0
