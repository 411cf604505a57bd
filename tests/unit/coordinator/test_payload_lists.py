"""Rule 15: payloads that differ. The reducer of a chunk is right; without a reducer who says so, nobody is."""

from __future__ import annotations

from atoll.protocol import messages as m
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
        story.wait(story.core.run.limits.stall_s)
        assert not story.num("a", m.Evicted) + story.num("b", m.Evicted)
        assert story.view.last_commit == 0
        assert story.plan().attempt == 2


def test_a_list_that_does_not_come_is_waited_for_only_so_long() -> None:
    story = differing()
    story.lists("a", "ppppp")
    story.wait(story.core.run.limits.stall_s - 0.5)
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
