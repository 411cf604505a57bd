"""Whom a certificate is of, as a URI and as the DNS name of a handshake. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from atoll.protocol.digest import Digest
from atoll.protocol.errors import InvalidMessage
from atoll.protocol.settings import RUN_ID, SITE_NAME

SCHEME = "spiffe://"
MAX_URI_CHARACTERS = 256
HOST_NAME = re.compile(rf"({SITE_NAME.pattern})/([1-9][0-9]{{0,3}})")
"""NAME/K: host K of the site of that name, beside its host 0, whose certificates are those of the site."""
DNS_NAME_BYTES = 16


class Kind(Enum):
    """The path of the URI, before the name."""

    COORDINATOR = "coordinator"
    INVITE = "join"
    """Whoever has the invite; its name is the invite's id."""
    SITE_IDENTITY = "identity/site"
    """A site, before the coordinator; other sites take it for nothing."""
    HOST_IDENTITY = "identity/host"
    """Another host than the first of a site, before the coordinator; its name is NAME/K."""
    VIEWER = "identity/viewer"
    OPERATOR = "identity/operator"
    RELAY_IDENTITY = "identity/relay"
    """A relay, before the coordinator; sites take it for nothing."""
    SITE = "site"
    """A site, before other sites: for a day."""
    HOST = "host"
    """Another host than the first of a site, before the other hosts of the site, and as a part of it before other
    sites: for a day."""
    RELAY = "relay"
    """Any relay of the run, before sites: for a day. An address says where it is, not which one it is."""
    PAGE = "page"
    """The coordinator's page, before whoever looks at it without a certificate."""
    METRICS = "metrics"
    """A name alone, no certificate: of what sites and relays show their metrics with. A site could
    stand in for another one."""


ROLES = {
    "site": Kind.SITE_IDENTITY,
    "host": Kind.HOST_IDENTITY,
    "viewer": Kind.VIEWER,
    "operator": Kind.OPERATOR,
    "relay": Kind.RELAY_IDENTITY,
}
"""What an invite can be for, and the kind of certificate that comes of it."""
OF_A_DAY = {Kind.SITE_IDENTITY: Kind.SITE, Kind.HOST_IDENTITY: Kind.HOST, Kind.RELAY_IDENTITY: Kind.RELAY}
"""What these identities get certificates for by `Renew`."""
NAMELESS = frozenset({Kind.COORDINATOR, Kind.RELAY, Kind.PAGE, Kind.METRICS})
OF_HOSTS = frozenset({Kind.HOST_IDENTITY, Kind.HOST})


def is_name(kind: Kind, name: str) -> bool:
    """Whether one of that kind, which has names, can be called so."""
    return (HOST_NAME if kind in OF_HOSTS else SITE_NAME).fullmatch(name) is not None


def host_of_site(site: str, number: int) -> str:
    """The name of that host, from 1; as 0 the host that leads has it before the others alone."""
    return f"{site}/{number}"


def site_of(name: str) -> str:
    """Of a site itself, or of one of its hosts."""
    return name.partition("/")[0]


def host_number(name: str) -> int:
    """Of a site itself 0, or of one of its hosts."""
    return int(name.partition("/")[2] or 0)


@dataclass(frozen=True, slots=True)
class Subject:
    """Whom a certificate is of."""

    run_id: str
    kind: Kind
    name: str = ""
    """Empty for those of which a run has one."""

    @property
    def site(self) -> str:
        """The name of the site that it is or is a part of."""
        return site_of(self.name)

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
            Kind.HOST_IDENTITY: "host",
            Kind.VIEWER: "viewer",
            Kind.OPERATOR: "operator",
            Kind.RELAY_IDENTITY: "relay",
            Kind.RELAY: "a relay",
            Kind.SITE: "site",
            Kind.HOST: "host",
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
            elif path != rest and rest.startswith("/") and is_name(kind, rest[1:]):
                return Subject(run_id, kind, rest[1:])
    raise InvalidMessage(f"{text[:MAX_URI_CHARACTERS]!r} names nobody of a run")
