"""Whole runs in which hosts exchange by several processes: what all sites hold is the same, bit by bit. Their workers
have no torch."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from atoll.coordinator import admin
from atoll.protocol.addresses import parse_address
from atoll.protocol.errors import HostError
from tests.harness.chaos import command_line, descendants
from tests.harness.local_run import LocalRun, Process
from tests.harness.pidfd import still_there
from tests.harness.sockets import free_address
from tests.process.test_endpoints import (
    LIMIT_S,
    PLAIN_WORKER,
    SETTINGS,
    SIGN1,
    TENSORS,
    WAYS,
    Sites,
    addresses_of_hosts,
    committed,
    contributes,
)

pytestmark = pytest.mark.timeout(400)
WORKER = [sys.executable, PLAIN_WORKER, "--tensors", TENSORS, "--shard", "--fingerprint", "x"]
LONG = replace(SETTINGS, steps=5000, min_sites=2, quorum=1, sync=SIGN1)

NUM_PROCESSES = {"one": 1, "two": 2, "three": 3}


def exchanged(run: LocalRun, name: str) -> dict[int, list[int]]:
    """Of each process beside the node: chunks that it has exchanged, sync by sync."""
    found: dict[int, list[int]] = {}
    text = (run.home(name) / "node.log").read_text()
    for process, num_chunks in re.findall(r"exchange process (\d+): sync \d+: exchanged (\d+) of", text):
        found.setdefault(int(process), []).append(int(num_chunks))
    return found


@pytest.mark.parametrize(
    "way",
    [pytest.param(way, marks=[pytest.mark.slow] * (way not in ("both ways", "fragments in flight"))) for way in WAYS],
)
def test_sites_of_one_two_and_three_processes_hold_the_same_bits(tmp_path: Path, way: str) -> None:
    with LocalRun(tmp_path, replace(SETTINGS, quorum=3, max_sites=64, time_limits="wan", sync=WAYS[way])) as run:
        run.start_coordinator()
        for name, num in NUM_PROCESSES.items():
            run.start_node(name, WORKER, extra=["--exchange-processes", str(num)])
        assert run.wait_all(LIMIT_S) == {"one": 0, "two": 0, "three": 0}
        status = run.status()
        for number in range(1, status["last_commit"] + 1):
            assert len(set(run.hashes(number).values())) == 1
        assert all(len(set(c["contributors"])) == 3 for c in status["commits"])
        for name, num in NUM_PROCESSES.items():
            assert "cannot dial" not in (run.home(name) / "node.log").read_text()
            parts = exchanged(run, name)
            assert sorted(parts) == list(range(1, num))
            assert all(num_chunks > 0 for of_process in parts.values() for num_chunks in of_process)


# --- what ends


def processes_of(node: Process) -> list[int]:
    """The exchange processes beside it."""
    return [p for p in descendants(node.popen.pid) if any("exchange_processes" in word for word in command_line(p))]


def start(run: LocalRun, name: str, num_processes: int, *worker: str) -> Process:
    extra = ["--exchange-processes", str(num_processes)]
    return run.start_node(name, [*WORKER, "--step-delay-s", "0.01", *worker], extra=extra)


def stop(run: LocalRun, *names: str) -> None:
    """All end well, with one state."""
    admin.ask(run.toml.with_name("run.db"), "stop", reason="the test is over")
    assert run.wait_all(LIMIT_S) == dict.fromkeys(names, 0)
    last = run.status()["last_commit"]
    assert set(run.hashes(last)) == {name for name in names if "-host" not in name}
    assert len(set(run.hashes(last).values())) == 1


def test_a_process_that_is_killed_is_started_again_where_it_was(tmp_path: Path) -> None:
    with LocalRun(tmp_path, replace(LONG, time_limits="wan")) as run:
        run.start_coordinator()
        start(run, "one", 1)
        node = start(run, "two", 3)
        run.wait(contributes("one", "two"), LIMIT_S, "both contribute")
        before = addresses_of_hosts(run.status(), "two")
        for _ in range(2):
            first, _ = processes_of(node)
            os.kill(first, signal.SIGKILL)
            node.wait_for_line(
                r"exchange process \d of this host has ended: signal SIGKILL; it is started again", LIMIT_S
            )
            run.wait(committed(run.status()["last_commit"] + 3), LIMIT_S, "commits go on")
            run.wait(contributes("one", "two"), LIMIT_S, "both contribute again")
        assert addresses_of_hosts(run.status(), "two") == before
        assert run.status()["num_evicted"] == 0
        stop(run, "one", "two")


def test_processes_end_with_their_node_however_it_ends(tmp_path: Path) -> None:
    with LocalRun(tmp_path, LONG) as run:
        run.start_coordinator()
        start(run, "one", 2)
        node = start(run, "two", 2)
        run.wait(contributes("one", "two"), LIMIT_S, "both contribute")
        left = processes_of(node)
        node.kill()
        assert len(left) == 1
        assert not still_there(left, LIMIT_S)
        run.wait(contributes("one"), LIMIT_S, "the other site goes on")
        again = start(run, "two", 2)
        run.wait(contributes("one", "two"), LIMIT_S, "both contribute again")
        left = processes_of(again)
        again.interrupt()
        assert again.wait(LIMIT_S) == 0
        assert len(left) == 1
        assert not still_there(left, LIMIT_S)
        start(run, "two", 1)
        run.wait(contributes("one", "two"), LIMIT_S, "it is back with one")
        stop(run, "one", "two")


def test_a_node_whose_process_cannot_have_its_port_ends_and_says_so(tmp_path: Path) -> None:
    with LocalRun(tmp_path, LONG) as run, socket.socket() as taken:
        run.start_coordinator()
        while True:
            listen = free_address()
            host, port = parse_address(listen)
            with suppress(OSError):
                taken.bind((host, port + 1))
                break
        taken.listen()
        node = run.start_node("one", WORKER, extra=["--exchange-processes", "2", "--listen", listen])
        assert node.wait(LIMIT_S) == HostError.exit_code
        node.wait_for_line(f"exchange process 1 of this host: cannot listen on {host}:{port + 1}", LIMIT_S)


def test_two_hosts_of_two_processes_each_lose_a_process_and_a_host(tmp_path: Path) -> None:
    with LocalRun(tmp_path, LONG) as run:
        run.start_coordinator()
        start(run, "one", 2)
        sites = Sites(run, {"two": 2}, "--step-delay-s", "0.01", extra=["--exchange-processes", "2"])
        sites.start_all()
        run.wait(contributes("one", "two"), LIMIT_S, "both contribute")
        assert len(addresses_of_hosts(run.status(), "two")) == 3
        other = run.nodes["two-host1"]
        os.kill(processes_of(other)[0], signal.SIGKILL)
        other.wait_for_line("exchange process 1 of this host has ended", LIMIT_S)
        run.wait(committed(run.status()["last_commit"] + 3), LIMIT_S, "commits go on")
        run.wait(contributes("one", "two"), LIMIT_S, "both contribute again")
        other.kill()
        run.wait(contributes("one"), LIMIT_S, "the other site goes on")
        sites.start("two", 1)
        run.wait(contributes("one", "two"), LIMIT_S, "both contribute again")
        run.wait(committed(run.status()["last_commit"] + 3), LIMIT_S)
        stop(run, "one", "two", "two-host1")
