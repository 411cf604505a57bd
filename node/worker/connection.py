"""This process's connection to its node: made once, before the model is built, and told why the process ends."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from dataclasses import dataclass
from types import TracebackType

from atoll.node.local_protocol import ENV_SOCKET, FATAL_KINDS, Greeting
from atoll.node.worker.client import LocalClient
from atoll.protocol.errors import AtollError, ConfigError, RefusedError
from atoll.protocol.settings import RunSettings, settings_from_json


@dataclass(slots=True)
class Connection:
    client: LocalClient
    greeting: Greeting
    settings: RunSettings
    rank: int
    world: int
    told: bool = False
    is_starting: bool = False
    """It has announced that it takes long before it joins."""

    def tell(self, error: BaseException) -> None:
        """Say to the node that this rank ends for good, if `error` means that; anything else is a crash."""
        kind = next((kind for kind, cls in FATAL_KINDS.items() if isinstance(error, cls)), None)
        if kind is None or self.told:
            return
        self.told = True
        try:
            self.client.fatal(kind, str(error))
        except AtollError:
            pass  # the node refused this rank or is gone: it needs no reason from us


_connection: Connection | None = None
_left = ""  # the node's socket, once this rank has left


def connect() -> Connection | None:
    """The connection of this process, made at the first call; None if it was not started by a node.

    Raises WorkerError if the node is gone, RefusedError if it does not want this process, ConfigError if this process
    has left it.
    """
    global _connection  # noqa: PLW0603 one process is one rank
    if _connection is not None:
        return _connection
    if _left and _left == os.environ.get(ENV_SOCKET):
        raise ConfigError(
            "this process has left its run: a script joins once, with all that it trains; what comes later is a run "
            "and a node of its own"
        )
    client = LocalClient.from_environment()
    if client is None:
        return None
    rank, world = rank_and_world()
    greeting = client.hello(world)
    try:
        settings = settings_from_json(greeting.settings_json)
    except RefusedError as error:
        client.fatal("refused", str(error))  # another version of atoll: a restart would not cure it
        raise
    _connection = Connection(client, greeting, settings, rank, world)
    atexit.register(gc.freeze)  # Python looks for garbage as it ends: with torch loaded that takes a second
    show_errors_in_one_line()
    return _connection


def disconnect() -> None:
    """Close it; a later `connect` is refused, as this rank has left."""
    global _connection, _left
    if _connection is not None:
        _connection.client.close()
        _connection, _left = None, os.environ.get(ENV_SOCKET, "")


def rank_and_world() -> tuple[int, int]:
    """From the environment, as the node or torchrun sets it; one rank without it."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def ranks_here() -> range:
    """Of this host, as the node or torchrun sets it; all of them without it."""
    rank, world = rank_and_world()
    first = rank - int(os.environ.get("LOCAL_RANK", str(rank)))
    return range(first, first + int(os.environ.get("LOCAL_WORLD_SIZE", str(world))))


def show_errors_in_one_line() -> None:
    """Errors that atoll raises on purpose end the process with one line; ATOLL_WORKER_DEBUG=1 shows tracebacks."""
    previous = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, AtollError) and not os.environ.get("ATOLL_WORKER_DEBUG"):
            sys.stderr.write(f"atoll: {error}\n")
        else:
            previous(kind, error, trace)

    sys.excepthook = show
