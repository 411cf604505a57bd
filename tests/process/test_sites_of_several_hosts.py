"""Whole runs in which a site has two hosts: each a daemon of its own, which share no memory and no folder."""

from __future__ import annotations

import os
import random
import re
import signal
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from atoll.node.daemon.rank_commands import TRAINER_MODULE
from atoll.protocol.sync_settings import SyncSettings
from benchmarks import netns
from tests.harness.chaos import command_line, descendants
from tests.harness.local_run import LocalRun, Process, Status
from tests.harness.namespace import NAMESPACE
from tests.harness.sockets import free_address
from tests.process.test_sites_of_several_ranks import DIGITS, SETTINGS, contributors, of_shapes

LIMIT_S = 150.0
pytestmark = pytest.mark.timeout(400)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "a.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 2000)
    return folder


def both_have(homes: Sequence[Path], checkpoint: str) -> Callable[[Status], bool]:
    return lambda _: all(any((home / "optimizer").glob(checkpoint)) for home in homes)


class TwoHosts:
    """The daemons of a site named "two"."""

    def __init__(self, run: LocalRun, text: Path, layout: str, machines: netns.Hosts | None = None) -> None:
        self._run, self._text, self._layout, self._machines = run, text, layout, machines
        self._address = f"{machines.address(0)}:17800" if machines is not None else free_address()

    def start(self, host: int, script: Path | None = None) -> Process:
        extra = ["--site-hosts", "2"]
        extra += ["--data", str(self._text), "--parallel", self._layout] if script is None else []
        extra += ["--site-rank", str(host), "--site-address", self._address, "--name", "two"]
        where = {NAMESPACE: self._machines.namespace(host)} if self._machines is not None else {}
        name = "two" if host == 0 else f"two-host{host}"
        worker = [str(script)] if script is not None else []
        return self._run.start_node(name, worker, launcher="python", environment=where, extra=extra)


def doing(status: Status, name: str) -> str:
    return next(str(site["doing"]) for site in status["sites"] if site["name"] == name)


def newest(status: Status) -> int:
    return int(status["last_commit"])


WAYS = {
    "shards": ("dp_shard=2", SyncSettings(every=10)),
    "columns": ("tp=2,dp_replicate=2", SyncSettings(every=10, overlap_steps=4)),
    "stages-in-fragments": ("pp=2", SyncSettings(every=10, fragments=2, overlap_steps=2)),
}


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[pytest.mark.slow] * (way != "stages-in-fragments")) for way in WAYS]
)
def test_a_site_of_two_hosts_and_one_of_one_train_one_model(tmp_path: Path, text: Path, way: str) -> None:
    layout, sync = WAYS[way]
    with LocalRun(tmp_path, replace(of_shapes(min_sites=2, steps=40), time_limits="wan", sync=sync)) as run:
        run.start_coordinator()
        hosts = TwoHosts(run, text, layout)
        hosts.start(1)
        hosts.start(0)
        run.start_node("one", launcher="python", extra=["--data", str(text)])
        assert run.wait_all(LIMIT_S) == {"one": 0, "two": 0, "two-host1": 0}
        assert not [line for name in ("two", "two-host1") for line in run.nodes[name].lines if "lost" in line]
        status = run.status()
        assert run.hashes(newest(status)) == dict.fromkeys(("one", "two"), status["state_hash"])
        assert {site["name"]: site["num_ranks"] for site in status["sites"]} == {
            "one": 1,
            "two": 4 if "," in layout else 2,
        }
        samples = {line["site"]: line["num_done"] for line in status["data"]}
        assert sum(samples.values()) * 32 == status["run_tokens"]


@pytest.mark.slow
def test_a_script_on_two_hosts_has_its_last_word(tmp_path: Path) -> None:
    """Its model has buffers without dimensions; after the run each rank evaluates, and the other one ends first."""
    with LocalRun(tmp_path, SETTINGS) as run:
        run.start_coordinator()
        hosts = TwoHosts(run, tmp_path, "")
        for host in (0, 1):
            hosts.start(host, DIGITS)
        run.start_node("one", [str(DIGITS)], launcher="python")
        assert run.wait_all(LIMIT_S) == {"one": 0, "two": 0, "two-host1": 0}
        status = run.status()
        assert run.hashes(newest(status)) == dict.fromkeys(("one", "two"), status["state_hash"])
        found = re.search(
            r"step 40: ([0-9.]+)% of 360 test images are right", (run.home("two") / "node.log").read_text()
        )
        assert found
        assert float(found[1]) > 80, "an untrained model has 10"


NAMESPACES = [
    pytest.mark.root,
    pytest.mark.skipif(bool(netns.available()), reason=f"network namespaces: {netns.available()}"),
]


@pytest.mark.slow  # without torch: test_endpoints.py
@pytest.mark.parametrize("host", [0, 1])
@pytest.mark.parametrize("are_apart", [False, pytest.param(True, marks=NAMESPACES)], ids=["loopback", "namespaces"])
def test_a_host_that_is_killed_stops_its_site_until_it_is_back(
    tmp_path: Path, text: Path, host: int, are_apart: bool
) -> None:
    """The other site trains on; the one that lost a host catches up, and contributes again."""
    settings = replace(of_shapes(min_sites=2, steps=100_000), sync=SyncSettings(every=10), checkpoint_every=10)
    with ExitStack() as held:
        machines = held.enter_context(netns.Hosts(3, 1_000_000_000)) if are_apart else None
        run = held.enter_context(LocalRun(tmp_path, settings))
        run.start_coordinator(f"{machines.bridge_address}:17700" if machines is not None else "")
        hosts = TwoHosts(run, text, "dp_shard=2", machines)
        daemons = [hosts.start(0), hosts.start(1)]
        where = {NAMESPACE: machines.namespace(2)} if machines is not None else {}
        run.start_node("one", launcher="python", environment=where, extra=["--data", str(text)])
        run.wait(lambda status: contributors(status) == {"one", "two"}, LIMIT_S, "both contribute")
        daemons[host].popen.kill()
        daemons[host].wait(LIMIT_S)
        other = daemons[1 - host]
        lost = r"host 1 of this site.* is lost.*stop until it is back" if host else r"host 0 of this site.*wait for it"
        other.wait_for_line(lost, LIMIT_S)
        run.wait(lambda status: contributors(status) == {"one"}, LIMIT_S, "the other site goes on")
        if host == 1:  # which is no hang: the coordinator is told for how long it may be
            run.wait(lambda status: "waiting for host 1 of this site" in doing(status, "two"), LIMIT_S)
        hosts.start(host)
        run.wait(lambda status: contributors(status) == {"one", "two"}, LIMIT_S, "both contribute again")
        assert other.popen.poll() is None
        status = run.status()
        at = newest(status)
        run.wait(lambda status: newest(status) > at, LIMIT_S)
        assert len(run.hashes(at)) == 2
        assert len(set(run.hashes(at).values())) == 1
        assert "the inner optimizer is restored from step" in (run.home("two") / "node.log").read_text()


@pytest.mark.slow  # what ranks read for each other: test_checkpoints_of_hosts.py
def test_two_hosts_come_back_in_other_layouts_with_their_optimizer(tmp_path: Path, text: Path) -> None:
    """What a rank needs of the earlier layout is on the other host in part."""
    settings = replace(of_shapes(min_sites=1, steps=100_000), checkpoint_every=4)
    worlds = {"dp_shard=2": 2, "tp=2": 2, "pp=2": 2, "dp_replicate=2,dp_shard=2": 4}
    with LocalRun(tmp_path, settings) as run:
        run.start_coordinator()
        run.start_node("one", launcher="python", extra=["--data", str(text)])
        homes = [run.home("two"), run.home("two-host1")]
        for number, (layout, world) in enumerate(worlds.items()):
            hosts = TwoHosts(run, text, layout)
            daemons = [hosts.start(1), hosts.start(0)]
            run.wait(lambda status: contributors(status) == {"one", "two"}, LIMIT_S, f"a commit with {layout}")
            log = (homes[0] / "node.log").read_text()
            restored = [int(step) for step in re.findall(r"the inner optimizer is restored from step (\d+)", log)]
            assert len(restored) == number, "as often as it came back"
            assert restored == sorted(set(restored))
            run.wait(both_have(homes, f"rank-*-of-{world}.{number + 1}-*.safetensors"), LIMIT_S, "their checkpoint")
            for daemon in daemons:
                daemon.popen.kill()
                daemon.wait(LIMIT_S)
            run.wait(lambda status: contributors(status) == {"one"}, LIMIT_S, "commits of the other site")


@pytest.mark.slow
def test_a_rank_that_is_killed_costs_its_site_a_start_on_all_hosts(tmp_path: Path, text: Path) -> None:
    """The ranks of host 0 wait for the one of host 1 in a collective, and are ended, however long that may take."""
    with LocalRun(tmp_path, of_shapes(min_sites=2, steps=100_000)) as run:
        run.start_coordinator()
        hosts = TwoHosts(run, text, "tp=2")
        daemons = [hosts.start(0), hosts.start(1)]
        run.start_node("one", launcher="python", extra=["--data", str(text)])
        run.wait(lambda status: contributors(status) == {"one", "two"}, LIMIT_S, "both contribute")
        of_host_0, rank = (worker_below(daemon) for daemon in daemons)
        os.kill(rank, signal.SIGKILL)
        at = newest(run.wait(lambda status: "two" not in contributors(status), LIMIT_S, "the other site goes on"))
        run.wait(lambda status: newest(status) > at and "two" in contributors(status), LIMIT_S, "it contributes again")
        assert [daemon.popen.poll() for daemon in daemons] == [None, None], "both hosts are here still"
        assert of_host_0 != worker_below(daemons[0])
        assert len(run.journal("two", "WorkersFailed")) == 1
        assert len(set(run.hashes(at).values())) == 1


def worker_below(daemon: Process) -> int:
    """Of a host with one rank; what starts a rank has its command too, and comes before it."""
    return [pid for pid in descendants(daemon.popen.pid) if TRAINER_MODULE in command_line(pid)][-1]


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.timeout(1500)
@pytest.mark.skipif(bool(netns.available()), reason=f"network namespaces: {netns.available()}")
def test_a_cable_that_comes_and_goes_costs_a_site_nothing_but_the_time(tmp_path: Path, text: Path) -> None:
    """It is pulled at any moment of a sync, for a moment or for many syncs: what each host holds then differs."""
    draws = random.Random(1)

    def moment(run: LocalRun, most: int) -> None:
        at = newest(run.status()) + draws.randrange(most)
        run.wait(lambda status: newest(status) >= at, LIMIT_S, f"commit {at}")

    with netns.Hosts(3, 1_000_000_000) as machines, LocalRun(tmp_path, of_shapes(min_sites=2, steps=400_000)) as run:
        run.start_coordinator(f"{machines.bridge_address}:17700")
        hosts = TwoHosts(run, text, "dp_shard=2", machines)
        for host in (0, 1):
            hosts.start(host)
        where = {NAMESPACE: machines.namespace(2)}
        run.start_node("one", launcher="python", environment=where, extra=["--data", str(text)])
        for cut in range(12):
            run.wait(lambda status: contributors(status) == {"one", "two"}, LIMIT_S, f"both contribute, {cut} cuts")
            moment(run, 40)
            machines.set_link(1, "down")
            run.wait(
                lambda status: "waiting for host 1" in doing(status, "two") or contributors(status) == {"one"},
                LIMIT_S,
                f"the other site goes on, {cut} cuts",
            )
            moment(run, draws.choice([1, 200]))
            machines.set_link(1, "up")
        run.wait(lambda status: contributors(status) == {"one", "two"}, LIMIT_S, "both contribute again")
        assert run.status()["num_evicted"] == 0
        at = newest(run.status())
        run.wait(lambda status: newest(status) > at, LIMIT_S)
        assert len(run.hashes(at)) == 2
        assert len(set(run.hashes(at).values())) == 1
