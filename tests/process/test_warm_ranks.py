"""The harness starts ranks as forks of a process that has imported torch; they are like any other rank."""

from __future__ import annotations

import json
import os
import select
import sys
from pathlib import Path
from typing import Any

from atoll.protocol.settings import RunSettings
from tests.harness.chaos import command_line
from tests.harness.local_run import LocalRun
from tests.harness.warm_ranks import BESIDE_A_NODE

LIMIT_S = 60.0
EXECUTED = "TORCH_TESTS_WANT_EXEC"
"""A variable that the process which is forked has not."""
SHOWS_ITSELF = str(Path(__file__).parents[1] / "workers" / "shows_itself.py")


def shown(folder: Path, environment: dict[str, str]) -> dict[str, Any]:
    """By a rank of a node with these variables."""
    folder.mkdir()
    with LocalRun(folder, RunSettings(run_id="run")) as run:
        run.start_coordinator()
        node = run.start_node("a", [sys.executable, SHOWS_ITSELF, "word"], environment=environment)
        found = node.wait_for_line(r'\[rank 0\] (?P<json>\{"argv": .*\})$', LIMIT_S)
        node.wait_for_line("the workers ended with exit code 3", LIMIT_S)
        shown: dict[str, Any] = json.loads(found["json"])
    return shown


def test_a_fork_is_like_a_rank_that_is_executed(tmp_path: Path) -> None:
    """But for torch, which it has."""
    fork = shown(tmp_path / "fork", {})
    executed = shown(tmp_path / "executed", {EXECUTED: "1"})
    assert fork.pop("has torch")
    assert not executed.pop("has torch")
    assert set(executed["names"]) - set(fork["names"]) <= {EXECUTED}
    assert fork["command"] == [sys.executable, SHOWS_ITSELF, "word"]
    assert fork["variables"], "/proc has its own"
    for what in fork.keys() - {"names", "folder"}:
        assert fork[what] == executed[what], what


def test_what_waits_beside_a_node_ends_with_it(tmp_path: Path) -> None:
    with LocalRun(tmp_path, RunSettings(run_id="run")) as run:
        run.start_coordinator()
        node = run.start_node("a", [sys.executable, "-c", "import signal; signal.pause()"])
        node.wait_for_line(r"\S", LIMIT_S)
        children = Path(f"/proc/{node.popen.pid}/task/{node.popen.pid}/children").read_text().split()
        (waits,) = [int(child) for child in children if command_line(int(child))[: len(BESIDE_A_NODE)] == BESIDE_A_NODE]
        end = os.pidfd_open(waits)
        node.kill()
        assert select.select([end], [], [], LIMIT_S)[0]
        os.close(end)
