"""Connections of strangers end no process, and many sites need no larger limit of descriptors than the system's own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.protocol import addresses, descriptors
from atoll.protocol.settings import RunSettings
from atoll.protocol.sync_settings import SyncSettings
from tests.harness.load_sites import Fleet, manifest
from tests.harness.local_run import LocalRun, Status

SOFT_1024 = ("sh", "-c", 'ulimit -S -n 1024 && exec "$@"', "sh")
HARD_1024 = ("sh", "-c", 'ulimit -n 1024 && exec "$@"', "sh")
CROWDS = [1200, pytest.param(2000, marks=pytest.mark.slow)]
"""The first is over the limit as well, in half the time."""
NUM_IDLE = 1500
HERE, ELSEWHERE = "127.0.0.1", "127.0.0.2"
LIMIT_S = 300.0
WORKER = [sys.executable, str(Path(__file__).parents[1] / "workers" / "plain_worker.py"), "--tensors", "a=30x40"]
SLOW = [*WORKER, "--step-delay-s", "0.1"]


def num_connected(status: Status) -> int:
    return [site["connected"] for site in status["sites"]].count(True)


def contributed(status: Status, name: str) -> bool:
    return any(name in commit["contributors"] for commit in status["commits"])


@contextlib.contextmanager
def idle_connections(address: str, source: str) -> Iterator[None]:
    """That say nothing. Those that are closed by the other side stay so."""
    to = addresses.parse_address(address)
    with contextlib.ExitStack() as stack:
        for _ in range(NUM_IDLE):
            stack.enter_context(contextlib.closing(socket.create_connection(to, source_address=(source, 0))))
        yield


@pytest.mark.timeout(420)
@pytest.mark.parametrize("num_sites", CROWDS)
def test_many_sites_on_a_soft_limit_of_1024(tmp_path: Path, num_sites: int) -> None:
    assert descriptors.raise_limit() > num_sites + descriptors.RESERVED, "this process connects that often itself"
    settings = RunSettings(
        run_id="load", min_sites=num_sites + 1, max_sites=num_sites + 1, data="local", time_limits="wan"
    )
    with LocalRun(tmp_path, settings) as run:
        run.start_coordinator(prefix=SOFT_1024)
        fleet = Fleet(address=run.address, run_id="load", manifest=manifest(1000), heartbeat_s=4.0, train_s=1.0)

        async def all_here() -> None:
            while fleet.num_admitted < num_sites:
                await fleet.joined.wait()
                fleet.joined.clear()
            await asyncio.to_thread(
                run.wait, lambda status: num_connected(status) == num_sites, LIMIT_S, "all sites are connected"
            )

        async def play() -> None:
            sites, here = asyncio.create_task(fleet.run(num_sites)), asyncio.create_task(all_here())
            async with asyncio.timeout(LIMIT_S):
                await asyncio.wait((sites, here), return_when=asyncio.FIRST_COMPLETED)
            if sites.done():
                await sites  # why one of them lost its stream
            await here
            sites.cancel()
            await asyncio.gather(sites, return_exceptions=True)

        asyncio.run(play())


@pytest.mark.timeout(420)
def test_idle_connections_end_no_node_and_close_no_page(tmp_path: Path) -> None:
    """With a hard limit that they exceed. A site at the address of the idle connections has to wait until their time is
    over, and joins. The page is looked at from another address: one that opens too many is turned away there."""
    settings = RunSettings(
        run_id="idle", steps=100_000, min_sites=2, max_sites=8, data="local", sync=SyncSettings(every=10)
    )
    with LocalRun(tmp_path, settings) as run:
        coordinator = run.start_coordinator(prefix=HARD_1024, extra=("--http-listen", "127.0.0.1:0"))
        page = coordinator.wait_for_line(r"status page (http://\S+/)", LIMIT_S).group(1)
        for name in "ab":
            run.start_node(name, SLOW, prefix=HARD_1024)
        status = run.wait(lambda s: s["last_commit"] >= 1, LIMIT_S, "a commit")

        def shown() -> Status:
            with urllib.request.urlopen(page + "status.json", timeout=60) as answer:
                document: Status = json.load(answer)
                return document

        with contextlib.ExitStack() as stack:
            stack.enter_context(idle_connections(page.removeprefix("http://").rstrip("/"), ELSEWHERE))
            for address in (run.address, status["sites"][0]["address"]):
                stack.enter_context(idle_connections(address, HERE))
            last = shown()["last_commit"]
            run.wait(lambda s: s["last_commit"] >= last + 3, LIMIT_S, "commits go on", status=shown)
            run.start_node("c", SLOW, prefix=HARD_1024)
            run.wait(lambda s: contributed(s, "c"), LIMIT_S, "a site joins", status=shown)
            assert [process.popen.poll() for process in run.processes] == [None] * 4
