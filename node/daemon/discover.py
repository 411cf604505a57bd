"""Which run is behind an address: asked once, before the node has a home folder or an identity."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Sequence

import grpc

from atoll.protocol import addresses, transport
from atoll.protocol.errors import HostError, InvalidMessage, PeerError
from atoll.protocol.machine import Network
from atoll.protocol.settings import RunSettings, settings_from_json
from atoll.protocol.status import from_rpc_error
from atoll.protocol.v1 import session_pb2, session_pb2_grpc

log = logging.getLogger(__name__)

RETRY_S = 0.5


async def discover(
    coordinators: Sequence[str],
    handshake: transport.Handshake | None,
    wait_s: float,
    network: Network = transport,
) -> tuple[RunSettings, str]:
    """The run of the coordinator, which may still be starting, and the first of its addresses, `coordinators`, that
    answers. Raises PeerError after `wait_s`; ConfigError or RefusedError at once."""
    deadline, told, problem = asyncio.get_running_loop().time() + wait_s, False, ""
    while True:
        for address in coordinators:
            left_s = deadline - asyncio.get_running_loop().time()
            try:
                return await _asked(address, handshake, max(min(left_s, 2.0), RETRY_S), network), address
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.PERMISSION_DENIED:
                    raise from_rpc_error(error, f"the coordinator at {address}") from None
                problem = error.details() or error.code().name
        where = " or ".join(coordinators)
        if deadline - asyncio.get_running_loop().time() <= RETRY_S:
            raise PeerError(
                f"no coordinator at {where} ({problem}); start it with `atoll coordinator run.toml`, or check "
                "--coordinator HOST:PORT; where one of the two is in plain text (--insecure), the other must be"
            )
        if not told:
            log.warning("no coordinator at %s yet; waiting up to %.0f s", where, wait_s)
            told = True
        await asyncio.sleep(RETRY_S)


async def _asked(address: str, handshake: transport.Handshake | None, limit_s: float, network: Network) -> RunSettings:
    channel = network.open_channel(address, handshake=handshake, max_message_bytes=transport.MAX_SESSION_MESSAGE_BYTES)
    try:
        stub = session_pb2_grpc.CoordinatorServiceStub(channel)
        reply = await stub.Status(session_pb2.StatusRequest(), timeout=limit_s)
        return settings_in(reply.json, address)
    finally:
        await channel.close()


def settings_in(text: str, address: str) -> RunSettings:
    """The run's settings in the status that came from `address`. Raises InvalidMessage if it is none."""
    try:
        settings = json.dumps(json.loads(text)["settings"])
    except (ValueError, KeyError, TypeError, RecursionError):
        raise InvalidMessage(f"{address} answers, but not as an atoll coordinator of this version") from None
    return settings_from_json(settings)


def local_address_towards(address: str) -> str:
    """The local IP address of a connection to `address`. Raises HostError if there is no route or name. In a thread: a
    name may be looked up for many seconds."""
    host, port = addresses.parse_address(address)
    try:
        family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise HostError(f"no route to {address}: {error.strerror}") from None
    except UnicodeError:
        raise HostError(f"no route to {address}: {host!r} is no name of a machine") from None


def address_for_peers(listen: str, port: int, coordinator: str) -> str:
    """What peers are told of a node that listens on `listen`: for all addresses, the one towards the coordinator. In a
    thread, as that."""
    host, _ = addresses.parse_address(listen)
    if host in ("0.0.0.0", "::"):
        host = local_address_towards(coordinator)
    return addresses.join_address(host, port)
