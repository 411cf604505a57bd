"""A second Ctrl-C ends a process whatever its disk does: threads in a call that never comes back are not waited for."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from atoll.node.daemon.main import END_LIMIT_S
from atoll.protocol.exit_codes import ENDED_AT_ONCE
from atoll.protocol.settings import RunSettings
from atoll.protocol.sync_settings import SyncSettings
from tests.harness.chaos import descendants
from tests.harness.local_run import LocalRun, Process
from tests.harness.sockets import free_address
from tests.harness.stuck_disk import StuckDisk

WORKER = [sys.executable, str(Path(__file__).parents[1] / "workers" / "plain_worker.py"), "--tensors", "a=30x40"]
SLOW = [*WORKER, "--step-delay-s", "0.02"]
SETTINGS = RunSettings(
    run_id="run",
    steps=100_000,
    min_sites=1,
    data="local",
    time_limits="local",
    sync=SyncSettings(every=10, chunk_elements=1000, codec="fp32", log_commits=2, snapshots=1),
)
LIMIT_S = 60.0
SLACK_S = 60.0

pytestmark = pytest.mark.timeout(150)

STUCK_STORE = """
import sys, threading
from pathlib import Path
from atoll.coordinator.sqlite_store import SqliteStore
from atoll.__main__ import run
stuck = Path(sys.argv.pop(1))
persist = SqliteStore.persist
def may_be_stuck(*args):
    if stuck.exists():
        stuck.with_suffix(".seen").write_text("waits")  # a FIFO
        threading.Event().wait()
    return persist(*args)
SqliteStore.persist = may_be_stuck
sys.exit(run())
"""


@pytest.mark.parametrize("what", ["payloads", "snapshot"])
def test_a_second_ctrl_c_ends_a_node_whose_disk_is_stuck_and_all_its_processes(what: str, tmp_path: Path) -> None:
    disk = StuckDisk(tmp_path)
    sync = replace(SETTINGS.sync, fsync=what == "payloads", snapshots=int(what == "snapshot"))
    with LocalRun(tmp_path, replace(SETTINGS, sync=sync)) as run:
        run.start_coordinator()
        node = run.start_node("a", SLOW, environment=disk.environment)
        run.wait(lambda status: status["last_commit"] >= 1, LIMIT_S)
        disk.begin()
        run.wait(lambda _: disk.is_waited_for, LIMIT_S, "a thread in the disk")
        below = descendants(node.popen.pid)
        assert below
        node.interrupt()
        node.wait_for_line("leaving after the sync under way", LIMIT_S)
        node.interrupt()
        assert node.wait(END_LIMIT_S + SLACK_S) == ENDED_AT_ONCE
        run.wait(lambda _: not any(Path(f"/proc/{pid}").exists() for pid in below), LIMIT_S, "all are gone")


def test_other_hosts_of_the_site_hear_of_it(tmp_path: Path) -> None:
    """Else they would wait half an hour for host 0."""
    disk, address = StuckDisk(tmp_path), free_address()
    with LocalRun(tmp_path, SETTINGS) as run:
        run.start_coordinator()

        def start(host: int, environment: dict[str, str]) -> Process:
            extra = ["--site-hosts", "2", "--site-address", address, "--site-rank", str(host), "--name", "a"]
            return run.start_node(f"a{host}", [*SLOW, "--shard"], extra=extra, environment=environment)

        other, node = start(1, {}), start(0, disk.environment)
        run.wait(lambda status: status["last_commit"] >= 1, LIMIT_S)
        disk.begin()
        run.wait(lambda _: disk.is_waited_for, LIMIT_S, "a thread in the disk")
        node.interrupt()
        node.wait_for_line("leaving after the sync under way", LIMIT_S)
        node.interrupt()
        assert node.wait(END_LIMIT_S + SLACK_S) == ENDED_AT_ONCE
        assert other.wait(LIMIT_S) == ENDED_AT_ONCE
        assert other.lines[-1].endswith("Ctrl-C again"), "it was told why"


def test_a_node_that_waits_for_its_disk_before_it_has_begun_is_ended_by_ctrl_c_again(tmp_path: Path) -> None:
    disk = StuckDisk(tmp_path)
    with LocalRun(tmp_path, SETTINGS) as run:
        run.start_coordinator()
        node = run.start_node("a", SLOW, environment=disk.environment)
        run.wait(lambda status: status["last_commit"] >= 3, LIMIT_S)
        node.kill()
        for name in ("outer.json", "outer.index"):  # to be put together again from a snapshot, in new files
            (run.home("a") / "state" / name).unlink()
        disk.begin()
        node = run.start_node("a", SLOW, environment=disk.environment)
        run.wait(lambda _: disk.is_waited_for, LIMIT_S, "a thread in the disk")
        node.interrupt()
        node.wait_for_line("again to end at once", LIMIT_S)
        node.interrupt()
        assert node.wait(END_LIMIT_S + SLACK_S) == ENDED_AT_ONCE


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_second_signal_ends_a_coordinator_whose_store_is_stuck(number: int, tmp_path: Path) -> None:
    stuck = tmp_path / "disk.stuck"
    with LocalRun(tmp_path, SETTINGS) as run:
        command = [sys.executable, "-c", STUCK_STORE, str(stuck), "coordinator", str(run.toml)]
        coordinator = run.start("coordinator", [*command, "--listen", "127.0.0.1:0", "--insecure"])
        run.address = coordinator.wait_for_line(r"listening on (\S+)", LIMIT_S).group(1)
        run.start_node("a", SLOW)
        run.wait(lambda status: status["last_commit"] >= 1, LIMIT_S)
        seen = stuck.with_suffix(".seen")
        os.mkfifo(seen)
        stuck.touch()
        assert seen.read_text() == "waits"  # a decision is not kept
        os.kill(coordinator.popen.pid, number)
        coordinator.wait_for_line("again to end at once", LIMIT_S)
        os.kill(coordinator.popen.pid, number)
        assert coordinator.wait(LIMIT_S) == ENDED_AT_ONCE
        stuck.unlink()
        run.start_coordinator()  # the store is whole
        before = run.status()["last_commit"]
        run.wait(lambda status: status["last_commit"] > before, LIMIT_S, "the run goes on")
