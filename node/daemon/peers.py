"""How a host of a site meets hosts of other sites: what it listens with, and what must be compiled before."""

from __future__ import annotations

import asyncio
import functools
import logging
from concurrent.futures import Executor
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from atoll.node import limits
from atoll.node.daemon.config import NodeConfig
from atoll.node.daemon.discover import address_for_peers, local_address_towards
from atoll.node.daemon.home import Home
from atoll.node.dataplane import kernels as outer_kernels
from atoll.node.exchange.hub import Hub
from atoll.node.exchange.peers.claims import Claims
from atoll.node.exchange.peers.dialer import Dialer
from atoll.node.exchange.peers.listener import listen
from atoll.node.exchange.peers.upload_cap import UploadCap
from atoll.node.exchange.service import PeerService
from atoll.node.exchange.sync.attempt import FRAME_RATES
from atoll.node.exchange.sync.spill import Spill
from atoll.node.relay.attached import Attached
from atoll.node.relay.client import RelayClient
from atoll.node.threads import giving_way
from atoll.protocol import addresses, descriptors
from atoll.protocol.addresses import Relayed
from atoll.protocol.codecs import kernels
from atoll.protocol.errors import ConfigError
from atoll.protocol.machine import Machine
from atoll.protocol.settings import RunSettings
from atoll.protocol.time_limits import time_limits
from atoll.protocol.trust.security import PLAIN, MutualTls, Security

log = logging.getLogger("atoll.node")

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Met:
    """What talks to peers, where it listens, and at which address peers reach it."""

    hub: Hub
    listen_on: str
    address: str
    security: Security = PLAIN
    attached: Attached | None = None
    """To the relay by which alone peers reach it, if there is one."""


async def meet_peers(
    config: NodeConfig,
    run_id: str,
    home: Home,
    machine: Machine,
    stack: AsyncExitStack,
    *,
    security: Security = PLAIN,
    towards: str,
) -> Met:
    """At --listen; without it, at the local address of a connection to `towards`, or for a relay on loopback alone."""
    await asyncio.to_thread(home.remove_spills)
    spills = home.spill_folder, home.average_error_folder
    pool = giving_way(config.num_exchange_threads, "exchange", config.nice)
    relays = relay_client(security, machine, stack)
    hub = await make_hub(run_id, spills, machine, security, pool=pool, relays=relays)
    hub.incarnation, hub.num_processes = home.incarnation, config.exchange_processes
    if config.max_upload_bytes_per_s:
        hub.uplink.cap = UploadCap(config.max_upload_bytes_per_s, asyncio.get_running_loop().time())
    towards_peers = LOOPBACK if config.relay else await asyncio.to_thread(local_address_towards, towards)
    listen_on = config.listen or addresses.join_address(towards_peers, 0)
    port = await listen_for_peers(hub, listen_on, machine, security, stack)
    attached = None
    if config.relay:
        assert relays is not None  # in plain text it was refused
        attached = relays.attach(config.relay, home.incarnation, addresses.on_this_machine(listen_on, port))
        address = str(Relayed(config.name, config.relay))
    else:
        address = config.advertise or await asyncio.to_thread(address_for_peers, listen_on, port, towards)
    if security is PLAIN:
        who = "each user of this machine" if addresses.is_loopback(listen_on) else "whoever reaches it"
        here = addresses.join_address(addresses.parse_address(listen_on)[0], port)
        log.warning("%s is in plain text: %s can read the model", here, who)
    return Met(hub, listen_on, address, security, attached)


def relay_client(security: Security, machine: Machine, stack: AsyncExitStack) -> RelayClient | None:
    """Ended by `stack`. None in plain text."""
    if not isinstance(security, MutualTls):
        return None
    relays = RelayClient(security, machine)
    stack.callback(relays.close)
    return relays


def check_cap(config: NodeConfig, settings: RunSettings) -> None:
    """Raises ConfigError if others would take a link of that speed for one that hangs."""
    least = FRAME_RATES * time_limits(settings.time_limits).slowest_bytes_per_s
    if 0 < config.max_upload_bytes_per_s < least:
        raise ConfigError(
            f"--max-upload-mbit {config.max_upload_bytes_per_s * 8 / 1e6:g}: run {settings.run_id} "
            f"(time_limits {settings.time_limits}) takes no link of less than {least * 8 / 1e6:.1f} Mbit/s"
        )


def address_of_metrics(listens: str, address: str) -> str:
    """Where others find them, if they find its peers' port at `address`; empty if they do not."""
    if addresses.is_loopback(listens) or addresses.relayed(address) is not None:
        return ""
    _, port = addresses.parse_address(listens)
    return addresses.join_address(addresses.parse_address(address)[0], port)


async def make_hub(
    run_id: str,
    spills: tuple[Path, Path],
    machine: Machine,
    security: Security,
    *,
    pool: Executor,
    relays: RelayClient | None = None,
) -> Hub:
    """`spills`: the folders of contributions, and of errors of averages. Which start of the site it is is to be set."""
    spill, error_spill = [await asyncio.to_thread(Spill, folder, disk=machine.disk) for folder in spills]
    return Hub(
        run_id=run_id,
        incarnation=0,
        dialer=Dialer(machine.network, security, relays),
        claims=Claims(security),
        pool=pool,
        spill=spill,
        error_spill=error_spill,
    )


async def listen_for_peers(
    hub: Hub, listen_on: str, machine: Machine, security: Security, stack: AsyncExitStack
) -> int:
    """The port. `stack` ends both."""
    limit = descriptors.raise_limit()
    server, port = await listen(
        listen_on,
        PeerService(hub).handlers,
        machine.network,
        security=security,
        max_connections=descriptors.for_connections(limit, min(limits.MAX_PEER_CONNECTIONS, limit // 2), "peers"),
        idle_limit_s=limits.PEER_IDLE_LIMIT_S,
    )
    stack.push_async_callback(server.stop, 0.5)
    stack.push_async_callback(hub.close)
    return port


@functools.cache
def prepare_kernels() -> None:
    """Compile and check everything that replicated state depends on, before the site says that it is ready: once."""
    kernels.warm_up()
    kernels.self_test()
    outer_kernels.warm_up()
    outer_kernels.self_test()
