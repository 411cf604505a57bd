"""What a process shows that is in a run by an identity: its identity to the coordinator, and among sites a certificate
of a day. Both are renewed, and follow the roots that are in force."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from atoll.protocol.errors import InvalidMessage, PeerError
from atoll.protocol.machine import Machine
from atoll.protocol.trust import certificates, enrolled
from atoll.protocol.trust.enrolled import Enrolled
from atoll.protocol.trust.joining import renew, renew_identity
from atoll.protocol.trust.names import NAMELESS, OF_A_DAY, Subject
from atoll.protocol.trust.renewing import keep_in_force
from atoll.protocol.trust.security import MutualTls, Shown
from atoll.protocol.trust.watching import News, watch

RETRY_S = 1.0


class Standing:
    """`open` it, then it lives until its stack ends. `banned` hear of the names of sites that are banned."""

    def __init__(self, found: Enrolled, folder: Path, addresses: Sequence[str], machine: Machine) -> None:
        """`folder`: in which `found` lies. `addresses`: of coordinators, in the order in which they are tried."""
        self.before_coordinator = MutualTls(found.subject.run_id, found.shown)
        self.subject = found.subject
        kind = OF_A_DAY[found.subject.kind]
        name = "" if kind in NAMELESS else found.subject.name
        self._among = Subject(found.subject.run_id, kind, name)
        self._folder = folder
        self._given = tuple(addresses)
        self._learned = found.learned  # as on the disk
        self._machine = machine
        self._kept = found.shown.roots  # on the disk
        self._writes = asyncio.Lock()  # one at a time: each writes aside under the same names
        self._wakes = asyncio.Event(), asyncio.Event()
        self._banned: tuple[str, ...] = ()
        self._told: list[Callable[[tuple[str, ...]], None]] = []
        self._tokens: frozenset[str] | None = None  # as of the last coordinator that said it

    async def open(self, stack: AsyncExitStack, wait_s: float) -> MutualTls:
        """What is shown among sites. Raises PeerError if no coordinator answers within `wait_s`, or RefusedError."""
        self.among_sites = MutualTls(self.subject.run_id, await within(wait_s, self._renewed))
        wall_time = self._machine.wall_time
        for work in (
            keep_in_force(self.before_coordinator, self._renewed_identity, wall_time, self._wakes[0]),
            keep_in_force(self.among_sites, self._renewed, wall_time, self._wakes[1]),
            watch(self.before_coordinator, lambda: self.addresses, self._heed, self._machine.network),
        ):
            stack.callback(asyncio.create_task(work).cancel)
        return self.among_sites

    @property
    def identity_until_s(self) -> float:
        """When it expires, in seconds since 1970."""
        certificate = certificates.from_pem(self.before_coordinator.shown.certificate)[0]
        return certificate.not_valid_after_utc.timestamp()

    @property
    def addresses(self) -> tuple[str, ...]:
        """Of all coordinators that may serve the run, as far as is known."""
        return tuple(dict.fromkeys((*self._given, *self._learned)))

    def tell_banned(self, tell: Callable[[tuple[str, ...]], None]) -> None:
        """Now, and whenever others are."""
        self._told.append(tell)
        tell(self._banned)

    def knows_token(self, token_id: str) -> bool:
        """Whether a viewer's token that the root has signed was not taken back, as far as was heard since the start."""
        return self._tokens is None or token_id in self._tokens

    async def _renewed(self) -> Shown:
        return await renew(self.before_coordinator, self.addresses, self._among, self._machine.network)

    async def _renewed_identity(self) -> Shown:
        """With the same key; on the disk before it is shown."""
        shown = await renew_identity(self.before_coordinator, self.addresses, self.subject, self._machine.network)
        async with self._writes:
            await asyncio.to_thread(enrolled.keep_shown, self._folder, shown, self._machine.disk)
            self._kept = shown.roots
        return shown

    async def _heed(self, news: News) -> None:
        """What is not signed by the first root is renewed: see `keep_in_force`. Raises InvalidMessage, HostError."""
        pem, known = certificates.to_pem(*news.roots), certificates.from_pem(self.before_coordinator.shown.roots)
        if certificates.salt_of(news.roots[0]) != certificates.salt_of(known[0]):
            raise InvalidMessage("the coordinator names roots of another run")
        async with self._writes:  # an identity that is being renewed is shown before this goes on
            for tls in (self.before_coordinator, self.among_sites):
                if tls.shown.roots != pem:
                    tls.show(Shown(pem, tls.shown.certificate, tls.shown.key))
            if self._kept != pem:
                shown, disk = self.before_coordinator.shown, self._machine.disk
                await asyncio.to_thread(enrolled.keep_shown, self._folder, shown, disk)
                self._kept = pem
        for wake in self._wakes:
            wake.set()
        self._tokens = self._tokens if news.tokens is None else news.tokens
        if news.banned != self._banned:
            self._banned = news.banned
            for tell in self._told:
                tell(news.banned)
        if news.coordinators and news.coordinators != self._learned:
            await asyncio.to_thread(enrolled.keep_learned, self._folder, news.coordinators, self._machine.disk)
            self._learned = news.coordinators


async def within(wait_s: float, call: Callable[[], Awaitable[Shown]]) -> Shown:
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
