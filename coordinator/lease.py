"""The lease: which of the coordinators on one database leads, as each of them knows it. The database's clock alone says
when it is over; the one that leads stops speaking before that."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from atoll.coordinator.stage import Roots, Stage
from atoll.protocol.errors import AtollError, ConfigError, HostError, StaleError
from atoll.protocol.signals import end_process
from atoll.protocol.trust.invites import MAX_ADDRESSES

log = logging.getLogger("atoll.coordinator")

LEASE_S = 5.0
RENEW_EVERY_S = 1.0
LOOK_EVERY_S = 0.5
SEEN_WITHIN_S = 5.0
"""Since it said so, a coordinator stands by."""


class LeaseHeld(StaleError):
    """Another coordinator leads."""


@dataclass(frozen=True, slots=True)
class Held:
    """As the database said a moment ago."""

    holder: str
    address: str
    left_s: float
    stage: Stage | None = None
    """Of the run's roots; None before a coordinator has led."""

    @property
    def is_over(self) -> bool:
        return self.left_s <= 0.0


@dataclass(frozen=True, slots=True)
class Claim:
    """What one start of a coordinator says of itself."""

    holder: str
    """Of this start alone."""
    address: str
    """Where sites reach it."""

    def check(self, where: str, held: Held) -> None:
        """Raises LeaseHeld."""
        if not held.is_over and held.holder != self.holder:
            raise LeaseHeld(f"{where}: the coordinator at {held.address} leads for {held.left_s:.1f} s more")


@dataclass(frozen=True, slots=True)
class Standby:
    """A coordinator that stands by."""

    address: str
    roots: frozenset[str]
    """That it holds, by their digests."""


class Lease(Protocol):
    """Of one start of a coordinator. From any thread; each method may raise HostError."""

    def stand_by(self, roots: frozenset[str]) -> Held:
        """Says that this one is here, with these roots. Who leads."""

    def renew(self) -> tuple[Standby, ...] | None:
        """Those that stand by; None if the lease was over, or is another one's."""

    def keep_stage(self, stage: Stage) -> bool:
        """For all that share the store; False, and nothing is kept, if the lease was over, or is another one's."""

    def end(self) -> None:
        """Whoever stands by need not wait."""


def end_with(error: BaseException) -> None:
    """Not one more word, and no thread is waited for, which may hang in the database."""
    sys.stderr.write(f"atoll coordinator: {error}\n")
    end_process(error.exit_code if isinstance(error, AtollError) else AtollError.exit_code)


class Leading:
    """`wait` until nobody leads; then `keep` what the store took, until the process ends."""

    def __init__(
        self, lease: Lease, where: str, roots: Roots, lost: Callable[[BaseException], None] = end_with
    ) -> None:
        """`where`: the store, in words. `roots`: that this coordinator has. `lost` ends this process: another
        coordinator may lead."""
        self._lease = lease
        self._roots = roots
        self._where = where
        self._lost = lost
        self._loop = asyncio.get_running_loop()
        self._until = 0.0
        self.standbys: tuple[Standby, ...] = ()
        """The others."""
        self.told: list[Callable[[], None]] = []
        """They hear when others stand by than before."""
        self.state = "it starts"
        """In words, of one that stands by."""

    async def is_free(self) -> bool:
        """Whether nobody leads. The roots of whoever does are in force here, too. Raises HostError, and ConfigError
        where one of them is not here."""
        held = await asyncio.to_thread(self._said)
        if held.stage is not None and await asyncio.to_thread(self._roots.follow, held.stage):
            log.info("the roots of the run are others: %d are trusted", len(held.stage.trusted))
            for tell in self._roots.told:
                tell()
        self.state = f"it stands by: the coordinator at {held.address} leads, for {max(0.0, held.left_s):.1f} s more"
        return held.is_over

    def _said(self) -> Held:
        return self._lease.stand_by(self._roots.held())

    async def wait(self, asked: asyncio.Event) -> bool:
        """Until nobody leads; False if this is to end before."""
        problem = ""
        while not asked.is_set():
            try:
                if await self.is_free():
                    return True
                problem = ""
            except (HostError, ConfigError) as error:
                if not problem:
                    log.warning("%s", error)
                why = "does not know who leads" if isinstance(error, HostError) else "cannot lead"
                problem = self.state = f"it stands by, and {why}: {error}"
            try:
                async with asyncio.timeout(LOOK_EVERY_S):
                    await asked.wait()
            except TimeoutError:
                continue
        return False

    def takes(self) -> None:
        """The store takes the lease now: it counts from before, which is no later than by the database's clock."""
        self._until = self._loop.time() + LEASE_S

    def start(self, stack: AsyncExitStack) -> None:
        """The store has taken the lease: it is kept until `stack` ends, and without it this process ends."""
        keeping = asyncio.create_task(self.keep())
        keeping.add_done_callback(self._over)
        stack.callback(keeping.cancel)

    def _over(self, keeping: asyncio.Task[NoReturn]) -> None:
        if not keeping.cancelled() and (error := keeping.exception()) is not None:
            self._lost(error)

    @property
    def left_s(self) -> float:
        return self._until - self._loop.time()

    async def keep(self) -> NoReturn:
        """Raises StaleError once the lease may be over: nothing more may be said to anybody."""
        problem = ""
        while True:
            asked_at = self._loop.time()
            renewing = asyncio.ensure_future(asyncio.to_thread(self._lease.renew))
            while not renewing.done() and self.left_s > 0.0:  # the store may take it anew meanwhile
                await asyncio.wait((renewing,), timeout=self.left_s)
            if self.left_s <= 0.0:
                renewing.add_done_callback(lambda done: done.cancelled() or done.exception())
                raise StaleError(f"{self._where} did not renew the lease within {LEASE_S:g} s{problem}")
            try:
                standbys = renewing.result()
            except HostError as error:
                problem = f": {error}"
                log.warning("the lease is not renewed yet, %.1f s are left%s", self.left_s, problem)
            else:
                if standbys is None:
                    raise StaleError(f"{self._where}: the lease is over, and another coordinator may lead")
                self._until, problem = max(self._until, asked_at + LEASE_S), ""
                if standbys != self.standbys:
                    self.standbys = standbys
                    for tell in self.told:
                        tell()
            await asyncio.sleep(max(0.0, min(RENEW_EVERY_S, self.left_s)))

    def addresses(self, own: str) -> tuple[str, ...]:
        """Where sites reach this one, and those that stand by; none if nobody does."""
        others = (standby.address for standby in self.standbys)
        return tuple(dict.fromkeys((own, *others)))[:MAX_ADDRESSES] if self.standbys else ()

    def lacking(self, root: str) -> tuple[str, ...]:
        """The addresses of those that stand by without it."""
        return tuple(standby.address for standby in self.standbys if root not in standby.roots)

    async def keep_stage(self, stage: Stage) -> None:
        """For all that share the store. Raises HostError, StaleError."""
        if not await asyncio.to_thread(self._lease.keep_stage, stage):
            raise StaleError(f"{self._where}: the lease is over, and another coordinator may lead")

    def end(self) -> None:
        """In a thread, when nothing more is said."""
        self._lease.end()

    def document(self) -> dict[str, Any]:
        return {"left_s": round(self.left_s, 1), "standbys": [standby.address for standby in self.standbys]}
