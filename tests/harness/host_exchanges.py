"""Exchanges of the site of `tests.harness.hosts`: what its core wants, and the part of host 0."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from atoll.node import host_protocol as hosts
from atoll.node.core.outputs import ShareSnapshot
from atoll.node.daemon.exchange_processes.attached import Processes
from atoll.node.daemon.exchange_processes.process_exchanges import ProcessExchanges
from atoll.node.exchange.hub import Hub
from atoll.node.exchange.sync.exchange import ExchangeResult
from atoll.node.tasks import Tasks
from atoll.protocol import messages as m
from tests.harness.failures import unexpected
from tests.harness.hand_host import HAND_ADDRESS, HandHost
from tests.harness.hosts import SITE_ID, Led
from tests.harness.model_on_hosts import LAYOUT, W

TAKEN = hosts.SnapshotTaken(generation=1, fragment=0, step=10, seq=2)
SHARE = ShareSnapshot(generation=1, fragment=0, step=10, seq=2)
OTHER = m.Member(site_id=2, incarnation=1, address="127.0.0.1:2")
"""A site that never answers."""


def begun(site: Led, *, tokens: int = 100, alone: bool = False, **changes: Any) -> hosts.BeginAtHost:
    """What the core of host 0 wants; its site reduces all."""
    here = m.Endpoint(address=HAND_ADDRESS, first_chunk=W)
    me = m.Member(site_id=SITE_ID, incarnation=site.home.incarnation, address=site.address, endpoints=(here,))
    others = () if alone else (OTHER,)
    plan = m.Plan(
        sync=1,
        attempt=1,
        term=1,
        base_commit=0,
        contributors=(me, *others) if tokens else others,
        receivers=() if tokens else (me,),
        trees=(m.Tree(first_chunk=0, num_chunks=LAYOUT.num_sync_chunks, parents=(-1, 0)[: 1 + bool(others)]),),
        stall_limit_s=600.0,
        num_steps=10,
        deadline_s=600.0,
        slowest_bytes_per_s=1,
    )
    if not tokens:
        plan = replace(plan, trees=(m.Tree(first_chunk=0, num_chunks=LAYOUT.num_sync_chunks, parents=(-1,)),))
    weights = (tokens,) if alone else ()
    plan = replace(plan, **changes)
    return hosts.BeginAtHost(
        plan=plan, tokens=tokens, weights=weights, error_commits=(4,), spread_s=2.5, in_flight=(1, 3), site_id=SITE_ID
    )


def no_processes(hub: Hub) -> ProcessExchanges:
    """Of a host that has none beside its daemon."""
    return ProcessExchanges(
        attached=Processes(0), hub=hub, own_of=lambda _: range(0), site_id=lambda: SITE_ID, tasks=Tasks(unexpected)
    )


async def sharing(site: Led) -> HandHost:
    """A host that has what it is to send of a snapshot."""
    host, _ = await site.host_at_commit_0()
    await site.runs(1, host)
    await takes_snapshot(site, host)
    return host


async def takes_snapshot(site: Led, *taking: HandHost) -> None:
    """These have what they are to send of it."""
    asked = asyncio.create_task(site.leader.replicas.share_snapshot(SHARE, lambda: True))
    for host in taking:
        await host.hears(hosts.TakeSnapshot)
        await host.says(TAKEN)
    await asked


def on_host_0(site: Led, wanted: hosts.BeginAtHost) -> asyncio.Task[ExchangeResult]:
    """Its part of that exchange, which hosts were told of."""
    plane, hub, plan = site.plane, site.hub, wanted.plan
    data = plane.sync_data(plan.base_commit, plan.fragment, (), plane.own)
    share = hub.share(plan, data)()
    exchange = hub.begin(plan, data, share, tokens=wanted.tokens, weights=wanted.weights)
    task = asyncio.create_task(exchange.run())
    site.leader.exchanges.has_begun(plan)
    return task
