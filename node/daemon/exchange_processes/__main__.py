"""`python -m atoll.node.daemon.exchange_processes FD`: one exchange process, which its node starts."""

from __future__ import annotations

import sys

from atoll.protocol.loading import nothing_is_garbage

if __name__ == "__main__":
    with nothing_is_garbage():
        from atoll.node.daemon.exchange_processes.process import main

    main(sys.argv[1:])
