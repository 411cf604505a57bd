"""What a process shows in a handshake, and whom it takes for whom: mutual TLS, or plain text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import grpc

from atoll.protocol.errors import InvalidMessage, RefusedError
from atoll.protocol.transport import Handshake
from atoll.protocol.trust import certificates
from atoll.protocol.trust.names import Kind, Subject


@dataclass(frozen=True, slots=True)
class Shown:
    """As PEM."""

    roots: bytes
    """Whoever has a certificate that one of these signed is believed to be whom it names."""
    certificate: bytes
    key: bytes


@dataclass(frozen=True, slots=True)
class Caller:
    """Whoever calls a server, by the certificate that it has shown the key of."""

    subject: Subject
    key_digest: bytes


class Security(Protocol):
    """Lives as long as its process."""

    def towards(self, kind: Kind, name: str = "") -> Handshake | None:
        """For a channel that is opened now; None for plain text."""

    def of_server(self) -> grpc.ServerCredentials | None:
        """For a port; None for plain text."""

    def caller(self, context: Any) -> Caller | None:
        """Who has made the call of this context; None where that is not known. Raises RefusedError for somebody who is
        not of this run."""


class PlainText:
    """Nobody is known, and whoever listens can read."""

    def towards(self, kind: Kind, name: str = "") -> None:
        return None

    def of_server(self) -> None:
        return None

    def caller(self, context: Any) -> None:
        return None


PLAIN = PlainText()


class MutualTls:
    """What is shown can be replaced: by servers it is from the next handshake on, by clients from the next channel."""

    def __init__(self, run_id: str, shown: Shown) -> None:
        self._run_id = run_id
        self.told: list[Callable[[Shown], None]] = []
        """They hear of what is shown in place of what was."""
        self.show(shown)

    def show(self, shown: Shown) -> None:
        """From now on. Raises InvalidMessage if the roots are none of atoll's, or the key is another one's."""
        self._salt = certificates.salt_of(certificates.from_pem(shown.roots)[0])
        if certificates.digest_of(certificates.from_pem(shown.certificate)[0]) != certificates.key_digest(
            certificates.key_from_pem(shown.key).public_key()
        ):
            raise InvalidMessage("a certificate and a key that do not belong together")
        self._credentials = grpc.ssl_channel_credentials(shown.roots, shown.key, shown.certificate)
        self._shown = shown
        for tell in self.told:
            tell(shown)

    @property
    def shown(self) -> Shown:
        return self._shown

    def towards(self, kind: Kind, name: str = "") -> Handshake:
        return Handshake(self._credentials, Subject(self._run_id, kind, name).dns_name(self._salt))

    def of_server(self) -> grpc.ServerCredentials:
        told = self._shown

        def changed() -> Any:  # None: as before, which the types of grpc do not know
            nonlocal told
            if told is self._shown:
                return None
            told = self._shown
            return _configuration(told)

        return grpc.dynamic_ssl_server_credentials(_configuration(told), changed, require_client_authentication=True)

    def caller(self, context: Any) -> Caller:
        shown = context.auth_context().get("x509_pem_cert", ())
        try:
            (certificate,) = certificates.from_pem(shown[0] if shown else b"")
            caller = Caller(certificates.subject_of(certificate), certificates.digest_of(certificate))
        except (InvalidMessage, ValueError) as error:  # none, or several
            raise RefusedError(f"a certificate that says of nobody who it is: {error}") from None
        if caller.subject.run_id != self._run_id:
            raise RefusedError(f"a certificate of {caller.subject}, this is run {self._run_id}")
        return caller


def _configuration(shown: Shown) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(shown.key, shown.certificate)], shown.roots)
