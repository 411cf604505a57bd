"""Exchanges of a host that does not lead: it does its part of an attempt, takes the payloads of all other chunks from
its leader, and gives the leader those of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc
import grpc.aio

from atoll.node import host_protocol as hosts
from atoll.node.daemon.exchange_processes.process_exchanges import ProcessExchanges
from atoll.node.daemon.followed_exchanges import FollowedExchanges
from atoll.node.daemon.plane import DataPlane
from atoll.node.daemon.shared_exchanges import OfRunning
from atoll.node.dataplane.kept_contributions import KeptContributions
from atoll.node.dataplane.sync_data import SyncData
from atoll.node.exchange.sync import sharing
from atoll.node.exchange.sync.exchange import Exchange, ExchangeResult
from atoll.node.exchange.sync.multiplication import Products
from atoll.node.tasks import together
from atoll.protocol import messages as m
from atoll.protocol import wire
from atoll.protocol.errors import AtollError, InvalidMessage, StateError
from atoll.protocol.status import error_of
from atoll.protocol.threads import run_to_its_end
from atoll.protocol.v1 import hosts_pb2

LEADER = "host 0 of this site"


@dataclass(eq=False, kw_only=True)
class HostExchanges(FollowedExchanges):
    """While the host is attached. `processes`: of this host, which do their parts of its part."""

    channel: grpc.aio.Channel
    session: int
    processes: ProcessExchanges
    kept: Callable[[], KeptContributions | None]
    """In a run with audits, once the model is known."""
    _own: range = field(default=range(0), init=False)

    async def begin(self, begun: hosts.BeginAtHost, plane: DataPlane) -> None:
        """In place of an older attempt."""
        plan, self._own = begun.plan, plane.own or range(0)
        try:
            await self.processes.wait_for(plan)
            errors = begun.error_commits if begun.tokens else (0,) * len(plane.layout.fragments)  # a receiver has none
            data = sync_data(plane, plan.base_commit, plan.fragment, errors, plane.own_part)
            if (kept := self.kept()) is not None:
                data.is_audited, data.kept = True, kept.of(plan.sync)
                if begun.tokens and data.kept is None:
                    raise StateError(f"what this host contributes to sync {plan.sync} is not kept here")
            await self.processes.begin(begun, plane, data)
        except AtollError as error:
            self.refuse(plan, error)
            return
        await self.begin_on(begun, data)
        self.processes.has_begun(plan)

    def refuse(self, plan: m.Plan, error: Exception) -> None:
        super().refuse(plan, error)
        self.processes.cancel(plan.sync, plan.attempt)

    async def close(self) -> None:
        await super().close()
        self.processes.abandon()

    def multiplied(self, plan: m.Plan, products: Products) -> None:
        """With those of the other processes of this host."""
        self.processes.summed(plan, products, partial(super().multiplied, plan))

    def tell(self, word: OfRunning) -> None:
        super().tell(word)
        self.processes.tell(word)

    def drop(self, sync: int) -> None:
        super().drop(sync)
        self.processes.drop(sync)

    async def together(self, plan: m.Plan, result: ExchangeResult) -> ExchangeResult:
        return await self.processes.done(plan, result)

    async def move(self, exchange: Exchange) -> None:
        await together([self._give(exchange), self._take(exchange)])

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
        call = method()
        try:
            await call.write(hosts_pb2.PutPayloadsRequest(open=self._of(exchange.plan)))
            await sharing.give(
                exchange, self._own.__contains__, lambda data: call.write(hosts_pb2.PutPayloadsRequest(data=data))
            )
            await call.done_writing()
            await call
        except (grpc.RpcError, asyncio.InvalidStateError):
            raise error_of(await call.code(), await call.details() or "", LEADER) from None
        finally:
            call.cancel()

    async def _take(self, exchange: Exchange) -> None:
        """Of all other chunks, from the leader."""
        async with self._taking(exchange.plan) as read:
            await sharing.take(exchange, lambda chunk: chunk not in self._own, read, LEADER)

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


def sync_data(
    plane: DataPlane, base_commit: int, fragment: int, error_commits: tuple[int, ...], own: range | None
) -> SyncData:
    """Raises InvalidMessage if the run has no such fragment, or another number of them."""
    if plane.errors is not None and len(error_commits) != len(plane.layout.fragments):
        raise InvalidMessage(f"errors of {len(error_commits)} fragments, this run has {len(plane.layout.fragments)}")
    return plane.sync_data(base_commit, fragment, error_commits, own)
