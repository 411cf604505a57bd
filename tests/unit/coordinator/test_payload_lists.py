"""Rule 15: payloads that differ. Of two sites the reducer is right; of more its word is one among several."""

from __future__ import annotations

import pytest

from atoll.protocol import messages as m
from atoll.protocol import payload_lists
from atoll.protocol.plans import reducers
from tests.harness.coordinator_story import Story, a_hash, some_settings

# a reduces chunks 0 to 2 of 5, b 3 and 4.


def differing() -> Story:
    story = Story(some_settings(min_sites=2))
    story.start("a", "b")
    for name in "ab":
        story.ready(name)
    story.done("a", "s0", payloads="p")
    story.done("b", "s0", payloads="q")
    return story


def test_the_lists_are_asked_for_and_the_outlier_is_evicted() -> None:
    for a_lists, b_lists, outlier in (("ppppp", "ppqpp", "b"), ("ppppq", "ppppp", "a")):
        story = differing()
        assert story.num("a", m.ListPayloads) == story.num("b", m.ListPayloads) == 1
        story.lists("a", a_lists)
        assert not story.num("a", m.Evicted) + story.num("b", m.Evicted)
        story.lists("b", b_lists)
        assert story.num(outlier, m.Evicted) == 1
        (right,) = {"a", "b"} - {outlier}
        commit = story.last(right, m.Commit)
        assert commit.payload_digest == a_hash({"a": "p", "b": "q"}[right])
        assert [c.site_id for c in commit.contributors] == [1, 2], "the plan's, whoever was lost"
        assert story.view.num_evicted == 1


def test_lists_that_tell_nothing_mean_another_attempt() -> None:
    for a_lists, b_lists in (("ppppp", "ppppp"), ("ppppq", "qpppp"), ("pp", "ppppq")):
        story = differing()
        story.lists("a", a_lists)
        story.lists("b", b_lists)
        story.wait(story.limits.stall_s)
        assert not story.num("a", m.Evicted) + story.num("b", m.Evicted)
        assert story.view.last_commit == 0
        assert story.plan().attempt == 2


def test_a_list_that_does_not_come_is_waited_for_only_so_long() -> None:
    story = differing()
    story.lists("a", "ppppp")
    story.wait(story.limits.stall_s - 0.5)
    assert story.plan().attempt == 1
    story.wait(0.5)
    assert story.plan().attempt == 2


def test_a_site_on_a_new_stream_is_asked_again() -> None:
    story = differing()
    story.drop("b")
    story.connect("b", state=(0, "s0"))
    assert story.num("b", m.ListPayloads) == 2
    story.lists("a", "ppppp")
    story.lists("b", "qpppp")
    assert story.num("b", m.Evicted) == 1


# Of four: a reduces chunks 0 and 1 of 5, b 2, c 3, d 4, or so; each reduces some.


def four(*, hides: str = "", **payloads: str) -> Story:
    """They are done with these payloads, and show the hash of each chunk where it is asked for, but for one."""
    story = Story(some_settings(min_sites=4))
    story.start("a", "b", "c", "d")
    for name in "abcd":
        story.ready(name)
    for name in "abcd":
        story.done(name, "s0", payloads="p" if payloads[name] == "ppppp" else f"p {payloads[name]}")
    for name, hashes in payloads.items():
        if name != hides:
            story.lists(name, hashes)
    return story


def chunk_of(site_id: int) -> int:
    story = Story(some_settings(min_sites=4))
    story.start("a", "b", "c", "d")
    for name in "abcd":
        story.ready(name)
    return next(n for n, r in enumerate(reducers(story.plan(), 5)) if r.site_id == site_id)


def with_another(chunk: int) -> str:
    return "".join("q" if n == chunk else "p" for n in range(5))


def test_15_a_reducer_that_gave_one_site_another_payload_has_nobody_evicted() -> None:
    """d gave it to a, and shows what b and c have: its word against that of a, and neither reduces next."""
    story = four(a=with_another(chunk_of(4)), b="ppppp", c="ppppp", d="ppppp")
    assert story.view.num_evicted == 0
    assert story.plan().attempt == 2
    assert (story.contributor_ids(), story.reducer_ids()) == ([1, 2, 3, 4], {2, 3})
    assert "payloads differ between sites: 1 with 4, 4 with 1)" in "\n".join(story.log)


def test_15_a_reducer_that_shows_another_payload_than_it_gave_has_nobody_evicted_but_receives_only() -> None:
    """All others were evicted, by the word of one."""
    story = four(a="ppppp", b="ppppp", c="ppppp", d=with_another(chunk_of(4)))
    assert story.view.num_evicted == 0
    assert (story.plan().attempt, story.contributor_ids()) == (2, [1, 2, 3])


def test_15_who_shows_nothing_receives_only() -> None:
    for payload in ("ppppp", "qqqqq"):  # with the others, while a has what it was given; or alone
        a_has = with_another(chunk_of(4)) if payload == "ppppp" else "ppppp"
        story = four(hides="d", a=a_has, b="ppppp", c="ppppp", d=payload)
        story.wait(story.limits.stall_s)
        assert (story.plan().attempt, story.contributor_ids()) == (2, [1, 2, 3])


def test_15_who_shows_what_all_have_and_says_otherwise_receives_only() -> None:
    story = Story(some_settings(min_sites=3))
    story.start("a", "b", "c")
    for name in "abc":
        story.ready(name)
    for name, payloads in zip("abc", "ppq", strict=True):
        story.done(name, "s0", payloads=payloads)
    for name in "abc":
        story.lists(name, "ppppp")
    assert (story.plan().attempt, story.contributor_ids()) == (2, [1, 2])


def test_15_of_more_chunks_than_one_message_lists_the_reducer_is_known_by_its_tree(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each site lists one hash for the chunks of each reducer. A list of each chunk is none then."""
    monkeypatch.setattr(payload_lists, "MAX_LISTED_CHUNKS", 4)
    story = differing()
    assert [tree.num_chunks for tree in story.plan().trees] == [3, 2]
    story.lists("a", "ppppp")
    story.lists("b", "pqppp")
    assert not story.num("a", m.Evicted) + story.num("b", m.Evicted), "these have too many hashes"
    story.lists("a", "pp")
    story.lists("b", "qp")
    assert story.num("b", m.Evicted) == 1
    assert story.last("a", m.Commit).payload_digest == a_hash("p")
