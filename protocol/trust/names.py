"""Whom a certificate is of, as a URI and as the DNS name of a handshake. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from atoll.protocol.digest import Digest
from atoll.protocol.errors import InvalidMessage
from atoll.protocol.settings import RUN_ID, SITE_NAME

SCHEME = "spiffe://"
MAX_URI_CHARACTERS = 256
DNS_NAME_BYTES = 16


class Kind(Enum):
    """The path of the URI, before the name."""

    COORDINATOR = "coordinator"
    INVITE = "join"
    """Whoever has the invite; its name is the invite's id."""
    SITE_IDENTITY = "identity/site"
    """A site, before the coordinator; other sites take it for nothing."""
    VIEWER = "identity/viewer"
    OPERATOR = "identity/operator"
    RELAY_IDENTITY = "identity/relay"
    """A relay, before the coordinator; sites take it for nothing."""
    SITE = "site"
    """A site, before other sites: for a day."""
    RELAY = "relay"
    """Any relay of the run, before sites: for a day. An address says where it is, not which one it is."""
    PAGE = "page"
    """The coordinator's page, before whoever looks at it without a certificate."""
    METRICS = "metrics"
    """A name alone, no certificate: of what sites and relays show their metrics with. A site could
    stand in for another one."""


ROLES = {
    "site": Kind.SITE_IDENTITY,
    "viewer": Kind.VIEWER,
    "operator": Kind.OPERATOR,
    "relay": Kind.RELAY_IDENTITY,
}
"""What an invite can be for, and the kind of certificate that comes of it."""
OF_A_DAY = {Kind.SITE_IDENTITY: Kind.SITE, Kind.RELAY_IDENTITY: Kind.RELAY}
"""What these identities get certificates for by `Renew`."""
NAMELESS = frozenset({Kind.COORDINATOR, Kind.RELAY, Kind.PAGE, Kind.METRICS})


@dataclass(frozen=True, slots=True)
class Subject:
    """Whom a certificate is of."""

    run_id: str
    kind: Kind
    name: str = ""
    """Empty for those of which a run has one."""

    @property
    def uri(self) -> str:
        path = f"{self.kind.value}/{self.name}" if self.name else self.kind.value
        return f"{SCHEME}{self.run_id}/{path}"

    def dns_name(self, salt: bytes) -> str:
        """What a client expects in the handshake. It travels in clear, so it says nothing to somebody who does not know
        the run's `salt`."""
        digest = Digest("atoll/dns-name/v1").data(salt).text(self.uri).finish()
        return f"{digest[:DNS_NAME_BYTES].hex()}.atoll"

    def __str__(self) -> str:
        who = {
            Kind.COORDINATOR: "the coordinator",
            Kind.INVITE: "the bearer of invite",
            Kind.SITE_IDENTITY: "site",
            Kind.VIEWER: "viewer",
            Kind.OPERATOR: "operator",
            Kind.RELAY_IDENTITY: "relay",
            Kind.RELAY: "a relay",
            Kind.SITE: "site",
            Kind.PAGE: "the page",
            Kind.METRICS: "metrics",
        }[self.kind]
        return f"{who} {self.name}".rstrip() + f" of run {self.run_id}"


def parse_uri(text: str) -> Subject:
    """The inverse of `Subject.uri`. Raises InvalidMessage."""
    run_id, slash, path = text.removeprefix(SCHEME).partition("/")
    if text.startswith(SCHEME) and len(text) <= MAX_URI_CHARACTERS and slash and RUN_ID.fullmatch(run_id):
        for kind in Kind:
            rest = path.removeprefix(kind.value)
            if kind in NAMELESS:
                if path == kind.value:
                    return Subject(run_id, kind)
            elif path != rest and rest.startswith("/") and SITE_NAME.fullmatch(rest[1:]):
                return Subject(run_id, kind, rest[1:])
    raise InvalidMessage(f"{text[:MAX_URI_CHARACTERS]!r} names nobody of a run")
