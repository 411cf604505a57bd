"""The exchanges of a node: begun, weighed, cancelled and dropped in the order in which the core wants it."""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from dataclasses import replace

from atoll.node.core import events as e
from atoll.node.core import outputs as out
from atoll.node.daemon.disk_jobs import DiskJobs
from atoll.node.daemon.shell import Shell
from atoll.node.exchange.sync.exchange import Exchange
from atoll.node.threads import run_to_its_end
from atoll.protocol import messages as m
from atoll.protocol.errors import AtollError, AverageError, HostError, NonFiniteError, NoRoomError, PeerError


class Exchanges:
    """An exchange needs the buffers, and what of it grows with the model is done in a thread: what concerns exchanges
    waits for both."""

    def __init__(self, shell: Shell, disk: DiskJobs) -> None:
        self._shell = shell
        self._hub = shell.hub
        self._disk = disk
        self._waiting: deque[out.Output] = deque()
        self._has_buffers = False
        self._beginning: asyncio.Task[None] | None = None

    def execute(self, output: out.Output) -> None:
        """After those before it."""
        self._waiting.append(output)
        self._go_on()

    def have_buffers(self) -> None:
        """From now on."""
        self._has_buffers = True
        self._go_on()

    def _go_on(self) -> None:
        while self._waiting and self._has_buffers and self._beginning is None:
            match self._waiting.popleft():
                case out.BeginExchange() as begun:
                    self._beginning = self._shell.spawn(self._begin(begun))
                case out.WeighExchange(plan, weights):
                    self._hub.weigh(plan, weights)
                case out.HurryExchange(sync):
                    self._hub.hurry(sync)
                case out.CancelExchange(sync, attempt):
                    self._hub.cancel(sync, attempt)
                case out.DropSync(sync):
                    self._hub.drop_sync(sync)
                    self._disk.drop_payloads(sync)

    async def _begin(self, begun: out.BeginExchange) -> None:
        plan, site_id = begun.plan, self._shell.core.site.site_id
        failure: m.ExchangeFailed | None = None
        try:
            data = self._disk.present.sync_data(plan)
            share = await run_to_its_end(self._hub.share(plan, data, site_id=site_id), self._hub.pool)
            exchange = self._hub.begin(
                plan,
                data,
                share,
                site_id=site_id,
                tokens=begun.tokens,
                weights=begun.weights,
                spread_s=begun.spread_s,
                in_flight=begun.in_flight,
            )
            self._shell.spawn(self._run(exchange))
            await exchange.reducer.make_room()  # what is forgotten is not taken for held by the next one
        except AtollError as error:
            failure = _failure(plan, error)
            if isinstance(error, NoRoomError):
                failure = replace(failure, peer_site_id=site_id, phase="holding contributions")
        self._beginning = None
        if failure is not None:
            self._shell.handle(e.ExchangeBroken(failure))
        self._go_on()

    async def _run(self, exchange: Exchange) -> None:
        loop, plan = asyncio.get_running_loop(), exchange.plan
        started = loop.time()
        try:
            result = await exchange.run()
        except asyncio.CancelledError:
            if self._shell.has_ended():
                raise
            return  # another attempt, or the end of the sync
        except (NonFiniteError, HostError) as error:
            self._shell.handle(e.NodeFailed(str(error), error.exit_code))
            return
        except (AtollError, OSError) as error:
            self._shell.handle(e.ExchangeBroken(_failure(plan, error)))
            return
        self._shell.observer.exchange_s = loop.time() - started
        if (held := self._shell.core.site.disk.outer) is None:
            return  # the run has gone back meanwhile, and the exchange is void
        done = m.Done(
            sync=plan.sync,
            attempt=plan.attempt,
            term=plan.term,
            payload_digest=result.payload_digest,
            last_commit=held.commit,
            state_hash=held.state_hash,
            tokens=result.tokens,
            stood_out=_outlier(result.stood_out) if result.stood_out is not None else None,
            links=result.links,
        )
        self._shell.handle(e.ExchangeFinished(done))


_MOST = sys.float_info.max
"""The wire carries finite numbers alone."""


def _outlier(found: tuple[int, float, float]) -> m.Outlier:
    site_id, norm, limit = found
    return m.Outlier(site_id=site_id, norm=min(norm, _MOST), limit=min(limit, _MOST))


def _failure(plan: m.Plan, error: Exception) -> m.ExchangeFailed:
    peer = error if isinstance(error, PeerError) else None
    average = error if isinstance(error, AverageError) else None
    phase = peer.phase if peer else "averaging" if average else "local"
    return m.ExchangeFailed(
        sync=plan.sync,
        attempt=plan.attempt,
        term=plan.term,
        peer_site_id=peer.peer_site_id if peer else 0,
        direction=m.Direction.SENDING if peer is not None and peer.sending else m.Direction.RECEIVING,
        phase=phase[:64],
        text=str(error)[:1024],
        tensor=average.tensor[:1024] if average else "",
        outliers=tuple(_outlier(found) for found in (average.outliers if average else ())),
    )
