"""What a stranger can ask of a server of Python's TLS before anybody knows who it is: pages, and a relay."""

from __future__ import annotations

import ssl
from collections.abc import Callable

import pytest

from atoll.node.relay import greeting
from atoll.protocol.trust.names import Kind
from atoll.protocol.trust.server_tls import ServerTls
from tests.unit.trust.test_security import tls

GROUPS = ("ffdhe2048", "ffdhe8192", "X448", "secp521r1")


def of_pages() -> ssl.SSLContext:
    return ServerTls(tls(Kind.PAGE).shown).context


def of_a_relay() -> ssl.SSLContext:
    return greeting._context(ssl.PROTOCOL_TLS_SERVER, tls(Kind.RELAY))


def shake_hands(server_context: ssl.SSLContext, client_context: ssl.SSLContext, expected: str = "") -> None:
    """Until the client has what the server shows; where the client expects a name, until each has what the other
    shows. Raises SSLError."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context.wrap_bio(to_client, to_server, server_hostname=expected or None)
    server = server_context.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(3):  # a client whose first key is of another group than the server's says its hello again
        for end in (client, server):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            if end is (server if expected else client):
                return
    raise AssertionError("the handshake does not come to its end")


def any_client() -> ssl.SSLContext:
    """That believes anybody, and has no certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


@pytest.mark.parametrize("server", [of_pages, of_a_relay])
def test_no_handshake_asks_for_arithmetic_that_takes_long(server: Callable[[], ssl.SSLContext]) -> None:
    """One hello of ffdhe8192 would hold up the event loop of a coordinator for a tenth of a second."""
    context, client = server(), any_client()
    shake_hands(context, client)
    for group in GROUPS:
        client.set_ecdh_curve(group)
        with pytest.raises(ssl.SSLError, match="NO_SUITABLE_KEY_SHARE"):
            shake_hands(context, client)
    client.set_ecdh_curve("prime256v1")
    shake_hands(context, client)
