"""Every connection that this node opens to another: in turn, with growing waits. Whom it expects at the other end is
known here.

A member's address is its own word, and may be that of somebody who has nothing to do with the run. So a peer that does
not answer as itself is dialled less and less often, and an address is dialled at a bounded pace, however many members
name it. A peer that did answer as itself waits for no other that names the same address.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum, auto
from weakref import WeakValueDictionary

import grpc.aio

from atoll.node.relay.client import RelayClient
from atoll.protocol import transport
from atoll.protocol.addresses import relayed
from atoll.protocol.errors import PeerError
from atoll.protocol.machine import Network
from atoll.protocol.messages import Donor, Member
from atoll.protocol.trust.names import Kind
from atoll.protocol.trust.security import PLAIN, Security

FIRST_WAIT_S = 0.05
MOST_WAIT_S = 2.0
"""After each failure in a row twice as long, from the first to the most. The most is a third of the shortest stall
limit: a peer whose link was cut for a moment is dialled again in time."""
DIALS_AT_ONCE = 6
"""Of one address, whose peers have not answered as themselves yet: a probe, an exchange, a transfer, and as many for a
start of the same node that was lost."""
DIAL_EVERY_S = 1.0
"""Of such an address, after those."""
LONGEST_QUEUE_S = 5.0
ONE_CHANNEL_S = 60.0
"""After another connection than a peer's first broke: for so long its streams go over the first. The peer, or what is
between, may accept no more than that."""
MAX_REMEMBERED = 4096
"""Peers and addresses."""


class Purpose(Enum):
    """What a connection is for. Each has its own: a transfer does not wait behind a sync in one connection."""

    EXCHANGE = auto()
    PROBE = auto()
    FETCH = auto()
    DONATE = auto()
    AUDIT = auto()


Callee = Member | Donor


@dataclass(slots=True)
class _Peer:
    num_failures: int = 0  # in a row
    not_before: float = 0.0
    has_answered: bool = False  # as itself
    several_from: float = 0.0  # when other connections than the first may be opened


Key = tuple[int, int, str, str]  # site id, incarnation, address, name
Place = tuple[Purpose, Key, int]  # the last: of a peer's connections for that purpose, from 0


class Dialer:
    """Lives in one event loop. Ask for a `channel`, and then say how it went: `reached` or `failed`."""

    def __init__(
        self, network: Network = transport, security: Security = PLAIN, relays: RelayClient | None = None
    ) -> None:
        """`relays`: by which sites are reached that nobody can dial."""
        self._network = network
        self._relays = relays
        self._security = security
        self._peers: OrderedDict[Key, _Peer] = OrderedDict()
        self._full_at: OrderedDict[str, float] = OrderedDict()  # by address: when the queue before it is empty
        self._channels: dict[Place, grpc.aio.Channel] = {}
        self._dialling: WeakValueDictionary[Place, asyncio.Lock] = WeakValueDictionary()
        self._closing: set[asyncio.Task[None]] = set()
        self._banned: frozenset[str] = frozenset()

    def ban(self, names: Collection[str]) -> None:
        """Sites of these names, and of no others, are not dialled from now on; what is open to them ends."""
        self._banned = frozenset(names)
        self._close(lambda place: place[1][3] in self._banned)

    async def channel(self, callee: Callee, purpose: Purpose, number: int = 0) -> grpc.aio.Channel:
        """A connection to that peer for this purpose, opened once it is the peer's turn. It connects at its first call,
        and again after it broke only as often as grpc's own back-off lets it.

        `number`: of several. A peer that has not answered as itself yet, or with which another than the first broke a
        while ago, has the first one alone. Raises PeerError where too many wait for the address."""
        self._refuse_banned(callee)
        peer = self._peer(callee)
        if not peer.has_answered or asyncio.get_running_loop().time() < peer.several_from:
            number = 0
        place = purpose, key_of(callee), number
        async with self._dialling.setdefault(place, asyncio.Lock()):
            if place not in self._channels:
                await self._turn(callee)
                self._refuse_banned(callee)  # meanwhile
                self._channels[place] = self._network.open_channel(
                    self._dialled(callee),
                    handshake=self._security.towards(Kind.SITE, callee.name),
                    max_message_bytes=transport.MAX_FRAME_BYTES,
                )
            return self._channels[place]

    def _refuse_banned(self, callee: Callee) -> None:
        """Raises PeerError."""
        if callee.name in self._banned:
            raise PeerError(f"site {callee.site_id} ({callee.name}) is banned from the run", callee.site_id)

    def _dialled(self, callee: Callee) -> str:
        """By grpc. Raises PeerError."""
        if (behind := relayed(callee.address)) is None:
            return callee.address
        where = f"site {callee.site_id} at {callee.address}"
        if self._relays is None:
            raise PeerError(f"{where}: without certificates no relay leads to it", callee.site_id)
        try:
            return self._relays.address_for(behind)
        except OSError as error:
            raise PeerError(f"{where}: {error.strerror}", callee.site_id) from None

    def disconnect(self, callee: Callee, purpose: Purpose) -> None:
        """None is needed any more, or a stream broke or hung: the next one gets a connection of its own.

        After one wrong byte in its framing an HTTP/2 connection may stay up with every later stream on it hanging.
        """
        self._close(lambda place: place[:2] == (purpose, key_of(callee)))

    def disconnect_others(self, callees: Collection[Callee], purpose: Purpose) -> None:
        """All of this purpose but those to `callees`."""
        used = {key_of(callee) for callee in callees}
        self._close(lambda place: place[0] is purpose and place[1] not in used)

    def broke(self, callee: Callee, channel: grpc.aio.Channel) -> None:
        """A stream on that connection broke or hung. Of many on one it is the first that counts, and of several
        connections the first one: they are one link."""
        place = next((place for place, found in self._channels.items() if found is channel), None)
        if place is None:
            return
        self._close(lambda found: found == place)
        if place[2] == 0:
            self.failed(callee)
        else:
            self._peer(callee).several_from = asyncio.get_running_loop().time() + ONE_CHANNEL_S

    def _close(self, chosen: Callable[[Place], bool]) -> None:
        for place in [place for place in self._channels if chosen(place)]:
            task = asyncio.get_running_loop().create_task(self._channels.pop(place).close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        self._close(lambda place: True)
        await asyncio.gather(*self._closing, return_exceptions=True)

    def reached(self, callee: Callee) -> None:
        """It answered as itself."""
        peer = self._peer(callee)
        peer.num_failures, peer.not_before, peer.has_answered = 0, 0.0, True

    def failed(self, callee: Callee) -> None:
        """It could not be reached, or another answers there."""
        peer = self._peer(callee)
        wait_s = min(FIRST_WAIT_S * 2.0 ** min(peer.num_failures, 16), MOST_WAIT_S)
        peer.num_failures += 1
        peer.not_before = asyncio.get_running_loop().time() + wait_s

    async def _turn(self, callee: Callee) -> None:
        now = asyncio.get_running_loop().time()
        peer = self._peer(callee)
        wait_s = max(0.0, peer.not_before - now)
        if not peer.has_answered:
            wait_s = max(wait_s, self._queue(callee, now))
        if wait_s:
            await asyncio.sleep(wait_s)

    def _queue(self, callee: Callee, now: float) -> float:
        """Takes a place in the queue for the address; how long it waits there."""
        address = self._queued_for(callee.address)
        full_at = max(self._full_at.pop(address, 0.0), now)
        wait_s = full_at + DIAL_EVERY_S - now - DIALS_AT_ONCE * DIAL_EVERY_S
        if wait_s > LONGEST_QUEUE_S:
            self._full_at[address] = full_at
            named_by = {site_id for site_id, _, named, _ in self._peers if self._queued_for(named) == address}
            raise PeerError(
                f"site {callee.site_id} at {callee.address}: that address is dialled too often; "
                f"{len(named_by)} members name it",
                callee.site_id,
            )
        self._full_at[address] = full_at + DIAL_EVERY_S
        while len(self._full_at) > MAX_REMEMBERED:
            self._full_at.popitem(last=False)
        return max(0.0, wait_s)

    def _queued_for(self, address: str) -> str:
        """A relay that was not one yet may be anybody's machine, whichever sites are said to be behind it."""
        behind = relayed(address)
        is_known = behind is None or (self._relays is not None and self._relays.knows(behind.relay))
        return address if behind is None or is_known else behind.relay

    def _peer(self, callee: Callee) -> _Peer:
        key = key_of(callee)
        peer = self._peers.pop(key, None) or _Peer()
        self._peers[key] = peer  # the last used at the end
        while len(self._peers) > MAX_REMEMBERED:
            self._peers.popitem(last=False)
        return peer


def key_of(callee: Callee) -> Key:
    return callee.site_id, callee.incarnation, callee.address, callee.name
