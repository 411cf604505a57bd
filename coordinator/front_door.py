"""The coordinator's port: counts who connects, and passes the bytes of those that may on to gRPC, which cannot.

Behind it gRPC listens on an abstract Unix socket of this process. Each connection there comes from a socket that is
named by its number, which gRPC gives to the handlers as the peer: so they can say whose a connection is.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
from collections import Counter
from collections.abc import Hashable
from functools import partial

import grpc

from atoll.coordinator import limits
from atoll.coordinator.door_counts import Counts, Turned
from atoll.coordinator.guest import Guest
from atoll.protocol import addresses
from atoll.protocol.accepting import Accepting
from atoll.protocol.errors import PeerError
from atoll.protocol.transport import bind, cannot_listen

log = logging.getLogger("atoll.coordinator")


class FrontDoor:
    """Listens from `start` to `close`."""

    def __init__(self, name: str, *, per_address: int, in_all: int) -> None:
        """`name`: nobody else on this machine has it."""
        self.turned_away: Counter[Turned] = Counter()
        self._counts = Counts(per_address=per_address, in_all=in_all)
        self._behind = f"atoll-{name}"
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count(1)
        self._accepting: Accepting | None = None
        self._guests: dict[int, Guest] = {}
        self._timer: asyncio.TimerHandle | None = None

    @property
    def address_behind(self) -> str:
        """Where gRPC is to listen."""
        return f"unix-abstract:{self._behind}"

    @property
    def num_open(self) -> int:
        return len(self._counts)

    def start(self, listen: str) -> int:
        """The port. gRPC listens already. Raises ConfigError for what is not an address, HostError if it cannot be
        had."""
        host, port = addresses.parse_address(listen)
        try:
            family, _, _, _, found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            both = host == "::" and socket.has_dualstack_ipv6()
            listening = socket.create_server(found[:2], family=family, dualstack_ipv6=both)
        except OSError:
            raise cannot_listen(listen) from None
        self._accepting = Accepting(listening, self._take, lambda: self._counts.may_come(self._loop.time()), log)
        self._look()
        return int(listening.getsockname()[1])

    def document(self) -> dict[str, int]:
        """Turned away, by reason."""
        return {why.value: self.turned_away[why] for why in Turned}

    def close(self) -> None:
        if self._accepting is not None:
            self._accepting.close()
            self._accepting = None
        if self._timer is not None:
            self._timer.cancel()
        for guest in tuple(self._guests.values()):
            guest.abort()

    def is_of(self, peer: str, identity: Hashable) -> None:
        """The connection that gRPC knows as `peer`, once somebody who may call has called. Raises PeerError for one
        that did not come through this door, or has gone."""
        number = self._number_of(peer)
        if not self._counts.is_here(number):
            raise PeerError("this connection did not come by the coordinator's port, or was closed just now")
        self._end(self._counts.is_of(number, identity, self._loop.time()), Turned.IDENTITY)
        self._let_enter()

    def address_of(self, peer: str) -> str:
        """From where the connection that gRPC knows as `peer` has come; empty if that is over."""
        guest = self._guests.get(self._number_of(peer))
        return guest.address if guest is not None else ""

    def _number_of(self, peer: str) -> int:
        number = peer.removeprefix(f"unix-abstract:{self._behind}-")
        return int(number) if number.isascii() and number.isdigit() else 0

    def _take(self, accepted: socket.socket, address: str) -> bool:
        number = next(self._numbers)
        decided = self._counts.come(number, address, self._loop.time())
        if isinstance(decided, Turned):
            self.turned_away[decided] += 1
            accepted.close()
            return decided not in (Turned.ADDRESS, Turned.PACE)
        self._end(decided, Turned.FULL)
        accepted.setblocking(False)
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._guests[number] = Guest(
            accepted,
            address=address,
            own_name=f"{self._behind}-{number}",
            behind=self._behind,
            waits=partial(self._waits, number),
            through=partial(self._through, number),
            gone=partial(self._gone, number),
        )
        return True

    def _waits(self, number: int) -> None:
        self._counts.wait(number)
        self._let_enter()

    def _through(self, number: int) -> None:
        self._counts.through(number, self._loop.time())
        self._let_enter()

    def _let_enter(self) -> None:
        for number in self._counts.enter(self._loop.time()):
            self._guests[number].enter()

    def _gone(self, number: int, why: Turned | None) -> None:
        del self._guests[number]
        self._counts.gone(number)
        if why is not None:
            self.turned_away[why] += 1

    def _look(self) -> None:
        """Now and then: who has not shown a certificate in time, and who may enter."""
        self._end(self._counts.late(self._loop.time()), Turned.SILENT)
        self._let_enter()
        self._timer = self._loop.call_later(limits.LOOK_EVERY_S, self._look)

    def _end(self, numbers: tuple[int, ...], why: Turned) -> None:
        for number in numbers:
            self._guests[number].abort(why)


async def listen(
    server: grpc.aio.Server, address: str, door: FrontDoor | None, credentials: grpc.ServerCredentials | None
) -> int:
    """The port where the server is reached, behind the door if there is one. Raises HostError, or ConfigError for what
    is no address."""
    if door is None or credentials is None:
        port = bind(server, address, None)
        await server.start()
        return port
    server.add_secure_port(door.address_behind, credentials)
    await server.start()
    try:
        return door.start(address)
    except BaseException:
        await server.stop(None)
        raise
