"""How two sides of a relay's port begin: TLS of the run, by Python's own library as no gRPC is spoken here, or a
ticket."""

from __future__ import annotations

import asyncio
import socket
import ssl

from atoll.node.relay import words
from atoll.node.relay.accepting import readable
from atoll.node.relay.pairing import SessionCertificate
from atoll.protocol.errors import InvalidMessage
from atoll.protocol.trust import certificates
from atoll.protocol.trust.names import Kind, Subject
from atoll.protocol.trust.security import MutualTls
from atoll.protocol.trust.server_tls import load_chain, new_context

HANDSHAKE_LIMIT_S = 10.0
SHUTDOWN_LIMIT_S = 1.0
"""For the other side to say that it has heard of the end."""
RECORD_HEAD_BYTES = 5
MAX_RECORD_BYTES = RECORD_HEAD_BYTES + (1 << 14)
"""Of TLS; the length is in the last two bytes of the head."""
Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def _context(protocol: int, tls: MutualTls) -> ssl.SSLContext:
    """Of what `tls` shows now: of one handshake, so that a renewed certificate is shown in the next one."""
    context = new_context(protocol)
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # a root that was given may have one above it
    context.load_verify_locations(cadata=tls.shown.roots.decode("ascii"))
    load_chain(context, tls.shown)
    return context


async def encrypted(connection: socket.socket, tls: MutualTls) -> Stream:
    """To a relay of the run, which is expected at the other end. Raises OSError."""
    return await asyncio.open_connection(
        sock=connection,
        ssl=_context(ssl.PROTOCOL_TLS_CLIENT, tls),
        server_hostname=tls.towards(Kind.RELAY).expected,
        limit=words.MAX_LINE_BYTES,
        ssl_handshake_timeout=HANDSHAKE_LIMIT_S,
        ssl_shutdown_timeout=SHUTDOWN_LIMIT_S,
    )


async def accepted(connection: socket.socket, tls: MutualTls) -> Stream:
    """From whoever has a certificate of the run. Raises OSError."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(words.MAX_LINE_BYTES)
    transport, protocol = await loop.connect_accepted_socket(
        lambda: asyncio.StreamReaderProtocol(reader),
        connection,
        ssl=_context(ssl.PROTOCOL_TLS_SERVER, tls),
        ssl_handshake_timeout=HANDSHAKE_LIMIT_S,
        ssl_shutdown_timeout=SHUTDOWN_LIMIT_S,
    )
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)


def site_of(writer: asyncio.StreamWriter, run_id: str) -> tuple[Subject, SessionCertificate]:
    """The site at the other end, or the host of one, by its certificate. Raises InvalidMessage for whoever is none."""
    shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    certificate = certificates.from_der(shown or b"")
    subject = certificates.subject_of(certificate)
    if subject.run_id != run_id or subject.kind not in (Kind.SITE, Kind.HOST):
        raise InvalidMessage(f"{subject} is no site of run {run_id} that others know")
    since, until = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    return subject, SessionCertificate(certificates.digest_of(certificate), since.timestamp(), until.timestamp())


async def read_word(reader: asyncio.StreamReader) -> words.Word:
    """Raises InvalidMessage, also at the end of the connection, and OSError."""
    try:
        line = await reader.readline()
    except ValueError:
        raise InvalidMessage(f"a line of more than {words.MAX_LINE_BYTES} bytes") from None
    return words.from_line(line)


async def first_record(connection: socket.socket) -> bytes:
    """What comes first, which stays there: of TLS the whole record in which a client says whom it expects. Less at the
    end of the connection. Raises OSError."""
    wanted = 1
    while True:
        await _readable(connection, wanted)
        found = connection.recv(MAX_RECORD_BYTES, socket.MSG_PEEK)
        needed = 1
        if found.startswith(words.TLS_MARK):
            head = found[:RECORD_HEAD_BYTES]
            needed = RECORD_HEAD_BYTES + int.from_bytes(head[3:]) if len(head) == RECORD_HEAD_BYTES else len(head) + 1
            needed = min(needed, MAX_RECORD_BYTES)
        if len(found) >= needed or len(found) < wanted:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
            return found
        wanted = needed


async def _readable(connection: socket.socket, num_bytes: int) -> None:
    """Until as much is there, or all that comes."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)
    await readable(connection)


async def read_ticket(connection: socket.socket) -> bytes:
    """Behind its mark, and not a byte more: the rest is for the other site. Empty if the connection ends before.
    Raises OSError."""
    loop, got = asyncio.get_running_loop(), b""
    size = len(words.TICKET_MARK) + words.TICKET_BYTES
    while len(got) < size:
        some = await loop.sock_recv(connection, size - len(got))
        if not some:
            return b""
        got += some
    return got.removeprefix(words.TICKET_MARK)
