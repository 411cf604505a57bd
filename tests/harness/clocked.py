"""`python -m tests.harness.clocked FILE node ...`: the `atoll` command, whose node reads the wall clock in FILE, in
seconds since 1970, where a test sets it."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from atoll.node.daemon import main, time_off
from atoll.protocol.machine import Machine


def run() -> int:
    """The exit code."""
    from atoll.__main__ import run as run_command

    file = Path(sys.argv.pop(1))
    main.FIRST_CONTACT_S, time_off.LOOK_EVERY_S = 1.0, 0.2
    through = Machine.through

    def clocked(proxy: str) -> Machine:
        return replace(through(proxy), wall_time=lambda: float(file.read_text()))

    setattr(Machine, through.__name__, clocked)
    return run_command()


if __name__ == "__main__":
    sys.exit(run())
