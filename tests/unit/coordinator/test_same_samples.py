"""Sites that train the same samples, as a script with one seed does: their losses tell, and people are told."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytest

from atoll.coordinator.core.sync.same_samples import SameSamples
from tests.harness.coordinator_story import Story, some_settings

SAME = "a (site 1) and c (site 3) had the same loss, to the last digit, in 8 commits and more: they train the same"


def play(story: Story, losses: Sequence[Mapping[str, float]], first: int = 0) -> None:
    for number, of_sites in enumerate(losses, start=first):
        for name, loss in of_sites.items():
            story.ready(name, loss=loss)
        for name in of_sites:
            story.done(name, f"s{number}")
        for name in of_sites:
            story.applied(name, number + 1, f"s{number + 1}")


def run_of(*names: str) -> Story:
    story = Story(some_settings(quorum=1, min_sites=len(names), max_sites=64, steps=2000))
    story.start(*names)
    return story


def losses_of(number: int) -> Mapping[str, float]:
    return {"a": 2.1 / (number + 1), "b": 3.1 / (number + 1), "c": 2.1 / (number + 1)}


def test_sites_with_the_same_losses_are_named_once_and_shown_until_they_differ() -> None:
    story = run_of("a", "b", "c")
    play(story, [losses_of(number) for number in range(7)])
    assert not story.view.same_samples
    play(story, [losses_of(7), losses_of(8)], first=7)
    (shown,) = story.view.same_samples
    assert shown.startswith(SAME)
    assert "seeds them with site.seed, or reads by site.loader" in shown
    assert sum(SAME in line for line in story.log) == 1, "it is said once"
    play(story, [{"a": 0.5, "b": 0.4, "c": 0.3}], first=9)
    assert not story.view.same_samples


def test_losses_that_say_nothing_name_nobody() -> None:
    """Zeros of sites that say none, one that does not move, and what is no number."""
    seen = SameSamples()
    for number in range(20):
        assert not seen.note_commit({1: 0.0, 2: 0.0, 3: 0.7, 4: 0.7, 5: math.inf, 6: math.inf, 7: float(number + 2)})
    assert seen.pairs() == []


def test_of_many_each_is_beside_the_first_and_who_rests_stays_named() -> None:
    seen = SameSamples()
    found = [seen.note_commit({4: 1.1 / n, 2: 1.1 / n, 9: 1.1 / n, 5: 2.3 / n}) for n in range(2, 11)]
    assert found == [[], [], [], [], [], [], [], [(2, 4), (2, 9)], []]
    seen.note_commit({2: 0.1, 9: 0.1})
    assert seen.pairs() == [(2, 4), (2, 9)]
    seen.note_commit({2: 0.2, 4: 0.3, 9: 0.2})
    assert seen.pairs() == [(2, 9)]
    seen.forget()
    assert seen.pairs() == []


def in_bfloat16(loss: float) -> float:
    (bits,) = np.array([loss], np.float32).view(np.uint32)
    return float((np.array([(int(bits) + 0x8000) & 0xFFFF0000], np.uint32).view(np.float32))[0])


def in_float32(loss: float) -> float:
    return float(np.float32(loss))


def error_rate(num_samples: int) -> Callable[[random.Random, float], float]:
    return lambda chance, _: in_float32(sum(chance.random() < 0.3 for _ in range(num_samples)) / num_samples)


def mean_of(
    num_steps: int, as_stored: Callable[[float], float], spread: float
) -> Callable[[random.Random, float], float]:
    """A window of steps."""

    def loss(chance: random.Random, usual: float) -> float:
        return sum(as_stored(usual + chance.gauss(0, spread)) for _ in range(num_steps)) / num_steps

    return loss


HONEST = {
    **{
        f"bfloat16, {spread}, {n} steps": mean_of(n, in_bfloat16, spread)
        for spread in (0.005, 0.05)
        for n in (1, 3, 10)
    },
    **{f"error rate of {n}": error_rate(n) for n in (32, 100)},
    "float32": mean_of(1, in_float32, 0.005),
}


@pytest.mark.parametrize("num_sites", [2, 8])
@pytest.mark.parametrize("fall", [0.0, 0.0001, 0.02])
@pytest.mark.parametrize("kind", HONEST)
def test_of_honest_sites_with_losses_of_few_values_nobody_is_named(kind: str, fall: float, num_sites: int) -> None:
    """2,000 commits; with `fall` a commit, until it has reached 2.9: steep as at the begin of a run."""
    chance, seen = random.Random(7), SameSamples()
    for number in range(2000):
        usual = max(2.9, 10.8 - fall * number)
        assert not seen.note_commit({i: HONEST[kind](chance, usual) for i in range(num_sites)}), f"commit {number}"


@pytest.mark.parametrize("num_steps", [1, 3, 10])
@pytest.mark.parametrize("seed", range(5))
def test_sites_of_the_same_samples_are_named_though_a_loss_says_nothing_now_and_then(num_steps: int, seed: int) -> None:
    """One of 256 float32 losses has 16 bits by chance: they stay in a row, and named."""
    chance, seen = random.Random(seed), SameSamples()
    found = []
    for number in range(2000):
        loss = mean_of(num_steps, in_float32, 0.02)(chance, 2.9)
        loss = in_bfloat16(loss) if number % 6 == 5 else loss
        found += seen.note_commit({1: loss, 2: loss, 3: mean_of(num_steps, in_float32, 0.02)(chance, 2.9)})
        assert (seen.pairs() == [(1, 2)]) == (number >= 8), f"commit {number}"
    assert found == [(1, 2)]


def test_a_pair_whose_losses_differ_is_no_pair_also_where_these_say_nothing() -> None:
    seen = SameSamples()
    for number in range(8):
        seen.note_commit({1: 1.1 / (number + 2), 2: 1.1 / (number + 2)})
    assert seen.pairs() == [(1, 2)]
    seen.note_commit({1: 0.5, 2: 0.5})
    assert seen.pairs() == [(1, 2)]
    seen.note_commit({1: 0.5, 2: 0.25})
    assert seen.pairs() == []
