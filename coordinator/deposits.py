"""What is kept is deposited with sites as well: those that come hear what they have not, then all of them hear of each
decision: of a commit right behind it, of others within a second."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial

from atoll.coordinator.store import Store
from atoll.coordinator.streams import Bodies, Stream
from atoll.protocol import messages as m
from atoll.protocol.deposit_messages import DEPOSITS_PART_BYTES
from atoll.protocol.deposits import Seal, parts_of
from atoll.protocol.messages import Deposit
from atoll.protocol.threads import run_to_its_end

log = logging.getLogger("atoll.coordinator")

LATER = frozenset({"site", "forget", "attestation", "open", "abandon", "line"})
"""There are many: a thousand sites that come one by one would each be said to a thousand."""
EVERY_S = 1.0
MAX_KEEPERS = 64
"""Sites at once that hear of what is kept: each hears of each of the others, and a thousand times a thousand is too
much. When one goes, the next one is told."""


class Depositing:
    """Beside a coordinator, which says what is kept and who was welcomed. `deciding`: for whoever uses the store."""

    def __init__(self, store: Store, seal: Seal, deciding: asyncio.Lock, bodies: Bodies) -> None:
        self._store = store
        self._seal = seal
        self._deciding = deciding
        self._bodies = bodies
        self._idle: dict[int, Stream] = {}  # who would take them, too
        self._up_to_date: dict[int, Stream] = {}
        self._catching_up: dict[int, asyncio.Task[None]] = {}
        self._waiting: list[Deposit] = []
        self._due: asyncio.TimerHandle | None = None

    def kept(self, deposits: Sequence[Deposit]) -> None:
        """To all that have what came before: what there are many of now and then, all else at once."""
        self._waiting += deposits
        if any(deposit.record not in LATER for deposit in deposits):
            self._say()
        elif self._waiting and self._due is None:
            self._due = asyncio.get_running_loop().call_later(EVERY_S, self._say)

    def _say(self) -> None:
        waiting, self._waiting = self._waiting, []
        if self._due is not None:
            self._due.cancel()
            self._due = None
        for part in parts_of(map(self._seal.sealed, waiting)) if self._up_to_date else ():
            message = m.Deposits(deposits=part)
            for stream in self._up_to_date.values():
                stream.deposit(message, self._bodies)

    def welcomed(self, stream: Stream) -> None:
        """It takes deposits, if its Hello said so, and not many others do."""
        if stream.deposits_to and stream.number not in self._up_to_date.keys() | self._catching_up.keys():
            self._idle[stream.number] = stream
            self._take_more()

    def _take_more(self) -> None:
        while self._idle and len(self._up_to_date.keys() | self._catching_up.keys()) < MAX_KEEPERS:
            number = next(iter(self._idle))
            task = asyncio.get_running_loop().create_task(self._catch_up(self._idle.pop(number)))
            self._catching_up[number] = task
            task.add_done_callback(partial(self._caught_up, number))

    def gone(self, stream: Stream) -> None:
        """It ended."""
        self._idle.pop(stream.number, None)
        self._up_to_date.pop(stream.number, None)
        if (task := self._catching_up.get(stream.number)) is not None:
            task.cancel()
        self._take_more()

    def _caught_up(self, number: int, task: asyncio.Task[None]) -> None:
        self._catching_up.pop(number, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("stream %d hears no more of what is kept: %s", number, error)
        self._take_more()

    async def _catch_up(self, stream: Stream) -> None:
        """Part by part, each once the one before has gone out."""
        after = stream.deposits_to - 1  # the highest that it has
        is_new = not after
        while True:
            async with self._deciding:
                read = partial(self._store.deposits_after, after, DEPOSITS_PART_BYTES, is_new=is_new)
                found = await run_to_its_end(read)
                if not found:
                    self._up_to_date[stream.number] = stream
                    return
            for part in parts_of(map(self._seal.sealed, found)):
                stream.deposit(m.Deposits(deposits=part), self._bodies)
            after = found[-1].seq
            await stream.outgoing.join()
