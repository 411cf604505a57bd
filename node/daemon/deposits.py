"""What the coordinator deposits with this site goes to the disk beside everything else, and back when it is asked for.
Nothing at this site depends on it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace

from atoll.node.daemon.deposit_box import DepositBox
from atoll.node.tasks import Tasks
from atoll.protocol import messages as m
from atoll.protocol.deposits import fits
from atoll.protocol.errors import HostError

log = logging.getLogger(__name__)


class Deposits:
    """`say`: to the coordinator, on the stream that there is."""

    def __init__(self, box: DepositBox, tasks: Tasks, say: Callable[[m.SiteMessage], None]) -> None:
        self._box = box
        self._tasks = tasks
        self._say = say
        self._waiting: list[m.Deposit] = []
        self._writing: asyncio.Task[None] | None = None
        self._giving: asyncio.Task[None] | None = None
        self._is_broken = False

    def in_hello(self, message: m.Hello) -> m.Hello:
        """With what is on the disk by now; what is not comes again. What was asked for on the last stream is not said
        on the next one."""
        if self._giving is not None:
            self._giving.cancel()
        return replace(message, deposits_to=0 if self._is_broken else self._box.last_seq + 1)

    def take(self, message: m.Deposits) -> None:
        """All that has come while the disk was busy is written together."""
        self._waiting += filter(fits, message.deposits)
        if self._writing is None or self._writing.done():
            self._writing = self._tasks.spawn(self._write())

    async def _write(self) -> None:
        while self._waiting:
            taken, self._waiting = self._waiting, []
            try:
                if not self._is_broken:
                    await asyncio.to_thread(self._box.add, taken)
            except HostError as error:
                self._broken(error)

    def give_back(self, asked: m.ReturnDeposits) -> None:
        """A part for each time that it is asked."""
        if self._giving is not None:
            self._giving.cancel()
        self._giving = self._tasks.spawn(self._give_back(asked.after_seq))

    async def _give_back(self, after: int) -> None:
        if self._writing is not None:
            await asyncio.wait({self._writing})
        try:
            found = await asyncio.to_thread(self._box.after, after)
        except HostError as error:  # no answer: that it has kept nothing would not be true
            self._broken(error)
        else:
            self._say(m.DepositsReturned(deposits=found, is_last=not found))

    def _broken(self, error: HostError) -> None:
        """The site needs none of it."""
        self._is_broken = True
        log.error("this site keeps nothing more for its coordinator until it is started anew: %s", error)

    def close(self) -> None:
        """Once no task is left."""
        self._box.close()
