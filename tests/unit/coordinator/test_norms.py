"""How large contributions are, as reducers say: who stands out again and again is named; nobody's run depends on it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest

from atoll.coordinator.core.view.document import SiteView
from atoll.protocol import messages as m
from atoll.protocol import plans
from atoll.protocol.plans import top_of
from tests.harness.coordinator_story import Story, a_hash, some_settings

NAMES = "abcd"
Word = Callable[[str, m.Plan], m.Averaged | None]


def chunks_of(story: Story, plan: m.Plan, name: str) -> int:
    own = story.id_of(name)
    return sum(t.num_chunks for t in plan.trees if plan.contributors[top_of(t)].site_id == own)


def run_of(num_commits: int, word: Callable[[Story], Word], robust: str = "clip", *, num_fragments: int = 1) -> Story:
    """`word`: what a reducer says of the norms."""
    settings = some_settings(quorum=1, min_sites=len(NAMES), max_sites=64, steps=2000, fragments=num_fragments)
    story = Story(replace(settings, sync=replace(settings.sync, robust=robust, clip=3.0 if robust == "off" else 1.5)))
    story.start(*NAMES)
    play(story, range(num_commits), word(story))
    return story


def play(story: Story, commits: range, word: Word) -> None:
    for number in commits:
        for name in NAMES:
            story.ready(name)
        plan = story.plan()
        for name in NAMES:
            averaged = word(name, plan) if chunks_of(story, plan, name) else None
            story.done(name, f"s{number}", averaged=averaged)
        for name in NAMES:
            story.applied(name, number + 1, f"s{number + 1}")


def of_d(story: Story, *, share: float = 1.0, norm: float = 10.0) -> Callable[[str, m.Plan], m.Averaged]:
    """The norm of d is 10, and of all others 1; in that share of the chunks d's is high."""

    def word(name: str, plan: m.Plan) -> m.Averaged:
        count = chunks_of(story, plan, name)
        return m.Averaged(
            num_chunks=count,
            norms=(1.0, 1.0, 1.0, norm),
            num_high=(0, 0, 0, int(count * share)),
            cosines=(0.5, 0.5, 0.5, -0.5),
            average_share=0.25,
            last_cosine=(0.75,),
            codec_error=(0.125,),
        )

    return word


def sites_of(story: Story) -> Mapping[str, SiteView]:
    return {site.name: site for site in story.view.sites}


def test_who_stands_out_three_times_in_a_row_is_named() -> None:
    story = run_of(2, of_d)
    assert not story.view.high
    assert sites_of(story)["d"].high_in_a_row == 2
    play(story, range(2, 3), of_d(story))
    text = "d (site 4) contributed more than 1.5 times the median norm 3 times in a row: what it sends is clipped"
    assert story.view.high == (text,)
    assert f"# {text}" in story.log
    play(story, range(3, 4), of_d(story))
    assert sites_of(story)["d"].high_in_a_row == 4
    assert sum("times in a row" in line for line in story.log) == 1, "it is said once"
    play(story, range(4, 5), of_d(story, share=0.0))
    assert not story.view.high
    assert sites_of(story)["d"].high_in_a_row == 0


@pytest.mark.parametrize("num_fragments", [1, 2])
@pytest.mark.parametrize("of_others", [1.0, 0.0])
def test_who_contributes_nothing_but_zeros_is_named_whatever_the_others_send(
    of_others: float, num_fragments: int
) -> None:
    """All sites may have the same script."""

    def word(story: Story, of_d: float = 0.0) -> Word:
        def said(name: str, plan: m.Plan) -> m.Averaged:
            return m.Averaged(
                num_chunks=chunks_of(story, plan, name), norms=(*[of_others] * 3, of_d), num_high=(0,) * 4
            )

        return said

    story = run_of(0, word, num_fragments=num_fragments)
    before = 3 * num_fragments - 1
    play(story, range(before), word(story))
    assert not story.view.high
    play(story, range(before, before + 2), word(story))
    text = "d (site 4) contributed nothing but zeros again and again, with the weight of its tokens"
    assert [shown.startswith(text) for shown in story.view.high].count(True) == 1
    assert len(story.view.high) == (1 if of_others else 4)
    assert sum(line.startswith(f"# {text}") for line in story.log) == 1, "it is said once"
    play(story, range(before + 2, before + 3), word(story, of_d=0.5))
    assert not any(shown.startswith(text) for shown in story.view.high)


@pytest.mark.parametrize(
    ("robust", "text"),
    [("warn", "counts in full"), ("trim", "is left out where it is among the highest"), ("clip", "is clipped")],
)
def test_it_is_said_what_becomes_of_it(robust: str, text: str) -> None:
    story = run_of(3, of_d, robust)
    (found,) = story.view.high
    assert found.endswith(f": what it sends {text}")


def test_half_of_the_chunks_are_not_most_of_them() -> None:
    story = run_of(4, lambda story: of_d(story, share=0.5))
    assert sites_of(story)["d"].high_in_a_row == 0
    assert sites_of(story)["d"].norm is not None


def test_norms_and_agreement_of_all_reducers_are_shown() -> None:
    said: list[str] = []

    def word(story: Story) -> Word:
        def of_reducer(name: str, plan: m.Plan) -> m.Averaged | None:
            said.append(name)
            return of_d(story)(name, plan)

        return of_reducer

    story = run_of(1, word)
    found = sites_of(story)
    assert len(said) > 1, "several reduce"
    assert (found["a"].norm, found["d"].norm) == (math.sqrt(len(said)), math.sqrt(100 * len(said)))
    assert (found["a"].cosine, found["d"].cosine) == (0.5, -0.5)
    view = story.view
    assert (view.average_share, view.last_cosine, view.codec_error, view.robust) == (0.25, 0.75, 0.125, "clip")
    assert view.contribution_bytes > 0


def test_what_was_found_closer_stays_until_it_is_looked_at_again() -> None:
    story = run_of(1, of_d)
    play(story, range(1, 2), lambda name, plan: replace(of_d(story)(name, plan), cosines=(), norms=(2.0,) * 4))
    assert (story.view.average_share, story.view.last_cosine, story.view.codec_error) == (0.25, 0.75, 0.125)
    assert sites_of(story)["d"].cosine == -0.5
    assert sites_of(story)["d"].norm == sites_of(story)["a"].norm


def test_one_reducer_names_nobody_by_what_it_says_of_chunks_that_are_not_its_own() -> None:
    def word(story: Story) -> Word:
        honest = of_d(story, share=0.0, norm=1.0)

        def said(name: str, plan: m.Plan) -> m.Averaged | None:
            if name != "a":
                return honest(name, plan)
            return m.Averaged(num_chunks=1000, norms=(1.0, 9.0, 1.0, 1.0), num_high=(0, 1000, 0, 0))

        return said

    story = run_of(5, word)
    assert not story.view.high
    assert sites_of(story)["b"].high_in_a_row == 0


def test_of_many_reducers_those_with_the_most_chunks_are_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "MOST_HEARD", 1)
    counts: list[int] = []

    def word(story: Story) -> Word:
        def said(name: str, plan: m.Plan) -> m.Averaged | None:
            count = chunks_of(story, plan, name)
            counts.append(count)
            return m.Averaged(num_chunks=count, norms=(float(count),) * 4, num_high=(0,) * 4)

        return said

    story = run_of(1, word)
    assert len(counts) > 1
    assert {site.norm for site in story.view.sites} == {float(max(counts))}


def test_of_equal_reducers_a_draw_says_who_is_heard() -> None:
    members = tuple(m.Member(site_id=i, incarnation=1, address="") for i in range(1, 101))
    trees = tuple(m.Tree(first_chunk=i, num_chunks=1, parents=(), top=i) for i in range(100))
    found = []
    for sync in (1, 2):
        plan = m.Plan(
            sync=sync,
            attempt=1,
            term=1,
            base_commit=0,
            contributors=members,
            trees=trees,
            stall_limit_s=6.0,
            num_steps=20,
            deadline_s=60.0,
            slowest_bytes_per_s=1,
        )
        found.append(plans.heard(plan))
        assert len(found[-1]) == plans.MOST_HEARD
        assert set(found[-1].values()) == {1}
        assert found[-1] == plans.heard(plan)
    assert set(found[0]) != set(found[1])


def test_in_a_run_without_it_nobody_is_named_whatever_is_said() -> None:
    story = run_of(5, of_d, "off")
    assert story.view.last_commit == 5
    assert not story.view.high
    assert sites_of(story)["d"].norm is None


def test_one_reducer_names_nobody_where_the_others_say_nothing() -> None:
    def word(story: Story) -> Word:
        return lambda name, plan: of_d(story)(name, plan) if name == "a" else None

    story = run_of(5, word)
    assert sites_of(story)["d"].high_in_a_row == 0


def test_a_run_that_goes_back_forgets_what_was_said_of_void_commits() -> None:
    story = run_of(3, of_d)
    assert story.view.high
    story.ask_to_go_back(2)
    for name in NAMES:
        story.says(name, m.CommitRebuilt(commit=2, state_hash=a_hash("s2"), has_oldest=True, text=""))
    assert story.rollbacks
    assert not story.view.high
    assert {site.norm for site in story.view.sites} == {None}


@pytest.mark.parametrize(
    "odd",
    [
        m.Averaged(num_chunks=0, norms=(1.0,) * 4, num_high=(1,) * 4),
        m.Averaged(num_chunks=1, norms=(1.0,) * 3, num_high=(1,) * 4),
        m.Averaged(num_chunks=1, norms=(1.0,) * 4, num_high=(1,) * 5),
        m.Averaged(num_chunks=1, norms=(1.0,) * 4, num_high=(1,) * 4, cosines=(1.0,)),
        m.Averaged(num_chunks=1),
        m.Averaged(num_chunks=1, norms=(1.0, 1.0, -1.0, 1.0), num_high=(1,) * 4),
        m.Averaged(num_chunks=1, norms=(1.0,) * 4, num_high=(2, 0, 0, 0)),
        m.Averaged(num_chunks=1, norms=(1.0,) * 4, num_high=(0,) * 4, cosines=(1.5, 0, 0, 0)),
        m.Averaged(num_chunks=1, norms=(1.0,) * 4, num_high=(0,) * 4, last_cosine=(-2.0,)),
        m.Averaged(num_chunks=1, norms=(1.0,) * 4, num_high=(0,) * 4, codec_error=(-0.5,)),
        m.Averaged(num_chunks=1, norms=(1.0,) * 4, num_high=(0,) * 4, average_share=-1.0),
        None,
    ],
)
def test_what_is_no_word_on_all_contributors_is_passed_over(odd: m.Averaged | None) -> None:
    story = run_of(3, lambda _: lambda name, plan: odd)
    assert story.view.last_commit == 3
    assert not story.view.high
    assert story.view.average_share is None
    assert {site.norm for site in story.view.sites} == {None}
