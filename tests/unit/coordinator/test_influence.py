"""What contributions count by their inner products: the geometric median, and the coordinator that waits for them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.coordinator.core.sync import geometric_median
from atoll.coordinator.core.sync.geometric_median import SMOOTHING, matrix_of, problem_of, shares
from atoll.coordinator.core.sync.influence import WHOLE, voices
from atoll.protocol import messages as m
from atoll.protocol.plans import influences
from atoll.protocol.time_limits import time_limits
from tests.harness.coordinator_story import Story, some_settings

Vectors = npt.NDArray[np.float64]
LIMITS = time_limits("local")


def products_of(vectors: Vectors) -> list[float]:
    gram = vectors @ vectors.T
    return [float(gram[i, j]) for i in range(len(gram)) for j in range(i + 1)]


@st.composite
def clouds(draw: st.DrawFn, least: int = 1) -> tuple[Vectors, list[float]]:
    """Vectors, some of them alike or zero, and what their distances count."""
    number, dim = draw(st.integers(least, 9)), draw(st.integers(1, 6))
    generator = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    vectors = generator.standard_normal((number, dim)) + draw(st.sampled_from([0.0, 3.0])) * np.ones(dim)
    for _ in range(draw(st.integers(0, 3))):
        vectors[generator.integers(number)] = vectors[generator.integers(number)] * draw(st.sampled_from([0, 1]))
    return vectors, [float(weight) for weight in generator.integers(1, 5, number)]


def median_of(vectors: Vectors, weights: list[float]) -> Vectors:
    """Pillutla et al., Algorithm 1, on the vectors themselves."""
    of_each = np.array(weights)
    smallest = SMOOTHING * float(np.linalg.norm(vectors, axis=1).max())
    point = of_each @ vectors / of_each.sum()
    for _ in range(geometric_median.MAX_STEPS if smallest else 0):
        pulls = of_each / np.maximum(smallest, np.linalg.norm(vectors - point, axis=1))
        point = pulls @ vectors / pulls.sum()
    found: Vectors = point
    return found


@given(clouds())
def test_shares_are_between_0_and_1_and_their_point_is_the_median(of: tuple[Vectors, list[float]]) -> None:
    vectors, weights = of
    found = shares(products_of(vectors), weights)
    assert math.isclose(sum(found), 1)
    assert min(found) > 0
    scale = max(1e-30, float(np.linalg.norm(vectors)))
    assert np.linalg.norm(np.array(found) @ vectors - median_of(vectors, weights)) <= 1e-5 * scale


@given(clouds(), st.integers(0, 1 << 30), st.sampled_from([2.0**-60, 2.0**-1, 2.0**20, 2.0**80]))
def test_neither_order_nor_scale_changes_what_a_vector_counts(
    of: tuple[Vectors, list[float]], seed: int, scale: float
) -> None:
    vectors, weights = of
    found = shares(products_of(vectors), weights)
    order = np.random.default_rng(seed).permutation(len(vectors))
    other = shares(products_of(vectors[order] * scale), [3 * weights[i] for i in order])
    point, other_point = np.array(found) @ vectors, np.array(other) @ vectors[order]
    assert np.linalg.norm(point - other_point) <= 1e-5 * max(1e-30, float(np.linalg.norm(vectors)))


@given(clouds(least=5), st.sampled_from([1.0, 1e2, 1e6]), st.booleans())
def test_less_than_half_of_the_vectors_move_the_point_by_little_wherever_they_are(
    of: tuple[Vectors, list[float]], far: float, is_opposite: bool
) -> None:
    """Minsker's bound (arXiv 1308.1334, Lemma 2.1): it stays within so many radii of the others' centre."""
    vectors, _ = of
    number, num_wild = len(vectors), (len(vectors) - 1) // 2 - 1
    honest = vectors[num_wild:]
    centre = honest.mean(axis=0)
    radius = float(np.linalg.norm(honest - centre, axis=1).max())
    vectors[:num_wild] = -far * vectors[num_wild : 2 * num_wild] if is_opposite else far
    found = shares(products_of(vectors), [1.0] * number)
    share = num_wild / number
    most = (1 - share) / math.sqrt(1 - 2 * share) * radius + 1e-5 * np.linalg.norm(vectors)
    assert np.linalg.norm(np.array(found) @ vectors - centre) <= most


def test_vectors_that_are_all_alike_or_zero_count_by_their_weights() -> None:
    for vector in ([0.0, 0.0], [3.0, -1.0]):
        assert shares(products_of(np.array([vector] * 3)), [1.0, 2.0, 5.0]) == pytest.approx([1 / 8, 2 / 8, 5 / 8])
    assert shares([4.0], [7.0]) == [1.0]


def test_one_of_five_that_is_a_thousand_times_as_long_counts_next_to_nothing() -> None:
    vectors = np.random.default_rng(1).standard_normal((5, 1000))
    vectors[2] *= -1000
    found = shares(products_of(vectors), [1.0] * 5)
    assert found[2] < 1e-3
    assert all(0.2 < share < 0.3 for place, share in enumerate(found) if place != 2)


@pytest.mark.parametrize(
    ("products", "problem"),
    [
        ([1.0, 0.5, 1.0], ""),
        ([1.0, 0.0, 0.0], ""),
        ([4.0, -2.0, 1.0], ""),
        ([1.0, 0.5], "2 inner products of 2"),
        ([1.0, 0.5, 1.0, 0.0], "4 inner products of 2"),
        ([1.0, 1.1, 1.0], "more than that of their norms"),
        ([0.0, 1e-9, 1.0], "more than that of their norms"),
        ([1.0, 0.0, -1.0], "negative"),
        ([math.nan, 0.0, 1.0], "beyond"),
        ([1.0, math.nan, 1.0], "beyond"),
        ([1.0, 0.0, math.inf], "beyond"),
        ([1e101, 0.0, 1.0], "beyond"),
    ],
)
def test_what_no_two_contributions_have_is_no_word_on_them(products: list[float], problem: str) -> None:
    found = problem_of(products, 2)
    assert problem in found
    assert bool(found) == bool(problem)


def test_products_travel_row_by_row_up_to_the_diagonal() -> None:
    assert matrix_of([1, 2, 3, 4, 5, 6]) == [[1, 2, 4], [2, 3, 5], [4, 5, 6]]


def test_nobody_has_more_voice_than_the_median_contributor() -> None:
    assert voices((100, 100, 1 << 44)) == [100, 100, 100]
    assert voices((1, 50, 100, 1600)) == [1, 50, 50, 50]


# --- the coordinator


def a_run(*names: str, **settings: Any) -> Story:
    story = Story(some_settings(**{"min_sites": len(names), "quorum": 3, "max_sites": 64, "robust": "gram"} | settings))
    story.start(*names)
    for name in names:
        story.ready(name, tokens=100)
    return story


ALIKE, ODD = "1:0,0:1,1:1", "1:0,0:1,-1000:0"


def test_the_weights_are_said_once_all_reducers_have_spoken_and_the_commit_lists_them() -> None:
    story = a_run("a", "b", "c")
    story.multiplies("a", ALIKE)
    story.multiplies("b", ODD)
    assert story.num("c", m.Influences) == 0, "the third reducer has not"
    story.multiplies("c", ALIKE)
    said: m.Influences = story.last("a", m.Influences)
    assert (said.sync, said.attempt, story.num("b", m.Influences)) == (1, 1, 1)
    assert sum(said.influences) == pytest.approx(WHOLE, abs=3)
    assert said.influences[2] < 0.01 * WHOLE
    for name in "abc":
        story.done(name, "s0")
    made: m.Commit = story.last("a", m.Commit)
    assert influences(made) == said.influences
    assert [c.tokens for c in made.contributors] == [100, 100, 100]


def test_a_coordinator_that_is_started_again_says_what_it_said() -> None:
    story = a_run("a", "b", "c")
    for name in "abc":
        story.multiplies(name, ODD)
    said = story.last("a", m.Influences)
    story.restart()
    for name in "abc":
        story.connect(name, state=(0, "s0"))
    assert story.last("a", m.Influences) == said
    for name in "abc":
        story.done(name, "s0")
    assert influences(story.last("a", m.Commit)) == said.influences


def test_a_coordinator_that_is_started_before_it_has_said_anything_hears_reducers_anew() -> None:
    story = a_run("a", "b", "c")
    story.multiplies("a", ODD)
    story.restart()
    for name in "abc":
        story.connect(name, state=(0, "s0"))
    for name in "bc":
        story.multiplies(name, ODD)
    assert story.num("a", m.Influences) == 0
    story.multiplies("a", ODD)
    assert story.num("a", m.Influences) == 1


def test_another_attempt_begins_with_nothing_of_the_one_before() -> None:
    story = a_run("a", "b", "c", "d")
    for name in "abc":
        story.multiplies(name, "1:0,0:1,1:1,2:2")
    story.leave("d")
    assert story.plan().attempt == 2
    assert story.num("a", m.Influences) == 0
    for name in "abc":
        story.multiplies(name, ODD)
    said: m.Influences = story.last("a", m.Influences)
    assert (said.attempt, len(said.influences)) == (2, 3)


def test_who_says_what_no_contributions_have_is_evicted() -> None:
    story = a_run("a", "b", "c", "d")
    plan = story.plan()
    products = (1.0, 2.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    story.says("b", m.Products(sync=1, attempt=1, term=plan.term, products=products))
    assert "more than that of their norms" in story.last("b", m.Evicted).reason
    assert story.plan().attempt == 2


def test_who_holds_up_the_others_is_evicted_and_whoever_waits_for_it_is_not() -> None:
    """Nothing moves: two have said their products, and wait for those of the third."""
    story = a_run("a", "b", "c", "d")
    for name in "abd":
        story.multiplies(name, "1:0,0:1,1:1,2:2")
    for name in "abcd":
        story.beats(name, phase="exchanging", doing="", step=10)
    story.wait(3 * LIMITS.stall_s)
    assert [name for name in "abcd" if story.num(name, m.Evicted)] == ["c"]
    assert story.plan().attempt == 2


@pytest.mark.parametrize("held_up_s", [0.0, LIMITS.give_up_s])
def test_the_time_to_average_runs_from_when_reducers_hear_what_contributions_count(held_up_s: float) -> None:
    """What they count is decided once the run has given up going back to a commit that c never puts together."""
    story = a_run("a", "b", "c")
    for name in "abc":
        story.multiplies(name, ALIKE)
        story.done(name, "s0")
    for name in "abc":
        story.applied(name, 1, "s1")
        story.ready(name, tokens=100)
    if held_up_s:
        story.ask_to_go_back(0)
    for name in "abc":
        story.multiplies(name, ALIKE)
        story.beats(name, phase="exchanging", doing="", step=20)
    deadline_s = story.plan().deadline_s
    assert not held_up_s or held_up_s > deadline_s + 2 * LIMITS.stall_s
    story.wait(held_up_s)
    said: m.Influences = story.last("a", m.Influences)
    assert said.sync == 2
    heard_at, moved = story.now, 0
    while story.now - heard_at < deadline_s + 1.5 * LIMITS.stall_s:
        moved += 1
        for name in "abc":
            story.sites[name].heartbeat = m.Heartbeat(phase="exchanging", moved_bytes=moved)
        story.wait(LIMITS.stall_s / 4)
        assert not [name for name in "abc" if story.num(name, m.Evicted)]
    story.wait(LIMITS.stall_s)
    assert f"beyond the deadline of sync 2, {deadline_s:.0f} s" in story.last("a", m.Evicted).reason
