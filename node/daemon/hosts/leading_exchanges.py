"""Exchanges of a site of several hosts, as its leader sees them: each host does its part of an attempt, and the attempt
is done when every host has all payloads."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import partial, reduce

from atoll.node import host_protocol as hosts
from atoll.node.core import outputs as out
from atoll.node.core.exchange_failures import error_of
from atoll.node.daemon.hosts.attached import AttachedHost, AttemptKey, Hosts
from atoll.node.exchange.hub import Hub
from atoll.node.exchange.sync import sharing
from atoll.node.exchange.sync.exchange import Exchange, ExchangeResult
from atoll.node.threads import run_to_its_end
from atoll.protocol import messages as m
from atoll.protocol.errors import AtollError, InvalidMessage, StateError

MOST_BYTES = 1 << 63
"""Of what hosts say that they have moved."""


def key_of(said: m.Plan | m.Weights | m.Done | m.ExchangeFailed | hosts.PayloadsOf) -> AttemptKey:
    return said.sync, said.term, said.attempt


@dataclass(eq=False, kw_only=True)
class LeadingExchanges:
    attached: Hosts
    hub: Hub
    own_of: Callable[[int], range]
    """The chunks of a host, by its number."""
    site_id: Callable[[], int]
    _shared: dict[int, tuple[m.Plan, list[AttachedHost]]] = field(default_factory=dict, init=False)
    """By sync: the newest attempt that hosts take part in, and who does."""
    _failures: dict[AttemptKey, AtollError] = field(default_factory=dict, init=False)
    """Of these attempts."""

    # --- what the core wants

    def begin(self, begun: out.BeginExchange) -> bool:
        """Whether other hosts take part. As a receiver host 0 does without those that are not here, or behind; what a
        site contributes is on all of its hosts.

        Raises StateError where a contributor lacks one.
        """
        plan, ready = begun.plan, self.attached.ready
        if (before := self._shared.get(plan.sync)) is not None:
            self.cancel(plan.sync, before[0].attempt)
            self._forget(plan.sync)
        lacking = [f"host {number}" for number in self.attached.missing]
        if begun.tokens:
            lacking += [host.words for host in ready if plan.fragment not in host.snapshots]
        else:
            lacking += [host.words for host in ready if not host.is_laid_out or not host.is_in_step]
        if lacking and begun.tokens:
            raise StateError(f"what this site contributes is not on all of its hosts: {', '.join(lacking)}")
        if lacking or not ready:
            return False
        word = hosts.BeginAtHost(
            plan=plan,
            tokens=begun.tokens,
            weights=begun.weights,
            spread_s=begun.spread_s,
            in_flight=tuple(sorted(begun.in_flight)),
            error_commits=begun.error_commits,
            site_id=self.site_id(),
        )
        self._shared[plan.sync] = plan, ready
        for host in ready:
            host.say(word)
        return True

    def weigh(self, plan: m.Plan, weights: tuple[int, ...]) -> None:
        self._tell(plan.sync, m.Weights(sync=plan.sync, attempt=plan.attempt, term=plan.term, tokens=weights))

    def hurry(self, sync: int) -> None:
        self._tell(sync, hosts.HurryAtHost(sync=sync))

    def cancel(self, sync: int, attempt: int) -> None:
        self._tell(sync, hosts.CancelAtHost(sync=sync, attempt=attempt))

    def drop(self, sync: int) -> None:
        """Also what hosts took part in before an attempt without them."""
        self._forget(sync)
        for host in self.attached.ready:
            host.say(hosts.DropAtHost(sync=sync))
            for key in [key for key in host.done if key[0] == sync]:
                del host.done[key]

    def _forget(self, sync: int) -> None:
        self._shared.pop(sync, None)
        self.attached.changed()
        for key in [key for key in self._failures if key[0] == sync]:
            del self._failures[key]

    def has_begun(self, plan: m.Plan) -> None:
        """Host 0 does its part by now: another one may have failed before that."""
        if (error := self._failures.get(key_of(plan))) is not None:
            self.hub.fail(plan, error)

    def _tell(self, sync: int, word: hosts.OfExchange) -> None:
        for host in self._of(sync):
            host.say(word)

    def _of(self, sync: int) -> list[AttachedHost]:
        _, taking_part = self._shared.get(sync, (None, ()))
        return [host for host in taking_part if self.attached.is_here(host)]

    async def done(self, plan: m.Plan, result: ExchangeResult) -> ExchangeResult:
        """When all hosts that take part have all payloads, too. Raises what a host failed by; StateError if a host
        has other payloads, or the attempt is over."""
        found, key = self._shared.get(plan.sync), key_of(plan)
        if found is None or key_of(found[0]) != key:
            return result
        taking_part = found[1]
        await self.attached.until(
            lambda: (
                key in self._failures
                or self._shared.get(plan.sync) is not found
                or all(key in host.done for host in taking_part)
            )
        )
        if (error := self._failures.get(key)) is not None:
            raise error
        if self._shared.get(plan.sync) is not found:
            raise StateError(f"sync {plan.sync} attempt {plan.attempt} is over")
        said = [host.done[key] for host in taking_part]
        for host, done in zip(taking_part, said, strict=True):
            if (done.payload_digest, done.tokens) != (result.payload_digest, result.tokens):
                raise StateError(f"{host.words} has other payloads, or weights, of sync {plan.sync} than host 0")
        return _together(result, said)

    # --- what hosts say

    def heard_beat(self, host: AttachedHost, beat: hosts.HostBeat) -> None:
        """What it has moved is the site's: the coordinator sees the site get on by that."""
        counters, before = self.hub.counters, host.beat
        if before is not None:  # its first one counts from its start, which may be long ago
            counters.sent_bytes = _more(counters.sent_bytes, before.sent_bytes, beat.sent_bytes)
            counters.received_bytes = _more(counters.received_bytes, before.received_bytes, beat.received_bytes)
            counters.moved_bytes = _more(counters.moved_bytes, before.moved_bytes, beat.moved_bytes)
        host.beat = beat

    def heard_done(self, host: AttachedHost, done: m.Done) -> None:
        """Raises InvalidMessage for figures that no exchange of its chunks has."""
        plan, taking_part = self._shared.get(done.sync, (None, []))
        if plan is None or key_of(plan) != key_of(done) or host not in taking_part:
            return  # it is over
        _check(done.averaged, len(plan.contributors), len(self.own_of(host.number)), host.words)
        host.done[key_of(done)] = done
        self.attached.changed()

    def heard_failed(self, host: AttachedHost, failed: m.ExchangeFailed) -> None:
        """What one of them cannot do, the site cannot."""
        plan, _ = self._shared.get(failed.sync, (None, ()))
        if plan is not None and key_of(plan) == key_of(failed):
            self._fail(plan, error_of(failed, host.words, self.site_id()))

    def lost(self, host: AttachedHost) -> None:
        """What it takes part in cannot be done any more."""
        for plan, taking_part in list(self._shared.values()):
            if host in taking_part and key_of(plan) not in host.done:
                self._fail(plan, StateError(f"{host.words} is lost, with its part of sync {plan.sync}"))

    def _fail(self, plan: m.Plan, error: AtollError) -> None:
        self._failures[key_of(plan)] = error
        self.hub.fail(plan, error)
        self.attached.changed()

    # --- payloads

    async def _running(self, of: hosts.PayloadsOf) -> Exchange:
        return await self.hub.running(of.sync, of.term, of.attempt)

    async def take(self, host: AttachedHost, of: hosts.PayloadsOf, read: Callable[[], Awaitable[bytes | None]]) -> None:
        """Those of its own chunks."""
        own = self.own_of(host.number)
        await sharing.take(await self._running(of), own.__contains__, read, host.words)

    async def give(self, host: AttachedHost, of: hosts.PayloadsOf, write: Callable[[bytes], Awaitable[None]]) -> None:
        """Those of all other chunks."""
        own = self.own_of(host.number)
        await sharing.give(await self._running(of), lambda chunk: chunk not in own, write)

    async def give_committed(
        self, host: AttachedHost, of: hosts.PayloadsOf, write: Callable[[bytes], Awaitable[None]]
    ) -> None:
        """All of them, from the log. Raises StateError if they are not here."""
        async with host.giving:
            # In a thread: a commit has the log's lock as it is written.
            held = await run_to_its_end(partial(self.hub.log.held, of.sync, of.term, of.attempt))
            await sharing.give_file(held, self.hub.pool, write)


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


def _together(own: ExchangeResult, others: list[m.Done]) -> ExchangeResult:
    """What all hosts have seen of links and averages."""
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
        norms=tuple(map(math.hypot, one.norms, other.norms)),
        num_high=tuple(map(sum, zip(one.num_high, other.num_high, strict=True))),
        cosines=sampled.cosines,
        average_share=sampled.average_share,
        last_cosine=sampled.last_cosine,
        codec_error=one.codec_error or other.codec_error,
    )
