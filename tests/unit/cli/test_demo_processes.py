"""The demo's processes, with small scripts in the place of coordinator and nodes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from atoll.cli import demo_run, demo_setup
from atoll.cli.config import load_run
from atoll.cli.demo import DemoOptions
from atoll.cli.demo_processes import Processes, crashes_in
from atoll.cli.demo_run import Demo, wait_until_listening
from atoll.cli.main import main
from atoll.protocol.errors import ConfigError, WorkerError
from atoll.protocol.settings import RunSettings
from atoll.protocol.sync_settings import SyncSettings
from tests.harness.coordinator_story import Story, some_settings

STUBBORN = """
import signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
while True: time.sleep(1)
"""
POLITE = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *a: sys.exit(0))
print("ready", flush=True)
while True: time.sleep(1)
"""
LIMIT_S = 60.0


def test_crashes_of_workers_are_counted_in_a_nodes_log(tmp_path: Path) -> None:
    log = tmp_path / "berlin.log"
    assert crashes_in(log) == 0
    crash = (
        "workers crashed, restarting them from the outer state: the workers ended with exit code 1\n  | [rank 0] x\n"
    )
    log.write_text(
        f"training\n{crash}commit 1: step 20\n{crash}  | workers crashed, x\nworkers end since commit 3, x\n"
    )
    assert crashes_in(log) == 3


def script(text: str) -> list[str]:
    return [sys.executable, "-c", text]


def wait_for_line(path: Path, text: str) -> None:
    """A whole one: its end is a write of its own where a process does not buffer what it prints."""
    deadline = time.monotonic() + LIMIT_S
    while f"{text}\n" not in (path.read_text() if path.exists() else ""):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the second, where it is gone as it is read
        return False


def test_nothing_is_left_running(tmp_path: Path) -> None:
    for name, text, grace_s, expected in (
        ("polite", POLITE, LIMIT_S, 0),
        ("stubborn", STUBBORN, 0.2, -signal.SIGKILL),
    ):
        with Processes(tmp_path, os.environ, grace_s=grace_s) as processes:
            child = processes.start(name, script(text))
            wait_for_line(child.log_path, "ready")
        assert child.exit_code == expected


def test_they_end_with_a_demo_that_is_killed(tmp_path: Path) -> None:
    code = f"""
import os, pathlib, time
from atoll.cli.demo_processes import Processes
processes = Processes(pathlib.Path({str(tmp_path)!r}), os.environ)
child = processes.start("polite", {script(POLITE)!r})
print(child.process.pid, flush=True)
time.sleep(60)
"""
    with subprocess.Popen(script(code), stdout=subprocess.PIPE, text=True) as demo:
        assert demo.stdout is not None
        pid = int(demo.stdout.readline())
        wait_for_line(tmp_path / "polite.log", "ready")
        demo.kill()
    deadline = time.monotonic() + LIMIT_S
    while is_running(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_process_that_was_killed_can_be_started_again(tmp_path: Path) -> None:
    with Processes(tmp_path, os.environ) as processes:
        first = processes.start("a", script(POLITE))
        wait_for_line(first.log_path, "ready")
        first.kill()
        assert (first.exit_code, first.killed) == (-signal.SIGKILL, True)
        second = processes.start("a", script("print('again')"))
        assert second.process.wait(LIMIT_S) == 0
        assert not second.killed
        assert second.tail() == ["ready", "again"]  # one log for both


def test_the_page_is_found_in_what_the_coordinator_prints(tmp_path: Path) -> None:
    line = "run x: listening on 127.0.0.1:4711 (status page http://127.0.0.1:4712/)"
    with Processes(tmp_path, os.environ) as processes:
        child = processes.start("coordinator", script(f"import time; print({line!r}, flush=True); time.sleep(60)"))
        assert wait_until_listening(child) == "http://127.0.0.1:4712/"


def test_a_coordinator_that_ends_at_once_is_an_error(tmp_path: Path) -> None:
    with Processes(tmp_path, os.environ) as processes:
        child = processes.start("coordinator", script("import sys; sys.exit('no good')"))
        with pytest.raises(WorkerError, match="exit code 1 before it listened"):
            wait_until_listening(child)


def test_the_last_lines_of_the_guilty_one_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = "listening on 127.0.0.1:1"
    coordinator = script(f"import time; print({line!r}, flush=True); time.sleep(60)")
    node = script("import sys; sys.exit('the disk is on fire')")
    monkeypatch.setattr(demo_setup, "coordinator_command", lambda folder: coordinator)
    monkeypatch.setattr(demo_setup, "node_command", lambda *args: node)
    status = json.loads(json.dumps(asdict(Story(some_settings()).view)))
    monkeypatch.setattr(demo_setup, "let_in", lambda folder, name: None)
    monkeypatch.setattr(demo_run, "local_status", lambda store_path: status)
    folder = tmp_path / "demo"
    with pytest.raises(WorkerError, match="site amsterdam ended with exit code 1"):
        Demo(DemoOptions(num_sites=1, keep=folder)).run()
    assert "the disk is on fire" in capsys.readouterr().err
    assert (folder / "logs" / "amsterdam.log").exists()


@pytest.mark.parametrize(
    ("sync", "steps", "expected"),
    [
        ({"every": 20}, 300, 15),
        ({"every": 20}, 301, 16),
        ({"every": 10, "fragments": 3}, 20, 6),
        ({"every": 10, "fragments": 3}, 17, 6),
        ({"every": 1, "strategy": "gradient"}, 30, 30),
        ({"every": 1, "strategy": "momentum", "warmup_commits": 4, "local_doubling": 2}, 10, 8),  # 2 and 2 at the end
    ],
)
def test_as_many_commits_are_expected_as_there_are_windows(sync: dict[str, Any], steps: int, expected: int) -> None:
    settings = RunSettings(run_id="r", steps=steps, sync=SyncSettings(**sync))
    assert demo_setup.expected_commits(settings) == expected


def test_the_run_file_of_the_demo_is_one_of_run_toml(tmp_path: Path) -> None:
    settings = demo_setup.demo_settings(DemoOptions(num_sites=2, model="small", codec="bf16", seed=9))
    path = tmp_path / "run.toml"
    demo_setup.write_run_file(settings, path)
    loaded, coordinator = load_run(path, store_path=tmp_path / "run.db")
    assert asdict(loaded) == asdict(settings)
    assert coordinator.listen == "127.0.0.1:0"
    assert (settings.min_sites, settings.time_limits) == (2, "local")


def test_a_refusal_of_the_demo_names_the_command_once_and_what_it_can_choose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["demo", "--preset", "streaming", "--sync-every", "3", "--steps", "20"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("atoll demo: the demo's run: sync.overlap_steps = 5 is more than sync.every = 3")
    assert said.endswith("is of preset streaming: choose --sync-every 5 or more, or another preset)\n")
    assert said.count("atoll demo:") == 1


def test_a_folder_of_somebody_else_is_not_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "atoll-demo"
    folder.mkdir()
    (folder / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="no demo to replace"):
        demo_setup.prepare_folder(None)
    with pytest.raises(ConfigError, match="is there, and no demo"):
        demo_setup.prepare_folder(folder)
    assert (folder / "thesis.txt").exists()


def test_the_last_demo_is_replaced_unless_it_is_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = demo_setup.prepare_folder(None)
    (folder / "old").touch()
    assert demo_setup.prepare_folder(None) == folder
    assert not (folder / "old").exists()
    waits = "from atoll.cli import demo_setup; demo_setup.prepare_folder(None); print(flush=True); input()"
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    with subprocess.Popen(script(waits), stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(ConfigError, match="is using"):
            demo_setup.prepare_folder(None)
        other.kill()
    demo_setup.prepare_folder(None)


def test_names_are_distinct() -> None:
    names = demo_setup.site_names(64)
    assert len(set(names)) == 64
    assert demo_run.LISTENING.search("listening on [::1]:7700 (status page http://[::1]:1/)")
