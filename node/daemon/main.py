"""The node process: self-test, find the run, open the home folder, serve peers, run until the core says exit."""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial

from atoll.node.daemon.allowance import TimeOff
from atoll.node.daemon.config import NodeConfig, validate
from atoll.node.daemon.discover import discover
from atoll.node.daemon.health import health_server, obstacles_of
from atoll.node.daemon.home import Home
from atoll.node.daemon.hosts.follower import run_follower
from atoll.node.daemon.journal import Journal
from atoll.node.daemon.launcher import WORKERS_END_LIMIT_S
from atoll.node.daemon.node import FLUSH_S, Node
from atoll.node.daemon.peers import address_of_metrics, check_cap, meet_peers, prepare_kernels
from atoll.node.daemon.plane import DataPlane
from atoll.node.daemon.security import Identity, NodeSecurity, page_access
from atoll.node.daemon.site_log import log_to
from atoll.node.daemon.time_off import Account, Watch, home_of, stay_off
from atoll.node.daemon.tracing import SiteTraces
from atoll.node.dataplane.kept_contributions import check_parts
from atoll.node.threads import giving_way
from atoll.protocol import notify
from atoll.protocol.addresses import parse_proxy
from atoll.protocol.errors import PeerError
from atoll.protocol.exit_codes import ENDED_AT_ONCE
from atoll.protocol.machine import Machine
from atoll.protocol.signals import Signals, end_process
from atoll.protocol.trace_export import Exporter, from_environment
from atoll.protocol.transport import Handshake

log = logging.getLogger("atoll.node")

CLEAN_END_S = 1.0
"""Between the end of the workers and the end of this process, after a second Ctrl-C."""
END_LIMIT_S = FLUSH_S + WORKERS_END_LIMIT_S + CLEAN_END_S + 2.0
"""From a second Ctrl-C to the end of this process, at most."""
MAX_DISK_THREADS = 32
"""One works at a time as a rule; others wait for a disk."""
FIRST_CONTACT_S = 30.0
"""How long a node waits for a coordinator that is not there yet."""
AGAIN_S, MAX_UNANSWERED = 60.0, 500
"""A site that comes back from its time off asks for the coordinator again so often, half a day long."""


async def run_node(config: NodeConfig, machine: Machine | None = None) -> int:
    """Runs one site until the run is over or it has to leave, with the time off that its owner wants; the exit code.
    Raises atoll's errors before it is in the run, and CancelledError for a signal."""
    validate(config)
    if config.site_rank:
        return await run_follower(config)
    async with AsyncExitStack() as stack:
        this = asyncio.current_task()
        assert this is not None

        def first(name: str) -> None:
            log.warning("%s: ending; again to end at once", name)
            this.cancel()

        signals = Signals(first, lambda _: end_process(ENDED_AT_ONCE), END_LIMIT_S)
        stack.callback(signals.close)  # at the very end: what is closed before may wait for a disk
        asyncio.get_running_loop().set_default_executor(giving_way(MAX_DISK_THREADS, "disk", config.nice))
        prepared = asyncio.create_task(asyncio.to_thread(prepare_kernels))
        watched = asyncio.create_task(notify.stay_watched())
        stack.callback(watched.cancel)
        machine = machine or Machine.through(parse_proxy(config.proxy))
        again, run_id, num_unanswered = signals.again, "", 0
        while True:
            signals.first, signals.again = first, again
            try:
                stay, num_unanswered = await _stay(config, machine, prepared, signals), 0
            except PeerError as error:
                num_unanswered += 1
                if not run_id or num_unanswered > MAX_UNANSWERED:
                    raise
                stay = _Stay(run_id, error.exit_code, TimeOff(machine.wall_time() + AGAIN_S, str(error)))
            run_id = stay.run_id
            woken = asyncio.Event()
            signals.first = partial(_wake, woken)
            if stay.time_off is None or signals.num_heard:
                return stay.exit_code
            await stay_off(stay.time_off, config, stay.run_id, machine, woken)
            if woken.is_set():
                return 0


def _wake(woken: asyncio.Event, name: str) -> None:
    log.info("%s: ending", name)
    woken.set()


@dataclass(frozen=True, slots=True)
class _Stay:
    """In the run. With `time_off` the site is to come back after it."""

    run_id: str
    exit_code: int = 0
    time_off: TimeOff | None = None


async def _stay(config: NodeConfig, machine: Machine, prepared: asyncio.Task[None], signals: Signals) -> _Stay:
    async with AsyncExitStack() as stack:
        identity = await asyncio.to_thread(Identity.of, config, machine.wall_time())
        handshake: Handshake | None = None
        coordinators = config.coordinators
        if identity is not None:
            handshake, coordinators = identity.handshake, identity.addresses
        settings, address = await discover(coordinators, handshake, FIRST_CONTACT_S, machine.network)
        config = replace(config, coordinator=",".join(dict.fromkeys((address, *coordinators))))
        check_cap(config, settings)
        check_parts(settings.sync, config.site_hosts, config.exchange_processes)
        folder = home_of(config, settings.run_id)
        account = Account(folder, machine.disk)
        if config.allowance:
            await account.read(machine.wall_time())
        if (time_off := config.allowance.time_off(account.sent, machine.wall_time())) is not None:
            return _Stay(settings.run_id, time_off=time_off)
        home = Home(folder, machine)
        stack.callback(home.close)
        newest = log_to(home.folder, stack, config, settings.run_id)
        journal = Journal(home.folder / "journal.jsonl")
        stack.callback(journal.close)
        exporter = await from_environment(os.environ, "atoll-node", machine.wall_time)
        if exporter is not None:
            stack.push_async_callback(exporter.close)
        await prepared
        log.info("run %s, site %s, start %d, home %s", settings.run_id, config.name, home.incarnation, home.folder)
        if settings.data == "local" and not config.data_paths and not config.command:
            log.warning("no --data: this site trains on the source of Python's standard library")
        plane = await asyncio.to_thread(DataPlane.load, home, settings, config.num_kernel_threads)
        security = NodeSecurity()
        if identity is not None:
            security = await identity.secured(config.coordinators, machine, stack, FIRST_CONTACT_S)
        met = await meet_peers(
            config, settings.run_id, home, machine, stack, security=security.among_sites, towards=address
        )
        node = Node(
            config=config,
            settings=settings,
            home=home,
            plane=plane,
            met=met,
            journal=journal,
            machine=machine,
            security=security,
        )
        stack.callback(node.close)
        newest.of_node = lambda: node.core.site.newest_sync
        if exporter is not None:
            stack.callback(_traced(node, exporter).close)
        if config.http_listen:
            access = page_access(
                config.http_listen, settings.run_id, security.among_sites, machine, security.knows_token
            )
            metrics = node.shell.observer.pages(access)
            await metrics.start(config.http_listen, "metrics")
            stack.push_async_callback(metrics.close)
            node.telemetry.metrics_address = address_of_metrics(metrics.address, met.address)
            log.info("metrics on http%s://%s/metrics", "s" if access.tls else "", metrics.address)
        health = health_server(home.folder, partial(obstacles_of, node.core, met.attached))
        await health.start()
        stack.push_async_callback(health.close)
        notify.tell("READY=1", f"STATUS=site {config.name} of run {settings.run_id}")
        log.info("listening for peers on %s", met.address)
        _on_signals(node, signals)
        watch = Watch(config.allowance, account, machine, lambda: met.hub.counters.sent_bytes)
        node.shell.observer.sent = lambda: account.sent
        if config.allowance:
            node.shell.tasks.spawn(watch.run(node.leave))  # the node ends it
        code, text = await node.run()
        if config.allowance:
            await watch.count()
        is_over = node.core.site.disk.final
        if code == 0 and is_over:
            await asyncio.to_thread(home.note_end)
        log.log(logging.INFO if code == 0 else logging.ERROR, "%s", text)
        comes_back = code == 0 and not is_over
        return _Stay(settings.run_id, code, watch.time_off if comes_back else None)


def _traced(node: Node, exporter: Exporter) -> SiteTraces:
    """Its syncs, from now on. Close what is returned when the node has ended."""
    observer, run_id, name = node.shell.observer, node.core.settings.run_id, node.shell.config.name
    observer.num_lost_spans = lambda: exporter.num_lost
    observer.traces = SiteTraces(
        run_id, name, node.home.incarnation, site_id=lambda: node.core.site.site_id, send=exporter.send
    )
    return observer.traces


def _on_signals(node: Node, signals: Signals) -> None:
    """From now on the first signal leaves gracefully, and the second at once."""
    ending: list[asyncio.Task[None]] = []

    def again(reason: str) -> None:
        exit_code = node.leave_now(reason)
        if not ending:
            ending.append(asyncio.get_running_loop().create_task(_end_at_once(node, exit_code)))

    signals.first, signals.again = node.leave, again


async def _end_at_once(node: Node, exit_code: int) -> None:
    """Without the threads that are waited for as a node ends: they may never come back from the disk."""
    await node.end_workers()
    await asyncio.sleep(CLEAN_END_S)
    end_process(exit_code)
