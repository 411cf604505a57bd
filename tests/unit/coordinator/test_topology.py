"""Who reduces what: every chunk once, by bytes and bandwidth, within what each site retains."""

from __future__ import annotations

import random

import pytest

from atoll.coordinator.core.sync.chunk_sizes import ChunkSizes
from atoll.coordinator.core.sync.topology import Reducer, direct
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
