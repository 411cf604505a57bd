"""Who has connections to the coordinator: counted by address until the handlers say whose a connection is, by identity
from then on. Pure: time is passed in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from enum import StrEnum
from itertools import takewhile
from operator import attrgetter
from typing import TypeVar

from atoll.coordinator import limits
from atoll.protocol.addresses import source_of
from atoll.protocol.handshakes import Crowds
from atoll.protocol.pace import Buckets, Pace, Recent

K = TypeVar("K")


class Turned(StrEnum):
    """Away: why a connection is closed by the coordinator."""

    ADDRESS = "address"
    """Its address has as many that nobody has shown a certificate on."""
    PACE = "pace"
    """Its address opens them too fast."""
    FULL = "full"
    """There are as many as there may be."""
    NO_TLS = "no TLS"
    SILENT = "silent"
    """Nobody has shown a certificate on it in time."""
    IDENTITY = "identity"
    """The same one has opened newer ones."""


@dataclass(slots=True)
class _Guest:
    source: str
    is_known: bool
    """Somebody has shown a certificate at its address before."""
    until_s: float
    """When it is closed if nobody knows whose it is."""


class Counts:
    """Numbers are those of connections. A connection comes, waits for its handshake when it has said its first words,
    enters, and is of somebody; and it may be gone at any time."""

    def __init__(self, *, per_address: int, in_all: int) -> None:
        self._per_address = per_address
        self._in_all = in_all
        self._strangers: dict[int, _Guest] = {}  # the oldest first
        self._of_source: dict[str, dict[int, None]] = {}  # of these
        self._known: dict[int, Hashable] = {}
        self._of_identity: dict[Hashable, dict[int, None]] = {}  # of these, the oldest first
        self._came = Buckets[str](Pace(per_address, per_address / limits.REFILL_S), limits.MAX_SOURCES)
        self._crowds = Crowds()
        self._waiting: dict[int, None] = {}  # of strangers, the oldest first
        self._entered: dict[int, float] = {}  # of strangers, when; the oldest first
        self._entered_of: Counter[str] = Counter()
        self._in_vain = Recent[str | bool](limits.HALF_FORGOTTEN_S, limits.MAX_SOURCES)
        """Handshakes that were begun and have not ended well, by address, and of all that are known or not."""
        self._handshakes = Buckets[None](limits.HANDSHAKES, 1)
        self._accepted = Buckets[None](limits.ACCEPTED, 1)
        self._known_again = Buckets[Hashable](limits.CONNECTIONS_OF_ONE, limits.MAX_SOURCES)

    def __len__(self) -> int:
        return len(self._strangers) + len(self._known)

    def may_come(self, now: float) -> bool:
        """After one has been taken from the kernel, of whomever: whether others may be, now."""
        return self._accepted.take(None, now)

    def come(self, number: int, address: str, now: float) -> Turned | tuple[int, ...]:
        """Why it may not stay; or those that make room for it."""
        source = source_of(address)
        if len(self._of_source.get(source, ())) >= self._per_address:
            return Turned.ADDRESS
        if not self._came.take(source, now):
            return Turned.PACE
        room: tuple[int, ...] = ()
        if len(self) >= self._in_all:
            if not self._strangers:
                return Turned.FULL
            crowd = max(self._of_source.values(), key=len)
            room = (next(iter(crowd)),)
            self.gone(room[0])
        self._strangers[number] = _Guest(source, self._crowds.is_known(source), now + limits.HANDSHAKE_LIMIT_S)
        self._of_source.setdefault(source, {})[number] = None
        return room

    def wait(self, number: int) -> None:
        """For its handshake: it has said something."""
        assert number in self._strangers
        self._waiting[number] = None

    def enter(self, now: float) -> tuple[int, ...]:
        """Those that may begin their handshakes, in their order."""
        if len(self._entered) >= limits.MAX_HANDSHAKES or not self._handshakes.take(None, now):
            return ()  # in a flood nearly always: what follows looks at all that wait
        self._handshakes.give_back(None, now)
        found = []
        for number in self._in_turn(now):
            guest = self._strangers[number]
            if len(self._entered) >= limits.MAX_HANDSHAKES:
                break
            if self._entered_of[guest.source] >= limits.MAX_HANDSHAKES_OF_ADDRESS:
                continue
            if not self._handshakes.take(None, now):
                break
            del self._waiting[number]
            guest.until_s = now + limits.HANDSHAKE_LIMIT_S
            self._entered[number] = now
            self._entered_of[guest.source] += 1
            for key in (guest.source, guest.is_known):
                self._in_vain.add(key, now)
            found.append(number)
        return tuple(found)

    def _in_turn(self, now: float) -> list[int]:
        """Those of known addresses, or of others, of which fewer were begun in vain; of these the address with the
        fewest; of it the oldest. Each is placed as if those before it had been begun."""
        order = list(self._waiting)
        for key_of in (attrgetter("source"), attrgetter("is_known")):
            begun, places = dict[str | bool, float](), dict[int, float]()
            for number in order:
                key = key_of(self._strangers[number])
                places[number] = begun[key] if key in begun else self._in_vain.of(key, now)
                begun[key] = places[number] + 1
            order.sort(key=places.__getitem__)
        return order

    def through(self, number: int, now: float) -> None:
        """Its handshake has ended well. It counts for its address until it is known whose it is."""
        guest, began = self._strangers.get(number), self._entered.get(number, now)
        if guest is not None and self._left(number, guest):
            self._handshakes.give_back(None, now)
            self._accepted.give_back(None, now)
            for key in (guest.source, guest.is_known):
                self._in_vain.give_back(key, began, now)
            guest.until_s = now + limits.FIRST_CALL_LIMIT_S

    def _left(self, number: int, guest: _Guest) -> bool:
        """The handshake of this one is over; whether there was one."""
        if self._entered.pop(number, None) is None:
            return False
        self._entered_of[guest.source] -= 1
        if not self._entered_of[guest.source]:
            del self._entered_of[guest.source]
        return True

    def is_of(self, number: int, identity: Hashable, now: float) -> tuple[int, ...]:
        """Somebody has shown a certificate on it; those that make room for it. It no longer counts for its address, as
        long as this one does not open them too fast."""
        guest = self._strangers.get(number)
        if guest is None:
            return ()  # another call on it, or it has gone
        self.through(number, now)
        self.gone(number)
        self._crowds.let_in(guest.source)
        if self._known_again.take(identity, now):
            self._came.give_back(guest.source, now)
        self._known[number] = identity
        own = self._of_identity.setdefault(identity, {})
        own[number] = None
        room = tuple(own)[: -limits.MAX_CONNECTIONS_OF_ONE]
        for other in room:
            self.gone(other)
        return room

    def is_here(self, number: int) -> bool:
        return number in self._strangers or number in self._known

    def gone(self, number: int) -> None:
        if (guest := self._strangers.pop(number, None)) is not None:
            _leave(self._of_source, guest.source, number)
            self._waiting.pop(number, None)
            self._left(number, guest)
        elif number in self._known:
            _leave(self._of_identity, self._known.pop(number), number)

    def late(self, now: float) -> tuple[int, ...]:
        """Those on which nobody has shown a certificate in time; they are gone."""
        found = [number for number, guest in self._strangers.items() if guest.until_s <= now]
        if self._waiting:
            slow_s = now - limits.CROWDED_HANDSHAKE_LIMIT_S
            found += takewhile(lambda number: self._entered[number] <= slow_s, self._entered)
        found = list(dict.fromkeys(found))
        for number in found:
            self.gone(number)
        return tuple(found)


def _leave(groups: dict[K, dict[int, None]], key: K, number: int) -> None:
    del groups[key][number]
    if not groups[key]:
        del groups[key]
