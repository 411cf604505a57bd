"""What the parts of a node share, and what they do beside its loop of events: none of it fails in silence."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from atoll.node.core import events as e
from atoll.node.core.site import SiteCore
from atoll.node.daemon.config import NodeConfig
from atoll.node.daemon.deposit_box import DepositBox
from atoll.node.daemon.exchange_processes.fleet import ExchangeProcesses
from atoll.node.daemon.home import Home
from atoll.node.daemon.hosts.leader import Leader
from atoll.node.daemon.launcher import Launcher
from atoll.node.daemon.local_server import LocalServer
from atoll.node.daemon.observer import Observer
from atoll.node.daemon.plane import DataPlane
from atoll.node.exchange.hub import Hub
from atoll.node.tasks import Tasks
from atoll.protocol.errors import AtollError, HostError
from atoll.protocol.exit_codes import exit_code_on_own_disk
from atoll.protocol.layout import Manifest
from atoll.protocol.settings import RunSettings
from atoll.protocol.trust.words import Words

log = logging.getLogger(__name__)

Failed = Callable[[Exception], e.Event]
OnFailure = Callable[[BaseException], None]


def fatal(doing: str = "") -> Failed:
    """What a failure on this machine becomes that no other site can help with."""
    return lambda error: e.NodeFailed(f"{doing}{error}", exit_code_on_own_disk(error))


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """How the parts are made that reach the workers: by a socket, by processes, by shared memory. A simulated site has
    workers without any of these three."""

    local_server: Callable[[Callable[[e.RankEvent], None], OnFailure], LocalServer] = LocalServer
    launcher: Callable[[NodeConfig, Callable[[e.WorkersExited], None], OnFailure], Launcher] = Launcher
    deposit_box: Callable[[Path, int], DepositBox] = DepositBox
    data_plane: Callable[[Home, RunSettings, Manifest, int], DataPlane] = DataPlane


@dataclass(eq=False, kw_only=True)
class Shell:
    config: NodeConfig
    home: Home
    parts: Parts
    core: SiteCore
    hub: Hub
    leader: Leader
    processes: ExchangeProcesses
    observer: Observer
    handle: Callable[[e.Event], None]
    """It raises nothing."""
    fail: OnFailure
    """Ends the node, for an error that nothing was prepared for."""
    has_ended: Callable[[], bool]
    """Whether what the node was to say and do is said and done."""
    tasks: Tasks
    """What one of them raises ends the node."""
    words: Words | None = None
    """Of this site, in a run with certificates."""
    layout: asyncio.Task[None] | None = None
    """It makes the data plane and the buffers: `start` waits for it."""

    @property
    def start_of_site(self) -> tuple[int, int]:
        """Its id, once it has one, and its incarnation."""
        return self.hub.site_id, self.home.incarnation

    def start(self, work: Callable[[], Awaitable[e.Event | None]], failed: Failed) -> asyncio.Task[None]:
        """Run it until the event that it ends in. One of atoll's own errors or an I/O error becomes an event, too: a
        HostError ends the site."""

        async def guarded() -> None:
            if self.layout is not None:
                await asyncio.wait({self.layout})  # there may be no data plane before
                if self.has_ended():
                    return  # it could not be made
            event: e.Event | None
            try:
                event = await work()
            except (AtollError, OSError) as error:
                if log.isEnabledFor(logging.DEBUG):
                    log.exception("failed")
                event = fatal()(error) if isinstance(error, HostError) else failed(error)
            if event is not None:
                self.handle(event)

        return self.tasks.spawn(guarded())
