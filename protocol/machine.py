"""The machine under a process: what the asyncio shells of node and coordinator ask it for. `main` passes it in; pure
cores ask it for nothing.

Monotonic time and threads are not here: both are those of the event loop that a shell runs in.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Protocol

import grpc.aio

from atoll.protocol import transport
from atoll.protocol.disk import Disk
from atoll.protocol.resources import Resources, measure


class Network(Protocol):
    """Channels and servers, as the module `transport` makes them."""

    def open_channel(
        self, address: str, *, handshake: transport.Handshake | None, max_message_bytes: int
    ) -> grpc.aio.Channel: ...

    def create_server(
        self,
        *,
        max_message_bytes: int,
        max_received_bytes: int | None = None,
        max_connections: int = ...,
        max_calls_each: int = ...,
        idle_limit_s: float = ...,
    ) -> grpc.aio.Server: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    wall_time: Callable[[], float] = time.time
    """In seconds since 1970, for people to read; no machine compares it with another's."""
    token_bytes: Callable[[int], bytes] = secrets.token_bytes
    """For keys."""
    random: Random = field(default_factory=Random)
    """For waits that many processes must not begin together; never for keys."""
    network: Network = transport
    proxy: str = ""
    """HOST:PORT of the HTTP proxy through which `network` dials; empty without one."""
    disk: Disk = field(default_factory=Disk)
    resources: Callable[[Path], Resources] = measure
    """Of this process and of a folder's disk, for people."""

    @classmethod
    def through(cls, proxy: str) -> Machine:
        """This machine, which dials through that HTTP proxy (HOST:PORT), if one is named."""
        return cls(network=transport.Proxied(proxy), proxy=proxy) if proxy else cls()


REAL = Machine()
"""The one that this process runs on."""
