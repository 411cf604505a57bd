"""Where the `atoll` command begins; also `python -m atoll`."""

from __future__ import annotations

import signal
import sys


def run() -> int:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while modules load ends the process without a traceback
    from atoll.cli.main import main

    signal.signal(signal.SIGINT, signal.default_int_handler)
    return main()


if __name__ == "__main__":
    sys.exit(run())
