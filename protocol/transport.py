"""Where every gRPC channel and server is made: message bounds, keepalive, reconnecting, flow-control windows."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
import grpc.aio

from atoll.protocol.addresses import HERE, parse_address
from atoll.protocol.errors import HostError

MAX_FRAME_BYTES = 1 << 20
"""Bound on one message between nodes."""
MAX_SESSION_MESSAGE_BYTES = 32 << 20
"""Bound on one message from the coordinator to a node; the ranges of samples of many sites are the largest."""

MAX_CONNECTIONS = 256
"""Of a server that says no other bound."""
HANDSHAKE_LIMIT_MS = 10_000
CALLS_WAIT_LIMIT_S = 600
"""A call that waits longer for a busy server to take it is cancelled; by default after 30 s, which a crowd takes on a
busy machine. A caller that gives up takes its call back."""
MAX_CALLS_EACH = 64
"""At once on one connection of a server that says no other bound, by far more than nodes need; the next one waits at
the caller or is refused."""
IDLE_LIMIT_S = 60.0
"""For a connection without a call; who closes it early costs the next call a connection."""

NO_PROXY = "no_grpc_proxy"
"""grpc's own variable, before no_proxy."""
LAST_CALLS_S = 1.0
"""For what a stopped server leaves behind, see `run`."""

T = TypeVar("T")
_Options = Sequence[tuple[str, int | str]]

# grpcio 1.85 logs a server that was never started from its `__dealloc__`: a handler that keeps the record keeps an
# object whose memory is freed, and the process crashes later and elsewhere.
logging.getLogger("grpc").setLevel(logging.INFO)


def _without_traceback(record: logging.LogRecord) -> bool:
    record.exc_info = None
    return True


# It logs what a peer or a broken link sent in place of text with the traceback of decoding it, which is no bug of ours.
logging.getLogger("grpc._cython.cygrpc").addFilter(_without_traceback)


@dataclass(frozen=True, slots=True)
class Handshake:
    """How a client begins a connection that is encrypted."""

    credentials: grpc.ChannelCredentials
    expected: str
    """The DNS name that the server's certificate must have."""


def _common_options(max_sent_bytes: int, max_received_bytes: int) -> list[tuple[str, int | str]]:
    return [
        ("grpc.max_send_message_length", max_sent_bytes),
        ("grpc.max_receive_message_length", max_received_bytes),
        # A dead machine is noticed in 30 s at worst, also while no call is open; the protocol's own limits are
        # shorter. The answer may queue behind megabytes of chunks on a thin link, hence the long timeout.
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # Windows of several frames, so that a long fat link is full before the bandwidth probe has grown them.
        ("grpc.http2.lookahead_bytes", 4 << 20),
        ("grpc.http2.bdp_probe", 1),
        ("grpc.http2.max_frame_size", 1 << 20),
        ("grpc.http2.write_buffer_size", 1 << 20),
    ]


def channel_options(max_message_bytes: int, proxy: str = "") -> _Options:
    """`proxy`: HOST:PORT of one that takes CONNECT."""
    proxied = [("grpc.http_proxy", f"http://{proxy}")] if proxy else []
    if proxy:
        os.environ[NO_PROXY] = ""  # else grpc reads no_proxy, and goes past the proxy without a word
    return [
        *_common_options(max_message_bytes, max_message_bytes),
        # An http_proxy in the environment must not capture the links between sites.
        ("grpc.enable_http_proxy", int(bool(proxy))),
        *proxied,
        # How long a connection without a call lasts is the server's to say.
        ("grpc.client_idle_timeout_ms", 86_400_000),
        ("grpc.use_local_subchannel_pool", 1),  # a connection of its own for each channel
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 5_000),  # of one attempt to connect
        ("grpc.max_reconnect_backoff_ms", 5_000),
        ("grpc.enable_retries", 0),  # the callers know what is safe to repeat
    ]


def server_options(
    max_message_bytes: int, max_received_bytes: int, max_connections: int, max_calls_each: int, idle_limit_s: float
) -> _Options:
    return [
        *_common_options(max_message_bytes, max_received_bytes),
        ("grpc.so_reuseport", 0),  # with it a second server on the same port starts and takes half of the calls
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.http2.max_ping_strikes", 0),
        # Of connections beyond the first bound each is closed as it comes. The others are limits for a connection
        # until it speaks HTTP/2 and its settings are there, and for one without a call.
        ("grpc.max_allowed_incoming_connections", max_connections),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_LIMIT_MS),
        ("grpc.http2.settings_timeout", HANDSHAKE_LIMIT_MS),
        ("grpc.max_connection_idle_ms", round(1000 * idle_limit_s)),
        ("grpc.max_concurrent_streams", max_calls_each),
        # An event loop takes one call a round. By default some of those that wait are cancelled beyond 1,000: a crowd
        # that comes together, each with its first call, must find room.
        ("grpc.server.max_pending_requests", max_connections),
        ("grpc.server.max_pending_requests_hard_limit", max_connections + 1),
        ("grpc.server_max_unrequested_time_in_server", CALLS_WAIT_LIMIT_S),
    ]


def create_server(
    *,
    max_message_bytes: int,
    max_received_bytes: int | None = None,
    max_connections: int = MAX_CONNECTIONS,
    max_calls_each: int = MAX_CALLS_EACH,
    idle_limit_s: float = IDLE_LIMIT_S,
) -> grpc.aio.Server:
    """A server without ports; credentials belong to each port, see `bind`. `max_received_bytes`: where what is received
    has a smaller bound than what is sent."""
    received = max_received_bytes or max_message_bytes
    options = server_options(max_message_bytes, received, max_connections, max_calls_each, idle_limit_s)
    return grpc.aio.server(options=options)


def run(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run`, which lets calls end that a stopped server leaves behind: grpcio 1.85 prints a traceback for each
    that is cancelled with the loop."""

    async def whole() -> T:
        try:
            return await main
        finally:
            left = asyncio.all_tasks() - {asyncio.current_task()}
            if left:
                await asyncio.wait(left, timeout=LAST_CALLS_S)

    return asyncio.run(whole())


def bind(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None) -> int:
    """Listen on "HOST:PORT" (port 0: any free one); the port.

    Raises ConfigError for what is not an address, HostError if it cannot be had.
    """
    parse_address(address)
    try:
        if credentials is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, credentials)
    except RuntimeError:
        port = 0
    if port == 0:
        raise cannot_listen(address)
    return port


def cannot_listen(address: str) -> HostError:
    return HostError(
        f"cannot listen on {address}: another process has that port, or this machine does not have that address; "
        "stop the other process or choose another address (port 0 takes any free one)"
    )


def open_channel(
    address: str, *, handshake: Handshake | None, max_message_bytes: int, proxy: str = ""
) -> grpc.aio.Channel:
    """A channel to "HOST:PORT", or to a socket of this process, which connects at the first call. Without a handshake
    it is in plain text. Raises ConfigError."""
    if address.startswith(HERE):
        proxy = ""  # grpc would ask the proxy for it
    else:
        parse_address(address)
    options = channel_options(max_message_bytes, proxy)
    if handshake is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, handshake.credentials, options=[*options, expects(handshake)])


class Proxied:
    """The network through an HTTP proxy, as far as this process dials."""

    def __init__(self, proxy: str) -> None:
        """HOST:PORT."""
        self._proxy = proxy

    def open_channel(self, address: str, *, handshake: Handshake | None, max_message_bytes: int) -> grpc.aio.Channel:
        return open_channel(address, handshake=handshake, max_message_bytes=max_message_bytes, proxy=self._proxy)

    create_server = staticmethod(create_server)


def expects(handshake: Handshake) -> tuple[str, str]:
    """The option of a channel."""
    return "grpc.ssl_target_name_override", handshake.expected
