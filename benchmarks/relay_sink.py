"""The site that is called in `benchmarks relay`: takes frames, at a port of its own and attached to a relay.

Reads from standard input, as JSON: `shown` (roots, certificate, key as PEM) and `relay`; prints its port.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc

from atoll.node.relay.client import RelayClient
from atoll.protocol import transport
from atoll.protocol.trust.security import MutualTls, Shown
from tests.harness.relaying import until

SERVICE, METHOD = "atoll.benchmarks.Sink", "Take"


async def take(frames: AsyncIterator[bytes], context: Any) -> bytes:
    num_bytes = 0
    async for frame in frames:
        num_bytes += len(frame)
    return str(num_bytes).encode()


async def serve() -> None:
    told = json.loads(sys.stdin.readline())
    security = MutualTls(told["run_id"], Shown(*(told["shown"][name].encode() for name in Shown.__annotations__)))
    server = transport.create_server(max_message_bytes=2 * transport.MAX_FRAME_BYTES)
    handlers: dict[str, Any] = {METHOD: grpc.stream_unary_rpc_method_handler(take)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    port = transport.bind(server, "127.0.0.1:0", security.of_server())
    await server.start()
    relays = RelayClient(security)
    attached = relays.attach(told["relay"], 1, f"127.0.0.1:{port}")
    await until(lambda: attached.is_attached)
    print(port, flush=True)
    await asyncio.to_thread(sys.stdin.readline)  # until whoever started this ends
    await server.stop(None)
    relays.close()


if __name__ == "__main__":
    asyncio.run(serve())
