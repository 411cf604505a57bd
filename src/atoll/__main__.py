"""Where the `atoll` command begins; also `python -m atoll`."""

from __future__ import annotations

import signal
import sys


def run() -> int:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while modules load ends the process without a traceback
    from atoll.protocol.loading import nothing_is_garbage

    with nothing_is_garbage():
        from atoll.cli.main import main
        from atoll.protocol.exit_codes import ENDED_AT_ONCE
        from atoll.protocol.signals import end_process

    signal.signal(signal.SIGINT, signal.default_int_handler)
    code = main()
    if code == ENDED_AT_ONCE:
        end_process(code)  # Python would wait for threads, and one in an fsync on a stuck disk never ends
    return code


if __name__ == "__main__":
    sys.exit(run())
