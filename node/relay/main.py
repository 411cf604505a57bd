"""The relay process: its certificate, its port, its metrics, until a signal."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack

from prometheus_client import ProcessCollector

from atoll.node.daemon.home import locked
from atoll.node.daemon.security import page_access
from atoll.node.relay.config import RelayConfig, validate
from atoll.node.relay.health import health_server
from atoll.node.relay.metrics import METRICS
from atoll.node.relay.quota import Quotas
from atoll.node.relay.server import MAX_STRANGERS, MAX_TO_COORDINATOR, RelayServer
from atoll.node.relay.splice import DESCRIPTORS
from atoll.protocol import descriptors, notify, pages
from atoll.protocol.errors import ConfigError
from atoll.protocol.exit_codes import ENDED_AT_ONCE
from atoll.protocol.http import Answer, plain_text
from atoll.protocol.machine import Machine
from atoll.protocol.metrics import families
from atoll.protocol.page_access import Access
from atoll.protocol.signals import Signals, end_process
from atoll.protocol.trust import enrolled
from atoll.protocol.trust.names import Kind, Subject
from atoll.protocol.trust.standing import Standing

log = logging.getLogger("atoll.relay")

MAX_PAIRS = 2048
GB = 10**9
FIRST_CONTACT_S = 30.0
"""A coordinator that is not there yet is asked again for so long."""
END_LIMIT_S = 5.0
PROCESS = ProcessCollector(registry=None)


async def serve(config: RelayConfig, known_as: Callable[[Subject], None]) -> None:
    """Until SIGINT or SIGTERM. Prints one line when it listens. `known_as` hears of what run and name the relay's
    certificate is. Raises ConfigError, HostError, PeerError or RefusedError."""
    validate(config)
    async with AsyncExitStack() as stack:
        asked = asyncio.Event()

        def first(name: str) -> None:
            log.info("%s: stopping; again to end at once", name)
            notify.tell("STOPPING=1")
            asked.set()

        stack.callback(Signals(first, lambda _: end_process(ENDED_AT_ONCE), END_LIMIT_S).close)
        machine = Machine()
        known = enrolled.joined(config.home)
        if known.subject.kind is not Kind.RELAY_IDENTITY:
            raise ConfigError(f"{config.home} is of {known.subject}: a relay joins by `atoll invite --relay NAME`")
        known_as(known.subject)
        if warning := enrolled.check_dates(known, machine.wall_time()):
            log.warning("%s", warning)
        stack.enter_context(locked(config.home))
        run_id = known.subject.run_id
        standing = Standing(known, config.home / enrolled.FOLDER, known.addresses, machine)
        tls = await standing.open(stack, FIRST_CONTACT_S)
        limit = descriptors.raise_limit()
        others = MAX_STRANGERS + MAX_TO_COORDINATOR * DESCRIPTORS
        wanted = MAX_PAIRS * DESCRIPTORS + others
        room = descriptors.for_connections(limit, wanted, "relayed connections") - others
        server = RelayServer(
            run_id,
            tls,
            Quotas(round(config.quota_gb * GB)),
            machine,
            coordinators=lambda: standing.addresses,
            max_pairs=max(1, room // DESCRIPTORS),
        )
        await server.start(config.listen)
        stack.push_async_callback(server.close)
        standing.tell_banned(server.ban)
        if config.http_listen:
            access = page_access(config.http_listen, run_id, tls, machine, standing.knows_token)
            metrics = _metrics(server, access)
            await metrics.start(config.http_listen, "metrics")
            stack.push_async_callback(metrics.close)
            log.info("metrics on %s", metrics.address)
        health = health_server(config.home)
        await health.start()
        stack.push_async_callback(health.close)
        watched = asyncio.create_task(notify.stay_watched())
        stack.callback(watched.cancel)
        notify.tell("READY=1", f"STATUS=relay {known.subject.name} of run {run_id}")
        sys.stdout.write(f"relay {known.subject.name} of run {run_id}: listening on {server.address}\n")
        sys.stdout.flush()
        await asked.wait()


def _metrics(server: RelayServer, access: Access) -> pages.Pages:
    async def answer(path: str) -> Answer:
        if path != "/metrics":
            return plain_text(404, "only /metrics is here")
        return pages.metrics((*families(METRICS, server), *PROCESS.collect()))

    return pages.Pages(answer, access)
