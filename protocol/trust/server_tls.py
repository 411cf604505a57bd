"""TLS by Python's own library: of pages, whose clients have no certificates, and between sites and relays."""

from __future__ import annotations

import os
import ssl

from atoll.protocol.trust.security import Shown

GROUP = "prime256v1"
"""In which keys of a handshake are agreed upon: P-256, which whoever can check certificates of a run has. OpenSSL would
take any that a client asks for: by ffdhe8192 a hello of a kilobyte holds up an event loop for a tenth of a second."""


def new_context(protocol: int) -> ssl.SSLContext:
    """TLS 1.3 alone, with handshakes that cost little."""
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_ecdh_curve(GROUP)
    return context


def load_chain(context: ssl.SSLContext, shown: Shown) -> None:
    """What is shown in handshakes from now on."""
    memory = os.memfd_create("atoll-shown")  # the key of a day touches no disk; ssl reads files alone
    try:
        with open(memory, "wb", closefd=False) as file:
            file.write(shown.certificate + shown.key)
        context.load_cert_chain(f"/proc/self/fd/{memory}")
    finally:
        os.close(memory)


class ServerTls:
    """What is shown can be replaced: it is from the next handshake on."""

    def __init__(self, shown: Shown) -> None:
        self.context = new_context(ssl.PROTOCOL_TLS_SERVER)
        self.show(shown)

    @property
    def shown(self) -> Shown:
        return self._shown

    def show(self, shown: Shown) -> None:
        load_chain(self.context, shown)
        self._shown = shown
