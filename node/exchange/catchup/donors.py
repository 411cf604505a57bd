"""The donors of a site that catches up: who may be asked, who has failed, and work shared out over all of them."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

from atoll.node.exchange.catchup.donor_client import DonorClient, dialled
from atoll.node.exchange.catchup.expected_donors import ExpectedDonors
from atoll.node.exchange.catchup.index import Index
from atoll.node.exchange.peers.counters import Counters
from atoll.node.exchange.peers.dialer import Dialer, Key, Purpose, key_of
from atoll.node.exchange.peers.frames import batches
from atoll.node.exchange.peers.progress import Pace
from atoll.node.tasks import together
from atoll.protocol import ring
from atoll.protocol.errors import (
    AtollError,
    HostError,
    InvalidMessage,
    NotYetError,
    PeerError,
    RefusedError,
    StateError,
)
from atoll.protocol.messages import MAX_DONORS, Donor, Header, Sources
from atoll.protocol.threads import run_to_its_end

log = logging.getLogger(__name__)

REQUESTS_PER_DONOR = 2
"""In flight at once."""
BATCH_BYTES = 8 << 20
MAX_BATCH_CHUNKS = 1024
MAX_STRIKES = 3
"""Answers that are not right, before a donor is not asked any more."""
ASK_AGAIN_S = 0.3
ARRIVAL_STALLS = 0.125
"""Within which one of the donors that are to dial is here: with the wait for a first answer less than a stall."""
BUSY_S = 0.1
MAX_BUSY_DOUBLINGS = 5
"""A donor that serves others rests for BUSY_S, then for twice as long, ..., while others are asked."""


@dataclass(eq=False, kw_only=True)
class Donors:
    index: Index
    header: Header
    dialer: Dialer
    counters: Counters
    refresh: Callable[[tuple[int, ...]], Awaitable[Sources]]
    """Asks the coordinator again, and to have donors of these site ids dial this site; what it says ends in `index`."""
    undialable: Callable[[], Collection[int]]
    """The sites that cannot be dialled, as far as is known now."""
    expected: ExpectedDonors
    pace: Pace

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._clients: dict[tuple[Key, bool], DonorClient] = {}  # the bool: the donor has dialled this site
        self._strikes: Counter[Key] = Counter()
        self._resting: set[Key] = set()  # failed, until the coordinator has been asked again
        self._busy_until: dict[Key, float] = {}
        self._busy_answers: Counter[Key] = Counter()  # in a row
        self._moved_at = self._loop.time()
        self._last_error: AtollError | None = None

    def close(self) -> None:
        self.expected.dismiss()
        for client in self._clients.values():
            self.dialer.disconnect(client.donor, Purpose.FETCH)

    async def share_out(
        self,
        chunks: list[int],
        size_bytes: Callable[[int], int],
        fetch: Callable[[DonorClient, set[int]], Coroutine[Any, Any, None]],
        may: Callable[[Donor], bool],
        *,
        all_may_lack: str = "",
    ) -> None:
        """Batches of `chunks` to several donors at once until none is left; what one leaves goes back to the others.

        With `all_may_lack`: raises StateError of that text if every donor says that it does not have them, or some do
        and nothing moves.
        """
        cut = partial(batches, chunks, size_bytes, BATCH_BYTES, MAX_BATCH_CHUNKS)
        waiting = deque(await run_to_its_end(lambda: [set(batch) for batch in cut()]))
        lacking: set[Key] = set()
        in_flight: Counter[Key] = Counter()

        async def work() -> None:
            while waiting:
                donor = self._next_free(may, in_flight)
                if donor is None:
                    if not (rest_s := self._rest_s(may)):
                        return  # those that are left are asked already
                    await asyncio.sleep(rest_s)
                    self._check_busy()
                    continue
                key, client, batch = key_of(donor), self._client(donor), waiting.popleft()
                in_flight[key] += 1
                try:
                    await fetch(client, batch)
                    self._busy_answers.pop(key, None)
                except NotYetError as error:
                    self._serves_others(key, error)
                    self._check_busy()
                except AtollError as error:
                    if isinstance(error, StateError):
                        lacking.add(key)
                    self.failed(client, error)
                finally:
                    in_flight[key] -= 1
                    if batch:
                        waiting.append(batch)

        try:
            while waiting:
                await together([work() for _ in self.usable(may) for _ in range(REQUESTS_PER_DONOR)])
                if waiting:
                    if all_may_lack and lacking and lacking.issuperset(map(key_of, self._eligible(may))):
                        raise StateError(all_may_lack)
                    if not self.usable(may):
                        await self.ask_again("donors failed")
        except PeerError:
            if all_may_lack and lacking and self._is_stalled:
                raise StateError(all_may_lack) from None
            raise

    def _check_busy(self) -> None:
        """Raises PeerError if nothing came whole for a stall, and no donor gave bytes of a chunk meanwhile."""
        since = self._loop.time() - self.pace.stall_s
        if not any(client.moved_at > since for client in self._clients.values()):
            self._check_stall("donors are busy")

    def _next_free(self, may: Callable[[Donor], bool], in_flight: Counter[Key]) -> Donor | None:
        """Of the first that are not busy, the one that is asked for least; None if each is asked for enough."""
        now = self._loop.time()
        free = (d for d in self._awake(may) if self._busy_until.get(key_of(d), 0.0) <= now)
        found = min(islice(free, MAX_DONORS), key=lambda d: in_flight[key_of(d)], default=None)
        return found if found is not None and in_flight[key_of(found)] < REQUESTS_PER_DONOR else None

    def _serves_others(self, key: Key, error: NotYetError) -> None:
        self._last_error = error
        rest_s = BUSY_S * 2.0 ** min(self._busy_answers[key], MAX_BUSY_DOUBLINGS)
        self._busy_answers[key] += 1
        self._busy_until[key] = self._loop.time() + rest_s

    def _rest_s(self, may: Callable[[Donor], bool]) -> float:
        """Until the first one that is busy may be asked again; 0 if none is."""
        now = self._loop.time()
        ends = (self._busy_until.get(key_of(d), 0.0) for d in self._awake(may))
        return min((end - now for end in ends if end > now), default=0.0)

    def _eligible(self, may: Callable[[Donor], bool]) -> list[Donor]:
        return [d for d in self.index.donors if self._strikes[key_of(d)] < MAX_STRIKES and may(d)]

    def usable(self, may: Callable[[Donor], bool] = lambda _: True) -> list[DonorClient]:
        """Clients of some donors that may be asked now."""
        return [self._client(donor) for donor in islice(self._awake(may), MAX_DONORS)]

    def _awake(self, may: Callable[[Donor], bool]) -> Iterator[Donor]:
        undialable = self.undialable()
        for donor in self._in_order(self._eligible(lambda _: True)):
            can_be_asked = self.expected.is_here(donor) or donor.site_id not in undialable
            if can_be_asked and key_of(donor) not in self._resting and may(donor):
                yield donor

    def _in_order(self, donors: list[Donor]) -> list[Donor]:
        """Those that failed least, the newest, and from a place in the ring of ids that is another for each site: sites
        that join have the highest ids, one after the other."""
        ids = sorted(d.site_id for d in self.index.donors)
        first = ids[ring.place(self.header.site_id, len(ids))] if ids else 0

        def place(donor: Donor) -> tuple[int, int, bool, int]:
            return self._client(donor).num_failures, -donor.commit, donor.site_id < first, donor.site_id

        return sorted(donors, key=place)

    def _client(self, donor: Donor) -> DonorClient:
        """By the way in which the donor is asked now."""
        here = self.expected.is_here(donor)
        client = self._clients.get((key_of(donor), here))
        if client is None:
            client = self._clients[key_of(donor), here] = DonorClient(
                donor=donor,
                ask=self.expected.ask if here else dialled(self.dialer),
                answered=(lambda donor: None) if here else self.dialer.reached,
                header=self.header,
                counters=self.counters,
                pace=self.pace,
                share=REQUESTS_PER_DONOR * min(len(self.index.donors), MAX_DONORS),
                is_here=here,
            )
        client.donor = donor  # it advances
        return client

    def _is_silent(self, donor: Donor) -> bool:
        """Dialled in vain so far."""
        client = self._clients.get((key_of(donor), False))
        return client is not None and client.was_silent and not client.has_answered

    def _to_be_asked_to_dial(self) -> list[Donor]:
        undialable = self.undialable()
        absent = [
            donor
            for donor in self._in_order(self._eligible(lambda _: True))
            if (donor.site_id in undialable or self._is_silent(donor)) and not self.expected.is_here(donor)
        ]
        return absent[: max(0, MAX_DONORS - self.expected.num_here)]

    def failed(self, client: DonorClient, error: AtollError) -> None:
        """Raises an error of this host; else notes that the donor failed."""
        if isinstance(error, HostError):
            raise error
        if isinstance(error, InvalidMessage) or not isinstance(self._last_error, InvalidMessage):
            self._last_error = error  # wrong bytes say more than what follows from them
        key = key_of(client.donor)
        log.info("%s", error)
        if isinstance(error, PeerError) and not (client.is_here or client.has_answered):
            client.was_silent = True
            self.dialer.failed(client.donor)
        if isinstance(error, InvalidMessage):
            self.counters.refuse(error)
            self._strikes[key] += 1
        elif isinstance(error, RefusedError):
            self._strikes[key] = MAX_STRIKES
        client.num_failures += 1
        self._resting.add(key)

    async def ask_again(self, why: str) -> None:
        """The coordinator's word as it is now. Raises PeerError if nothing has moved for too long."""
        self._check_stall(why)
        await asyncio.sleep(ASK_AGAIN_S)
        absent = self._to_be_asked_to_dial()
        self.expected.expect([(donor.site_id, donor.incarnation) for donor in absent])
        here = [donor for donor in self.index.donors if self.expected.is_here(donor)]
        self.index.learn(await self.refresh(tuple(donor.site_id for donor in absent)), here)
        if absent:
            await asyncio.sleep(ASK_AGAIN_S)  # they are on their way
            await self.expected.wait_for_first(ARRIVAL_STALLS * self.pace.stall_s)
        self._resting.clear()

    @property
    def _is_stalled(self) -> bool:
        return self._loop.time() - self._moved_at > self.pace.stall_s

    def _check_stall(self, why: str) -> None:
        if self._is_stalled:
            because = f"; the last error: {self._last_error}" if self._last_error else ""
            donors = ", ".join(f"site {d.site_id} at {d.address}" for d in self.index.donors) or "none"
            apart = ", ".join(f"site {d.site_id}" for d in self.index.donors if self.expected.awaits(d))
            if apart:
                because += (
                    f"; cannot dial {apart}, and asked to dial this site, none of them does: open this site or one of "
                    "them to the other, with --listen and --advertise HOST:PORT"
                )
            raise PeerError(
                f"catching up: nothing moved for {self.pace.stall_s:.1f} s, {why}; donors: {donors}{because}"
            )

    def moved(self) -> None:
        """Something that was lacking is here, whole and checked."""
        self._moved_at = self._loop.time()
