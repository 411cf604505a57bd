"""Whole runs: a coordinator and nodes as real processes over loopback, with a worker that needs no torch.

Each test asserts that what it provoked happened, that the run finished, and that all sites hold the same bits.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import sys
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from atoll.coordinator import admin
from atoll.protocol.errors import HostError, NonFiniteError, WorkerError
from atoll.protocol.outer_settings import OuterSettings
from atoll.protocol.settings import RunSettings
from atoll.protocol.sync_settings import SyncSettings
from tests.harness.local_run import GUARDED, LocalRun, Status, guarded_with
from tests.harness.sockets import free_address

WORKER = [sys.executable, str(Path(__file__).parents[1] / "workers" / "plain_worker.py"), "--tensors", "a=300x40,b=10"]
BROKEN = [sys.executable, "-c", "import sys; print('no such folder: /data'); sys.exit(3)"]
SLOW = [*WORKER, "--step-delay-s", "0.02"]
SETTINGS = RunSettings(
    run_id="run",
    steps=60,
    min_sites=3,
    data="local",
    time_limits="local",
    sync=SyncSettings(every=10, chunk_elements=1000, codec="int8"),
    outer=OuterSettings(learning_rate=0.7, momentum=0.5),
)
LIMIT_S = 150.0

pytestmark = pytest.mark.timeout(400)


def committed(count: int) -> Callable[[Status], bool]:
    return lambda status: bool(status["last_commit"] >= count)


def finished(status: Status) -> bool:
    return bool(status["finished"])


def assert_equal_at_the_end(run: LocalRun, names: list[str], commit: int = 6) -> None:
    hashes = run.hashes(commit)
    assert sorted(hashes) == sorted(names)
    assert len(set(hashes.values())) == 1, hashes
    status = run.status()
    assert status["attested_commit"] == commit
    assert status["state_hash"] == next(iter(hashes.values()))
    assert status["finished"]


def test_three_sites_end_with_the_same_bits_and_a_saved_model(tmp_path: Path) -> None:
    with LocalRun(tmp_path, SETTINGS) as run:
        coordinator = run.start_coordinator(extra=["--log-format", "json"])
        for name in "abc":
            run.start_node(name, WORKER, extra=["--log-format", "json"])
        assert run.wait_all(LIMIT_S) == {"a": 0, "b": 0, "c": 0}
        assert_equal_at_the_end(run, ["a", "b", "c"])
        assert run.status()["run_step"] == 60
        coordinator.popen.terminate()
        assert coordinator.wait(LIMIT_S) == 0
        said = [json.loads(line)["message"] for line in coordinator.lines]
        assert f"run {SETTINGS.run_id}: listening on {run.address}" in said
        assert said[-1] == f"run {SETTINGS.run_id}: stopped; all of it is in {run.store_path}"
        for logged, whose in ((coordinator.lines, None), *((run.nodes[name].lines, name) for name in "abc")):
            entries = [json.loads(line) for line in logged]
            assert {(entry["run"], entry.get("site")) for entry in entries} == {(SETTINGS.run_id, whose)}
            assert any(entry["level"] == "info" and "commit 6" in entry["message"] for entry in entries)
            assert {entry.get("sync") for entry in entries} >= {*range(2, 7)}
        in_file = [json.loads(line) for line in (run.home("a") / "node.log").read_text().splitlines()]
        assert {entry["site"] for entry in in_file} == {"a"}
        assert "atoll.node" in {entry["logger"] for entry in in_file}
        for name in "abc":
            manifest = json.loads((run.home(name) / "model" / "manifest.json").read_text())
            assert manifest["commit"] == 6
            assert [line["commit"] for line in run.journal(name, "commit")] == [1, 2, 3, 4, 5, 6]


def test_a_model_whose_folder_is_gone_at_the_end_is_saved_below_the_home(tmp_path: Path) -> None:
    parent = tmp_path / "mounted"
    parent.mkdir()
    with LocalRun(tmp_path, replace(SETTINGS, min_sites=1)) as run:
        coordinator = run.start_coordinator()
        node = run.start_node("a", SLOW, extra=["--save", str(parent / "model")])
        run.wait(committed(1), LIMIT_S)
        parent.rmdir()
        parent.touch()
        assert node.wait(LIMIT_S) == HostError.exit_code
        assert json.loads((run.home("a") / "model" / "manifest.json").read_text())["commit"] == 6
        assert any(f"the model of commit 6 is in {run.home('a') / 'model'}" in line for line in node.lines), node.lines
        assert run.status()["finished"]
        dated = re.compile(rf"[\d-]+ [\d:,]+ [IWE] {SETTINGS.run_id} .+")
        logs = [line for line in coordinator.lines if "listening on" not in line]
        assert all(map(dated.fullmatch, logs)), coordinator.lines


def test_a_site_joins_while_the_others_go_on(tmp_path: Path) -> None:
    with LocalRun(tmp_path, replace(SETTINGS, min_sites=2, steps=1_000_000)) as run:
        run.start_coordinator()
        run.start_node("a", SLOW)
        run.start_node("b", SLOW)
        run.wait(committed(2), LIMIT_S)
        run.start_node("c", SLOW)
        run.wait(lambda s: any("c" in c["contributors"] for c in s["commits"]), LIMIT_S, "c contributes")
        admin.ask(run.toml.with_name("run.db"), "stop", reason="the test is over")
        assert run.wait_all(LIMIT_S) == {"a": 0, "b": 0, "c": 0}
        last = run.status()["last_commit"]
        assert_equal_at_the_end(run, ["a", "b", "c"], last)
        first = run.journal("c", "commit")[0]["commit"]
        assert first > 1, "c came with the state of a later commit"
        numbers = [line["commit"] for line in run.journal("a", "commit")]
        assert numbers == list(range(1, last + 1)), "nobody was stopped"


def test_a_crashed_worker_is_restarted_from_the_outer_state(tmp_path: Path) -> None:
    with LocalRun(tmp_path, replace(SETTINGS, steps=100)) as run:
        run.start_coordinator()
        run.start_node("a", SLOW)
        run.start_node("b", SLOW)
        run.start_node("c", [*SLOW, "--crash-at", "25"])
        assert run.wait_all(LIMIT_S) == {"a": 0, "b": 0, "c": 0}
        assert_equal_at_the_end(run, ["a", "b", "c"], 10)
        assert len(run.journal("c", "WorkersFailed")) == 1
        assert not run.journal("a", "WorkersFailed")


def test_a_crash_loop_backs_off_and_leaves_with_the_last_words_of_the_worker(tmp_path: Path) -> None:
    with LocalRun(tmp_path, SETTINGS) as run:
        run.start_coordinator()
        node = run.start_node("a", BROKEN)
        node.wait_for_line(r"workers crashed, restarting them: the workers ended with exit code 3", LIMIT_S)
        node.wait_for_line(r"workers crashed, restarting them in 3 s, after 2 crashes in a row: the workers", LIMIT_S)
        assert node.wait(LIMIT_S) == WorkerError.exit_code
        assert len(run.journal("a", "WorkersFailed")) == 3
        assert "waiting to restart workers" in [line["phase"] for line in run.journal("a", "phase")]
        (last,) = run.journal("a", "exit")
        assert last["text"] == (
            "the workers crashed 3 times without a step: the workers ended with exit code 3\n"
            "[rank 0] no such folder: /data"
        )
        assert node.lines[-1].endswith("no such folder: /data")
        assert "no such folder: /data" in json.dumps(run.status())


def test_a_node_that_waits_to_restart_its_workers_says_so_and_ends_with_ctrl_c(tmp_path: Path) -> None:
    with LocalRun(tmp_path, replace(SETTINGS, time_limits="wan")) as run:
        run.start_coordinator()
        metrics = free_address()
        node = run.start_node("a", BROKEN, extra=["--http-listen", metrics])
        node.wait_for_line("restarting them in 15 s", LIMIT_S)
        with urllib.request.urlopen(f"http://{metrics}/metrics", timeout=60) as reply:
            text = reply.read().decode()
        assert "atoll_node_worker_crashes_total 2.0" in text
        (wait_s,) = re.findall(r"^atoll_node_restart_wait_seconds (\S+)$", text, re.MULTILINE)
        assert 0 < float(wait_s) <= 15
        node.interrupt()
        assert node.wait(LIMIT_S) == 0
        assert len(run.journal("a", "WorkersFailed")) == 2, "not started a third time"


def test_ctrl_c_leaves_after_the_sync_under_way(tmp_path: Path) -> None:
    with LocalRun(tmp_path, replace(SETTINGS, steps=1_000_000, time_limits="wan")) as run:
        run.start_coordinator()
        for name in "abc":
            run.start_node(name, SLOW)
        run.wait(committed(2), LIMIT_S)
        run.nodes["c"].interrupt()
        assert run.nodes["c"].wait(LIMIT_S) == 0
        left_at = run.journal("c", "commit")[-1]["commit"]
        run.wait(lambda s: len(s["commits"][-1]["contributors"]) == 2 and committed(left_at + 2)(s), LIMIT_S)
        admin.ask(run.store_path, "stop", reason="the test is over")
        assert run.wait_all(LIMIT_S, ["a", "b"]) == {"a": 0, "b": 0}
        assert_equal_at_the_end(run, ["a", "b"], run.status()["last_commit"])
        lines = run.journal("c", "exit")
        assert lines[-1]["text"] == "Ctrl-C"
        evicted = run.status()["num_evicted"]
        assert evicted == 0, "c said goodbye, it was not missed"


def test_another_model_is_refused_at_the_door(tmp_path: Path) -> None:
    with LocalRun(tmp_path, replace(SETTINGS, min_sites=1, steps=1_000_000)) as run:
        run.start_coordinator()
        run.start_node("a", SLOW)
        run.wait(committed(1), LIMIT_S)
        other = run.start_node("b", [*SLOW, "--tensors", "a=300x41,b=10"])
        assert other.wait(LIMIT_S) != 0
        assert any("refused" in line and "'a'" in line for line in other.lines), other.lines
        assert not any("Traceback" in line for line in other.lines)
        run.nodes["a"].interrupt()
        assert run.wait_all(LIMIT_S, ["a"]) == {"a": 0}


def test_a_loss_that_is_not_finite_ends_the_site_and_not_the_run(tmp_path: Path) -> None:
    with LocalRun(tmp_path, SETTINGS) as run:
        run.start_coordinator()
        run.start_node("a", SLOW)
        run.start_node("b", SLOW)
        run.start_node("c", [*SLOW, "--nan-loss-at", "5"])
        codes = run.wait_all(LIMIT_S)
        assert codes["a"] == codes["b"] == 0
        assert codes["c"] == NonFiniteError.exit_code
        assert_equal_at_the_end(run, ["a", "b"])


def test_a_loss_that_is_not_finite_right_after_a_commit_does_not_end_the_site(tmp_path: Path) -> None:
    """It begins anew, and is in the run at its end. It alone says so, and the run does not go back."""
    with LocalRun(tmp_path, replace(SETTINGS, steps=300)) as run:
        run.start_coordinator()
        run.start_node("a", SLOW)
        run.start_node("b", SLOW)
        odd = run.start_node("c", [*SLOW, "--nan-loss-at", "15"])
        assert run.wait_all(LIMIT_S) == {"a": 0, "b": 0, "c": 0}
        assert any("workers end since commit 1, which may be bad" in line for line in odd.lines), odd.lines
        assert_equal_at_the_end(run, ["a", "b", "c"], commit=30)


def test_parameters_that_are_not_finite_are_refused_by_name(tmp_path: Path) -> None:
    with LocalRun(tmp_path, SETTINGS) as run:
        run.start_coordinator()
        run.start_node("a", SLOW)
        run.start_node("b", SLOW)
        bad = run.start_node("c", [*SLOW, "--nan-at", "20"])
        codes = run.wait_all(LIMIT_S)
        assert (codes["a"], codes["b"]) == (0, 0)
        assert codes["c"] == NonFiniteError.exit_code
        assert any("'a'" in line for line in bad.lines), bad.lines
        assert_equal_at_the_end(run, ["a", "b"])


def test_a_loader_that_ends_leaves_the_run(tmp_path: Path) -> None:
    with LocalRun(tmp_path, replace(SETTINGS, time_limits="wan")) as run:
        run.start_coordinator()
        run.start_node("a", SLOW)
        run.start_node("b", SLOW)
        run.start_node("c", [*SLOW, "--end-at", "25"])
        assert run.wait_all(LIMIT_S) == {"a": 0, "b": 0, "c": 0}
        assert_equal_at_the_end(run, ["a", "b"])
        assert run.status()["num_evicted"] == 0


def test_what_a_script_does_after_the_run_is_waited_for(tmp_path: Path) -> None:
    """a saves a file of its own, c fails at that, and b is not given the time: Ctrl-C."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    train = " ".join(map(shlex.quote, WORKER))
    save = f"{train} && read -r line < {gate} && echo $line > {tmp_path}/"
    with LocalRun(tmp_path, SETTINGS) as run:
        run.start_coordinator()
        run.start_node("c", ["sh", "-c", f"{train} && echo no room && exit 5"])
        for name in "ba":
            run.start_node(name, ["sh", "-c", save + name])
            run.nodes[name].wait_for_line("listening", LIMIT_S)
        for name in "ab":
            run.nodes[name].wait_for_line("waiting at most 600 s for their script", LIMIT_S)
        run.nodes["b"].interrupt()
        assert run.nodes["b"].wait(LIMIT_S) == 0
        gate.write_text("saved\n")
        assert run.wait_all(LIMIT_S) == {"a": 0, "b": 0, "c": 0}
        assert_equal_at_the_end(run, ["a", "b", "c"])
        assert (tmp_path / "a").read_text() == "saved\n"
        assert not (tmp_path / "b").exists()
        c = "\n".join(run.nodes["c"].lines)
        assert "after they had left the run the workers ended with exit code 5\n  | [rank 0] no room" in c


def test_stop_makes_the_sync_under_way_the_last(tmp_path: Path) -> None:
    with LocalRun(tmp_path, replace(SETTINGS, steps=10_000)) as run:
        run.start_coordinator()
        for name in "abc":
            run.start_node(name, SLOW)
        run.wait(committed(2), LIMIT_S)
        stop = run.start("stop", [sys.executable, *GUARDED, "stop", str(run.toml)])
        assert stop.wait(LIMIT_S) == 0, stop.lines
        assert run.wait_all(LIMIT_S) == {"a": 0, "b": 0, "c": 0}
        status = run.status()
        assert_equal_at_the_end(run, ["a", "b", "c"], status["last_commit"])
        held = {(site["last_commit"], site["state_hash"]) for site in status["sites"]}
        assert held == {(status["last_commit"], status["state_hash"])}, "also of those that have left"
        again = run.start("again", [sys.executable, *GUARDED, "stop", str(run.toml)])
        assert again.wait(LIMIT_S) == 0
        assert again.lines == ["nothing to stop: the run is finished: atoll stop"]


def test_a_saved_model_starts_a_new_run(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    with LocalRun(first, replace(SETTINGS, min_sites=1, steps=20)) as run:
        run.start_coordinator()
        run.start_node("a", WORKER)
        assert run.wait_all(LIMIT_S) == {"a": 0}
        saved = run.home("a") / "model"
        parent = run.status()
    with LocalRun(second, replace(SETTINGS, run_id="child", min_sites=2, steps=40)) as run:
        run.start_coordinator(extra=["--resume", str(saved / "manifest.json")])
        run.start_node("b", WORKER)
        run.wait(lambda s: "has to bring the saved model" in s["state"] and s["sites"], LIMIT_S)
        run.start_node("a", WORKER, extra=["--from", str(saved)])
        assert run.wait_all(LIMIT_S) == {"a": 0, "b": 0}
        status = run.status()
        assert status["run_step"] == 40
        assert status["last_commit"] == 2, "20 of the 40 steps were the parent's"
        assert_equal_at_the_end(run, ["a", "b"], 2)
        assert parent["run_step"] == 20


def test_a_node_without_a_coordinator_ends_with_one_line(tmp_path: Path) -> None:
    with LocalRun(tmp_path, SETTINGS) as run:
        run.address = "127.0.0.1:1"
        node = run.start_node("a", WORKER, program=guarded_with("atoll.node.daemon.main.FIRST_CONTACT_S", 1.0))
        assert node.wait(LIMIT_S) != 0
        assert any("no coordinator at 127.0.0.1:1" in line for line in node.lines), node.lines
        assert not any("Traceback" in line for line in node.lines)


def test_two_nodes_cannot_share_a_home(tmp_path: Path) -> None:
    with LocalRun(tmp_path, replace(SETTINGS, min_sites=1, steps=1_000_000)) as run:
        run.start_coordinator()
        first = run.start_node("a", SLOW)
        run.wait(committed(1), LIMIT_S)
        second = run.start_node("a", SLOW)
        assert second.wait(LIMIT_S) == 3
        assert any("is in use by another node" in line for line in second.lines), second.lines
        os.killpg(first.popen.pid, signal.SIGINT)
        assert first.wait(LIMIT_S) == 0
