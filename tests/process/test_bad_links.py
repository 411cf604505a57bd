"""Whole runs over links that spoil what they carry, and with a coordinator that never comes back."""

from __future__ import annotations

import asyncio
import re
import socket
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.harness.local_run import LocalRun
from tests.harness.random_faults import PLAIN_WORKER, SETTINGS
from tests.harness.relay import Relay

LIMIT_S = 60.0
SLOW = [sys.executable, str(PLAIN_WORKER), "--tensors", "a=300x40,b=10", "--step-delay-s", "0.02"]

pytestmark = pytest.mark.timeout(150)


def free_address() -> str:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{taken.getsockname()[1]}"


class Spoiler:
    """Flips one bit in the middle of every n-th read that is large enough to hold a chunk, at most `limit` times."""

    def __init__(self, *, every: int, limit: int) -> None:
        self.every = every
        self.limit = limit
        self.num_flipped = 0
        self._num_large = 0

    def spoil(self, relay: Relay) -> None:
        relay.change = self.change

    def change(self, data: bytes) -> bytes:
        if len(data) < 900 or self.num_flipped >= self.limit:
            return data
        self._num_large += 1
        if self._num_large % self.every:
            return data
        self.num_flipped += 1
        middle = len(data) // 2
        return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


@contextmanager
def relay_in_front(target: str, spoil: Callable[[Relay], None]) -> Iterator[str]:
    """The address of a relay that runs in a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    relay = Relay(target)
    spoil(relay)
    asyncio.run_coroutine_threadsafe(relay.start(), loop).result(LIMIT_S)
    try:
        yield relay.address
    finally:
        asyncio.run_coroutine_threadsafe(relay.stop(), loop).result(LIMIT_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(LIMIT_S)
        loop.close()


def num_refused(metrics_address: str) -> float:
    with urllib.request.urlopen(f"http://{metrics_address}/metrics", timeout=5) as reply:
        found = re.search(r"^atoll_node_refused_messages_total\S* (\S+)$", reply.read().decode(), re.MULTILINE)
    assert found
    return float(found[1])


def start_sites(run: LocalRun, listen_of_c: str, advertised_of_c: str) -> list[str]:
    """a and b, which begin, and c behind a relay. Where they serve their metrics."""
    metrics = [free_address() for _ in "abc"]
    for name, address in zip("ab", metrics, strict=False):
        run.start_node(name, SLOW, extra=["--http-listen", address])
    run.wait(lambda s: bool(s["last_commit"] >= 1), LIMIT_S, "a and b have begun")
    behind_relay = ["--listen", listen_of_c, "--advertise", advertised_of_c]
    run.start_node("c", SLOW, extra=["--http-listen", metrics[2], *behind_relay])
    return metrics


def assert_no_traceback(run: LocalRun) -> None:
    for process in run.processes:
        assert not any("Traceback" in line for line in process.lines), process.name


def test_flipped_bits_are_refused_and_counted_and_nothing_is_lost(tmp_path: Path) -> None:
    spoiler, listen = Spoiler(every=3, limit=8), free_address()
    settings = replace(SETTINGS, steps=300, min_sites=2)
    with LocalRun(tmp_path, settings) as run, relay_in_front(listen, spoiler.spoil) as advertised:
        run.start_coordinator()
        metrics = start_sites(run, listen, advertised)
        run.wait(lambda s: spoiler.num_flipped >= spoiler.limit, LIMIT_S, "bits are flipped")
        last = run.status()["last_commit"]
        run.wait(lambda s: bool(s["last_commit"] > last + 1), LIMIT_S, "the run goes on")
        assert sum(map(num_refused, metrics)) > 0
        assert run.wait_all(LIMIT_S) == {"a": 0, "b": 0, "c": 0}
        hashes = run.hashes(30)
        assert sorted(hashes) == ["a", "b", "c"]
        assert len(set(hashes.values())) == 1
        assert run.status()["finished"]
        assert_no_traceback(run)


@pytest.mark.slow
def test_a_link_that_always_flips_bits_is_named_and_the_run_goes_on(tmp_path: Path) -> None:
    spoiler, listen = Spoiler(every=1, limit=1_000_000), free_address()
    settings = replace(SETTINGS, steps=200, min_sites=2)
    with LocalRun(tmp_path, settings) as run, relay_in_front(listen, spoiler.spoil) as advertised:
        coordinator = run.start_coordinator()
        start_sites(run, listen, advertised)
        coordinator.wait_for_line(r"could not exchange with c \(site \d\)", LIMIT_S)
        codes = run.wait_all(2 * LIMIT_S)
        assert codes == {"a": 0, "b": 0, "c": 0}
        hashes = run.hashes(20)
        assert {"a", "b"} <= set(hashes)
        assert len(set(hashes.values())) == 1
        assert_no_traceback(run)


@pytest.mark.slow
def test_a_link_that_trickles_is_named_and_the_next_syncs_do_not_wait_for_it(tmp_path: Path) -> None:
    listen = free_address()
    settings = replace(SETTINGS, steps=400, min_sites=2)
    relays: list[Relay] = []

    def trickle(relay: Relay) -> None:
        relay.trickle(1, 1.0)
        relays.append(relay)

    with LocalRun(tmp_path, settings) as run, relay_in_front(listen, trickle) as advertised:
        coordinator = run.start_coordinator()
        start_sites(run, listen, advertised)
        coordinator.wait_for_line(r"could not exchange with c \(site \d\).*no byte for 6\.0 s", LIMIT_S)
        assert run.wait_all(2 * LIMIT_S) == {"a": 0, "b": 0, "c": 0}
        assert relays[0].num_trickled > 0
        hashes = run.hashes(40)
        assert sorted(hashes) == ["a", "b", "c"]
        assert len(set(hashes.values())) == 1
        failures = [line for line in coordinator.lines if "could not exchange" in line]
        assert len(failures) < 30, "not one in each of 40 syncs"
        assert_no_traceback(run)


def test_ctrl_c_without_a_coordinator_keeps_the_state_and_a_second_one_ends_at_once(tmp_path: Path) -> None:
    with LocalRun(tmp_path, replace(SETTINGS, min_sites=2, steps=5000)) as run:
        coordinator = run.start_coordinator()
        for name in "ab":
            run.start_node(name, SLOW)
        run.wait(lambda s: bool(s["last_commit"] >= 2), LIMIT_S)
        coordinator.kill()
        for name in "ab":
            run.nodes[name].wait_for_line("lost the coordinator", LIMIT_S)
            run.nodes[name].interrupt()
            run.nodes[name].wait_for_line("again to leave now", LIMIT_S)
            run.nodes[name].interrupt()
            assert run.nodes[name].wait(5) == 130
        assert_no_traceback(run)
        held = {name: run.journal(name, "commit")[-1]["commit"] for name in "ab"}
        run.start_coordinator()
        for name in "ab":
            run.start_node(name, SLOW)
        run.wait(lambda s: bool(s["last_commit"] > max(held.values()) + 1), LIMIT_S, "the run goes on from there")
