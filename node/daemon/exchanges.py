"""The exchanges of a node: begun, weighed, cancelled and dropped in the order in which the core wants it."""

from __future__ import annotations

import asyncio
from collections import deque
from functools import partial

from atoll.node import host_protocol as hosts
from atoll.node.core import events as e
from atoll.node.core import outputs as out
from atoll.node.core.exchange_events import ExchangeFinished, ProductsMade
from atoll.node.daemon.disk_jobs import DiskJobs
from atoll.node.daemon.exchange_processes.process_exchanges import ProcessExchanges
from atoll.node.daemon.hosts.leading_exchanges import LeadingExchanges
from atoll.node.daemon.plane import DataPlane
from atoll.node.daemon.shell import Shell
from atoll.node.exchange.sync.exchange import Exchange
from atoll.node.exchange.sync.multiplication import Products
from atoll.protocol import messages as m
from atoll.protocol.errors import AtollError, HostError, NonFiniteError, StateError
from atoll.protocol.plans import with_weights
from atoll.protocol.spec import spec_of
from atoll.protocol.threads import run_to_its_end
from atoll.protocol.trust.words import of_payloads


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

    @property
    def _of_hosts(self) -> LeadingExchanges:
        """Of the other hosts of the site."""
        return self._shell.leader.exchanges

    @property
    def _of_processes(self) -> ProcessExchanges:
        """Of the other exchange processes of this host."""
        return self._shell.processes.exchanges

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
                    self._beginning = self._shell.tasks.spawn(self._begin(begun))
                case out.WeighExchange(plan, weights, roots):
                    self._hub.weigh(plan, weights, roots)
                    self._of_hosts.weigh(plan, weights, roots)
                    self._of_processes.weigh(plan, weights, roots)
                case out.InfluenceExchange(plan, influences):
                    self._hub.influence(plan, influences)
                    self._of_hosts.influence(plan, influences)
                    self._of_processes.influence(plan, influences)
                case out.HurryExchange(sync):
                    self._hub.hurry(sync)
                    self._of_hosts.hurry(sync)
                    self._of_processes.hurry(sync)
                case out.CancelExchange(sync, attempt):
                    self._hub.cancel(sync, attempt)
                    self._of_hosts.cancel(sync, attempt)
                    self._of_processes.cancel(sync, attempt)
                case out.DropSync(sync):
                    self._hub.drop_sync(sync)
                    self._disk.drop_payloads(sync)
                    self._of_hosts.drop(sync)
                    self._of_processes.drop(sync)

    def _is_over(self, plan: m.Plan) -> bool:
        """What waits behind its beginning says so."""
        ends = out.CancelExchange(plan.sync, plan.attempt), out.DropSync(plan.sync)
        return any(output in ends for output in self._waiting)

    def _word(self, begun: out.BeginExchange) -> hosts.BeginAtHost:
        """As the parts of this site hear it."""
        return hosts.BeginAtHost(
            plan=begun.plan,
            tokens=begun.tokens,
            weights=begun.weights,
            spread_s=begun.spread_s,
            in_flight=tuple(sorted(begun.in_flight)),
            error_commits=begun.error_commits,
            site_id=self._hub.site_id,
            roots=begun.roots,
        )

    async def _begin(self, begun: out.BeginExchange) -> None:
        plan = begun.plan
        if self._shell.observer.traces is not None:
            self._shell.observer.traces.enter(plan)
        try:
            if await self._of_processes.wait_for(plan) and self._is_over(plan):
                self._beginning = None
                self._go_on()
                return
            plane, word = self._disk.present, self._word(begun)
            if begun.is_behind and not await self._takes_ahead(plane, plan):
                raise StateError("this site is behind, and fetches the payloads of this sync later")
            is_shared = self._of_hosts.begin(word) or self._shell.config.site_hosts == 1
            own = plane.own_part if is_shared else None
            data = plane.sync_data(plan.base_commit, plan.fragment, begun.error_commits, own)
            if (kept := self._disk.kept) is not None:
                data.is_audited, data.kept = True, kept.of(plan.sync)
            await self._of_processes.begin(word, plane, data)
            share = await run_to_its_end(self._hub.share(plan, data), self._hub.pool)
            exchange = self._hub.begin(
                plan,
                data,
                share,
                tokens=begun.tokens,
                weights=begun.weights,
                roots=begun.roots,
                spread_s=begun.spread_s,
                in_flight=begun.in_flight | (self._hub.contributed if begun.is_behind else frozenset()),
                multiplied=partial(self.multiplied, plan),
            )
            self._shell.tasks.spawn(self._run(exchange))
            self._of_hosts.has_begun(plan)
            self._of_processes.has_begun(plan)
            await exchange.reducer.make_room()  # what is forgotten is not taken for held by the next one
        except AtollError as error:
            self._of_processes.cancel(plan.sync, plan.attempt)
            self._shell.handle(e.ExchangeBroken(plan, error))
        self._beginning = None
        self._go_on()

    async def _takes_ahead(self, plane: DataPlane, plan: m.Plan) -> bool:
        """Whether payloads of a sync whose base is not here may come now. Other hosts and processes of the site take
        part in its own exchanges alone."""
        if self._shell.config.site_hosts > 1 or self._shell.config.exchange_processes > 1:
            return False
        return await run_to_its_end(partial(plane.log.has_room_ahead, plan.sync))

    def multiplied(self, plan: m.Plan, products: Products) -> None:
        """By this process; the site says those of all its parts."""

        def made(of_site: Products) -> None:
            self._shell.handle(ProductsMade(plan, of_site))

        self._of_processes.summed(plan, products, lambda of_host: self._of_hosts.summed(plan, of_host, made))

    async def _run(self, exchange: Exchange) -> None:
        loop, plan = asyncio.get_running_loop(), exchange.plan
        started = loop.time()
        try:
            result = await self._of_processes.done(plan, await exchange.run())
            result = await self._of_hosts.done(plan, result)
        except asyncio.CancelledError:
            if self._shell.has_ended():
                raise
            return  # another attempt, or the end of the sync
        except (NonFiniteError, HostError) as error:
            self._shell.handle(e.NodeFailed(str(error), error.exit_code))
            return
        except (AtollError, OSError) as error:
            self._of_processes.cancel(plan.sync, plan.attempt)
            self._shell.handle(e.ExchangeBroken(plan, error))
            return
        self._shell.observer.exchanged(loop.time() - started)
        said = result.tokens, result.stood_out, result.links, result.averaged
        root, signature, errors, words = result.payloads_root, None, result.errors, self._shell.words
        if root and words is not None:
            way = spec_of(self._disk.present.settings.sync, plan.base_commit, plan.fragment).trainable
            plan = with_weights(plan, result.tokens, result.influences)
            signature = words.signed(of_payloads(words.run_id, plan, way, self._shell.start_of_site, root))
            if errors is not None:
                errors = words.signed_errors(plan, way, self._shell.start_of_site, errors)
        self._shell.handle(ExchangeFinished(plan, result.payload_digest, *said, root, signature, errors))
