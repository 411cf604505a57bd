"""Which handshakes of TLS may begin, and in which order: each takes a piece of the processor, with pages and relays of
the event loop, in which a coordinator decides nothing and a relay carries nothing. Pure: time is passed in.

A stranger that begins many keeps out nobody else. An address has a pace; and of the pace of all a part is for addresses
that were let in before, and one for those of which few handshakes come."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum

from atoll.protocol.addresses import source_of
from atoll.protocol.pace import Buckets, Pace

OF_ONE = Pace(at_once=256, per_s=16.0)
"""Of one address."""
FEW = Pace(at_once=8, per_s=1.0)
"""Of one address: a person's browser, or a Prometheus."""
MAX_ADDRESSES = 4096
"""That are remembered."""
MAX_KNOWN = 1024
LOOPBACK_OF_6 = source_of("::1")


class Crowd(IntEnum):
    """Of handshakes, by their addresses; one may be of several."""

    MANY = 1
    """Any."""
    FEW = 2
    """Of which few come."""
    KNOWN = 3
    """Somebody was let in from there, or it is this machine."""


OF_ALL: Mapping[Crowd, Pace] = {
    Crowd.MANY: Pace(at_once=128, per_s=16.0),
    Crowd.FEW: Pace(at_once=128, per_s=16.0),
    Crowd.KNOWN: Pace(at_once=256, per_s=32.0),
}
"""Each takes 0.23 ms at a page and 1.25 at a relay (decision 0085)."""


class Crowds:
    """To which one an address belongs. Addresses are said as `source_of` does."""

    def __init__(self) -> None:
        self._few = Buckets[str](FEW, MAX_ADDRESSES)
        self._known: dict[str, None] = {}  # the last that was let in at the end

    def of(self, source: str, now: float) -> tuple[Crowd, ...]:
        """For a handshake, which counts; the one with the fewest strangers first."""
        is_one_of_few = self._few.take(source, now)
        return (Crowd.KNOWN,) * self.is_known(source) + (Crowd.FEW,) * is_one_of_few + (Crowd.MANY,)

    def is_known(self, source: str) -> bool:
        return source in self._known or source.startswith("127.") or source == LOOPBACK_OF_6

    def let_in(self, source: str) -> None:
        """Somebody there has shown that what is behind the handshake is for them."""
        self._known.pop(source, None)
        self._known[source] = None
        if len(self._known) > MAX_KNOWN:
            del self._known[next(iter(self._known))]


class Handshakes:
    """Of one port, where whoever finds no room is turned away."""

    def __init__(self) -> None:
        self._crowds = Crowds()
        self._of_one = Buckets[str](OF_ONE, MAX_ADDRESSES)
        self._of_all = Buckets[Crowd](OF_ALL[Crowd.MANY], len(Crowd), OF_ALL)

    def begin(self, source: str, now: float) -> Crowd | None:
        """As one of which crowd it counts; None if it may not begin."""
        if not self._of_one.take(source, now):
            return None
        crowds = self._crowds.of(source, now)
        return next((crowd for crowd in crowds if self._of_all.take(crowd, now)), None)

    def give_back(self, source: str, crowd: Crowd, now: float) -> None:
        """It is not to count after all."""
        self._of_one.give_back(source, now)
        self._of_all.give_back(crowd, now)

    def let_in(self, source: str) -> None:
        """As in Crowds."""
        self._crowds.let_in(source)
