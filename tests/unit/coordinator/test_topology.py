"""Who reduces what: every chunk once, by bytes and bandwidth, within what each site retains."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from atoll.coordinator.core.sync import topology
from atoll.coordinator.core.sync.chunk_sizes import ChunkSizes
from atoll.coordinator.core.sync.topology import Reducer, direct
from atoll.protocol.endpoints import Places
from atoll.protocol.errors import ConfigError
from atoll.protocol.messages import Member, Plan, Tree
from atoll.protocol.plans import reducers
from tests.harness.chunk_runs import sizes_of_runs

PLENTY = 1 << 40


def sizes_of(sizes: list[int]) -> ChunkSizes:
    return sizes_of_runs((1, size) for size in sizes)


def sites(*bandwidths: int, retain: int = PLENTY) -> list[Reducer]:
    return [
        Reducer(site_id=i + 1, bandwidth_bytes_per_s=b, max_retained_bytes=retain) for i, b in enumerate(bandwidths)
    ]


def work(trees: tuple[Tree, ...], sizes: list[int], contributors: list[Reducer]) -> dict[int, int]:
    """Bytes that each site reduces; the plan must be one that sites accept."""
    plan = Plan(
        sync=1,
        attempt=1,
        term=1,
        base_commit=0,
        contributors=tuple(Member(site_id=c.site_id, incarnation=1, address="a:1") for c in contributors),
        trees=trees,
        stall_limit_s=1.0,
        num_steps=1,
        deadline_s=600.0,
        slowest_bytes_per_s=1 << 10,
    )
    totals = dict.fromkeys((c.site_id for c in contributors), 0)
    for member, size in zip(reducers(plan, len(sizes)), sizes, strict=True):
        totals[member.site_id] += size
    return totals


def test_unknown_bandwidths_share_equally() -> None:
    sizes = [100] * 30
    assert work(direct(sizes_of(sizes), sites(0, 0, 0)), sizes, sites(0, 0, 0)) == {1: 1000, 2: 1000, 3: 1000}


def busy(reduced: dict[int, int], bandwidths: list[int], num_receivers: int = 0) -> list[float]:
    """How long each site sends: contributions to what others reduce, payloads of what it reduces."""
    total, others = sum(reduced.values()), len(reduced) - 1 + num_receivers
    return [(total - own + own * others) / rate for own, rate in zip(reduced.values(), bandwidths, strict=True)]


@pytest.mark.parametrize("num_receivers", [0, 3])
def test_links_are_busy_for_the_same_time(num_receivers: int) -> None:
    sizes, bandwidths = [1] * 10_000, [100, 100, 90, 80, 85]
    contributors = sites(*bandwidths)
    reduced = work(direct(sizes_of(sizes), contributors, num_receivers=num_receivers), sizes, contributors)
    times = busy(reduced, bandwidths, num_receivers)
    assert all(reduced.values())
    assert max(times) < 1.001 * min(times)


def test_links_are_busy_for_the_same_time_where_payloads_are_bundles() -> None:
    """A reducer sends the contributions of all five to all others."""
    runs, bandwidths = [(10_000, 1)], [100, 100, 90, 95, 85]
    contributors, sizes = sites(*bandwidths), [1] * 10_000
    reduced = work(direct(sizes_of_runs(runs, are_bundled=True), contributors), sizes, contributors)
    sent = [10_000 - own + 5 * 4 * own for own in reduced.values()]
    times = [num_bytes / rate for num_bytes, rate in zip(sent, bandwidths, strict=True)]
    assert max(times) < 1.002 * min(times)


def test_a_thin_site_reduces_nothing() -> None:
    sizes = [10] * 100
    contributors = sites(100, 1, 100, 100, 100)
    reduced = work(direct(sizes_of(sizes), contributors), sizes, contributors)
    assert reduced == {1: 250, 2: 0, 3: 250, 4: 250, 5: 250}


def test_a_thin_site_reduces_what_fits_nowhere_else() -> None:
    sizes = [10] * 100
    contributors = [
        *sites(100, 100, retain=3 * 400),
        Reducer(site_id=3, bandwidth_bytes_per_s=1, max_retained_bytes=PLENTY),
    ]
    reduced = work(direct(sizes_of(sizes), contributors), sizes, contributors)
    assert reduced == {1: 400, 2: 400, 3: 200}


def test_an_unknown_bandwidth_counts_as_the_mean_of_the_others() -> None:
    sizes = [1] * 10_000
    contributors = sites(110, 0, 90)
    reduced = work(direct(sizes_of(sizes), contributors), sizes, contributors)
    assert reduced == work(direct(sizes_of(sizes), sites(110, 100, 90)), sizes, contributors)
    assert reduced[1] > reduced[2] > reduced[3]


def test_balance_is_by_bytes_not_by_chunks() -> None:
    sizes = [1000] * 4 + [1] * 4000
    contributors = sites(0, 0)
    assert work(direct(sizes_of(sizes), contributors), sizes, contributors) == {1: 4000, 2: 4000}


def test_every_chunk_is_reduced_once_whatever_the_sizes() -> None:
    generator = random.Random(7)
    for _ in range(200):
        sizes = [generator.choice([16, 20, 1000, 4096]) for _ in range(generator.randrange(1, 40))]
        contributors = sites(*(generator.choice([0, 1, 1000]) for _ in range(generator.randrange(1, 9))))
        rotation = generator.randrange(9)
        totals = work(direct(sizes_of(sizes), contributors, rotation=rotation), sizes, contributors)
        assert sum(totals.values()) == sum(sizes)


def test_what_a_site_cannot_retain_goes_to_the_others() -> None:
    sizes = [10] * 30
    contributors = [*sites(0, 0), Reducer(site_id=3, bandwidth_bytes_per_s=0, max_retained_bytes=3 * 40)]
    assert work(direct(sizes_of(sizes), contributors), sizes, contributors) == {1: 130, 2: 130, 3: 40}


def test_sites_that_together_retain_too_little_are_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match=r"retain 300 bytes.* up to 600"):
        direct(sizes_of([10] * 30), sites(0, 0, retain=150))


def test_a_reducer_of_bundles_holds_the_contributions_and_what_they_are_joined_to() -> None:
    """As `Share.bytes_to_retain` counts: of 10 sites 9 contributions of others, and a payload of all 10."""
    runs = [(10, 100)]
    for room, fits in ((1900, True), (1899, False)):
        contributors = sites(*[0] * 10, retain=room)
        if fits:
            assert len(direct(sizes_of_runs(runs, are_bundled=True), contributors)) == 10
        else:
            with pytest.raises(ConfigError):
                direct(sizes_of_runs(runs, are_bundled=True), contributors)


def test_avoided_sites_reduce_nothing() -> None:
    sizes = [10] * 30
    contributors = sites(0, 0, 0)
    assert work(direct(sizes_of(sizes), contributors, avoid=frozenset({1, 3})), sizes, contributors) == {
        1: 0,
        2: 300,
        3: 0,
    }
    with pytest.raises(ConfigError):
        direct(sizes_of(sizes), contributors, avoid=frozenset({1, 2, 3}))


def test_rotation_gives_other_reducers() -> None:
    sizes = [10] * 30
    found = {direct(sizes_of(sizes), sites(0, 0, 0), rotation=k) for k in range(3)}
    assert len(found) == 3


# --- sites of several hosts


def with_hosts(contributors: list[Reducer], *firsts: Sequence[int]) -> list[Reducer]:
    """`firsts`: of each site, where its hosts beside the first begin."""
    return [replace(c, first_chunks=tuple(chunks)) for c, chunks in zip(contributors, firsts, strict=True)]


def work_of_hosts(trees: tuple[Tree, ...], sizes: list[int], contributors: list[Reducer]) -> dict[int, list[int]]:
    """Of each site, the bytes that each of its hosts reduces."""
    assert work(trees, sizes, contributors)
    found = {}
    for place, site in enumerate(contributors):
        firsts = (0, *site.first_chunks)
        places = Places(firsts, 1, len(sizes))
        parts = [places.of_host(host) for host in range(len(firsts))]
        own = [c for t in trees if t.top == place for c in range(t.first_chunk, t.first_chunk + t.num_chunks)]
        found[site.site_id] = [sum(sizes[chunk] for chunk in own if chunk in part) for part in parts]
    return found


def test_hosts_of_a_site_reduce_as_much_as_each_other() -> None:
    sizes = [10] * 1000
    contributors = with_hosts(sites(0, 0, 0), [500], [500], [500])
    found = work_of_hosts(direct(sizes_of(sizes), contributors), sizes, contributors)
    assert all(abs(first - second) <= 10 for first, second in found.values())
    assert sum(map(sum, found.values())) == 10_000
    assert max(max(hosts) for hosts in found.values()) <= 10_000 / 6 + 10


def test_hosts_of_sites_that_are_cut_elsewhere_reduce_what_their_parts_are_of_the_model() -> None:
    """One site has three hosts, one has two, one has one: four parts, with every reducer in each."""
    sizes = [10] * 1200
    contributors = with_hosts(sites(100, 0, 110), [400, 800], [600], [])
    trees = direct(sizes_of(sizes), contributors)
    assert [tree.top for tree in trees] == 4 * [0, 1, 2]
    assert {0, 400, 600, 800} <= {tree.first_chunk for tree in trees}
    found = work_of_hosts(trees, sizes, contributors)
    for hosts in found.values():
        assert max(hosts) - min(hosts) <= 2 * 10, "of two parts, a chunk each"


def test_parts_are_shared_by_the_bandwidths_of_sites_as_the_whole_model_is() -> None:
    sizes, bandwidths = [1] * 10_000, [100, 100, 90, 80, 85]
    contributors = with_hosts(sites(*bandwidths), [5000], [3000], [], [2000, 7000], [])
    alone = work(direct(sizes_of(sizes), sites(*bandwidths)), sizes, contributors)
    reduced = work(direct(sizes_of(sizes), contributors), sizes, contributors)
    assert all(abs(reduced[site_id] - alone[site_id]) <= 6 for site_id in alone)


def test_trees_cover_all_chunks_in_their_order_wherever_hosts_begin() -> None:
    generator = random.Random(11)
    for _ in range(300):
        sizes = [generator.choice([0, 16, 20, 1000, 4096]) for _ in range(generator.randrange(2, 60))]
        sizes[generator.randrange(len(sizes))] = 16
        contributors = sites(*(generator.choice([0, 1, 1000]) for _ in range(generator.randrange(1, 7))))
        hosts = [
            sorted(generator.sample(range(1, 2 * len(sizes)), generator.randrange(min(5, len(sizes)))))
            for _ in contributors
        ]
        contributors = with_hosts(contributors, *hosts)
        trees = direct(sizes_of(sizes), contributors, rotation=generator.randrange(9))
        assert sum(work(trees, sizes, contributors).values()) == sum(sizes)
        assert all(tree.num_chunks for tree in trees)
        for tree in trees:
            assert any(sizes[tree.first_chunk : tree.first_chunk + tree.num_chunks]), "a reducer of nothing"


def test_endpoints_that_begin_at_frozen_chunks_cut_no_sync() -> None:
    sizes = [10] * 30
    beyond = with_hosts(sites(0, 0), [30, 40], [31])
    assert direct(sizes_of(sizes), beyond) == direct(sizes_of(sizes), sites(0, 0))


def test_parts_whose_reducers_may_retain_too_little_of_them_are_not_cut_by_hosts() -> None:
    """No whole chunk of either part fits into half of what the third site retains; one of the whole model does."""
    sizes = [10] * 8
    alone = [replace(c, max_retained_bytes=3 * num) for c, num in zip(sites(0, 0, 0), (70, 30, 10), strict=True)]
    contributors = with_hosts(alone, [4], [4], [4])
    trees = direct(sizes_of(sizes), contributors)
    assert trees == direct(sizes_of(sizes), alone)
    assert work(trees, sizes, contributors) == {1: 40, 2: 30, 3: 10}
    roomy = with_hosts(sites(0, 0, 0), [4], [4], [4])
    assert len(direct(sizes_of(sizes), roomy)) == 6


def test_what_a_site_retains_is_kept_to_in_all_its_parts_together() -> None:
    sizes = [10] * 1000
    contributors = with_hosts(sites(0, 0, 0), [500], [250, 750], [])
    contributors[2] = replace(contributors[2], max_retained_bytes=3 * 1000)
    reduced = work(direct(sizes_of(sizes), contributors), sizes, contributors)
    assert 960 <= reduced[3] <= 1000
    with pytest.raises(ConfigError, match="may retain"):
        direct(sizes_of(sizes), [replace(c, max_retained_bytes=3 * 3000) for c in contributors])


def test_a_plan_of_too_many_trees_is_not_cut_by_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [10] * 100
    contributors = with_hosts(sites(0, 0, 0), [50], [25, 75], [])
    monkeypatch.setattr(topology, "MOST_TREES", 12)
    assert len(direct(sizes_of(sizes), contributors)) == 12
    monkeypatch.setattr(topology, "MOST_TREES", 11)
    assert direct(sizes_of(sizes), contributors) == direct(sizes_of(sizes), sites(0, 0, 0))
    assert len(direct(sizes_of(sizes), contributors, avoid=frozenset({1}))) == 8, "who reduces nothing has no trees"


TREES_BEFORE = {
    0: [(0, 30, 0)],
    1: [(0, 9, 1), (9, 10, 2), (19, 3, 3), (22, 8, 0)],
    2: [(0, 7, 2), (7, 6, 3), (13, 9, 0), (22, 8, 1)],
}
"""First chunk, number of chunks and place of the reducer, by rotation, in versions that knew of no endpoints."""


def test_sites_of_one_host_have_the_ranges_that_they_had() -> None:
    sizes = [10] * 10 + [0] * 3 + [11] * 17
    contributors = [*sites(100, 105, 95), Reducer(site_id=4, bandwidth_bytes_per_s=0, max_retained_bytes=4 * 40)]
    for rotation, expected in TREES_BEFORE.items():
        trees = direct(sizes_of(sizes), contributors, rotation=rotation)
        assert [(tree.first_chunk, tree.num_chunks, tree.top) for tree in trees] == expected
