"""The other hosts of a site, as its leader knows them: those that are attached now."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from atoll.node import host_protocol as hosts
from atoll.node.daemon.hosts.link import Outbox
from atoll.node.daemon.hosts.ranks_elsewhere import Ranks
from atoll.node.daemon.shared_exchanges import Changes
from atoll.node.daemon.shared_products import AttemptKey
from atoll.protocol import messages as m
from atoll.protocol.v1 import hosts_pb2

NOTHING = hosts.StateHeld(has_state=False, commit=0, state_hash=b"")


@dataclass(slots=True, kw_only=True, eq=False)
class AttachedHost:
    """From its first word until its stream ends, or the leader gives it up."""

    number: int
    process: bytes
    session: int
    words: str  # for people
    outbox: Outbox[hosts_pb2.AttachResponse]
    lost: asyncio.Future[str]  # why, if the leader gives it up
    ranks: Ranks
    addresses: tuple[str, ...] = ()  # where peers reach it, and its processes; empty until it is ready
    site_address: str = ""  # where other hosts of the site reach it
    is_laid_out: bool = False  # its ranks have buffers
    follows: bool = False  # it does as the leader does, commit by commit
    said: hosts.StateHeld = NOTHING  # what its disk holds, as it said last
    applies: int = 0  # the commit that it was told to apply last
    brought: int = 0  # the number of the HoldState that it is to be told last
    is_being_told: bool = False  # that HoldState is being made
    told: int = 0  # the number of the HoldState or RollBackHost that it was told last
    beat: hosts.HostBeat | None = None  # the last
    published: int = 0  # the last number that is in its PUBLISH
    snapshots: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    """By fragment: generation, step and seq of what it has taken of SNAPSHOT."""
    advanced: dict[tuple[int, int], hosts.HostErrorsAdvanced] = field(default_factory=dict)
    """By commit and fragment, of those that the leader waits for."""
    kept: dict[int, hosts.HostKept] = field(default_factory=dict)
    """By number, of those that the leader waits for."""
    giving: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Of payloads of a commit, one after the other."""
    done: dict[AttemptKey, m.Done] = field(default_factory=dict)
    """Of the exchanges that are not over."""

    @property
    def is_brought(self) -> bool:
        """To what the leader holds: what the host has said is of before."""
        return self.said.number < self.told

    @property
    def is_in_step(self) -> bool:
        """It has applied what it was told, but for the last commit. One that is further behind has no time for an
        exchange yet."""
        return self.follows and self.said.commit + 1 >= self.applies

    def say(self, message: hosts.HostTold) -> None:
        self.outbox.say(message)


class Hosts(Changes, dict[int, AttachedHost]):
    """By number. `until` wakes when any of them has changed."""

    def __init__(self, num_hosts: int) -> None:
        super().__init__()
        self._num_hosts = num_hosts

    @property
    def ready(self) -> list[AttachedHost]:
        """Those that may be told what to do."""
        return [host for _, host in sorted(self.items()) if host.addresses]

    @property
    def missing(self) -> tuple[int, ...]:
        """Hosts of the site that are not ready."""
        here = {host.number for host in self.ready}
        return tuple(number for number in range(1, self._num_hosts) if number not in here)

    def is_here(self, host: AttachedHost) -> bool:
        """Not lost, and not attached anew since."""
        return self.get(host.number) is host

    async def each(self, told: Iterable[AttachedHost], has_done: Callable[[AttachedHost], Any]) -> list[AttachedHost]:
        """Waits until each of them has, or is lost; those that are."""
        listed = list(told)
        await self.until(lambda: all(has_done(host) or not self.is_here(host) for host in listed))
        return [host for host in listed if not has_done(host)]
