"""Which sites are attached to a relay, and which of its connections belong together. Pure.

A pair is two tickets, each for one use within a time limit; it is whole when both were used. Names are those of
certificates: what a site says of itself is not asked.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import count

from atoll.node.relay.quota import Quotas
from atoll.protocol.errors import RefusedError

TICKET_LIMIT_S = 10.0
MAX_PAIRS_EACH = 1024
"""Of the site that called: a run of a hundred sites opens a few connections between each two."""
MAX_PAIRS_BETWEEN = 64
"""From one site to another: a site that calls without end leaves room at the other one."""
MAX_SITES = 4096


@dataclass(slots=True, eq=False)
class Pair:
    number: int
    caller: str
    called: str
    until: float
    """By then both have come."""
    tickets: list[bytes] = field(default_factory=list)
    """That were not used yet."""

    @property
    def is_whole(self) -> bool:
        return not self.tickets

    def __str__(self) -> str:
        return f"{self.caller} to {self.called}"


@dataclass(frozen=True, slots=True)
class SessionCertificate:
    """What a site shows to others for a day."""

    key_digest: bytes
    since_s: float
    """From when it holds, in seconds since 1970, as the coordinator signed it: of two, the later is the newer."""
    until_s: float


@dataclass(frozen=True, slots=True)
class Control:
    """The connection over which a site hears that it is called."""

    certificate: SessionCertificate
    start: int
    """Of the site's node."""
    number: int
    """Of the connection."""


class Pairing:
    def __init__(self, quotas: Quotas, max_pairs: int, max_pairs_each: int = MAX_PAIRS_EACH) -> None:
        self._quotas = quotas
        self._max_pairs = max_pairs
        self._max_pairs_each = max_pairs_each
        self._controls: dict[str, Control] = {}
        self._by_ticket: dict[bytes, Pair] = {}
        self._pairs: dict[int, Pair] = {}
        self._each: Counter[str] = Counter()  # by caller
        self._between: Counter[tuple[str, str]] = Counter()
        self._numbers = count(1)
        self.num_pairs = 0
        """Since the relay's start."""

    @property
    def pairs(self) -> list[Pair]:
        return list(self._pairs.values())

    @property
    def attached(self) -> list[str]:
        return list(self._controls)

    def attach(self, name: str, certificate: SessionCertificate, start: int) -> tuple[Control, Control | None]:
        """From now on the site hears of calls over the first; the second one is replaced. A start is what the site
        says: it orders connections of one key alone, as who has the key of an older certificate may be a thief. Raises
        RefusedError."""
        before = self._controls.get(name)
        if before is not None:
            if before.certificate.since_s > certificate.since_s:
                raise RefusedError(f"a newer certificate of site {name} is attached: this one is replaced")
            if before.certificate.key_digest == certificate.key_digest and before.start > start:
                raise RefusedError(f"start {start} of site {name} is over: start {before.start} is attached")
        if before is None and len(self._controls) >= MAX_SITES:
            raise RefusedError(f"{MAX_SITES} sites are attached to this relay: it takes no more")
        control = Control(certificate, start, next(self._numbers))
        self._controls[name] = control
        return control, before

    def detach(self, name: str, control: Control) -> None:
        """That connection has ended."""
        if self._controls.get(name) == control:
            del self._controls[name]

    def control_of(self, name: str) -> Control | None:
        return self._controls.get(name)

    def call(self, caller: str, called: str, tickets: tuple[bytes, bytes], now: float) -> Control:
        """The first ticket is the caller's; the other one is to be told to the called site, over the connection that
        comes back. Raises RefusedError."""
        control = self._controls.get(called)
        if control is None:
            raise RefusedError(f"site {called} is not attached to this relay")
        if problem := self._quotas.refusal(caller, now):
            raise RefusedError(problem)
        if self._each[caller] >= self._max_pairs_each:
            raise RefusedError(f"site {caller} has {self._each[caller]} connections through this relay: no more")
        if self._between[caller, called] >= MAX_PAIRS_BETWEEN:
            raise RefusedError(f"site {caller} has {MAX_PAIRS_BETWEEN} connections to site {called}: no more")
        if len(self._pairs) >= self._max_pairs:
            raise RefusedError(f"this relay has {len(self._pairs)} connections, and room for no more")
        pair = Pair(next(self._numbers), caller, called, now + TICKET_LIMIT_S, list(tickets))
        self._pairs[pair.number] = pair
        self._each[caller] += 1
        self._between[caller, called] += 1
        self._by_ticket.update(dict.fromkeys(tickets, pair))
        self.num_pairs += 1
        return control

    def come(self, ticket: bytes, now: float) -> Pair | None:
        """Somebody has come with it: the pair, of which it is used up. None if it is no ticket, or is too late."""
        pair = self._by_ticket.get(ticket)
        if pair is None or now >= pair.until:
            return None
        del self._by_ticket[ticket]
        pair.tickets.remove(ticket)
        return pair

    def late(self, now: float) -> list[Pair]:
        """Not whole at the end of their time; they are to be ended."""
        return [pair for pair in self._pairs.values() if not pair.is_whole and now >= pair.until]

    def end(self, pair: Pair) -> None:
        """Once, or again."""
        if self._pairs.pop(pair.number, None) is None:
            return
        for ticket in pair.tickets:
            del self._by_ticket[ticket]
        pair.tickets.clear()
        self._each -= Counter([pair.caller])  # without those that are at zero
        self._between -= Counter([(pair.caller, pair.called)])

    def of_site(self, name: str) -> list[Pair]:
        """That it calls, or is called by."""
        return [pair for pair in self._pairs.values() if name in (pair.caller, pair.called)]

    def of_caller(self, name: str) -> list[Pair]:
        return [pair for pair in self._pairs.values() if pair.caller == name]
