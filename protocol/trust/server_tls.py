"""TLS for servers of pages, whose clients have no certificates."""

from __future__ import annotations

import os
import ssl

from atoll.protocol.trust.security import Shown


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
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_3
        self.show(shown)

    @property
    def shown(self) -> Shown:
        return self._shown

    def show(self, shown: Shown) -> None:
        load_chain(self.context, shown)
        self._shown = shown
