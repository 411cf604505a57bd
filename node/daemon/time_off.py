"""A site that its owner gives for some hours, or some bytes a month: it leaves the run as at SIGTERM, waits outside of
it, and comes back by itself."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path

from atoll.node.daemon.allowance import Allowance, Sent, TimeOff
from atoll.node.daemon.config import NodeConfig, default_home
from atoll.node.daemon.health import health_server
from atoll.node.daemon.home import locked
from atoll.node.daemon.site_log import log_to
from atoll.protocol import notify
from atoll.protocol.disk import Disk
from atoll.protocol.errors import HostError
from atoll.protocol.machine import Machine
from atoll.protocol.threads import run_to_its_end

log = logging.getLogger("atoll.node")

LOOK_EVERY_S = 2.0
"""At the wall clock: it is set, and stands still to the loop while the machine sleeps."""
FILE = "sent"
"""In the home: what was sent in this month."""


class Account:
    """What a home has sent in this month, across starts. A kill or a power cut loses what was sent since the last
    look."""

    def __init__(self, home: Path, disk: Disk) -> None:
        self._path, self._disk = home / FILE, disk
        self._counted_bytes = 0
        self.sent = Sent()

    async def read(self, now_s: float) -> None:
        """What was sent before this start. Raises HostError."""
        try:
            text = await asyncio.to_thread(self._path.read_text, encoding="ascii", errors="replace")
            self.sent = Sent.of(text)
        except FileNotFoundError:
            return
        except (OSError, ValueError):
            raise HostError(
                f"{self._path} does not say what was sent in which month; write it anew, as `2026-01 0`"
            ) from None
        await self.count(0, now_s)

    async def count(self, total_bytes: int, now_s: float) -> Sent:
        """`total_bytes`: sent by this process so far."""
        before = self.sent
        self.sent = self.sent.plus(total_bytes - self._counted_bytes, now_s)
        self._counted_bytes = total_bytes
        if self.sent != before:
            text = self.sent.text().encode()
            # To its end: the look as the node ends would write into the same new file.
            await run_to_its_end(partial(self._disk.write_whole, self._path, text, fsync=True))
        return self.sent


class Watch:
    """Over a node in the run: it is told to leave when it is due to be off."""

    def __init__(self, allowance: Allowance, account: Account, machine: Machine, sent_bytes: Callable[[], int]) -> None:
        self.allowance, self.account = allowance, account
        self._machine, self._sent_bytes = machine, sent_bytes
        self.time_off: TimeOff | None = None
        """For which the node was told to leave."""

    async def run(self, leave: Callable[[str], None]) -> None:
        while self.time_off is None:
            sent = await self.count()
            if (time_off := self.allowance.time_off(sent, self._machine.wall_time())) is not None:
                self.time_off = time_off
                log.info("%s", time_off)
                leave(str(time_off))
            else:
                await asyncio.sleep(LOOK_EVERY_S)

    async def count(self) -> Sent:
        return await self.account.count(self._sent_bytes(), self._machine.wall_time())


async def stay_off(time_off: TimeOff, config: NodeConfig, run_id: str, machine: Machine, woken: asyncio.Event) -> None:
    """Until it is over, or `woken`. The home is this node's meanwhile. Raises HostError."""
    home = home_of(config, run_id)
    async with AsyncExitStack() as stack:
        stack.enter_context(locked(home))
        log_to(home, stack, config, run_id)
        health = health_server(home, lambda: iter((f"the site is off: {time_off}",)))
        await health.start()
        stack.push_async_callback(health.close)
        log.info("off: %s", time_off)
        notify.tell("READY=1", f"STATUS=site {config.name} of run {run_id} is off: {time_off}")
        while not woken.is_set() and (left_s := time_off.until_s - machine.wall_time()) > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(min(left_s, LOOK_EVERY_S)):
                    await woken.wait()


def home_of(config: NodeConfig, run_id: str) -> Path:
    return config.home or default_home(run_id, config.name, os.environ)
