"""How often a site with a thin link contributes: by what its turns cost the others, without flapping."""

from __future__ import annotations

import pytest

from atoll.coordinator.core.sync.links import Links
from atoll.coordinator.core.sync.resting import MOST_EVERY, Committed, Resting
from atoll.protocol.messages import LinkUse

SITES = (1, 2, 3, 4, 5)
FAST_BYTES_PER_S = 1000.0
SYNC_BYTES = 400
USUAL_S = 0.2
"""An exchange of fast sites: 400 bytes to four peers and back."""


class World:
    """Syncs one after the other, a second apart. `up` and `down` are what the links of sites carry."""

    def __init__(self, *, hidden_s: float = 0.0, most_every: int = 1 << 12, num_fragments: int = 1) -> None:
        self.links, self.resting = Links(), Resting()
        self.up, self.down = dict.fromkeys(SITES, FAST_BYTES_PER_S), dict.fromkeys(SITES, FAST_BYTES_PER_S)
        self.sync, self.period_s, self.hidden_s, self.most_every = 0, 1.0, hidden_s, most_every
        self.num_fragments = num_fragments
        self.extra_s: float | None = None  # that a turn takes; None: as long as the links say
        self.contributed: dict[int, list[int]] = {i: [] for i in SITES}
        self.changes: list[tuple[int, int]] = []

    def makes_thin(self, site_id: int, bytes_per_s: float) -> None:
        self.up[site_id] = self.down[site_id] = bytes_per_s

    def goes_on(self, num_syncs: int) -> None:
        for _ in range(num_syncs):
            self.sync += 1
            contributors = [i for i in SITES if not self.resting.rests(i, self.sync)]
            for i in contributors:
                self.contributed[i].append(self.sync)
            for receiver in SITES:
                rates = {i: min(self.up[i], self.down[receiver]) for i in contributors if i != receiver}
                uses = (LinkUse(site_id=i, received_bytes=1000, seconds=1000 / rate) for i, rate in rates.items())
                self.links.note(receiver, uses)
            self.links.settle(SITES, SYNC_BYTES, self.period_s)
            expected = [100 / self.up[i] + 100 / self.down[i] for i in contributors]
            waited_s = max(expected)
            if self.extra_s is not None and self.resting.turns(self.sync):
                waited_s = USUAL_S + self.extra_s
            committed = Committed(
                sync=self.sync,
                site_ids=SITES,
                sync_bytes=SYNC_BYTES,
                period_s=self.period_s,
                hidden_s=self.hidden_s,
                waited_s=waited_s,
                most_every=self.most_every,
                num_fragments=self.num_fragments,
            )
            self.changes += [(self.sync, i) for i in self.resting.settle(self.links, committed)]


def test_turns_of_a_thin_site_cost_the_others_a_tenth_of_their_time_and_it_has_every_nth() -> None:
    world = World()
    world.makes_thin(3, 100.0)  # two seconds in place of 0.2
    world.goes_on(100)
    assert world.resting.every(3) == 32, "1.8 s is a tenth of 18 periods"
    assert world.resting.extra_s(3) == pytest.approx(1.8)
    assert [sync for sync in world.contributed[3] if sync > 2] == [32, 64, 96]
    assert all(len(world.contributed[i]) == 100 for i in SITES if i != 3)


def test_what_a_turn_takes_counts_more_than_what_links_say() -> None:
    world = World()
    world.makes_thin(3, 100.0)
    world.extra_s = 5.0
    world.goes_on(40)
    assert world.resting.every(3) == 64
    world.extra_s = 0.3
    world.goes_on(80)
    assert world.resting.every(3) == 4


def test_of_two_thin_sites_turns_fall_together_and_only_the_slower_one_is_taken_to_cost_that_much() -> None:
    world = World()
    world.makes_thin(2, 400.0)
    world.makes_thin(3, 100.0)
    world.goes_on(100)
    assert (world.resting.every(2), world.resting.every(3)) == (4, 32)
    assert set(world.contributed[3]) <= set(world.contributed[2])


def test_noise_of_a_factor_of_two_changes_nothing() -> None:
    world = World()
    world.makes_thin(3, 100.0)
    world.goes_on(40)
    before = len(world.changes)
    for extra_s in (1.6, 3.0, 0.9, 2.9, 1.0):
        world.extra_s = extra_s
        world.goes_on(32)
        assert world.resting.every(3) == 32
    assert len(world.changes) == before


def test_a_link_that_recovers_has_its_turn_at_once_and_soon_rests_no_more() -> None:
    world = World()
    world.makes_thin(3, 50.0)
    world.goes_on(40)
    assert world.resting.every(3) == 64
    world.makes_thin(3, FAST_BYTES_PER_S)
    world.goes_on(12)
    assert [sync for sync in world.contributed[3] if sync > 40] == [42, *range(44, 53)], "sync 41 shows it"


def test_a_link_that_only_receives_faster_is_tried_once() -> None:
    world = World()
    world.makes_thin(3, 50.0)
    world.goes_on(40)
    world.down[3] = FAST_BYTES_PER_S
    world.goes_on(20)
    assert world.contributed[3][-1] == 42
    assert world.resting.every(3) > 1


def test_what_overlap_hides_costs_nobody_anything() -> None:
    world = World(hidden_s=5.0)
    world.makes_thin(3, 100.0)
    world.goes_on(40)
    assert world.resting.every(3) == 1
    assert len(world.contributed[3]) == 40


@pytest.mark.parametrize(("most_every", "expected"), [(1, 1), (5, 4), (1 << 12, MOST_EVERY)])
def test_no_site_rests_for_longer_than_the_log_is(most_every: int, expected: int) -> None:
    world = World(most_every=most_every)
    world.makes_thin(3, 1.0)
    world.goes_on(10)
    assert world.resting.every(3) == expected


def test_a_tenth_of_a_second_is_nothing_however_short_a_window_is() -> None:
    world = World()
    world.period_s = 0.05
    for site_id in SITES:
        world.makes_thin(site_id, (2 if site_id == 3 else 5) * FAST_BYTES_PER_S)
    world.goes_on(10)
    assert world.links.share(3) == pytest.approx(0.4)
    assert not world.changes


@pytest.mark.parametrize("num_fragments", [1, 2, 3, 4, 6, 30])
def test_turns_come_to_each_fragment(num_fragments: int) -> None:
    world = World(num_fragments=num_fragments)
    world.makes_thin(3, 200.0)
    world.goes_on(10)
    every = world.resting.every(3)
    assert every > 1
    turns = [sync for sync in range(1, every * num_fragments + 1) if not world.resting.rests(3, sync)]
    assert {sync % num_fragments for sync in turns} == set(range(num_fragments))


def test_who_leaves_is_forgotten() -> None:
    world = World()
    world.makes_thin(3, 100.0)
    world.goes_on(10)
    world.resting.forget(3)
    assert world.resting.every(3) == 1
    assert not world.resting.rests(3, 11)
