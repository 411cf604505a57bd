"""Samples are counted once, whatever is killed: real processes, with a worker that needs no torch.

Each step of the worker counts as many tokens as samples, so the tokens of the run are the samples that are done.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.harness import chaos
from tests.harness.chaos import LIMIT_S, WORKER, ChaosRun, command_line, descendants
from tests.harness.data_account import NUM_SAMPLES, TRACE, assert_every_sample_counts_once

SETTINGS = replace(chaos.SETTINGS, min_sites=2)

pytestmark = pytest.mark.timeout(400)


@contextmanager
def a_run(folder: Path) -> Iterator[ChaosRun]:
    """All workers note what they load in one file."""
    with ChaosRun(folder, SETTINGS, [*WORKER, "--step-delay-s", "0.02", "--trace", str(folder / TRACE)]) as run:
        yield run


def test_a_killed_sites_samples_are_done_once_by_others(tmp_path: Path) -> None:
    with a_run(tmp_path) as run:
        before = run.begin("abc", 3)
        assert any(held["site"] == "c" for p in before["data"][0]["passes"] for held in p["leased"])
        run.kill_site("c")
        run.wait_for_contributors("ab")
        run.wait(lambda s: bool(s["data"][0]["num_passes_done"] >= 2), LIMIT_S, "two passes are done")
        run.end_well()
        assert assert_every_sample_counts_once(run) >= 2


def test_a_site_that_comes_back_leases_anew(tmp_path: Path) -> None:
    with a_run(tmp_path) as run:
        run.begin("abc", 3)
        run.kill_site("c")
        run.start_site("c")
        run.wait_for_contributors("abc")
        run.end_well()
        assert_every_sample_counts_once(run)


def test_a_frozen_site_is_evicted_and_what_it_trained_is_done_again(tmp_path: Path) -> None:
    with a_run(tmp_path) as run:
        before = run.begin("abc", 3)["num_evicted"]
        with run.frozen(run.nodes["c"]):
            run.wait(lambda s: s["num_evicted"] > before, LIMIT_S, "c is evicted")
        run.wait_for_contributors("abc")
        assert any("local progress is discarded" in line["text"] for line in run.journal("c", "report"))
        run.end_well()
        assert_every_sample_counts_once(run)


def test_samples_of_crashed_workers_are_drawn_again(tmp_path: Path) -> None:
    with a_run(tmp_path) as run:
        run.begin("ab")
        run.start_node("c", [*run.worker, "--crash-at", "25"])
        run.wait_for_journal("c", "WorkersFailed", 1)
        run.wait_for_contributors("abc")
        run.end_well()
        assert_every_sample_counts_once(run)


def test_the_account_survives_the_coordinator(tmp_path: Path) -> None:
    """Sites train on from what they have leased; a worker that dies meanwhile costs nothing either."""
    with a_run(tmp_path) as run:
        run.begin("abc", 3)
        run.kill_coordinator()
        assert run.kill_below("b", "plain_worker")
        run.nodes["a"].wait_for_line("lost the coordinator", LIMIT_S)
        run.nodes["b"].wait_for_line("workers crashed", LIMIT_S)
        run.start_coordinator()
        run.wait_for_contributors("abc")
        run.end_well()
        assert_every_sample_counts_once(run)


def test_a_torch_loader_with_processes_of_its_own(tmp_path: Path) -> None:
    """All processes of one site's worker are killed, of another one the first alone: the others end with it."""
    script = Path(__file__).parents[1] / "workers" / "loading_worker.py"
    command = [sys.executable, str(script), str(NUM_SAMPLES), "4"]
    with ChaosRun(tmp_path, SETTINGS, command) as run:
        run.begin("ab")
        assert len(run.kill_below("b", script.name)) == 3, "the rank and two that load"
        run.wait_for_journal("b", "WorkersFailed", 1)
        of_a = [pid for pid in descendants(run.nodes["a"].popen.pid) if script.name in " ".join(command_line(pid))]
        rank = next(pid for pid in of_a if command_line(pid)[1] == str(script))
        os.kill(rank, signal.SIGKILL)
        run.wait_for_journal("a", "WorkersFailed", 1)
        run.wait_for_contributors("ab")
        assert not [pid for pid in of_a if command_line(pid)]
        status = run.end_well()
        (line,) = status["data"]
        assert line["num_done"] > 0
