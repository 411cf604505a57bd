"""What a node shows to the coordinator, and to other sites."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass

from atoll.node.daemon.config import NodeConfig
from atoll.protocol.addresses import is_loopback, parse_address
from atoll.protocol.errors import ConfigError, InvalidMessage, PeerError
from atoll.protocol.machine import Machine
from atoll.protocol.page_access import LOOPBACK_NAMES, Access, ByName, ByToken
from atoll.protocol.trust import certificates, enrolled, tokens
from atoll.protocol.trust.joining import renew
from atoll.protocol.trust.names import OF_A_DAY, Kind, Subject, host_number
from atoll.protocol.trust.renewing import keep_in_force
from atoll.protocol.trust.security import PLAIN, MutualTls, Security, Shown
from atoll.protocol.trust.server_tls import ServerTls

log = logging.getLogger("atoll.node")

RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class NodeSecurity:
    """Nobody, in plain text."""

    before_coordinator: Security = PLAIN
    among_sites: Security = PLAIN
    identity_until_s: float = 0.0
    """When the identity expires, in seconds since 1970."""


@dataclass(frozen=True, slots=True)
class Identity:
    """A site, or another host of one, that has joined its run."""

    subject: Subject
    addresses: tuple[str, ...]
    """Of the coordinator, the one that --coordinator says first."""
    before_coordinator: MutualTls
    until_s: float

    @classmethod
    def of(cls, config: NodeConfig, now_s: float) -> Identity | None:
        """Of what lies in the home; None in plain text. Raises ConfigError."""
        if config.is_plain_text:
            if config.relay:
                raise ConfigError(
                    f"--relay {config.relay}: a run in plain text has no relays, which know sites by certificates"
                )
            return None
        found = enrolled.load(config.home / enrolled.FOLDER) if config.home is not None else None
        if found is None:
            raise ConfigError(f"no site has joined a run with {config.home}: `atoll join`, with an invite, does")
        wanted = Kind.HOST_IDENTITY if config.site_rank else Kind.SITE_IDENTITY
        who = f"host {config.site_rank} of site {config.name}" if config.site_rank else f"site {config.name}"
        subject = found.subject
        if (subject.kind, subject.site, host_number(subject.name)) != (wanted, config.name, config.site_rank):
            raise ConfigError(f"{config.home} is of {subject}, not of {who}")
        if warning := enrolled.check_dates(found, now_s):
            log.warning("%s", warning)
        addresses = tuple(dict.fromkeys(filter(None, (config.coordinator, *found.addresses))))
        return cls(found.subject, addresses, MutualTls(found.subject.run_id, found.shown), found.expires_s)

    async def secured(self, machine: Machine, stack: AsyncExitStack, wait_s: float) -> NodeSecurity:
        """With a certificate for other sites, which is renewed until `stack` ends. Raises PeerError if no coordinator
        answers within `wait_s`, or RefusedError."""
        subject = Subject(self.subject.run_id, OF_A_DAY[self.subject.kind], self.subject.name)

        async def another() -> Shown:
            return await renew(self.before_coordinator, self.addresses, subject, machine.network)

        among_sites = MutualTls(subject.run_id, await _within(wait_s, another))
        renewing = asyncio.create_task(keep_in_force(among_sites, another, machine.wall_time))
        stack.callback(renewing.cancel)
        return NodeSecurity(self.before_coordinator, among_sites, self.until_s)


def page_access(http_listen: str, run_id: str, among_sites: Security, machine: Machine) -> Access:
    """To the metrics of a node or relay: on this machine for all, elsewhere by a viewer's token for nodes, which
    the run's root has signed. Neither hears which tokens were taken back: they are good here until they expire."""
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
        return token.run_id == run_id and token.is_of_nodes and token.expires_s > machine.wall_time()

    return ByToken((), tls.context, is_good)


async def _within(wait_s: float, call: Callable[[], Awaitable[Shown]]) -> Shown:
    """The coordinator may be starting again just now."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + wait_s
    while True:
        try:
            return await call()
        except PeerError:
            if loop.time() + RETRY_S > deadline:
                raise
        await asyncio.sleep(RETRY_S)
