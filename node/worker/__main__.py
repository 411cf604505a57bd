"""`python -m atoll.node.worker`: a rank of the built-in trainer, which `atoll node` starts."""

from __future__ import annotations

from atoll.protocol.loading import nothing_is_garbage

if __name__ == "__main__":
    with nothing_is_garbage():
        from atoll.node.worker.trainer import main

    main()
