"""Whole runs in which sites have one, two and three hosts, each with chunks of its own: what all of them hold is the
same, bit by bit. Their workers have no torch."""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from atoll.coordinator import admin
from atoll.protocol.settings import RunSettings
from atoll.protocol.sync_settings import SyncSettings
from benchmarks import netns
from tests.harness.local_run import LocalRun, Process, Status
from tests.harness.namespace import NAMESPACE
from tests.harness.sockets import free_address

PLAIN_WORKER = str(Path(__file__).parents[1] / "workers" / "plain_worker.py")
TENSORS = "a=40x30,b=900,c=20x40,d=7,e=33x33,k=:lowest,n=12:mean,z=50:frozen"
LIMIT_S = 150.0
SETTINGS = RunSettings(run_id="hosts", steps=60, min_sites=3, data="some text", time_limits="local", seed=3)
SIGN1 = SyncSettings(every=10, chunk_elements=500, codec="sign1", down="bf16", error_feedback=1.0)
pytestmark = pytest.mark.timeout(400)


class Sites:
    """Of so many hosts each, by name; the daemon of a host is called by both."""

    def __init__(
        self,
        run: LocalRun,
        num_hosts: dict[str, int],
        *worker: str,
        machines: netns.Hosts | None = None,
        extra: Sequence[str] = (),
        are_copies: bool = False,
    ) -> None:
        """`machines`: one for each host, in the order of `num_hosts`. `extra`: flags of each daemon. `are_copies`: each
        rank has the whole model."""
        self._run, self.num_hosts, self._machines, self._extra = run, num_hosts, machines, extra
        firsts = itertools.accumulate(num_hosts.values(), initial=0)
        self._firsts = dict(zip(num_hosts, firsts, strict=False))
        self._addresses = {
            name: f"{machines.address(self._firsts[name])}:17800" if machines is not None else free_address()
            for name in num_hosts
        }
        shards = [] if are_copies else ["--shard"]
        self._worker = [sys.executable, PLAIN_WORKER, "--tensors", TENSORS, *shards, "--fingerprint", "x", *worker]

    def leader_address(self, name: str) -> str:
        """Where host 0 of that site waits for the others."""
        return self._addresses[name]

    def daemons(self, name: str) -> list[str]:
        return [name, *(f"{name}-host{host}" for host in range(1, self.num_hosts[name]))]

    def start(self, name: str, host: int = 0, *, extra: Sequence[str] = (), program: Sequence[str] = ()) -> Process:
        num_hosts, extra = self.num_hosts[name], [*self._extra, *extra]
        if num_hosts > 1:
            extra += ["--site-hosts", str(num_hosts), "--site-address", self._addresses[name]]
            extra += ["--site-rank", str(host), "--name", name] if not self._run.secured else []  # the invite says it
        where = {} if self._machines is None else {NAMESPACE: self._machines.namespace(self._firsts[name] + host)}
        daemon = self.daemons(name)[host]
        return self._run.start_node(daemon, self._worker, environment=where, extra=extra, program=program)

    def start_all(self) -> None:
        for name, num_hosts in self.num_hosts.items():
            for host in range(num_hosts):
                self.start(name, host)

    def all_ended(self) -> dict[str, int]:
        return {daemon: 0 for name in self.num_hosts for daemon in self.daemons(name)}

    def log(self, daemon: str) -> str:
        return (self._run.home(daemon) / "node.log").read_text()

    def stop(self) -> None:
        """All of them end well, with one state."""
        admin.ask(self._run.toml.with_name("run.db"), "stop", reason="the test is over")
        assert self._run.wait_all(LIMIT_S) == self.all_ended()
        last = self._run.status()["last_commit"]
        assert len(self._run.hashes(last)) == len(self.num_hosts)
        assert len(set(self._run.hashes(last).values())) == 1
        self.check_hosts(last)

    def check_hosts(self, last_commit: int) -> None:
        """Each has followed to the end, and did its part."""
        for name, num_hosts in self.num_hosts.items():
            assert "holds another state" not in self.log(name)
            for daemon in self.daemons(name)[1:num_hosts]:
                assert f"commit {last_commit}: " in self.log(daemon)
                assert re.search(r"sync \d+: exchanged [1-9]\d* of the \d+ chunks", self.log(daemon))


def committed(count: int) -> Callable[[Status], bool]:
    return lambda status: bool(status["last_commit"] >= count)


def contributes(*names: str) -> Callable[[Status], bool]:
    """To the last commit."""
    return lambda status: bool(status["commits"]) and sorted(status["commits"][-1]["contributors"]) == sorted(names)


def addresses_of_hosts(status: Status, name: str) -> list[str]:
    return next(list(site["endpoints"]) for site in status["sites"] if site["name"] == name)


WAYS = {
    "eight bits": SyncSettings(every=10, chunk_elements=500),
    "one bit": SIGN1,
    "one of 64 values": SyncSettings(every=10, chunk_elements=500, codec="topk2", error_feedback=0.95),
    "both ways": SyncSettings(
        every=10, chunk_elements=500, codec="sign1", up="int8", error_feedback_down=0.5, error_feedback=0.5
    ),
    "fragments in flight": SyncSettings(every=10, chunk_elements=500, fragments=2, overlap_steps=3),
    "by influence": SyncSettings(every=10, chunk_elements=500, robust="gram"),
}


@pytest.mark.parametrize(
    "way",
    [pytest.param(way, marks=[pytest.mark.slow] * (way not in ("one bit", "fragments in flight"))) for way in WAYS],
)
def test_sites_of_one_two_and_three_hosts_hold_the_same_bits(tmp_path: Path, way: str) -> None:
    of_processes = ["--exchange-processes", "2"] if way == "by influence" else []  # of each host
    with LocalRun(tmp_path, replace(SETTINGS, quorum=3, max_sites=64, time_limits="wan", sync=WAYS[way])) as run:
        run.start_coordinator()
        sites = Sites(run, {"one": 1, "two": 2, "three": 3}, extra=of_processes)
        sites.start_all()
        assert run.wait_all(LIMIT_S) == sites.all_ended()
        status = run.status()
        last = status["last_commit"]
        for number in range(1, last + 1):
            assert len(set(run.hashes(number).values())) == 1
        assert set(run.hashes(last)) == {"one", "two", "three"}
        assert all(len(set(c["contributors"])) == 3 for c in status["commits"])
        sites.check_hosts(last)
        if WAYS[way].error_feedback and WAYS[way].fragments == 1:
            for name in sites.num_hosts:
                found = [(line["commit"], line["error_commits"]) for line in run.journal(name, "commit")]
                assert found == [(n, [n]) for n in range(1, last + 1)]


def test_ranks_of_two_hosts_that_are_copies_stay_copies_where_they_merge(tmp_path: Path) -> None:
    """What a rank has trained since the snapshot it finds by its own host's SNAPSHOT. The eleventh sync compares."""
    sync = SyncSettings(every=10, chunk_elements=500, overlap_steps=3)
    settings = replace(SETTINGS, min_sites=1, quorum=1, steps=130, time_limits="wan", sync=sync)
    with LocalRun(tmp_path, settings) as run:
        run.start_coordinator()
        sites = Sites(run, {"two": 2}, "--trace", str(tmp_path / "trace-{rank}"), are_copies=True)
        sites.start_all()
        assert run.wait_all(LIMIT_S) == sites.all_ended()
        assert run.status()["last_commit"] == 13
    traces = [[json.loads(line) for line in (tmp_path / f"trace-{rank}").read_text().splitlines()] for rank in (0, 1)]
    merged = [[(line["version"], line["digest"]) for line in trace if line["event"] == "merged"] for trace in traces]
    assert merged[0] == merged[1]
    assert len(merged[0]) > 10


def test_a_host_that_comes_back_at_another_address_is_dialled_there_and_has_its_error(tmp_path: Path) -> None:
    with LocalRun(tmp_path, replace(SETTINGS, steps=5000, min_sites=2, quorum=1, sync=SIGN1)) as run:
        run.start_coordinator()
        sites = Sites(run, {"one": 1, "two": 2}, "--step-delay-s", "0.01")
        sites.start_all()
        run.wait(committed(3), LIMIT_S)
        before = addresses_of_hosts(run.status(), "two")
        run.nodes["two-host1"].kill()
        run.nodes["two"].wait_for_line("host 1 of this site.* is lost", LIMIT_S)
        lost_at = run.status()["last_commit"]
        run.wait(contributes("one"), LIMIT_S, "the other site goes on")
        sites.start("two", 1)
        run.wait(
            lambda status: "two" in status["commits"][-1]["contributors"] and status["last_commit"] > lost_at + 2,
            LIMIT_S,
            "the site contributes again",
        )
        after = addresses_of_hosts(run.status(), "two")
        assert len(before) == len(after) == 1
        assert before != after
        again_at = run.status()["last_commit"]
        run.wait(committed(again_at + 3), LIMIT_S)
        sites.stop()
        contributors = {c["commit"]: c["contributors"] for c in run.status()["commits"]}
        for line in run.journal("two", "commit"):
            if line["commit"] > again_at:
                assert line["error_commits"] == [line["commit"]], (line, contributors[line["commit"]])


def test_a_site_whose_host_0_is_killed_goes_on_once_it_is_back(tmp_path: Path) -> None:
    with LocalRun(tmp_path, replace(SETTINGS, steps=5000, min_sites=2, quorum=1, sync=SIGN1)) as run:
        run.start_coordinator()
        sites = Sites(run, {"one": 1, "two": 2}, "--step-delay-s", "0.01")
        sites.start_all()
        run.wait(committed(3), LIMIT_S)
        run.nodes["two"].kill()
        run.nodes["two-host1"].wait_for_line("the workers of this host wait for it", LIMIT_S)
        run.wait(contributes("one"), LIMIT_S, "the other site goes on")
        sites.start("two", 0)
        run.wait(contributes("one", "two"), LIMIT_S, "both contribute again")
        run.wait(committed(run.status()["last_commit"] + 3), LIMIT_S)
        sites.stop()


@pytest.mark.root
@pytest.mark.skipif(bool(netns.available()), reason=f"network namespaces: {netns.available()}")
def test_hosts_that_lose_each_other_come_together_again(tmp_path: Path) -> None:
    """The cable of one host is pulled in the middle of training, which tells nobody; then it is put back."""
    settings = replace(SETTINGS, steps=5000, min_sites=2, quorum=1, sync=SIGN1)
    with netns.Hosts(3, 1_000_000_000) as machines, LocalRun(tmp_path, settings) as run:
        run.start_coordinator(f"{machines.bridge_address}:17700")
        sites = Sites(run, {"two": 2, "one": 1}, "--step-delay-s", "0.01", machines=machines)
        sites.start_all()
        run.wait(contributes("one", "two"), LIMIT_S, "both contribute")
        machines.set_link(1, "down")
        run.nodes["two"].wait_for_line("host 1 of this site.* is lost: .*stop until it is back", LIMIT_S)
        run.nodes["two-host1"].wait_for_line("host 0 of this site.*the workers of this host wait for it", LIMIT_S)
        run.wait(contributes("one"), LIMIT_S, "the other site goes on")
        machines.set_link(1, "up")
        run.wait(contributes("one", "two"), LIMIT_S, "both contribute again")
        assert run.status()["num_evicted"] == 0
        sites.stop()


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.skipif(bool(netns.available()), reason=f"network namespaces: {netns.available()}")
def test_a_link_between_two_hosts_that_do_not_lead_is_cut(tmp_path: Path) -> None:
    """Nobody is told of it, and both hear host 0 as before."""
    settings = replace(SETTINGS, steps=20_000, min_sites=2, quorum=1, sync=SIGN1)
    with netns.Hosts(4, 1_000_000_000) as machines, LocalRun(tmp_path, settings) as run:
        run.start_coordinator(f"{machines.bridge_address}:17700")
        sites = Sites(run, {"three": 3, "one": 1}, "--step-delay-s", "0.01", machines=machines)
        sites.start_all()
        run.wait(contributes("one", "three"), LIMIT_S, "both contribute")
        machines.drop(1, 2)
        where = machines.address(1).replace(".", "[.]")
        run.nodes["three-host2"].wait_for_line(f"host 1 of this site at {where}:.*workers of this host wait", LIMIT_S)
        run.wait(contributes("one"), LIMIT_S, "the other site goes on")
        machines.restore(1, 2)
        run.wait(contributes("one", "three"), LIMIT_S, "both contribute again")
        assert run.status()["num_evicted"] == 0
        sites.stop()
