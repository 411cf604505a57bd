"""A site's connections to a relay: plain ones, through an HTTP proxy if there is one, and what is asked over TLS."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from atoll.node.relay import greeting, words
from atoll.node.relay.greeting import Stream
from atoll.node.tasks import end
from atoll.protocol.addresses import parse_address
from atoll.protocol.errors import InvalidMessage, PeerError, RefusedError
from atoll.protocol.trust.security import MutualTls

CONNECT_LIMIT_S = 10.0
NEXT_AFTER_S = 0.5
"""Of silence at one of several addresses."""
MAX_HEAD_BYTES = 1 << 13
"""Of a proxy's answer."""


@dataclass(frozen=True, slots=True)
class Route:
    """To a relay."""

    relay: str
    proxy: str = ""
    """HOST:PORT of each; the second is empty without one."""


async def connect(route: Route) -> socket.socket:
    """To the relay's port; nothing was said on it yet. Raises OSError."""
    if not route.proxy:
        return await _connect(route.relay)
    connection = await _connect(route.proxy)
    try:
        await _ask_proxy(connection, route.relay)
    except BaseException:
        connection.close()
        raise
    return connection


async def connect_first(addresses: Sequence[str], hello: bytes) -> socket.socket:
    """To the first that answers `hello`, which is said, and whose answer stays to be read. The next address is tried
    beside those that are silent: a machine that is lost, or one whose kernel still takes connections for a process that
    is stopped. Raises OSError of the last."""
    found: asyncio.Future[socket.socket] = asyncio.get_running_loop().create_future()

    async def attempt(address: str) -> None:
        connection = await _connect(address)
        try:
            await asyncio.get_running_loop().sock_sendall(connection, hello)
            if not await greeting.first_record(connection):
                raise ConnectionAbortedError(f"{address} has closed the connection")
        except BaseException:
            connection.close()
            raise
        if found.done():
            connection.close()
        else:
            found.set_result(connection)

    async def wait(*those: asyncio.Future[Any], limit_s: float | None = None) -> None:
        await asyncio.wait((found, *those), timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)

    attempts: list[asyncio.Task[None]] = []
    try:
        for address in addresses:
            attempts.append(asyncio.create_task(attempt(address)))
            await wait(attempts[-1], limit_s=NEXT_AFTER_S)
            if found.done():
                return found.result()
        while not found.done() and (left := [task for task in attempts if not task.done()]):
            await wait(*left)
        if not found.done():
            attempts[-1].result()  # its error
        return found.result()
    except BaseException:
        if found.done():
            found.result().close()
        raise
    finally:
        await end(attempts)


async def _connect(address: str) -> socket.socket:
    loop = asyncio.get_running_loop()
    host, port = parse_address(address)
    problem = OSError(f"{address} has no number")
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError:
        raise OSError(f"{address} is no name of a machine") from None
    for family, kind, protocol, _, place in found:
        connection = socket.socket(family, kind, protocol)
        connection.setblocking(False)
        try:
            await loop.sock_connect(connection, place)
            return connection
        except OSError as error:
            connection.close()
            problem = error
        except BaseException:
            connection.close()
            raise
    raise problem


async def _ask_proxy(connection: socket.socket, target: str) -> None:
    """By CONNECT (RFC 9110, 9.3.6). Behind its answer nothing comes: relays do not speak first."""
    loop, head = asyncio.get_running_loop(), b""
    await loop.sock_sendall(connection, f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n".encode())
    while b"\r\n\r\n" not in head:
        some = await loop.sock_recv(connection, MAX_HEAD_BYTES - len(head))
        if not some:
            raise OSError(f"the HTTP proxy does not lead to {target}: its answer has no end")
        head += some
    version, _, rest = head.partition(b" ")
    if not version.startswith(b"HTTP/1.") or not rest.startswith(b"2") or not head.endswith(b"\r\n\r\n"):
        line = head.split(b"\r\n")[0][:80].decode("ascii", "replace")
        raise OSError(f"the HTTP proxy does not lead to {target}: {line}")


async def speak(tls: MutualTls, route: Route, word: words.Word) -> tuple[Stream, words.Word]:
    """Over TLS: `word`, and the relay's answer to it. Raises OSError, InvalidMessage, and RefusedError for what the
    relay refuses."""
    connection = await connect(route)
    reader, writer = await greeting.encrypted(connection, tls)
    try:
        writer.write(words.to_line(word))
        answer = await greeting.read_word(reader)
        if isinstance(answer, words.Refused):
            raise RefusedError(answer.text)
    except BaseException:
        writer.transport.abort()
        raise
    return (reader, writer), answer


async def called(tls: MutualTls, route: Route, name: str) -> socket.socket:
    """A connection that leads to that site once it has come to the relay, too. Raises RefusedError in the words of the
    relay, PeerError if none was reached."""
    try:
        async with asyncio.timeout(CONNECT_LIMIT_S):
            (_, writer), answer = await speak(tls, route, words.Call(name))
            writer.transport.abort()  # the relay has said all
            if not isinstance(answer, words.Ticket):
                raise InvalidMessage(f"it answers a call with {type(answer).__name__}")
            return await with_ticket(route, answer)
    except (OSError, InvalidMessage) as error:
        text = str(error) or f"no answer within {CONNECT_LIMIT_S:g} s"
        raise PeerError(f"the relay at {route.relay} does not lead to site {name}: {text}") from None


async def with_ticket(route: Route, ticket: words.Ticket) -> socket.socket:
    """Raises OSError."""
    connection = await connect(route)
    try:
        await asyncio.get_running_loop().sock_sendall(connection, words.TICKET_MARK + ticket.ticket)
    except BaseException:
        connection.close()
        raise
    return connection
