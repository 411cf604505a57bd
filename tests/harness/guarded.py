"""`python -m tests.harness.guarded VERB ...`: the `atoll` command with the guard of event loops (`loop_guard`).

What blocks a loop ends the process. The harness starts coordinators and nodes so.
"""

from __future__ import annotations

import sys

from tests.harness import loop_guard

if __name__ == "__main__":
    from atoll.__main__ import run

    loop_guard.install(coordinator="coordinator" in sys.argv, node="node" in sys.argv, ends_process=True)
    sys.exit(run())
