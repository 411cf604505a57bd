"""The harness starts commands as forks of one process; they are like any other process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from atoll.protocol.settings import RunSettings
from tests.harness.local_run import GUARDED, LocalRun, Process
from tests.harness.warm_start import Forked, WarmStart, warm_start

Begin = Callable[..., Process]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    processes: list[Process] = []

    def begin(*arguments: str, environment: dict[str, str] | None = None) -> Process:
        processes.append(Process("it", [sys.executable, *GUARDED, *arguments], tmp_path, environment or {}))
        return processes[-1]

    yield begin
    for process in processes:
        process.end()


def test_a_fork_says_the_same_as_the_command(begin: Begin) -> None:
    process = begin("status", "--help")
    assert process.wait(60) == 0
    command = [sys.executable, "-m", "atoll", "status", "--help"]
    found = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True)
    assert process.lines == [line.rstrip() for line in found.stdout.splitlines()]


def test_its_exit_code_is_the_commands(begin: Begin) -> None:
    process = begin("node", "--coordinator", "127.0.0.1:1", "--name", "a", "--no-such-option")
    assert process.wait(60) == 2
    assert process.popen.poll() == process.popen.returncode == 2
    assert "--no-such-option" in process.lines[-1]


def test_it_hears_signals_and_has_a_session_and_descriptors_of_its_own(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    with LocalRun(folders[0], RunSettings(run_id="a")) as a, LocalRun(folders[1], RunSettings(run_id="b")) as b:
        first, second = a.start_coordinator(), b.start_coordinator()
        for process in (first, second):
            pid = process.popen.pid
            assert isinstance(process.popen, Forked)
            assert os.getsid(pid) == pid
            assert os.readlink(f"/proc/{pid}/fd/0") == os.devnull
            names = [os.readlink(f"/proc/{pid}/fd/{number}") for number in (1, 2)]
            assert names[0] == names[1]
        assert os.readlink(f"/proc/{first.popen.pid}/fd/1") != os.readlink(f"/proc/{second.popen.pid}/fd/1")
        first.popen.kill()
        assert first.wait(60) == -signal.SIGKILL
        with pytest.raises(subprocess.TimeoutExpired):
            second.popen.wait(0.0)
        second.popen.terminate()
        assert second.wait(60) == 0
        second.popen.send_signal(signal.SIGKILL)  # it is not there any more


def test_variables_that_libraries_read_as_they_are_imported_are_seen(begin: Begin) -> None:
    process = begin("status", "--help", environment={"NUMBA_CPU_NAME": "generic"})
    assert not isinstance(process.popen, Forked)
    assert process.wait(60) == 0
    assert warm_start().fits(os.environ)
    assert not warm_start().fits({**os.environ, "NUMBA_CPU_NAME": "generic"})


def test_a_process_that_is_forked_no_more_is_an_error_and_not_a_wait() -> None:
    server = WarmStart()
    server._server.kill()
    server._server.wait()
    with pytest.raises((AssertionError, BrokenPipeError)):
        server.start(["status", "--help"], os.environ)
