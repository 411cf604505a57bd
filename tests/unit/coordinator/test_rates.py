"""With gradient exchange a commit has one learning rate: that of all its contributors."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Mapping
from dataclasses import replace

import pytest

from atoll.protocol import messages as m
from atoll.protocol.layout import Manifest
from atoll.protocol.outer import same_rates
from atoll.protocol.outer_settings import OuterSettings
from tests.harness.coordinator_story import Story, a_manifest, some_settings

RATES = (0.01, 0.1)
OTHERS = (0.02, 0.1)


def story_of(*names: str, manifest: Manifest | None = None) -> Story:
    settings = some_settings(quorum=1, min_sites=len(names), outer=OuterSettings(optimizer="adamw", momentum=0.9))
    sync = replace(settings.sync, strategy="gradient", every=1)
    story = Story(replace(settings, sync=sync), manifest=manifest)
    story.start(*names)
    return story


def ready(story: Story, rates: Mapping[str, tuple[float, ...]]) -> None:
    for name, of_site in rates.items():
        story.ready(name, rates=of_site)


def contributors(story: Story) -> set[str]:
    return {member.address.partition(":")[0] for member in story.plan().contributors}


def test_the_commit_has_the_rates_of_its_contributors() -> None:
    story = story_of("a", "b")
    ready(story, {"a": RATES, "b": RATES})
    for name in "ab":
        story.done(name, "s0")
    commit: m.Commit = story.last("a", m.Commit)
    assert commit.rates == RATES


def test_a_cosine_of_another_processor_is_the_same_schedule() -> None:
    """Which computes its last digits otherwise; the commit has the rates of one contributor, for all."""
    story = story_of("a", "b", "c")
    near_the_end = 1e-3 * (1 + math.cos(math.pi * 0.9999))
    of_b = (near_the_end, 0.1)
    of_c = (math.nextafter(near_the_end, 1), math.nextafter(0.1, 0))
    ready(story, {"a": (near_the_end * (1 + 1e-7), 0.1), "b": of_b, "c": of_c})
    assert contributors(story) == {"a", "b", "c"}
    for name in "abc":
        assert not story.num(name, m.Refused)
        story.done(name, "s0")
    rates = {story.last(name, m.Commit).rates for name in "abc"}
    assert rates == {(near_the_end * (1 + 1e-7), 0.1)}


def test_rates_that_a_script_sets_otherwise_are_not_the_same() -> None:
    assert same_rates((0.0, 0.0), (1e-11, 0.0))
    assert not same_rates((1e-3, 0.1), (1.0001e-3, 0.1))
    assert not same_rates((1e-6, 0.1), (0.0, 0.1))
    assert not same_rates((1e-3, 0.1), (1e-3,))


def rates_of_commit(story: Story, rates: Mapping[str, tuple[float, ...]]) -> tuple[float, ...]:
    """Of the next one, in which all are that are not refused; each of them takes it."""
    ready(story, rates)
    story.wait(5.0)
    in_it = contributors(story)
    assert in_it == {name for name in rates if not story.num(name, m.Refused)}
    for name in in_it:
        story.done(name, "s0")
    commit: m.Commit = story.last(min(in_it), m.Commit)
    assert all(same_rates(commit.rates, rates[name]) for name in in_it), "what own_word.wrong_in_commit holds"
    return commit.rates


LEFT, RIGHT = (1e-3 * (1 - 1e-7), 0.1), (1e-3 * (1 + 1e-7), 0.1)
"""One schedule on processors of two kinds."""


def at_edge(rates: tuple[float, float], share: float = 0.9999) -> tuple[float, float]:
    """The same as `rates`, just so, and others than those of a site left of it."""
    return rates[0] * (1 + share * 1e-5), rates[1]


def test_a_lowest_site_at_the_edge_of_some_sends_away_none_of_the_others() -> None:
    story = story_of(*"abcdef")
    edge = at_edge(RIGHT)
    assert same_rates(edge, RIGHT)
    assert not same_rates(edge, LEFT)
    said = {"a": edge, "b": RIGHT, "c": RIGHT, "d": RIGHT, "e": LEFT, "f": LEFT}
    assert rates_of_commit(story, said) == RIGHT
    assert not any(story.num(name, m.Refused) for name in "bcdef")


def test_rates_at_the_edge_get_no_votes_of_those_whom_they_agree_with() -> None:
    """`a` would have the most, its own, those of `b` and `c` and of all but one of the others."""
    story = story_of(*"abcdefgh")
    edge = at_edge(RIGHT)
    beyond = at_edge(edge, 0.9)
    said = {"a": edge, "b": beyond, "c": beyond, "d": RIGHT, "e": RIGHT, "f": RIGHT, "g": RIGHT, "h": LEFT}
    assert rates_of_commit(story, said) == RIGHT
    assert not any(story.num(name, m.Refused) for name in "defgh")


@pytest.mark.parametrize("seed", range(40))
def test_fewer_sites_than_are_honest_have_no_honest_one_refused(seed: int) -> None:
    chance = random.Random(seed)
    num_honest = chance.randint(2, 6)
    num_others = chance.randint(1, num_honest - 1)
    names = list("abcdefghijkl"[: num_honest + num_others])
    honest = set(chance.sample(names, num_honest))
    edges = [(1e-3 * (1 + chance.uniform(-2.5e-5, 2.5e-5)), 0.1) for _ in range(2)]
    said = {name: chance.choice((LEFT, RIGHT) if name in honest else (*edges, at_edge(RIGHT))) for name in names}
    story = story_of(*names)
    rates_of_commit(story, said)
    assert not any(story.num(name, m.Refused) for name in honest), said


def test_one_in_the_last_place_apart_is_the_same_for_two() -> None:
    rates = (1e-3, 0.1)
    near = (math.nextafter(1e-3, 1), math.nextafter(0.1, 0))
    assert rates_of_commit(story_of("a", "b"), {"a": near, "b": rates}) == near


def test_most_sites_are_right_and_the_others_are_refused_with_both_values() -> None:
    story = story_of("a", "b", "c")
    ready(story, {"a": OTHERS, "b": RATES, "c": RATES})
    refused: m.Refused = story.last("a", m.Refused)
    assert refused.kind is m.RefusedKind.INVALID
    assert f"has the rates {list(OTHERS)}, those of site 2, 3 are {list(RATES)}" in refused.text
    assert contributors(story) == {"b", "c"}
    for name in "bc":
        assert not story.num(name, m.Refused)
        story.done(name, "s0")
    assert story.last("b", m.Commit).rates == RATES


def test_a_site_that_was_started_again_is_no_witness_against_those_of_the_last_commit() -> None:
    story = story_of("a", "b")
    ready(story, {"a": RATES, "b": RATES})
    for name in "ab":
        story.done(name, "s0")
    for name in "ab":
        story.applied(name, 1, "s1")
    story.connect("a", incarnation=2, state=(1, "s1"))
    story.offer("a")
    story.applied("a", 1, "s1")
    ready(story, {"a": OTHERS, "b": RATES})
    story.wait(5.0)
    assert story.last("a", m.Refused).kind is m.RefusedKind.INVALID
    assert not story.num("b", m.Refused)


def test_of_as_many_the_lowest_id_counts() -> None:
    story = story_of("a", "b")
    ready(story, {"b": OTHERS, "a": RATES})
    assert story.num("b", m.Refused) == 1
    assert not story.num("a", m.Refused)


def test_in_a_plan_that_was_made_ahead_they_are_held_against_each_other_too() -> None:
    story = story_of("a", "b", "c")
    ready(story, dict.fromkeys("abc", RATES))
    for name in "abc":
        story.done(name, "s0")
    for name in "abc":
        story.applied(name, 1, "s1")
    assert story.plan().ahead
    ready(story, {"a": OTHERS, "b": OTHERS, "c": RATES})
    assert story.num("c", m.Refused) == 1
    story.wait(5.0)
    assert contributors(story) == {"a", "b"}


def test_after_a_restart_of_the_coordinator_the_rates_of_the_attempt_are_known() -> None:
    story = story_of("a", "b", "c")
    ready(story, dict.fromkeys("abc", RATES))
    story.restart()
    for name in "ab":
        story.connect(name, state=(0, "s0"))
    story.wait(12.0)
    assert contributors(story) == {"a", "b"}, "another attempt, of those who are back"
    for name in "ab":
        story.done(name, "s0")
    assert story.last("a", m.Commit).rates == RATES


@pytest.mark.parametrize("rates", [(), (0.01,), (0.01, 0.1, 0.01, 0.0), (-0.01, 0.1), (0.01, math.inf), (1e6, 0.1)])
def test_rates_that_cannot_be_are_refused(rates: tuple[float, ...]) -> None:
    story = story_of("a", "b")
    story.ready("a", rates=rates)
    assert story.num("a", m.Refused) == 1


def test_each_parameter_group_has_rates() -> None:
    tensors = [replace(spec, group=number) for number, spec in enumerate(a_manifest().tensors)]
    story = story_of("a", "b", manifest=Manifest.canonical(tensors))
    both = (*RATES, 0.01, 0.0)
    story.ready("a", rates=RATES)
    assert story.num("a", m.Refused) == 1
    story.ready("b", rates=both)
    assert not story.num("b", m.Refused)


def test_of_many_commits_a_second_one_is_said() -> None:
    story = story_of("a", "b")
    for number in range(10):
        ready(story, dict.fromkeys("ab", RATES))
        story.done("a", f"s{number}")
        story.done("b", f"s{number}")
        for name in "ab":
            story.applied(name, number + 1, f"s{number + 1}")
        story.wait(0.3)
    said = [level for level, text in story.reports if ": sync " in text and text.startswith("commit ")]
    assert len(said) == 10
    assert said.count(logging.INFO) == 3
    assert not [text for level, text in story.reports if level == logging.INFO and "all who were planned" in text]
    flips = [text for level, text in story.reports if level == logging.INFO and text == "run run: syncing"]
    assert len(flips) <= 1


def test_where_values_are_averaged_there_are_none() -> None:
    story = Story(some_settings(min_sites=1))
    story.start("a")
    story.ready("a", rates=RATES)
    assert story.num("a", m.Refused) == 1
