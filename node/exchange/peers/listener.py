"""Where peers reach this node."""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio

from atoll.node.exchange.peers.rpc import SERVICE
from atoll.node.limits import CallsOfSites
from atoll.protocol import transport
from atoll.protocol.machine import Network
from atoll.protocol.trust.access import guarded
from atoll.protocol.trust.security import PLAIN, Security


async def listen(
    address: str,
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]],
    network: Network = transport,
    *,
    security: Security = PLAIN,
    max_connections: int = transport.MAX_CONNECTIONS,
    idle_limit_s: float = transport.IDLE_LIMIT_S,
) -> tuple[grpc.aio.Server, int]:
    """The server that answers, and its port. `handlers`: of PeerService's methods, by name.

    Raises ConfigError for what is not an address, HostError if it cannot be had.
    """
    server = network.create_server(
        max_message_bytes=transport.MAX_FRAME_BYTES, max_connections=max_connections, idle_limit_s=idle_limit_s
    )
    allowed = guarded(SERVICE, handlers, security, let_in=CallsOfSites().let_in)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, allowed),))
    port = transport.bind(server, address, security.of_server())
    await server.start()
    return server, port
