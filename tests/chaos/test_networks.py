"""Hosts of their own (network namespaces) with links that are cut, or drop what goes one way. Needs root."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from benchmarks import netns
from tests.harness.chaos import LIMIT_S, ChaosRun, settings
from tests.harness.namespace import NAMESPACE

NAMES = "abc"
COORDINATOR = None
B, C = 1, 2
BITS_PER_S = 1_000_000_000

pytestmark = [
    pytest.mark.root,
    pytest.mark.timeout(400),
    pytest.mark.skipif(bool(netns.available()), reason=f"network namespaces: {netns.available()}"),
]


@contextmanager
def hosts_of_a_run(folder: Path) -> Iterator[tuple[netns.Hosts, ChaosRun]]:
    with netns.Hosts(len(NAMES), BITS_PER_S) as hosts, ChaosRun(folder, settings(min_sites=3)) as run:
        run.start_coordinator(f"{hosts.bridge_address}:17700")
        for i, name in enumerate(NAMES):
            run.start_node(name, run.worker, environment={NAMESPACE: hosts.namespace(i)})
        run.wait_for_contributors(NAMES)
        yield hosts, run


def state_of(run: ChaosRun, name: str) -> str:
    return next(str(site["state"]) for site in run.status()["sites"] if site["name"] == name)


def test_a_site_and_the_coordinator_lose_each_other(tmp_path: Path) -> None:
    """Its cable is pulled; it sends and does not hear; it hears and is not heard. Each time the others go on."""
    with hosts_of_a_run(tmp_path) as (hosts, run):
        faults: list[tuple[Callable[[], None], Callable[[], None]]] = [
            (partial(hosts.set_link, C, "down"), partial(hosts.set_link, C, "up")),
            (partial(hosts.drop, COORDINATOR, C), partial(hosts.restore, COORDINATOR, C)),
            (partial(hosts.drop, C, COORDINATOR), partial(hosts.restore, C, COORDINATOR)),
        ]
        for lose, find in faults:
            lose()
            run.wait_for_contributors("ab")
            run.wait(lambda _: state_of(run, "c").startswith("gone: "), LIMIT_S, "c is evicted")
            find()
            run.wait_for_contributors("abc")
        assert sum("lost the coordinator" in line for line in run.nodes["c"].lines) >= 2
        run.end_well()


def test_two_sites_that_both_see_the_coordinator_lose_each_other(tmp_path: Path) -> None:
    """One way, then both: the chunks go over the site that reaches both, and nobody is left out."""
    with hosts_of_a_run(tmp_path) as (hosts, run):
        for directions in ([(B, C)], [(B, C), (C, B)]):
            failures = num_failures(run)
            for direction in directions:
                hosts.drop(*direction)
            wait_for_failures(run, failures + 1)
            run.wait_for_contributors("abc")
            for direction in directions:
                hosts.restore(*direction)
            run.wait_for_commits(2)
        assert run.status()["num_evicted"] == 0
        run.end_well()


def num_failures(run: ChaosRun) -> int:
    """Of exchanges, that sites reported."""
    assert run.coordinator is not None
    return sum("could not exchange" in line for line in run.coordinator.lines)


def wait_for_failures(run: ChaosRun, count: int) -> None:
    run.wait(lambda _: num_failures(run) >= count, LIMIT_S, "they notice")
