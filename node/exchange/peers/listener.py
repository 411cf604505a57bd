"""Where peers reach this node. Beside the dialer nothing else knows credentials."""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio

from atoll.node.exchange.peers.rpc import SERVICE
from atoll.protocol import transport
from atoll.protocol.machine import Network


class Listener:
    def __init__(
        self,
        credentials: grpc.ServerCredentials | None,
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]],
        network: Network = transport,
        *,
        max_connections: int = transport.MAX_CONNECTIONS,
        idle_limit_s: float = transport.IDLE_LIMIT_S,
    ) -> None:
        """`handlers`: of PeerService's methods, by name."""
        self._credentials = credentials
        self._server = network.create_server(
            max_message_bytes=transport.MAX_FRAME_BYTES, max_connections=max_connections, idle_limit_s=idle_limit_s
        )
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))

    async def start(self, address: str) -> int:
        """The port. Raises ConfigError for what is not an address, HostError if it cannot be had."""
        port = transport.bind(self._server, address, self._credentials)
        await self._server.start()
        return port

    async def stop(self, grace_s: float) -> None:
        await self._server.stop(grace_s)
