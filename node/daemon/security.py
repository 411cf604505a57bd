"""What a node shows to the coordinator, and to other sites."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from atoll.node.daemon.config import NodeConfig
from atoll.protocol.addresses import is_loopback, parse_address
from atoll.protocol.errors import ConfigError, InvalidMessage
from atoll.protocol.machine import Machine
from atoll.protocol.page_access import LOOPBACK_NAMES, Access, ByName, ByToken
from atoll.protocol.transport import Handshake
from atoll.protocol.trust import certificates, enrolled, tokens
from atoll.protocol.trust.enrolled import Enrolled
from atoll.protocol.trust.names import Kind, host_number
from atoll.protocol.trust.security import PLAIN, MutualTls, Security
from atoll.protocol.trust.server_tls import ServerTls
from atoll.protocol.trust.standing import Standing

log = logging.getLogger("atoll.node")


@dataclass(frozen=True, slots=True)
class NodeSecurity:
    """Nobody, in plain text."""

    before_coordinator: Security = PLAIN
    among_sites: Security = PLAIN
    standing: Standing | None = None

    @property
    def identity_until_s(self) -> float:
        """When the identity expires, in seconds since 1970; 0 in plain text."""
        return self.standing.identity_until_s if self.standing is not None else 0.0

    def knows_token(self, token_id: str) -> bool:
        """Whether a viewer's token was not taken back; there is none in plain text."""
        return self.standing is not None and self.standing.knows_token(token_id)


PLAIN_TEXT = NodeSecurity()


@dataclass(frozen=True, slots=True)
class Identity:
    """A site, or another host of one, that has joined its run."""

    found: Enrolled
    addresses: tuple[str, ...]
    """Of the coordinator, the one that --coordinator says first."""
    folder: Path
    """In which it lies."""

    @classmethod
    def of(cls, config: NodeConfig, now_s: float) -> Identity | None:
        """Of what lies in the home; None in plain text. Raises ConfigError."""
        if config.is_plain_text:
            if config.relay:
                raise ConfigError(
                    f"--relay {config.relay}: a run in plain text has no relays, which know sites by certificates"
                )
            return None
        folder = config.home / enrolled.FOLDER if config.home is not None else None
        found = enrolled.load(folder) if folder is not None else None
        if folder is None or found is None:
            raise ConfigError(f"no site has joined a run with {config.home}: `atoll join`, with an invite, does")
        wanted = Kind.HOST_IDENTITY if config.site_rank else Kind.SITE_IDENTITY
        who = f"host {config.site_rank} of site {config.name}" if config.site_rank else f"site {config.name}"
        subject = found.subject
        if (subject.kind, subject.site, host_number(subject.name)) != (wanted, config.name, config.site_rank):
            raise ConfigError(f"{config.home} is of {subject}, not of {who}")
        if warning := enrolled.check_dates(found, now_s):
            log.warning("%s", warning)
        addresses = tuple(dict.fromkeys((*config.coordinators, *found.addresses)))
        return cls(found, addresses, folder)

    @property
    def handshake(self) -> Handshake:
        """With the coordinator, at first."""
        return MutualTls(self.found.subject.run_id, self.found.shown).towards(Kind.COORDINATOR)

    async def secured(
        self, addresses: Sequence[str], machine: Machine, stack: AsyncExitStack, wait_s: float
    ) -> NodeSecurity:
        """With a certificate for other sites, by the coordinator at the first of `addresses` that answers; both are
        renewed until `stack` ends. Raises PeerError if none answers within `wait_s`, or RefusedError."""
        standing = Standing(self.found, self.folder, addresses, machine)
        among_sites = await standing.open(stack, wait_s)
        return NodeSecurity(standing.before_coordinator, among_sites, standing)


def page_access(
    http_listen: str, run_id: str, among_sites: Security, machine: Machine, knows_token: Callable[[str], bool]
) -> Access:
    """To the metrics of a node or relay: on this machine for all, elsewhere by a viewer's token for nodes, which
    the run's root has signed, and of which the run knows. `knows_token`: by its id."""
    if is_loopback(http_listen):
        return ByName(LOOPBACK_NAMES | {parse_address(http_listen)[0].lower()})
    if not isinstance(among_sites, MutualTls):
        log.warning("the metrics at %s are in plain text, for whoever reaches them", http_listen)
        return ByName(())
    tls = ServerTls(among_sites.shown)
    among_sites.told.append(tls.show)

    def is_good(text: str) -> bool:
        try:
            token = tokens.from_text(text, certificates.from_pem(among_sites.shown.roots))
        except InvalidMessage:
            return False
        is_in_force = token.expires_s > machine.wall_time() and knows_token(token.token_id)
        return token.run_id == run_id and token.is_of_nodes and is_in_force

    return ByToken((), tls.context, is_good)
