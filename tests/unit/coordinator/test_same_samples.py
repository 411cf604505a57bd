"""Sites that train the same samples, as a script with one seed does: their losses tell, and people are told."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from atoll.coordinator.core.sync.same_samples import SameSamples
from tests.harness.coordinator_story import Story, some_settings

SAME = "a (site 1) and c (site 3) had the same loss, to the last digit, in 3 commits and more: they train the same"


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
    return {"a": 2.0 / (number + 1), "b": 3.0 / (number + 1), "c": 2.0 / (number + 1)}


def test_sites_with_the_same_losses_are_named_once_and_shown_until_they_differ() -> None:
    story = run_of("a", "b", "c")
    play(story, [losses_of(0), losses_of(1)])
    assert not story.view.same_samples
    play(story, [losses_of(2), losses_of(3)], first=2)
    (shown,) = story.view.same_samples
    assert shown.startswith(SAME)
    assert "seeds them with site.seed, or reads by site.loader" in shown
    assert sum(SAME in line for line in story.log) == 1, "it is said once"
    play(story, [{"a": 0.5, "b": 0.4, "c": 0.3}], first=4)
    assert not story.view.same_samples


def test_losses_that_say_nothing_name_nobody() -> None:
    """Zeros of sites that say none, one that does not move, and what is no number."""
    seen = SameSamples()
    for number in range(6):
        assert not seen.note_commit({1: 0.0, 2: 0.0, 3: 0.7, 4: 0.7, 5: math.inf, 6: math.inf, 7: float(number + 2)})
    assert seen.pairs() == []


def test_of_many_each_is_beside_the_first_and_who_rests_stays_named() -> None:
    seen = SameSamples()
    found = [seen.note_commit({4: 1.0 / n, 2: 1.0 / n, 9: 1.0 / n, 5: 2.0 / n}) for n in (2, 3, 4, 5)]
    assert found == [[], [], [(2, 4), (2, 9)], []]
    seen.note_commit({2: 0.1, 9: 0.1})
    assert seen.pairs() == [(2, 4), (2, 9)]
    seen.note_commit({2: 0.2, 4: 0.3, 9: 0.2})
    assert seen.pairs() == [(2, 9)]
    seen.forget()
    assert seen.pairs() == []
