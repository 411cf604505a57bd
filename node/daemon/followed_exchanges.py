"""Exchanges of a part, a host of a site or a process of a host: begun and ended as the one that leads says, which hears
how each has come out."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial

from atoll.node import host_protocol as hosts
from atoll.node.core.exchange_failures import failure_of, outlier_of
from atoll.node.daemon.shared_exchanges import OfRunning, key_of
from atoll.node.dataplane.sync_data import SyncData
from atoll.node.exchange.hub import Hub
from atoll.node.exchange.peers.counters import Counters
from atoll.node.exchange.sync.exchange import Exchange, ExchangeResult
from atoll.node.exchange.sync.multiplication import Products
from atoll.node.tasks import end
from atoll.protocol import messages as m
from atoll.protocol.errors import AtollError, HostError, InvalidMessage, NonFiniteError
from atoll.protocol.status import was_cancelled
from atoll.protocol.threads import run_to_its_end

log = logging.getLogger("atoll.node")


def beat_of(counters: Counters) -> hosts.HostBeat:
    """What a part has moved, as the one that leads hears it."""
    return hosts.HostBeat(
        sent_bytes=counters.sent_bytes,
        received_bytes=counters.received_bytes,
        moved_bytes=counters.moved_bytes,
        sent_contribution_bytes=counters.sent_contribution_bytes,
        sent_average_bytes=counters.sent_average_bytes,
    )


@dataclass(eq=False, kw_only=True)
class FollowedExchanges(ABC):
    """`close` it when the one that leads is lost."""

    hub: Hub
    say: Callable[[m.Done | m.ExchangeFailed | m.Products], None]
    level: int
    """At which an exchange that is done is logged."""
    failed: Callable[[BaseException], None]
    """Hears of what this part cannot go on from."""
    _plans: dict[int, m.Plan] = field(default_factory=dict, init=False)
    """By sync, those that are wanted."""
    _tasks: dict[int, asyncio.Task[None]] = field(default_factory=dict, init=False)

    @abstractmethod
    async def move(self, exchange: Exchange) -> None:
        """Payloads between this part and the one that leads, until all are moved."""

    async def close(self) -> None:
        """Nothing runs any more, and nothing is held for it."""
        await end(self._tasks.values())
        self._tasks.clear()
        self._plans.clear()
        self.hub.abandon()

    async def begin_on(self, begun: hosts.BeginAtHost, data: SyncData) -> None:
        """In place of an older attempt."""
        plan = begun.plan
        self._plans[plan.sync] = plan
        try:
            for said, what in ((begun.weights, "weights"), (begun.roots, "roots")):
                if said and len(said) != len(plan.contributors):
                    raise InvalidMessage(f"{len(said)} {what} of {len(plan.contributors)} contributors")
            share = await run_to_its_end(self.hub.share(plan, data), self.hub.pool)
            exchange = self.hub.begin(
                plan,
                data,
                share,
                tokens=begun.tokens,
                weights=begun.weights,
                roots=begun.roots,
                spread_s=begun.spread_s,
                in_flight=begun.in_flight,
                multiplied=partial(self.multiplied, plan),
            )
        except AtollError as error:
            self.refuse(plan, error)
            return
        if (old := self._tasks.get(plan.sync)) is not None:
            await end([old])
        self._tasks[plan.sync] = asyncio.create_task(self._run(exchange))
        await exchange.reducer.make_room()

    def refuse(self, plan: m.Plan, error: Exception) -> None:
        self.say(failure_of(plan, error, self.hub.site_id))

    def multiplied(self, plan: m.Plan, products: Products) -> None:
        """Of the chunks of this part, as the one that leads hears them."""
        self.say(m.Products(sync=plan.sync, attempt=plan.attempt, term=plan.term, products=products))

    def tell(self, word: OfRunning) -> None:
        match word:
            case m.Influences(sync=sync, influences=influences):
                plan = self._plans.get(sync)
                if plan is not None and key_of(plan) == key_of(word):
                    self.hub.influence(plan, influences)
            case m.Weights(sync=sync, tokens=tokens, roots=roots):
                plan = self._plans.get(sync)
                if plan is not None and key_of(plan) == key_of(word):
                    self.hub.weigh(plan, tokens, roots)
            case hosts.HurryAtHost(sync=sync):
                self.hub.hurry(sync)
            case hosts.CancelAtHost(sync=sync, attempt=attempt):
                plan = self._plans.get(sync)
                if plan is not None and plan.attempt == attempt:
                    del self._plans[sync]
                self.hub.cancel(sync, attempt)

    def keep(self, in_flight: Collection[int]) -> None:
        """All other syncs are over."""
        for sync in self._plans.keys() - in_flight:
            self.drop(sync)

    def drop(self, sync: int) -> None:
        """It is over."""
        self._plans.pop(sync, None)
        self._tasks.pop(sync, None)
        self.hub.drop_sync(sync)

    async def _run(self, exchange: Exchange) -> None:
        plan, data, loop = exchange.plan, exchange.attempt.data, asyncio.get_running_loop()
        started = loop.time()
        running = asyncio.create_task(exchange.run())
        moving = asyncio.create_task(self.move(exchange))
        try:
            await asyncio.wait({running, moving}, return_when=asyncio.FIRST_EXCEPTION)
            if exchange.attempt.closed is None:  # else what moves has ended by that
                await moving
            result = await self.together(plan, await running)
        except (NonFiniteError, HostError) as error:
            self.failed(error)
        except asyncio.CancelledError:
            if was_cancelled():
                raise
        except (AtollError, OSError) as error:
            if self._plans.get(plan.sync) is plan:  # else another attempt, or the end of the sync
                self.refuse(plan, error)
        except Exception as error:
            log.error("a failure that nothing was prepared for", exc_info=error)
            self.failed(error)
        else:
            self.say(_done(plan, result))
            log.log(
                self.level,
                "sync %d: exchanged %d of the %d chunks, in %.2f s",
                plan.sync, sum(map(data.is_own, data.chunks)), len(data.chunks), loop.time() - started,
            )  # fmt: skip
        finally:
            await end([running, moving])

    async def together(self, plan: m.Plan, result: ExchangeResult) -> ExchangeResult:
        """With what parts of this part have done."""
        return result


def _done(plan: m.Plan, result: ExchangeResult) -> m.Done:
    """As a part says it to the one that leads, which knows what the site holds."""
    stood_out = result.stood_out
    return m.Done(
        sync=plan.sync,
        attempt=plan.attempt,
        term=plan.term,
        payload_digest=result.payload_digest,
        last_commit=0,
        state_hash=bytes(32),
        tokens=result.tokens,
        stood_out=None if stood_out is None else outlier_of(stood_out),
        links=result.links,
        averaged=result.averaged,
    )
