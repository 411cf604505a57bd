"""`python -m tests.harness.floods KIND HOST:PORT [SOURCE]`: floods that port of this machine until it is killed, as
somebody without a certificate, with what one core can do, from the address SOURCE (127.3.*.*: from thousands). Prints
`flooding` when it begins.

It never leaves loopback.
"""

from __future__ import annotations

import random
import re
import select
import socket
import ssl
import struct
import sys
from collections.abc import Callable, Iterator

from atoll.protocol.addresses import is_loopback, parse_address
from atoll.protocol.descriptors import raise_limit

MOST_HELD = 4000
BURST = 64
"""Connections of one kind that are worked on together."""
HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\x04\0\0\0\0\0"
STATUS = b"GET /status.json HTTP/1.1\r\nHost: localhost\r\n\r\n"
RESETS = struct.pack("ii", 1, 0)
Address = tuple[str, int]
SOURCE: list[str] = []
"""At most one."""


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """Of HTTP/2."""
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


BIG = HTTP2 + b"".join(frame(0, 0, 1, b"\0" * 16384) for _ in range(64))
"""A message of 1 MiB."""
STREAMS = HTTP2 + b"".join(frame(1, 4, 2 * i + 1, b"\x82") + frame(3, 0, 2 * i + 1, b"\0\0\0\x08") for i in range(500))
"""500 streams that are opened and reset."""


def client_hello() -> bytes:
    said = ssl.MemoryBIO()
    connection = no_certificate().wrap_bio(ssl.MemoryBIO(), said)
    try:
        connection.do_handshake()
    except ssl.SSLWantReadError:
        pass
    return said.read()


def no_certificate() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    return context


def _connected(address: Address, num: int) -> Iterator[socket.socket]:
    for _ in range(num):
        client = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET)
        client.setblocking(False)
        try:
            if SOURCE:
                client.bind((re.sub(r"\*", lambda _: str(random.randrange(1, 255)), SOURCE[0]), 0))
            client.connect(address)
        except BlockingIOError:
            pass
        except OSError:
            client.close()
            continue
        yield client


def burn(address: Address) -> None:
    """Only the processor."""
    while True:
        pass


def _held(address: Address, said: bytes) -> None:
    """As many connections as there may be, which say this and nothing more; those that are closed are opened again."""
    held: dict[int, socket.socket] = {}
    poll = select.epoll()
    while True:
        for client in _connected(address, min(BURST, MOST_HELD - len(held))):
            held[client.fileno()] = client
            poll.register(client, select.EPOLLIN | select.EPOLLOUT | select.EPOLLET)
        for number, _ in poll.poll(0.01 if len(held) >= MOST_HELD else 0):
            client = held[number]
            try:
                if said:
                    client.send(said)
                if client.recv(1 << 16, socket.MSG_DONTWAIT):
                    continue
            except BlockingIOError:
                continue
            except OSError:
                pass
            poll.unregister(client)
            del held[number]
            client.close()


def idle(address: Address) -> None:
    _held(address, b"")


def handshakes(address: Address) -> None:
    """That are begun and never finished."""
    _held(address, client_hello())


def garbage(address: Address) -> None:
    """After the beginning of a handshake, without an end."""
    _held(address, client_hello() + b"\x16\x03\x01\x40\x00" + b"\0" * (1 << 18))


def resets(address: Address) -> None:
    while True:
        for client in _connected(address, BURST):
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESETS)
            client.close()


def _over_tls(address: Address, said: bytes) -> None:
    """Handshakes without a certificate, and this behind them at once: a client is done before the server looks."""
    context = no_certificate()
    while True:
        clients = list(_connected(address, BURST))
        for client in clients:
            client.settimeout(2.0)
            try:
                with context.wrap_socket(client) as encrypted:
                    encrypted.sendall(said)
            except OSError:
                client.close()


def big_messages(address: Address) -> None:
    _over_tls(address, BIG)


def streams(address: Address) -> None:
    _over_tls(address, STREAMS)


def page(address: Address) -> None:
    """The status, as often as it is given."""
    while True:
        for client in list(_connected(address, BURST)):
            client.settimeout(2.0)
            try:
                client.sendall(STATUS)
                while client.recv(1 << 16):
                    pass
            except OSError:
                pass
            client.close()


KINDS: dict[str, Callable[[Address], None]] = {
    "burn": burn,
    "idle": idle,
    "handshakes": handshakes,
    "garbage": garbage,
    "resets": resets,
    "big-messages": big_messages,
    "streams": streams,
    "page": page,
}


def main(kind: str, address: str, *source: str) -> None:
    SOURCE.extend(source)
    if not is_loopback(address):
        raise SystemExit(f"{address} is not of this machine alone")
    raise_limit()
    sys.stdout.write("flooding\n")
    sys.stdout.flush()
    KINDS[kind](parse_address(address))


if __name__ == "__main__":
    main(*sys.argv[1:])
