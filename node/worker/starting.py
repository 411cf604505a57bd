"""A script that takes long before it joins says so: the node shows it, and waits as long."""

from __future__ import annotations

import math

from atoll.node.worker.connection import connect
from atoll.protocol.errors import ConfigError

DEFAULT_LIMIT_S = 3600.0


def starting(what: str, limit_s: float = DEFAULT_LIMIT_S) -> None:
    """Say that this process makes ready, before `atoll.join`: `atoll.starting("loading weights", limit_s=7200)`.

    The run's status shows `what`, and silence is no hang for `limit_s` seconds from here on; the coordinator allows
    `run.max_busy_s` at most. It may be said again, with something else; `atoll.join` ends it. Without a node it does
    nothing. Raises ConfigError for a limit that is none, WorkerError if the node is gone.
    """
    if not what:
        raise ConfigError('atoll.starting got no word for what it does; say one, as atoll.starting("loading")')
    if not 0 <= limit_s < math.inf:
        raise ConfigError(f"atoll.starting got limit_s = {limit_s}; give the seconds after which it must be over")
    connection = connect()
    if connection is not None:
        connection.is_starting = True
        connection.client.busy(what, limit_s)
