"""Workers with torch that are killed go on with the inner optimizer that they had."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from atoll.protocol.settings import RunSettings
from atoll.protocol.sync_settings import SyncSettings
from tests.harness.chaos import command_line, descendants
from tests.harness.local_run import LocalRun, Status

LIMIT_S = 150.0
EVERY = 5
SCRIPT = Path(__file__).parents[1] / "workers" / "torch_worker.py"
SETTINGS = RunSettings(
    run_id="run", steps=1_000_000, time_limits="local", checkpoint_every=EVERY, sync=SyncSettings(every=8)
)
RESTORED = r" I run a \S+ \[rank 0\] atoll: the inner optimizer is restored from step (\d+) of the run"
FRESH = r" I run a \S+ \[rank \d\] the optimizer has done \[\] steps"
COUNTED = r" I run a \S+ \[rank \d\] the optimizer has done \[(\d+)\] steps"
pytestmark = pytest.mark.timeout(400)


def committed(number: int) -> Callable[[Status], bool]:
    return lambda status: bool(status["last_commit"] >= number)


def said(run: LocalRun, pattern: str, times: int = 1) -> Callable[[Status], bool]:
    """In the node's log, where the output of workers is."""
    return lambda status: len(found(run, pattern)) >= times


def found(run: LocalRun, pattern: str) -> list[str]:
    log = run.home("a") / "node.log"
    return re.findall(pattern, log.read_text()) if log.exists() else []


def on_disk(run: LocalRun, num_ranks: int) -> Callable[[Status], bool]:
    """A checkpoint of every rank lies there."""
    folder = run.home("a") / "optimizer"
    return lambda status: all(any(folder.glob(f"rank-{rank}-of-*.safetensors")) for rank in range(num_ranks))


def kill_a_worker(run: LocalRun) -> None:
    below = descendants(run.nodes["a"].popen.pid)
    workers = [pid for pid in below if any(argument == str(SCRIPT) for argument in command_line(pid)[1:3])]
    os.kill(workers[-1], signal.SIGKILL)


ON_GPU = ("--device", "cuda")


@pytest.mark.parametrize(
    ("num_ranks", "options"),
    [
        pytest.param(1, (), marks=pytest.mark.slow),
        (2, ("--fsdp2",)),
        pytest.param(1, ON_GPU, marks=pytest.mark.gpu),
        pytest.param(1, (*ON_GPU, "--fsdp2"), marks=pytest.mark.gpu),
    ],
)
def test_a_killed_worker_goes_on_with_its_optimizer(tmp_path: Path, num_ranks: int, options: tuple[str, ...]) -> None:
    with LocalRun(tmp_path, SETTINGS) as run:
        run.start_coordinator()
        run.start_node(
            "a",
            [str(SCRIPT), "--step-delay-s", "0.01", *options],
            launcher="python",
            extra=["--ranks", str(num_ranks)],
        )
        run.wait(said(run, FRESH, num_ranks), LIMIT_S, "a first start")
        run.wait(on_disk(run, num_ranks), LIMIT_S, "a checkpoint")
        before = run.wait(committed(1), LIMIT_S, "a commit")["last_commit"]
        kill_a_worker(run)
        run.wait(said(run, COUNTED, num_ranks), LIMIT_S, "a second start")
        (step,) = found(run, RESTORED)
        assert int(step) > 0
        assert int(step) % EVERY == 0
        assert found(run, COUNTED) == [step] * num_ranks
        assert len(found(run, FRESH)) == num_ranks
        run.wait(committed(before + 2), LIMIT_S, "the run goes on")
        assert len(run.journal("a", "WorkersFailed")) == 1


def test_ctrl_c_in_the_middle_of_a_write_leaves_the_checkpoint_before_it(tmp_path: Path) -> None:
    stuck = tmp_path / "stuck"
    worker = [str(SCRIPT), "--step-delay-s", "0.01", "--stuck-disk", str(stuck)]
    with LocalRun(tmp_path, SETTINGS) as run:
        folder = run.home("a") / "optimizer"
        run.start_coordinator()
        node = run.start_node("a", worker, launcher="python")
        run.wait(on_disk(run, 1), LIMIT_S, "a checkpoint")
        stuck.touch()
        run.wait(said(run, "the disk is stuck"), LIMIT_S, "a write in its middle")
        before = run.status()["last_commit"]
        run.wait(committed(before + 2), LIMIT_S, "training does not wait for the disk")
        node.interrupt()
        node.wait_for_line("waiting at most 20 s for their script", LIMIT_S)
        node.interrupt()
        assert node.wait(LIMIT_S) == 0
        (torn,) = folder.glob("*.new")
        stuck.unlink()
        run.start_node("a", worker, launcher="python")
        run.wait(said(run, RESTORED), LIMIT_S, "a second start")
        before = run.status()["last_commit"]
        run.wait(committed(before + 2), LIMIT_S, "the run goes on")
        assert found(run, COUNTED) == found(run, RESTORED)
        assert not torn.exists()


def test_a_switch_of_the_optimizer_that_changed_costs_its_state_and_not_the_site(tmp_path: Path) -> None:
    worker = [str(SCRIPT), "--step-delay-s", "0.01"]
    with LocalRun(tmp_path, SETTINGS) as run:
        run.start_coordinator()
        node = run.start_node("a", worker, launcher="python")
        run.wait(on_disk(run, 1), LIMIT_S, "a checkpoint")
        before = run.wait(committed(1), LIMIT_S, "a commit")["last_commit"]
        node.kill()
        run.start_node("a", [*worker, "--amsgrad"], launcher="python")
        run.wait(committed(before + 4), LIMIT_S, "the run goes on")
        assert found(run, r"switches\.amsgrad was null, now true")
        assert len(found(run, FRESH)) == 2
        assert not run.journal("a", "WorkersFailed")


def test_a_state_that_crashes_workers_is_left_alone(tmp_path: Path) -> None:
    """The newest two are tried, each once, and the site is in the run for all that."""
    worker = [str(SCRIPT), "--step-delay-s", "0.01"]
    with LocalRun(tmp_path, SETTINGS) as run:
        run.start_coordinator()
        node = run.start_node("a", worker, launcher="python")
        folder = run.home("a") / "optimizer"
        run.wait(lambda status: len(list(folder.glob("*.safetensors"))) == 2, LIMIT_S, "two checkpoints")
        before = run.wait(committed(1), LIMIT_S, "a commit")["last_commit"]
        node.kill()
        run.start_node("a", [*worker, "--crash-if-restored"], launcher="python")
        run.wait(committed(before + 4), LIMIT_S, "the run goes on")
        tried = found(run, RESTORED)
        assert len(tried) == len(set(tried)) == len(run.journal("a", "WorkersFailed")) == 2
        crashed = r" I run a \S+ \[rank 0\] .* workers that went on from it crashed before their first step"
        assert len(found(run, crashed)) == 3
        assert len(found(run, FRESH)) == 2


def test_without_checkpoints_the_optimizer_starts_fresh(tmp_path: Path) -> None:
    with LocalRun(tmp_path, replace(SETTINGS, checkpoint_every=0)) as run:
        run.start_coordinator()
        run.start_node("a", [str(SCRIPT), "--step-delay-s", "0.01"], launcher="python")
        before = run.wait(committed(1), LIMIT_S, "a commit")["last_commit"]
        kill_a_worker(run)
        run.wait(said(run, FRESH, 2), LIMIT_S, "a second start")
        run.wait(committed(before + 2), LIMIT_S, "the run goes on")
        assert not found(run, COUNTED)
        assert not (run.home("a") / "optimizer").exists()
