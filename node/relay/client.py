"""What a site has to do with relays: it dials sites behind them, and may be attached to one itself.

In a thread with an event loop of its own: what goes through a relay passes no loop that the node waits for.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import OrderedDict
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any

from atoll.node.relay.attached import Attached
from atoll.node.relay.forwarders import Forwarder
from atoll.node.relay.outgoing import Route
from atoll.protocol import descriptors
from atoll.protocol.addresses import Relayed
from atoll.protocol.machine import REAL, Machine
from atoll.protocol.trust.security import MutualTls

log = logging.getLogger("atoll.node")

MAX_FORWARDERS = 4096
MAX_KNOWN = 256
"""Relays."""
CALLS_SHARE = 32
FEWEST_CALLS, MOST_CALLS = 16, 4096
"""That are led here at a time: one for so many descriptors as this process may have. Each takes six, and a relay, or
who calls by it, must not take those that the node needs."""
END_LIMIT_S = 5.0


def _over(running: Future[None]) -> None:
    if not running.cancelled() and (error := running.exception()) is not None:
        log.error("what leads through a relay has ended by a fault of its own", exc_info=error)


class RelayClient:
    """Called from one thread; `close` ends all of it."""

    def __init__(self, tls: MutualTls, machine: Machine = REAL) -> None:
        """Relays are reached as the machine reaches others: through its HTTP proxy, if it has one."""
        self._tls = tls
        self._machine = machine
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._forwarders: OrderedDict[Relayed, tuple[Forwarder, Future[None]]] = OrderedDict()
        self._known: OrderedDict[str, None] = OrderedDict()

    def address_for(self, to: Relayed) -> str:
        """What gRPC dials to come to that site. Raises OSError."""
        found = self._forwarders.pop(to, None)
        if found is None:
            forwarder = Forwarder(self._tls, to, self._machine, self._reached)
            found = forwarder, self._begin(forwarder.run())
        self._forwarders[to] = found  # the last used at the end
        while len(self._forwarders) > MAX_FORWARDERS:
            _, (_, running) = self._forwarders.popitem(last=False)
            running.cancel()
        return found[0].address

    def knows(self, relay: str) -> bool:
        """Whether a relay of the run has answered at this address, so that it is nobody else's."""
        return relay in self._known

    def attach(self, relay: str, start: int, to: str) -> Attached:
        """From now on this site, in this `start` of its node, is reached by that relay, which leads `to` its port."""
        max_calls = max(FEWEST_CALLS, min(descriptors.raise_limit() // CALLS_SHARE, MOST_CALLS))
        route = Route(relay, self._machine.proxy)
        attached = Attached(self._tls, route, self._machine, start=start, to=to, max_calls=max_calls)
        self._begin(attached.run())
        return attached

    def close(self) -> None:
        if self._loop is None or self._thread is None:
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(END_LIMIT_S)

    def _reached(self, relay: str) -> None:
        """In the other thread."""
        self._known[relay] = None
        while len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    def _begin(self, work: Coroutine[Any, Any, None]) -> Future[None]:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._run, args=(self._loop,), name="relay", daemon=True)
            self._thread.start()
        running = asyncio.run_coroutine_threadsafe(work, self._loop)
        running.add_done_callback(_over)
        return running

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        loop.run_forever()
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()
