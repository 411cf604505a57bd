"""What a node has once for all its exchanges: the dialer, threads, retained contributions, counters, its donor."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from atoll.node.dataplane.kept_contributions import KeptContributions
from atoll.node.dataplane.optim import OuterOptimizer
from atoll.node.dataplane.outer_state import OuterState
from atoll.node.dataplane.payload_log import AttemptLog, PayloadLog
from atoll.node.dataplane.sync_data import SyncData
from atoll.node.exchange.catchup.donations import Donations
from atoll.node.exchange.catchup.donor_client import DonorClient
from atoll.node.exchange.catchup.donor_server import DonorServer
from atoll.node.exchange.catchup.donors import Donors
from atoll.node.exchange.catchup.expected_donors import ExpectedDonors
from atoll.node.exchange.catchup.fetch import Fetch, Fetched
from atoll.node.exchange.catchup.index import Index
from atoll.node.exchange.peers.claims import Claims
from atoll.node.exchange.peers.counters import Counters
from atoll.node.exchange.peers.dialer import Dialer, Purpose
from atoll.node.exchange.peers.progress import Pace
from atoll.node.exchange.peers.rpc import check_header
from atoll.node.exchange.peers.uplink import Uplink
from atoll.node.exchange.sync.attempt import Attempt
from atoll.node.exchange.sync.average_errors import AverageErrors
from atoll.node.exchange.sync.exchange import Exchange
from atoll.node.exchange.sync.multiplication import Products
from atoll.node.exchange.sync.reduction import Share, share_of
from atoll.node.exchange.sync.retained import Retained
from atoll.node.exchange.sync.spill import Spill
from atoll.protocol import PROTOCOL_VERSION
from atoll.protocol.endpoints import places_of
from atoll.protocol.errors import NotYetError, RefusedError, StaleError
from atoll.protocol.layout import Layout
from atoll.protocol.messages import Header, Member, Plan, Sources
from atoll.protocol.v1 import peer_pb2

T = TypeVar("T")

DROPPED_REMEMBERED = 256
EARLY_HOLD_S = 1.0
"""How long a stream for a plan that is not here yet is held before it is told to come again."""
MAX_EARLY = 256
"""Streams held at once."""


@dataclass(eq=False, kw_only=True)
class Hub:
    """Lives in one event loop; `close` it at the end. `service.py` asks it what peers ask for.

    `dialer` and `pool` end with it. `allow` says what may be held as a reducer: in memory, and on the disk by `spill`;
    without one all of it may be in memory.
    """

    run_id: str
    incarnation: int
    dialer: Dialer
    pool: Executor
    spill: Spill | None = None
    error_spill: Spill | None = None
    """The same for errors of averages."""
    site_id: int = 0
    """Given by the coordinator; 0 until then."""
    num_processes: int = 1
    """Of this host, which share what it may hold."""
    claims: Claims = field(default_factory=Claims)
    """Of whoever calls."""

    def __post_init__(self) -> None:
        self.max_retained_bytes = self.reduce_buffer_bytes = 0
        self.counters = Counters()
        self.uplink = Uplink()
        self.average_errors = AverageErrors(self.pool, self.error_spill)
        self.donor: DonorServer | None = None
        self.expected_donors = ExpectedDonors()
        self.donations = Donations(identity=self.identity, dialer=self.dialer, donor=self.served_donor)
        self._log: AttemptLog | None = None
        self._exchanges: dict[int, Exchange] = {}  # by sync: the newest attempt
        self._dropped: deque[int] = deque(maxlen=DROPPED_REMEMBERED)
        self._num_early = 0
        self._begun = asyncio.Event()

    @property
    def retained_bytes(self) -> int:
        """Of contributions, of payloads reduced here, and of what was lost of averages."""
        of_syncs = sum(e.reducer.payload_bytes + e.retained.num_bytes for e in self._exchanges.values())
        return of_syncs + self.average_errors.num_bytes

    @property
    def contributed(self) -> frozenset[int]:
        """Syncs that this site contributed to, and that were not dropped."""
        return frozenset(sync for sync, exchange in self._exchanges.items() if exchange.attempt.contributes)

    # --- life

    def serve(
        self,
        layout: Layout,
        outer: Callable[[], OuterState | None],
        log: PayloadLog,
        pace: Pace,
        kept: KeptContributions | None = None,
        *,
        elsewhere: Callable[[int], DonorClient | None] = lambda chunk: None,
    ) -> None:
        """From now on exchanges write to `log`, and peers that catch up are served from it and the outer state, if they
        take what they ask for at `pace`. `elsewhere`: see `DonorServer`."""
        self.keep_payloads_in(log)
        self.donor = DonorServer(
            identity=self.identity,
            layout=layout,
            outer=outer,
            log=log,
            pool=self.pool,
            counters=self.counters,
            pace=pace,
            uplink=self.uplink,
            kept=kept,
            elsewhere=elsewhere,
            added=self.average_errors.added,
        )

    def keep_payloads_in(self, log: AttemptLog) -> None:
        """From now on exchanges do."""
        self._log = log

    @property
    def log(self) -> AttemptLog:
        """Raises NotYetError before that."""
        if self._log is None:
            raise NotYetError("this node has no log yet")
        return self._log

    def allow(self, max_retained_bytes: int, reduce_buffer_bytes: int, *, keeps_errors: bool = False) -> None:
        """From the next exchange on this host may hold this as a reducer, and in memory of contributions: of these and
        of errors of averages, half each, where such errors are kept. Each of its processes has an equal share."""
        self.max_retained_bytes, self.reduce_buffer_bytes = max_retained_bytes, reduce_buffer_bytes
        reduce_buffer_bytes //= self.num_processes
        of_errors = reduce_buffer_bytes // 2 if keeps_errors else 0
        if self.spill is not None:
            self.spill.memory_limit_bytes = reduce_buffer_bytes - of_errors
        if self.error_spill is not None:
            self.error_spill.memory_limit_bytes = of_errors

    async def close(self) -> None:
        for exchange in self._exchanges.values():
            exchange.cancel()
        self.expected_donors.dismiss()
        await self.donations.close()
        await self.dialer.close()
        self.pool.shutdown(wait=False, cancel_futures=True)
        for spill in filter(None, (self.spill, self.error_spill)):
            await asyncio.to_thread(spill.clear)
        if self.donor is not None and self.donor.kept is not None:
            await asyncio.to_thread(self.donor.kept.close)

    def identity(self, term: int = 0) -> Header:
        """Who answers here."""
        return Header(
            protocol_version=PROTOCOL_VERSION,
            run_id=self.run_id,
            term=term,
            site_id=self.site_id,
            incarnation=self.incarnation,
        )

    def ban(self, names: Collection[str]) -> None:
        """Sites of these names, and of no others, are not dialled and not answered from now on."""
        self.claims.ban(names)
        self.dialer.ban(names)

    # --- exchanges

    def share(self, plan: Plan, data: SyncData) -> Callable[[], Share]:
        """What the plan asks of this site, to be made in a thread: see `share_of`."""
        before = self._exchanges.get(plan.sync)
        arrived = before.retained.arrived() if before else []
        return partial(share_of, plan, data, self.site_id, arrived, self.spill, num_processes=self.num_processes)

    def begin(
        self,
        plan: Plan,
        data: SyncData,
        share: Share,
        *,
        tokens: int,
        weights: Sequence[int],
        roots: Sequence[bytes] = (),
        spread_s: float = 0.0,
        in_flight: Collection[int] = (),
        multiplied: Callable[[Products], None] = lambda products: None,
    ) -> Exchange:
        """The exchange of `plan` on this site, to be run; an older attempt at the same sync is cancelled. `share` is of
        the same plan, and no other exchange was begun or dropped since it was asked for. `tokens`: this site's weight,
        0 if it receives. `weights`, `roots`: of all contributors; nothing before they are said. `spread_s`: see
        `Attempt`. `multiplied`: see `Reducer`. `in_flight`: the other syncs that are not over. A site that was evicted
        may never have heard how one ended.

        Raises StaleError for an old plan, RefusedError if the plan does not list this start of this site, NoRoomError
        if it asks it to hold more than its share of `max_retained_bytes` or the disk has room for.
        """
        if plan.sync in self._dropped:
            raise StaleError(f"sync {plan.sync} is over here")
        self.claims.learn((*plan.contributors, *plan.receivers))
        old = self._exchanges.get(plan.sync)
        if old is not None and _order(old.plan) > _order(plan):
            raise StaleError(f"plan {_name(plan)} comes after {_name(old.plan)}")
        for sync in [sync for sync in self._exchanges if sync != plan.sync and sync not in in_flight]:
            self.drop_sync(sync)
        retained = old.retained if old is not None else Retained(self.pool, self.spill)
        header = self.identity(plan.term)
        attempt = Attempt(plan, data, header, tokens, self.pool, self.counters, self.uplink, share, spread_s)
        max_retained_bytes = self.max_retained_bytes // self.num_processes
        need = share.bytes_to_retain(attempt.where, max_retained_bytes, self.spill)
        exchange = Exchange(
            attempt=attempt,
            share=share,
            said=weights,
            said_roots=roots,
            log=self.log,
            retained=retained,
            errors=self.average_errors,
            has_room=need + sum(e.retained.num_bytes for e in self._exchanges.values()) <= max_retained_bytes,
            dialer=self.dialer,
            multiplied=multiplied,
        )
        if old is not None:
            old.cancel()
            if _order(old.plan) < _order(plan):
                old.close(StaleError(f"{_name(old.plan)} is over, {_name(plan)} runs"))
            old.reducer.forget_payloads()
        self._exchanges[plan.sync] = exchange
        plans = [exchange.plan for exchange in self._exchanges.values()]
        used = [place for plan in plans for member in plan.contributors for place in places_of(member)]
        self.dialer.disconnect_others(used, Purpose.EXCHANGE)
        self._begun.set()
        self._begun = asyncio.Event()
        return exchange

    def weigh(self, plan: Plan, weights: Sequence[int], roots: Sequence[bytes] = ()) -> None:
        """The weights of an exchange that began without them, if it still runs."""
        exchange = self._exchanges.get(plan.sync)
        if exchange is not None and _order(exchange.plan) == _order(plan):
            exchange.weigh(weights, roots)

    def influence(self, plan: Plan, influences: Sequence[int]) -> None:
        """What each contributor counts, if that exchange still runs."""
        exchange = self._exchanges.get(plan.sync)
        if exchange is not None and _order(exchange.plan) == _order(plan):
            exchange.influence(influences)

    def have_payloads(self, plan: Plan, chunks: list[int]) -> None:
        """Another process of this host has put their payloads into the file of that attempt."""
        exchange = self._exchanges.get(plan.sync)
        if exchange is not None and _order(exchange.plan) == _order(plan):
            exchange.collection.note(chunks)

    def hurry(self, sync: int) -> None:
        """What the exchange sends goes as fast as it can from now on."""
        if (exchange := self._exchanges.get(sync)) is not None:
            exchange.attempt.hurry()

    def fail(self, plan: Plan, error: Exception) -> None:
        """The exchange of this plan, if it runs: another host of this site cannot do its part."""
        exchange = self._exchanges.get(plan.sync)
        if exchange is not None and _order(exchange.plan) == _order(plan):
            exchange.attempt.fail(error)

    def cancel(self, sync: int, attempt: int) -> None:
        """That attempt, if it is the newest; what it holds of the sync stays."""
        exchange = self._exchanges.get(sync)
        if exchange is not None and exchange.plan.attempt == attempt:
            exchange.cancel()

    def drop_sync(self, sync: int) -> None:
        """The sync is over: forget contributions and payloads that are held for it, and turn its peers away."""
        exchange = self._exchanges.pop(sync, None)
        if exchange is not None:
            exchange.cancel()
            exchange.close(StaleError(f"sync {sync} is over here"))
            exchange.reducer.forget_payloads()
            exchange.retained.drop()
        if self._log is not None:
            self.average_errors.forget_void(self._log, self._exchanges)
        if sync not in self._dropped:
            self._dropped.append(sync)

    def abandon(self) -> None:
        """All exchanges, of which none need be over: this host has lost the one that leads it. What is held for them
        goes, too."""
        for exchange in self._exchanges.values():
            exchange.cancel()
            exchange.close(NotYetError("this host has lost host 0 of its site"))
            exchange.reducer.forget_payloads()
            exchange.retained.drop()
        self._exchanges.clear()

    def waits_for(self) -> tuple[list[int], list[int]]:
        """Of the exchanges under way: whose contributions are missing here, and whose payloads; see `Exchange`."""
        found = [exchange.waits_for() for exchange in self._exchanges.values()]
        contributions, payloads = (list(dict.fromkeys(i for pair in found for i in pair[which])) for which in (0, 1))
        return contributions, payloads

    # --- catching up

    async def fetch_state(
        self,
        *,
        sources: Sources,
        refresh: Callable[[tuple[int, ...]], Awaitable[Sources]],
        undialable: Callable[[], Collection[int]],
        outer: OuterState,
        log: PayloadLog,
        optimizer: OuterOptimizer,
        pace: Pace,
    ) -> Fetched:
        """Brings `outer` to the newest commit that `sources`, or what `refresh` brings meanwhile, name: see `Fetch`.

        `refresh` asks the coordinator again, and to have donors of these site ids dial this site; `undialable` are
        those that it cannot dial, as far as is known now. Something has to move at `pace`.
        """
        index = Index(outer.layout.manifest, outer.slots, len(outer.layout.fragments))
        index.learn(sources)
        self.claims.learn(sources.donors)

        async def ask_again(absent: tuple[int, ...]) -> Sources:
            found = await refresh(absent)
            self.claims.learn(found.donors)
            return found

        donors = Donors(
            index=index,
            header=self.identity(),
            dialer=self.dialer,
            counters=self.counters,
            refresh=ask_again,
            undialable=undialable,
            expected=self.expected_donors,
            pace=pace,
        )
        fetch = Fetch(donors=donors, outer=outer, payload_log=log, optimizer=optimizer, pool=self.pool)
        try:
            return await fetch.run()
        finally:
            donors.close()

    # --- peers

    def served_donor(self) -> DonorServer:
        """Raises NotYetError before `serve`."""
        if self.donor is None:
            raise NotYetError("this node has no state yet")
        return self.donor

    async def find(self, message: peer_pb2.ExchangeOpen) -> tuple[Exchange, Member]:
        """The exchange that a peer asks for, and who it is in the plan.

        Raises StaleError, RefusedError or InvalidMessage with both values; NotYetError for what is early.
        """
        check_header(message.header, self.run_id)
        return await self._when_begun(partial(self._member, message))

    async def running(self, sync: int, term: int, attempt: int) -> Exchange:
        """That exchange, for another host of this site. Raises as `find` does."""
        return await self._when_begun(partial(self._running, sync, (term, attempt)))

    async def _when_begun(self, found: Callable[[], T]) -> T:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + EARLY_HOLD_S
        while True:
            try:
                return found()
            except NotYetError:
                remaining_s = deadline - loop.time()
                if remaining_s <= 0 or self._num_early >= MAX_EARLY:
                    raise
            self._num_early += 1
            try:
                with suppress(TimeoutError):
                    async with asyncio.timeout(remaining_s):
                        await self._begun.wait()
            finally:
                self._num_early -= 1

    def _member(self, message: peer_pb2.ExchangeOpen) -> tuple[Exchange, Member]:
        exchange = self._running(message.sync, (message.plan_term, message.attempt))
        return exchange, _member(message, exchange)

    def _running(self, sync: int, order: tuple[int, int]) -> Exchange:
        exchange = self._exchanges.get(sync)
        asked = f"sync {sync}, term {order[0]}, attempt {order[1]}"
        if exchange is None:
            if sync in self._dropped or (len(self._dropped) == DROPPED_REMEMBERED and sync < min(self._dropped)):
                raise StaleError(f"{asked}: that sync is over here, the last one is {max(self._dropped)}")
            raise NotYetError(f"{asked}: no plan for it is here yet")
        if order < _order(exchange.plan):
            raise StaleError(f"{asked} is over, {_name(exchange.plan)} runs")
        if order > _order(exchange.plan):
            raise NotYetError(f"{asked} is early, {_name(exchange.plan)} runs")
        closed = exchange.attempt.closed
        if isinstance(closed, NotYetError):
            raise NotYetError(str(closed))
        if closed is not None:
            raise closed
        return exchange


def _member(message: peer_pb2.ExchangeOpen, exchange: Exchange) -> Member:
    plan, attempt, me = exchange.plan, exchange.attempt, exchange.attempt.me
    if message.plan_digest != attempt.digest:
        raise RefusedError(
            f"{_name(plan)}: plan {message.plan_digest.hex()[:16]}, here it is {attempt.digest.hex()[:16]}"
        )
    if message.reducer_site_id != me.site_id:
        raise RefusedError(f"meant for site {message.reducer_site_id}, this is site {me.site_id}")
    if message.reducer_incarnation != me.incarnation:
        raise StaleError(f"meant for incarnation {message.reducer_incarnation}, this is {me.incarnation}")
    header = message.header
    found = attempt.members.get(header.site_id)
    if found is None:
        raise RefusedError(f"site {header.site_id} is not in {_name(plan)}")
    member, contributes = found
    if member.incarnation != header.incarnation:
        raise StaleError(
            f"site {member.site_id} is in {_name(plan)} as incarnation {member.incarnation}, not {header.incarnation}"
        )
    if contributes:
        exchange.weights.hear(member, message.tokens)
        exchange.roots.hear(member, message.contributions_root)
        exchange.attempt.hurry(message.spare_ms)
    elif message.tokens:
        raise RefusedError(f"site {member.site_id} says {message.tokens} tokens, and only receives")
    return member


def _order(plan: Plan) -> tuple[int, int]:
    return plan.term, plan.attempt


def _name(plan: Plan) -> str:
    return f"sync {plan.sync}, term {plan.term}, attempt {plan.attempt}"
