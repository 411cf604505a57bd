"""Samples are counted once, whatever is killed: real processes, with a worker that needs no torch.

Each step of the worker counts as many tokens as samples, so the tokens of the run are the samples that are done.
"""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from atoll.cli.client import fetch_status
from atoll.protocol import wire
from atoll.protocol.messages import Commit
from atoll.protocol.ranges import Ranges
from atoll.protocol.sample_order import SampleOrder
from atoll.protocol.settings import OuterSettings, RunSettings, SyncSettings
from tests.harness.data_account import DATA, LEASED, assert_account_balances
from tests.harness.local_run import LocalRun, Status

NUM_SAMPLES = 500
SETTINGS = RunSettings(
    run_id="run",
    steps=150,
    min_sites=3,
    data=DATA,
    time_limits="local",
    sync=SyncSettings(every=10, chunk_elements=1000, codec="int8"),
    outer=OuterSettings(learning_rate=0.7, momentum=0.5),
)
LIMIT_S = 60.0

pytestmark = pytest.mark.timeout(150)


def worker(folder: Path, name: str, *extra: str) -> list[str]:
    return [
        sys.executable, str(Path(__file__).parents[1] / "workers" / "plain_worker.py"),
        "--tensors", "a=30x40", "--step-delay-s", "0.02", *LEASED, "--trace", str(folder / f"{name}.jsonl"), *extra,
    ]  # fmt: skip


def committed(count: int) -> Callable[[Status], bool]:
    return lambda status: bool(status["last_commit"] >= count)


def contributors(*names: str) -> Callable[[Status], bool]:
    return lambda status: bool(status["commits"]) and sorted(status["commits"][-1]["contributors"]) == sorted(names)


def loaded(folder: Path) -> Counter[int]:
    """Samples that any worker was given."""
    found: Counter[int] = Counter()
    for trace in folder.glob("*.jsonl"):
        for line in trace.read_text().splitlines():
            if line.endswith("}") and (event := json.loads(line))["event"] == "loaded":
                found.update(event["samples"])
    return found


def assert_every_sample_counts_once(run: LocalRun) -> int:
    """The account of a run that has ended, against the commits in the store and what workers loaded; passes done."""
    status = fetch_status(run.address, data_ranges=True)
    assert status["finished"]
    assert_account_balances(status)
    (line,) = status["data"]
    place = 0
    for item in status["data_ranges"]:
        assert item["first"] == place, "every position is in one range"
        place += item["num_samples"]
    assert place == line["num_passes_begun"] * NUM_SAMPLES
    assert run.coordinator is not None
    run.coordinator.interrupt()
    assert run.coordinator.wait(10) == 0
    done = Ranges()
    with sqlite3.connect(run.folder / "run.db") as db:
        for (body,) in db.execute("SELECT body FROM commits ORDER BY commit_number"):
            commit = wire.decode(Commit, body)
            for part in commit.done:
                before = done.num_samples
                done.update(part.ranges)
                assert done.num_samples == before + sum(r.num_samples for r in part.ranges), "done twice"
            assert done.num_samples == commit.run_tokens
    db.close()
    assert [(r.first, r.num_samples) for r in done] == [
        (item["first"], item["num_samples"]) for item in status["data_ranges"] if item["state"] == "done"
    ]
    order = SampleOrder(SETTINGS.seed, 0, NUM_SAMPLES)
    wanted = Counter(order.sample(p) for r in done for p in range(r.first, r.end))
    assert not wanted - loaded(run.folder), "a sample is done that no worker was given so often"
    return int(line["num_passes_done"])


def start(run: LocalRun, name: str, *extra: str) -> None:
    run.start_node(name, worker(run.folder, name, *extra))


def start_all(run: LocalRun) -> None:
    run.start_coordinator()
    for name in "abc":
        start(run, name)


def test_a_killed_sites_samples_are_done_once_by_others(tmp_path: Path) -> None:
    with LocalRun(tmp_path, SETTINGS) as run:
        start_all(run)
        before = run.wait(committed(3), LIMIT_S)
        assert any(held["site"] == "c" for p in before["data"][0]["passes"] for held in p["leased"])
        run.nodes["c"].kill()
        run.wait(contributors("a", "b"), LIMIT_S, "a and b commit without c")
        assert run.wait_all(LIMIT_S, ["a", "b"]) == {"a": 0, "b": 0}
        assert assert_every_sample_counts_once(run) >= 2


def test_a_site_that_comes_back_leases_anew(tmp_path: Path) -> None:
    with LocalRun(tmp_path, SETTINGS) as run:
        start_all(run)
        run.wait(committed(3), LIMIT_S)
        run.nodes["c"].kill()
        start(run, "c")
        run.wait(committed(5), LIMIT_S)
        run.wait(contributors("a", "b", "c"), LIMIT_S, "c is back")
        assert run.wait_all(LIMIT_S) == {"a": 0, "b": 0, "c": 0}
        assert_every_sample_counts_once(run)


def test_a_frozen_site_is_evicted_and_what_it_trained_is_done_again(tmp_path: Path) -> None:
    with LocalRun(tmp_path, replace(SETTINGS, steps=300)) as run:
        start_all(run)
        run.wait(committed(3), LIMIT_S)
        run.nodes["c"].popen.send_signal(signal.SIGSTOP)
        run.wait(lambda s: s["num_evicted"] == 1, LIMIT_S, "c is evicted")
        run.nodes["c"].popen.send_signal(signal.SIGCONT)
        run.wait(contributors("a", "b", "c"), LIMIT_S, "c is back")
        assert run.wait_all(LIMIT_S) == {"a": 0, "b": 0, "c": 0}
        reports = [line["text"] for line in run.journal("c", "report")]
        assert any("local progress is discarded" in text for text in reports)
        assert_every_sample_counts_once(run)


def test_samples_of_crashed_workers_are_drawn_again(tmp_path: Path) -> None:
    with LocalRun(tmp_path, SETTINGS) as run:
        run.start_coordinator()
        start(run, "a")
        start(run, "b")
        start(run, "c", "--crash-at", "25")
        assert run.wait_all(LIMIT_S) == {"a": 0, "b": 0, "c": 0}
        assert len(run.journal("c", "WorkersFailed")) == 1
        assert_every_sample_counts_once(run)


def test_the_account_survives_the_coordinator(tmp_path: Path) -> None:
    """Sites train on from what they have leased; a worker that dies meanwhile costs nothing either."""
    with LocalRun(tmp_path, SETTINGS) as run:
        start_all(run)
        run.wait(committed(3), LIMIT_S)
        assert run.coordinator is not None
        run.coordinator.kill()
        (pid,) = [
            int(child)
            for thread in Path(f"/proc/{run.nodes['b'].popen.pid}/task").glob("*")
            for child in (thread / "children").read_text().split()
        ]
        os.kill(pid, signal.SIGKILL)
        run.nodes["a"].wait_for_line("lost the coordinator", LIMIT_S)
        run.nodes["b"].wait_for_line("workers crashed", LIMIT_S)
        run.start_coordinator()
        assert run.wait_all(LIMIT_S) == {"a": 0, "b": 0, "c": 0}
        assert_every_sample_counts_once(run)
