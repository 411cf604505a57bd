"""Exchanges that are shared out among parts, which are hosts of a site or processes of a host, as their leader sees
them: each does what concerns its chunks, and an exchange is done when all parts have done that."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import reduce
from typing import Generic, Protocol, TypeVar

from atoll.node import host_protocol as hosts
from atoll.node.core.exchange_failures import error_of
from atoll.node.daemon.shared_products import AttemptKey, SharedProducts
from atoll.node.exchange.hub import Hub
from atoll.node.exchange.sync.exchange import ExchangeResult
from atoll.node.exchange.sync.multiplication import Products
from atoll.protocol import messages as m
from atoll.protocol.errors import AtollError, InvalidMessage, StateError

MOST_BYTES = 1 << 63
"""Of what parts say that they have moved."""
LARGEST_NORM = float.fromhex("0x1.fffffep+127")
"""That the wire carries."""

OfRunning = m.Weights | m.Influences | hosts.HurryAtHost | hosts.CancelAtHost
"""What parts are told of an exchange that has begun."""


def key_of(
    said: m.Plan | m.Weights | m.Products | m.Influences | m.Done | m.ExchangeFailed | hosts.PayloadsOf,
) -> AttemptKey:
    return said.sync, said.term, said.attempt


class Part(Protocol):
    """From its first word until it is lost."""

    number: int
    words: str
    """For people."""
    beat: hosts.HostBeat | None
    """The last."""
    done: dict[AttemptKey, m.Done]
    """Of the exchanges that are not over."""

    def say(self, message: OfRunning) -> None: ...


P = TypeVar("P", bound=Part)
P_contra = TypeVar("P_contra", bound=Part, contravariant=True)


class Parts(Protocol[P_contra]):
    """Those that are here. `until` wakes when any of them has changed."""

    def is_here(self, part: P_contra) -> bool: ...

    def changed(self) -> None: ...

    async def until(self, is_so: Callable[[], bool]) -> None: ...


class Changes:
    """Of what `until` waits for."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def changed(self) -> None:
        self._changed.set()

    async def until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            self._changed.clear()
            await self._changed.wait()


@dataclass(eq=False, kw_only=True)
class SharedExchanges(Generic[P]):
    attached: Parts[P]
    hub: Hub
    own_of: Callable[[int], range]
    """The chunks of a part, by its number."""
    site_id: Callable[[], int]
    _shared: dict[int, tuple[m.Plan, list[P]]] = field(default_factory=dict, init=False)
    """By sync: the newest attempt that parts take part in, and which."""
    _failures: dict[AttemptKey, AtollError] = field(default_factory=dict, init=False)
    """Of these attempts."""

    _products: SharedProducts = field(default_factory=SharedProducts, init=False)
    """Where averages are by influence."""

    # --- what the one that leads wants

    def replace(self, plan: m.Plan) -> None:
        """An older attempt at the sync is over."""
        if (before := self._shared.get(plan.sync)) is not None:
            self.cancel(plan.sync, before[0].attempt)
            self._forget(plan.sync)

    def take_part(self, plan: m.Plan, parts: list[P]) -> None:
        """From now on these do, in that attempt, which may be begun again."""
        self._shared[plan.sync] = plan, parts
        self._products.forget(plan.sync)
        self._products.expect(key_of(plan), [part.number for part in parts])
        for part in parts:
            part.done.pop(key_of(plan), None)

    def weigh(self, plan: m.Plan, weights: tuple[int, ...], roots: tuple[bytes, ...]) -> None:
        self.tell(m.Weights(sync=plan.sync, attempt=plan.attempt, term=plan.term, tokens=weights, roots=roots))

    def influence(self, plan: m.Plan, influences: tuple[int, ...]) -> None:
        self.tell(m.Influences(sync=plan.sync, attempt=plan.attempt, term=plan.term, influences=influences))

    def summed(self, plan: m.Plan, products: Products, then: Callable[[Products], None]) -> None:
        """`products`: of the one that leads. `then` hears those of all parts together, once these have said theirs."""
        self._products.made(key_of(plan), products, then)

    def hurry(self, sync: int) -> None:
        self.tell(hosts.HurryAtHost(sync=sync))

    def cancel(self, sync: int, attempt: int) -> None:
        self.tell(hosts.CancelAtHost(sync=sync, attempt=attempt))

    def _forget(self, sync: int) -> None:
        self._shared.pop(sync, None)
        self._products.forget(sync)
        self.attached.changed()
        for key in [key for key in self._failures if key[0] == sync]:
            del self._failures[key]

    def has_begun(self, plan: m.Plan) -> None:
        """The one that leads does its part by now: another one may have failed before that."""
        if (error := self._failures.get(key_of(plan))) is not None:
            self.hub.fail(plan, error)

    def tell(self, word: OfRunning) -> None:
        """Those that take part in that sync."""
        _, taking_part = self._shared.get(word.sync, (None, ()))
        for part in filter(self.attached.is_here, taking_part):
            part.say(word)

    async def done(self, plan: m.Plan, result: ExchangeResult) -> ExchangeResult:
        """When all that take part have done theirs, too. Raises what one failed by; StateError if a part does not
        agree; CancelledError if the attempt is over, or begun again."""
        found, key = self._shared.get(plan.sync), key_of(plan)
        if found is None or key_of(found[0]) != key:
            return result
        taking_part = found[1]
        await self.attached.until(
            lambda: (
                key in self._failures
                or self._shared.get(plan.sync) is not found
                or all(key in part.done for part in taking_part)
            )
        )
        if (error := self._failures.get(key)) is not None:
            raise error
        if self._shared.get(plan.sync) is not found:
            raise asyncio.CancelledError
        said = [part.done[key] for part in taking_part]
        for part, done in zip(taking_part, said, strict=True):
            self._check_agrees(part, done, result)
        return together(result, said)

    def _check_agrees(self, part: P, done: m.Done, result: ExchangeResult) -> None:
        if done.tokens != result.tokens:
            raise StateError(f"{part.words} has other weights of sync {done.sync}")

    # --- what parts say

    def heard_beat(self, part: P, beat: hosts.HostBeat) -> None:
        """What it has moved is the site's: the coordinator sees the site get on by that."""
        counters, before = self.hub.counters, part.beat
        if before is not None:  # its first one counts from its start, which may be long ago
            for field in fields(beat):
                name = field.name
                more = _more(getattr(counters, name), getattr(before, name), getattr(beat, name))
                setattr(counters, name, more)
        part.beat = beat

    def heard_done(self, part: P, done: m.Done) -> None:
        """Raises InvalidMessage for figures that no exchange of its chunks has."""
        plan, taking_part = self._shared.get(done.sync, (None, []))
        if plan is None or key_of(plan) != key_of(done) or part not in taking_part:
            return  # it is over
        _check(done.averaged, len(plan.contributors), len(self.own_of(part.number)), part.words)
        part.done[key_of(done)] = done
        self.attached.changed()

    def heard_products(self, part: P, said: m.Products) -> None:
        """Raises InvalidMessage for others than of the contributors."""
        plan, taking_part = self._shared.get(said.sync, (None, []))
        if plan is None or key_of(plan) != key_of(said) or part not in taking_part:
            return  # it is over
        num = len(plan.contributors)
        if len(said.products) != num * (num + 1) // 2:
            raise InvalidMessage(f"{part.words} says {len(said.products)} products of {num} contributors")
        self._products.heard(key_of(plan), part.number, said.products)

    def heard_failed(self, part: P, failed: m.ExchangeFailed) -> None:
        """What one of them cannot do, the site cannot."""
        plan, _ = self._shared.get(failed.sync, (None, ()))
        if plan is not None and key_of(plan) == key_of(failed):
            self._fail(plan, error_of(failed, part.words, self.site_id()))

    def lost(self, part: P) -> None:
        """What it takes part in cannot be done any more."""
        for plan, taking_part in list(self._shared.values()):
            if part in taking_part and key_of(plan) not in part.done:
                self._fail(plan, StateError(f"{part.words} is lost, with its part of sync {plan.sync}"))

    def _fail(self, plan: m.Plan, error: AtollError) -> None:
        self._failures[key_of(plan)] = error
        self.hub.fail(plan, error)
        self.attached.changed()


def _more(counter: int, before: int, now: int) -> int:
    return min(counter + max(0, now - before), MOST_BYTES)


def _check(averaged: m.Averaged | None, num_contributors: int, num_chunks: int, who: str) -> None:
    """Raises InvalidMessage."""
    if averaged is None:
        return
    lengths, highest = {len(averaged.norms), len(averaged.num_high)}, max(averaged.num_high, default=0)
    if lengths != {num_contributors} or not highest <= averaged.num_chunks <= num_chunks:
        raise InvalidMessage(
            f"{who} averaged {averaged.num_chunks} chunks, and has figures of {sorted(lengths)} contributors; it has "
            f"{num_chunks} chunks, of {num_contributors} contributors"
        )


def together(own: ExchangeResult, others: list[m.Done]) -> ExchangeResult:
    """What all parts have seen of links and averages."""
    links: dict[int, list[m.LinkUse]] = {}
    for use in (*own.links, *(use for done in others for use in done.links)):
        links.setdefault(use.site_id, []).append(use)
    stood_out = [(o.site_id, o.norm, o.limit) for done in others if (o := done.stood_out) is not None]
    nearest = max(
        [*([own.stood_out] if own.stood_out is not None else []), *stood_out],
        key=lambda outlying: outlying[1] / outlying[2] if outlying[2] else 0.0,
        default=None,
    )
    averaged = [a for a in (own.averaged, *(done.averaged for done in others)) if a is not None]
    return replace(
        own,
        links=tuple(
            m.LinkUse(
                site_id=site_id,
                received_bytes=min(sum(use.received_bytes for use in uses), MOST_BYTES),
                seconds=max(use.seconds for use in uses),
            )
            for site_id, uses in sorted(links.items())
        )[: m.MAX_LINKS],
        stood_out=nearest,
        averaged=reduce(_both, averaged) if averaged else None,
    )


def _both(one: m.Averaged, other: m.Averaged) -> m.Averaged:
    """Of the chunks of both; what is sampled, of either."""
    sampled = one if one.cosines else other
    return m.Averaged(
        num_chunks=one.num_chunks + other.num_chunks,
        norms=tuple(min(math.hypot(*both), LARGEST_NORM) for both in zip(one.norms, other.norms, strict=True)),
        num_high=tuple(map(sum, zip(one.num_high, other.num_high, strict=True))),
        cosines=sampled.cosines,
        average_share=sampled.average_share,
        last_cosine=sampled.last_cosine,
        codec_error=one.codec_error or other.codec_error,
    )
