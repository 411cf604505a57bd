"""Sites that nobody can dial: a relay joins what they dial out, and sees sizes only."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.harness.local_run import LocalRun, Process
from tests.harness.sockets import free_address
from tests.process.test_secured_runs import LIMIT_S, MODEL, SETTINGS

pytestmark = pytest.mark.timeout(150)


def start_relay(run: LocalRun, listen: str = "", *extra: str, prefix: Sequence[str] = ()) -> tuple[Process, str]:
    """The process, and its address; the relay has joined the run."""
    home = run.folder / "hub"
    if not home.exists():
        joining = ["join", str(run.invite("hub", role="relay")), "--home", str(home)]
        assert run.start("join", [*prefix, sys.executable, *run.program, *joining]).wait(LIMIT_S) == 0
    command = ["relay", "--home", str(home), "--listen", listen or free_address(), *extra]
    process = run.start("relay", [*prefix, sys.executable, *run.program, *command])
    return process, process.wait_for_line(r"listening on (\S+)", 30).group(1)


def test_sites_behind_a_relay_finish_a_run(tmp_path: Path) -> None:
    with LocalRun(tmp_path, replace(SETTINGS, steps=300), secured=True) as run:
        run.start_coordinator()
        _, address = start_relay(run)
        for name in "ab":
            run.start_node(name, MODEL, extra=["--relay", address])
        assert run.wait_all(LIMIT_S) == {"a": 0, "b": 0}
        last = run.status()["last_commit"]
        assert last == 20
        assert len(set(run.hashes(last).values())) == 1
