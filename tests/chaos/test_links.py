"""Links that flip bits and cut messages short, between sites and to the coordinator: refused, counted, and overcome."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.harness.chaos import LIMIT_S, ChaosRun, settings
from tests.harness.links import CutShort, FlipBit, Spoiler, relay_in_front, relays_in_front
from tests.harness.relay import Relay
from tests.harness.sockets import free_address

pytestmark = pytest.mark.timeout(400)

SETTINGS = settings(min_sites=2)


def num_refused(metrics_address: str) -> float:
    with urllib.request.urlopen(f"http://{metrics_address}/metrics", timeout=60) as reply:
        found = re.search(r"^atoll_node_refused_messages_total\S* (\S+)$", reply.read().decode(), re.MULTILINE)
    assert found
    return float(found[1])


def start_sites(run: ChaosRun, listen_of_c: str, advertised_of_c: str) -> None:
    """a and b, which begin, and c behind a relay."""
    run.start_coordinator()
    for name in "ab":
        run.start_site(name)
    run.wait_for_contributors("ab")
    run.start_node("c", run.worker, extra=["--listen", listen_of_c, "--advertise", advertised_of_c])


@contextmanager
def all_behind_relays(folder: Path, spoiler: Spoiler) -> Iterator[tuple[ChaosRun, list[str]]]:
    """A run of three sites, and where they serve their metrics. Whoever reduces is behind a relay: a site with which
    exchanges failed, or whose link looks thin, leaves that to the others, for longer than a test waits."""
    listens, metrics = [free_address() for _ in "abc"], [free_address() for _ in "abc"]
    with ChaosRun(folder, SETTINGS) as run, relays_in_front(listens, spoiler) as advertised:
        run.start_coordinator()
        for name, listen, relayed, http in zip("abc", listens, advertised, metrics, strict=True):
            extra = ["--listen", listen, "--advertise", relayed, "--http-listen", http]
            run.start_node(name, run.worker, extra=extra)
        run.wait_for_contributors("abc")
        yield run, metrics


def test_flipped_bits_are_refused_and_counted_and_nothing_is_lost(tmp_path: Path) -> None:
    spoiler = FlipBit(every=3, limit=0, large_bytes=500)
    with all_behind_relays(tmp_path, spoiler) as (run, metrics):
        spoiler.limit = 8
        run.wait(lambda s: spoiler.num_spoiled >= spoiler.limit, LIMIT_S, "bits are flipped")
        run.wait_for_contributors("abc")
        assert sum(map(num_refused, metrics)) > 0
        run.end_well()


def test_messages_that_are_cut_short_break_the_connection_and_nothing_is_lost(tmp_path: Path) -> None:
    spoiler = CutShort(every=5, limit=0, large_bytes=500)
    with all_behind_relays(tmp_path, spoiler) as (run, _):
        spoiler.limit = 2
        run.wait(lambda s: spoiler.num_spoiled >= spoiler.limit, LIMIT_S, "messages are cut")
        run.wait_for_contributors("abc")
        run.end_well()


@pytest.mark.parametrize("spoiler", [CutShort, FlipBit])
def test_a_session_that_is_spoiled_is_made_anew(tmp_path: Path, spoiler: type[Spoiler]) -> None:
    """A site that is hit says Hello again and goes on."""
    spoils(tmp_path, spoiler(every=4, limit=0, large_bytes=100))


def spoils(tmp_path: Path, spoiler: Spoiler) -> None:
    with ChaosRun(tmp_path, SETTINGS) as run:
        run.start_coordinator()
        with relay_in_front(run.address, spoiler) as relayed:
            run.start_site("a")
            direct, run.address = run.address, relayed
            node = run.start_site("b")
            run.address = direct
            run.wait_for_contributors("ab")
            spoiler.limit = 5
            run.wait(lambda s: spoiler.num_spoiled >= spoiler.limit, LIMIT_S, "the link is spoiled")
            node.wait_for_line("lost the coordinator", LIMIT_S)
            run.wait_for_contributors("ab")
            run.end_well()


@pytest.mark.slow
def test_a_link_that_always_flips_bits_is_named_and_the_run_goes_on(tmp_path: Path) -> None:
    spoiler, listen = FlipBit(every=1, limit=1_000_000), free_address()
    with ChaosRun(tmp_path, SETTINGS) as run, relay_in_front(listen, spoiler) as advertised:
        start_sites(run, listen, advertised)
        assert run.coordinator is not None
        run.coordinator.wait_for_line(r"could not exchange with c \(site \d\)", LIMIT_S)
        run.wait_for_commits(5)
        run.end_well("ab")


@pytest.mark.slow
def test_a_link_that_trickles_is_named_and_the_next_syncs_do_not_wait_for_it(tmp_path: Path) -> None:
    listen = free_address()
    relays: list[Relay] = []

    def trickle(relay: Relay) -> None:
        relay.trickle(1, 1.0)
        relays.append(relay)

    with ChaosRun(tmp_path, SETTINGS) as run, relay_in_front(listen, trickle) as advertised:
        start_sites(run, listen, advertised)
        assert run.coordinator is not None
        run.coordinator.wait_for_line(r"could not exchange with c \(site \d\).*no byte for 6\.0 s", LIMIT_S)
        run.wait_for_commits(30)
        run.end_well(timeout_s=2 * LIMIT_S)
        assert relays[0].num_trickled > 0
        failures = [line for line in run.coordinator.lines if "could not exchange" in line]
        assert len(failures) < 20, "not one in each of 30 syncs"
