"""What is kept is deposited with sites as well: those that come hear what they have not, then all of them hear of each
decision, before anything that comes of it is said."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from atoll.coordinator.store import Store
from atoll.coordinator.streams import Bodies, Stream
from atoll.protocol import messages as m
from atoll.protocol.deposits import Seal, parts_of
from atoll.protocol.messages import DEPOSITS_PART_BYTES, Deposit


class Depositing:
    """Beside a coordinator, which says what is kept and who was welcomed. `deciding`: for whoever uses the store."""

    def __init__(self, store: Store, seal: Seal, deciding: asyncio.Lock, bodies: Bodies) -> None:
        self._store = store
        self._seal = seal
        self._deciding = deciding
        self._bodies = bodies
        self._up_to_date: dict[int, Stream] = {}
        self._catching_up: dict[int, asyncio.Task[None]] = {}

    def kept(self, deposits: Iterable[Deposit]) -> None:
        """To all that have what came before."""
        for part in parts_of(map(self._seal.sealed, deposits)) if self._up_to_date else ():
            message = m.Deposits(deposits=part)
            for stream in self._up_to_date.values():
                stream.deposit(message, self._bodies)

    def welcomed(self, stream: Stream) -> None:
        """It takes deposits, if its Hello said so."""
        if stream.deposits_to and not {stream.number} & (self._up_to_date.keys() | self._catching_up.keys()):
            task = asyncio.get_running_loop().create_task(self._catch_up(stream))
            self._catching_up[stream.number] = task
            task.add_done_callback(lambda _: self._catching_up.pop(stream.number, None))

    def gone(self, stream: Stream) -> None:
        """It ended."""
        self._up_to_date.pop(stream.number, None)
        if (task := self._catching_up.get(stream.number)) is not None:
            task.cancel()

    async def _catch_up(self, stream: Stream) -> None:
        """Part by part, each once the one before has gone out."""
        after = stream.deposits_to - 1  # the highest that it has
        while True:
            async with self._deciding:
                found = await asyncio.to_thread(self._store.deposits_after, after, DEPOSITS_PART_BYTES)
                if not found:
                    self._up_to_date[stream.number] = stream
                    return
            for part in parts_of(map(self._seal.sealed, found)):
                stream.deposit(m.Deposits(deposits=part), self._bodies)
            after = found[-1].seq
            await stream.outgoing.join()
