"""What a node shows to the coordinator, and to other sites."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass

from atoll.node.daemon.config import NodeConfig
from atoll.protocol.errors import ConfigError
from atoll.protocol.machine import Machine
from atoll.protocol.trust import enrolled
from atoll.protocol.trust.enrolled import Enrolled
from atoll.protocol.trust.joining import renew
from atoll.protocol.trust.names import Kind, Subject
from atoll.protocol.trust.renewing import keep_in_force
from atoll.protocol.trust.security import PLAIN, MutualTls, Security, Shown


@dataclass(frozen=True, slots=True)
class NodeSecurity:
    """Nobody, in plain text."""

    before_coordinator: Security = PLAIN
    among_sites: Security = PLAIN


@dataclass(frozen=True, slots=True)
class Identity:
    """A site that has joined its run."""

    enrolled: Enrolled
    before_coordinator: MutualTls

    @classmethod
    def of(cls, config: NodeConfig) -> Identity | None:
        """Of what lies in the home; None in plain text. Raises ConfigError."""
        if config.insecure:
            return None
        found = enrolled.load(config.home / enrolled.FOLDER) if config.home is not None else None
        if found is None:
            raise ConfigError(f"no site has joined a run with {config.home}: `atoll join`, with an invite, does")
        if found.subject.kind is not Kind.SITE_IDENTITY or found.subject.name != config.name:
            raise ConfigError(f"{config.home} is of {found.subject}, not of site {config.name}")
        return cls(found, MutualTls(found.subject.run_id, found.shown))

    async def secured(self, machine: Machine, stack: AsyncExitStack) -> NodeSecurity:
        """With a certificate for other sites, which is renewed until `stack` ends. Raises PeerError or RefusedError."""
        subject = Subject(self.enrolled.subject.run_id, Kind.SITE, self.enrolled.subject.name)

        async def another() -> Shown:
            return await renew(self.before_coordinator, self.enrolled.addresses, subject)

        among_sites = MutualTls(subject.run_id, await another())
        renewing = asyncio.create_task(keep_in_force(among_sites, another, machine.wall_time))
        stack.callback(renewing.cancel)
        return NodeSecurity(self.before_coordinator, among_sites)
