"""The demo's processes: started with their output in files, ended together, none left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

GRACE_S = 5.0  # after each signal on the way down; less than a person's patience
TAIL_LINES = 15
TAIL_BYTES = 1 << 16

# The child is told to leave when the demo dies in whatever way. PR_SET_PDEATHSIG is 1.
_WITH_PARENT = (
    "import ctypes, os, signal, sys; ctypes.CDLL(None).prctl(1, signal.SIGTERM); "
    "os.getppid() == int(sys.argv[1]) or sys.exit(1); os.execv(sys.argv[2], sys.argv[2:])"
)


def crashes_in(log_path: Path) -> int:
    """How often a node's log says that its workers crashed; the status may hear of it later than a short run ends."""
    if not log_path.exists():
        return 0
    with log_path.open("rb") as file:
        return sum(line.startswith((b"workers crashed, ", b"workers end ")) for line in file)


@dataclass(slots=True)
class Child:
    name: str
    process: subprocess.Popen[bytes]
    log_path: Path
    killed: bool = False

    @property
    def exit_code(self) -> int | None:
        return self.process.poll()

    def kill(self) -> None:
        """kill -9, and nothing else: what follows is the system under test's affair."""
        self.killed = True
        self.process.kill()
        self.process.wait()

    def tail(self) -> list[str]:
        """The last lines of its output."""
        with self.log_path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - TAIL_BYTES))
            return file.read().decode(errors="replace").splitlines()[-TAIL_LINES:]


class Processes:
    """Use as a context manager: leaving it ends every process that is still there, the first one last."""

    def __init__(self, log_folder: Path, environment: Mapping[str, str], grace_s: float = GRACE_S) -> None:
        self._log_folder = log_folder
        self._environment = dict(environment)
        self._grace_s = grace_s
        self.children: dict[str, Child] = {}

    def start(self, name: str, command: Sequence[str]) -> Child:
        """Starts `command` in a session of its own, so that the terminal's Ctrl-C reaches the demo alone."""
        log_path = self._log_folder / f"{name}.log"
        words = [sys.executable, "-S", "-E", "-c", _WITH_PARENT, str(os.getpid()), *command]
        with log_path.open("ab") as log:
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
            )
        child = Child(name, process, log_path)
        self.children[name] = child
        return child

    def stop(self, names: Sequence[str]) -> None:
        """SIGTERM (leave properly), SIGTERM again (at once), SIGKILL."""
        children = [self.children[name] for name in names]
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
            running = [child for child in children if child.exit_code is None]
            for child in running:
                child.process.send_signal(number)
            deadline = time.monotonic() + self._grace_s
            for child in running:
                try:
                    child.process.wait(timeout=max(0.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    continue
            if all(child.exit_code is not None for child in children):
                return

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *exc: object) -> None:
        names = list(self.children)
        self.stop(names[1:])
        self.stop(names[:1])
