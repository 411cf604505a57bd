"""Whom a site that asks for the state is told of, in a run of many sites."""

from __future__ import annotations

import pytest

from atoll.coordinator.core.log import donors
from atoll.coordinator.core.sites.membership import Site
from atoll.protocol import messages as m
from tests.harness.coordinator_story import Story, some_settings

NUM_HOLDERS = 3 * m.MAX_LISTED_DONORS


def site(site_id: int, applied: int = 7, num_sources_asked: int = 1) -> Site:
    return Site(
        name=str(site_id), key_digest=b"", site_id=site_id, applied=applied, num_sources_asked=num_sources_asked
    )


def ids(sites: list[Site]) -> list[int]:
    return [s.site_id for s in sites]


def a_large_story() -> Story:
    story = Story(some_settings(max_sites=2 * NUM_HOLDERS))
    story.start(*(f"s{number}" for number in range(NUM_HOLDERS)))
    return story


def told(story: Story, name: str, undialled: str = "") -> set[int]:
    story.sources(name, undialled=undialled)
    return {d.site_id for d in story.last(name, m.Sources).donors}


def test_a_site_is_told_of_a_few_and_of_others_whenever_it_asks_again() -> None:
    story = a_large_story()
    story.join("late")
    answers = [told(story, "late") for _ in range(5)]
    assert [len(answer) for answer in answers] == [m.MAX_LISTED_DONORS] * 5
    assert set[int]().union(*answers) == set(range(1, NUM_HOLDERS + 1)), "of each, in the end"


def test_sites_that_join_together_are_told_of_different_ones() -> None:
    story = a_large_story()
    for name in "xyz":
        story.join(name)
    answers = [told(story, name) for name in "xyz"]
    assert len(set[int]().union(*answers)) > 2 * m.MAX_LISTED_DONORS


def test_a_donor_that_cannot_be_dialled_stays_and_is_asked_to_dial() -> None:
    story = a_large_story()
    story.join("late")
    first = min(told(story, "late"))
    for _ in range(5):
        assert first in told(story, "late", undialled=f"s{first - 1}")
    assert story.num(f"s{first - 1}", m.DialBack) == 5


def test_the_newest_are_told_of_first_and_all_of_them_in_turn() -> None:
    holders = [site(i, applied=8 if i % 2 else 7) for i in range(1, NUM_HOLDERS + 1)]
    heard = [donors.chosen(holders, site(1000, num_sources_asked=n), ()) for n in range(8) if n % donors.OF_ALL_EVERY]
    assert {s.applied for listed in heard for s in listed} == {8}
    assert {s.site_id for listed in heard for s in listed} == set(range(1, NUM_HOLDERS + 1, 2))
    few = [site(i, applied=8 if i < 4 else 7) for i in range(1, NUM_HOLDERS + 1)]
    listed = donors.chosen(few, site(1000), ())
    assert ids(listed)[:3] == [1, 2, 3]
    assert len(listed) == m.MAX_LISTED_DONORS
    assert ids(listed) == sorted(ids(listed))


@pytest.mark.parametrize("num_holders", [65, 112, 224, 448, 500])
def test_the_newest_hide_nobody_for_ever(num_holders: int) -> None:
    """They may all be of no use."""
    holders = [site(i, applied=8 if i <= m.MAX_LISTED_DONORS else 7) for i in range(1, num_holders + 1)]
    heard = [donors.chosen(holders, site(1000, num_sources_asked=n), ()) for n in range(1, 61)]
    assert {s.site_id for listed in heard for s in listed} == set(range(1, num_holders + 1))


def test_all_are_told_of_where_there_are_few() -> None:
    holders = [site(i, applied=i) for i in range(1, m.MAX_LISTED_DONORS + 1)]
    assert donors.chosen(holders, site(1000), (3,)) == holders
