"""docs/two-clouds.md, as a person would type it: each command of atoll in the order of the page, on one machine."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.harness.chaos import SETTINGS
from tests.harness.local_run import LocalRun, Process
from tests.harness.pages import typed_on
from tests.harness.sockets import free_address

PAGE = Path(__file__).parents[2] / "docs" / "two-clouds.md"
ATOLL = Path(sys.executable).with_name("atoll")
NOT_RUN = ("python3 -m venv", "~/venv/bin/pip install", "export PATH", "scp hub.example:")
IN_SMALL = {"--model small": "--model nano", "--steps 20000": "--steps 4", "--sync-every 100": "--sync-every 2"}
"""What the test types instead."""
LIMIT_S = 150.0

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]  # a minute: torch is imported six times


class Machines:
    """All of the page, below one folder: each has a home directory of its own, and files that are copied are there."""

    def __init__(self, run: LocalRun) -> None:
        self._run, self._folder = run, run.folder
        self._hub, self._sites = free_address(), {name: free_address() for name in ("north", "south")}
        self.serving: dict[str, Process] = {}

    def here(self, machine: str, command: str) -> str:
        """The command as it is typed in the test."""
        home = self._folder / machine
        for text, instead in IN_SMALL.items():
            command = command.replace(text, instead)
        command = command.replace("0.0.0.0:7700", self._hub).replace("hub.example:7700", self._hub)
        if machine in self._sites:
            for listens in ("0.0.0.0:7800", f"{machine}.example:7800"):
                command = command.replace(listens, self._sites[machine])
        assert ".example" not in command
        return command.replace("~", str(home))

    def type(self, machine: str, command: str) -> None:
        """Waits for its end, or, of what serves, until it does."""
        home = self._folder / machine
        (home / "texts").mkdir(parents=True, exist_ok=True)
        (home / "texts" / "all.txt").write_text("The quick brown fox jumps over the lazy dog.\n" * 1000)
        words = shlex.split(self.here(machine, command))[1:]
        environment = {"HOME": str(home), "XDG_STATE_HOME": str(home / "state")}
        name = f"{machine}-{words[0]}-{len(self._run.processes)}"
        process = self._run.start(name, ["env", "-C", str(self._folder), str(ATOLL), *words], environment)
        if words[0] == "coordinator":
            process.wait_for_line("listening on", LIMIT_S)
        elif words[0] == "node" and "--dry-run" not in words:
            process.wait_for_line("listening for peers", LIMIT_S)
        else:
            assert process.wait(LIMIT_S) == 0, f"{machine}$ {command}\n" + "\n".join(process.lines)
            return
        self.serving[machine] = process


def test_every_command_of_the_page_does_what_it_says(tmp_path: Path) -> None:
    commands = [line for line in typed_on(PAGE) if not line[1].startswith(NOT_RUN)]
    assert all(command.startswith("atoll ") for _, command in commands)
    for text in IN_SMALL:
        assert sum(text in command for _, command in commands) == 1, text
    with LocalRun(tmp_path, SETTINGS) as run:
        run.toml.unlink()
        machines = Machines(run)
        for machine, command in commands:
            if command.startswith("atoll sample"):  # the run is to be over
                assert machines.serving["north"].wait(LIMIT_S) == 0
                assert machines.serving["south"].wait(LIMIT_S) == 0
            machines.type(machine, command)
            if command.startswith("atoll init"):
                toml = re.sub(r'^http_listen = ".*"$', 'http_listen = ""', run.toml.read_text(), flags=re.MULTILINE)
                run.toml.write_text(toml)
        assert any("commit 2: step 4" in line for line in machines.serving["south"].lines)
