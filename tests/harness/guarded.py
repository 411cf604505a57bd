"""`python -m tests.harness.guarded VERB ...`: the `atoll` command with the guard of event loops (`loop_guard`).

What blocks a loop ends the process. The harness starts coordinators and nodes so.
"""

from __future__ import annotations

import sys

from tests.harness import loop_guard, namespace


def run() -> int:
    """The exit code."""
    from atoll.__main__ import run as run_command

    namespace.enter_if_told()
    loop_guard.install(coordinator="coordinator" in sys.argv, node="node" in sys.argv, ends_process=True)
    return run_command()


if __name__ == "__main__":
    sys.exit(run())
