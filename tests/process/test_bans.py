"""`atoll ban`, `evict` and `reset` on real processes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from atoll.protocol.errors import HostError, RefusedError
from atoll.protocol.settings import RunSettings
from atoll.protocol.sync_settings import SyncSettings
from tests.harness.local_run import GUARDED, LocalRun, Process

WORKER = [sys.executable, str(Path(__file__).parents[1] / "workers" / "plain_worker.py"), "--step-delay-s", "0.02"]
MODEL = [*WORKER, "--tensors", "a=30x40,b=10"]
OTHER_MODEL = [*WORKER, "--tensors", "a=30x40,c=10"]
SETTINGS = RunSettings(
    run_id="run",
    steps=100_000,
    min_sites=2,
    data="local",
    time_limits="local",
    sync=SyncSettings(every=15, chunk_elements=1000, codec="fp32"),
)
LIMIT_S = 150.0

pytestmark = pytest.mark.timeout(400)


def atoll(run: LocalRun, *arguments: str) -> Process:
    process = run.start(arguments[0], [sys.executable, *GUARDED, *arguments])
    process.wait(LIMIT_S)
    return process


def test_a_site_that_is_banned_ends_and_cannot_come_back_until_it_is_let_in(tmp_path: Path) -> None:
    with LocalRun(tmp_path, SETTINGS) as run:
        coordinator = run.start_coordinator()
        for name in "abc":
            run.start_node(name, MODEL)
        run.wait(lambda s: bool(s["commits"]) and "c" in s["commits"][-1]["contributors"], LIMIT_S)
        done = atoll(run, "ban", str(run.toml), "c", "--reason", "sends garbage")
        assert done.popen.returncode == 0, done.lines
        assert run.wait_all(LIMIT_S, ["c"]) == {"c": RefusedError.exit_code}
        assert any("banned from run 'run': sends garbage" in line for line in run.nodes["c"].lines)
        last = run.status()["last_commit"]
        run.wait(lambda s: s["last_commit"] > last, LIMIT_S, "the others go on")
        coordinator.kill()
        run.start_coordinator()
        again = run.start_node("c", MODEL)
        assert run.wait_all(LIMIT_S, ["c"]) == {"c": RefusedError.exit_code}, again.lines
        assert run.status()["banned"] == ["c: sends garbage"]
        assert atoll(run, "ban", str(run.toml), "c", "--lift").popen.returncode == 0
        run.start_node("c", MODEL)
        run.wait(lambda s: bool(s["commits"]) and "c" in s["commits"][-1]["contributors"], LIMIT_S, "c is back")
        unknown = atoll(run, "evict", str(run.toml), "nobody")
        assert unknown.popen.returncode == HostError.exit_code
        assert any("no site of run 'run' is called 'nobody'" in line for line in unknown.lines), unknown.lines
        mistyped = atoll(run, "ban", str(run.toml), "bb")
        assert mistyped.popen.returncode == 0
        assert mistyped.lines == ["bb is banned, though no site of that name is known here; known are a, b, c"]


def test_a_wrong_model_is_taken_back_before_training_and_not_after_it(tmp_path: Path) -> None:
    with LocalRun(tmp_path, SETTINGS) as run:
        run.start_coordinator()
        run.start_node("wrong", OTHER_MODEL)
        run.wait(lambda s: s["num_parameters"] > 0 and any(x["last_commit"] == 0 for x in s["sites"]), LIMIT_S)
        done = atoll(run, "reset", str(run.toml), "--reason", "the model was the wrong one")
        assert done.popen.returncode == 0, done.lines
        assert run.wait_all(LIMIT_S, ["wrong"]) == {"wrong": RefusedError.exit_code}
        status = run.status()
        assert (status["num_parameters"], status["sites"]) == (0, [])
        run.start_node("wrong", OTHER_MODEL)
        assert run.wait_all(LIMIT_S, ["wrong"]) == {"wrong": RefusedError.exit_code}
        assert any("was taken back: give the node another --home" in line for line in run.nodes["wrong"].lines)
        for name in "ab":
            run.start_node(name, MODEL)
        run.wait(lambda s: s["last_commit"] >= 1, LIMIT_S)
        late = atoll(run, "reset", str(run.toml))
        assert late.popen.returncode == HostError.exit_code
        assert any("training has started" in line for line in late.lines), late.lines
