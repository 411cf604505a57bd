"""Exchanges of a host that does not lead: it does its part of an attempt, takes the payloads of all other chunks from
its leader, and gives the leader those of its own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc
import grpc.aio

from atoll.node import host_protocol as hosts
from atoll.node.core.exchange_failures import failure_of, outlier_of
from atoll.node.daemon.plane import DataPlane
from atoll.node.dataplane.sync_data import SyncData
from atoll.node.exchange.hub import Hub
from atoll.node.exchange.sync import sharing
from atoll.node.exchange.sync.exchange import Exchange, ExchangeResult
from atoll.node.tasks import end, together
from atoll.node.threads import run_to_its_end
from atoll.protocol import messages as m
from atoll.protocol import wire
from atoll.protocol.errors import AtollError, HostError, InvalidMessage, NonFiniteError
from atoll.protocol.status import error_of, was_cancelled
from atoll.protocol.v1 import hosts_pb2

log = logging.getLogger("atoll.node")

LEADER = "host 0 of this site"


@dataclass(eq=False, kw_only=True)
class HostExchanges:
    """While the host is attached; `close` it then."""

    hub: Hub
    channel: grpc.aio.Channel
    session: int
    say: Callable[[hosts.HostSaid], None]
    level: int
    """At which an exchange that is done is logged."""
    failed: Callable[[BaseException], None]
    """Hears of what this host cannot go on from."""
    _plans: dict[int, m.Plan] = field(default_factory=dict, init=False)
    """By sync, those that are wanted."""
    _tasks: dict[int, asyncio.Task[None]] = field(default_factory=dict, init=False)

    async def close(self) -> None:
        """Nothing runs any more, and nothing is held for it."""
        await end(self._tasks.values())
        self.hub.abandon()

    async def begin(self, begun: hosts.BeginAtHost, plane: DataPlane) -> None:
        """In place of an older attempt."""
        plan = begun.plan
        self._plans[plan.sync] = plan
        try:
            data = sync_data(plane, plan.base_commit, plan.fragment, begun.error_commits)
            share = await run_to_its_end(self.hub.share(plan, data), self.hub.pool)
            exchange = self.hub.begin(
                plan,
                data,
                share,
                tokens=begun.tokens,
                weights=begun.weights,
                spread_s=begun.spread_s,
                in_flight=begun.in_flight,
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

    def tell(self, word: m.Weights | hosts.HurryAtHost | hosts.CancelAtHost) -> None:
        match word:
            case m.Weights(sync=sync, tokens=tokens):
                plan = self._plans.get(sync)
                if plan is not None and (plan.term, plan.attempt) == (word.term, word.attempt):
                    self.hub.weigh(plan, tokens)
            case hosts.HurryAtHost(sync=sync):
                self.hub.hurry(sync)
            case hosts.CancelAtHost(sync=sync, attempt=attempt):
                plan = self._plans.get(sync)
                if plan is not None and plan.attempt == attempt:
                    del self._plans[sync]
                self.hub.cancel(sync, attempt)

    def drop(self, sync: int) -> None:
        """It is over."""
        self._plans.pop(sync, None)
        self._tasks.pop(sync, None)
        self.hub.drop_sync(sync)

    async def _run(self, exchange: Exchange) -> None:
        plan, data, loop = exchange.plan, exchange.attempt.data, asyncio.get_running_loop()
        started = loop.time()
        running = asyncio.create_task(exchange.run())
        moving = asyncio.create_task(together([self._give(exchange), self._take(exchange)]))
        try:
            await asyncio.wait({running, moving}, return_when=asyncio.FIRST_EXCEPTION)
            if exchange.attempt.closed is None:  # else what moves has ended by that
                await moving
            result = await running
        except (NonFiniteError, HostError) as error:
            self.failed(error)
        except asyncio.CancelledError:
            if was_cancelled():
                raise
        except (AtollError, OSError) as error:
            if self._plans.get(plan.sync) is plan:  # else another attempt, or the end of the sync
                self.refuse(plan, error)
        else:
            self.say(_done(plan, result))
            log.log(
                self.level,
                "sync %d: exchanged %d of the %d chunks, in %.2f s",
                plan.sync, sum(map(data.is_own, data.chunks)), len(data.chunks), loop.time() - started,
            )  # fmt: skip
        finally:
            await end([running, moving])

    def _of(self, plan: m.Plan | m.Commit) -> Any:
        of = hosts.PayloadsOf(session=self.session, sync=plan.sync, term=plan.term, attempt=plan.attempt)
        return wire.to_proto(of)

    async def _give(self, exchange: Exchange) -> None:
        """Of its own chunks, to the leader."""
        method: grpc.aio.StreamUnaryMultiCallable[Any, Any] = self.channel.stream_unary(
            hosts.PUT_PAYLOADS_METHOD,
            request_serializer=hosts_pb2.PutPayloadsRequest.SerializeToString,
            response_deserializer=hosts_pb2.PutPayloadsResponse.FromString,
        )
        call, own = method(), exchange.attempt.data.own or range(0)
        try:
            await call.write(hosts_pb2.PutPayloadsRequest(open=self._of(exchange.plan)))
            await sharing.give(
                exchange, own.__contains__, lambda data: call.write(hosts_pb2.PutPayloadsRequest(data=data))
            )
            await call.done_writing()
            await call
        except (grpc.RpcError, asyncio.InvalidStateError):
            raise error_of(await call.code(), await call.details() or "", LEADER) from None
        finally:
            call.cancel()

    async def _take(self, exchange: Exchange) -> None:
        """Of all other chunks, from the leader."""
        own = exchange.attempt.data.own
        async with self._taking(exchange.plan) as read:
            await sharing.take(exchange, lambda chunk: own is None or chunk not in own, read, LEADER)

    async def take_committed(self, commit: m.Commit, plane: DataPlane) -> None:
        """All payloads of a commit, into the log. Raises StateError if the leader lacks them too."""
        file = await run_to_its_end(partial(plane.log.open_commit, commit))
        async with self._taking(commit, is_committed=True) as read:
            await sharing.take_file(file, commit, plane.layout, self.hub.pool, read)

    @asynccontextmanager
    async def _taking(
        self, plan: m.Plan | m.Commit, *, is_committed: bool = False
    ) -> AsyncIterator[Callable[[], Awaitable[bytes | None]]]:
        method: grpc.aio.UnaryStreamMultiCallable[Any, Any] = self.channel.unary_stream(
            hosts.TAKE_PAYLOADS_METHOD,
            request_serializer=hosts_pb2.TakePayloadsRequest.SerializeToString,
            response_deserializer=hosts_pb2.TakePayloadsResponse.FromString,
        )
        call = method(hosts_pb2.TakePayloadsRequest(of=self._of(plan), is_committed=is_committed))

        async def read() -> bytes | None:
            part = await call.read()
            return part.data if isinstance(part, hosts_pb2.TakePayloadsResponse) else None

        try:
            yield read
        except grpc.RpcError:
            raise error_of(await call.code(), await call.details() or "", LEADER) from None
        finally:
            call.cancel()


def sync_data(plane: DataPlane, base_commit: int, fragment: int, error_commits: tuple[int, ...]) -> SyncData:
    """Of the chunks of this host. Raises InvalidMessage if the run has no such fragment, or another number of them."""
    if plane.errors is not None and len(error_commits) != len(plane.layout.fragments):
        raise InvalidMessage(f"errors of {len(error_commits)} fragments, this run has {len(plane.layout.fragments)}")
    return plane.sync_data(base_commit, fragment, error_commits, plane.own)


def _done(plan: m.Plan, result: ExchangeResult) -> m.Done:
    """As a host says it to its leader, which knows what the site holds."""
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
