"""Exchanges of a site of several hosts, as its leader sees them: each host does its part of an attempt, and the attempt
is done when every host has all payloads."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import reduce

from atoll.node import host_protocol as hosts
from atoll.node.core import outputs as out
from atoll.node.daemon.hosts.attached import AttachedHost, AttemptKey, Hosts
from atoll.node.exchange.hub import Hub
from atoll.node.exchange.sync import sharing
from atoll.node.exchange.sync.exchange import Exchange, ExchangeResult
from atoll.protocol import messages as m
from atoll.protocol.errors import AtollError, AverageError, NoRoomError, PeerError, StateError

LOCAL = "local"
"""The phase of what is no peer's fault."""


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
        """Whether other hosts take part. As a receiver host 0 does without those that are not here, or lack the state;
        what a site contributes is on all of its hosts.

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
            lacking += [host.words for host in ready if not host.is_laid_out or not host.follows]
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
        """When all hosts that take part have all payloads, too. Raises StateError if they have others, or are lost."""
        found = self._shared.get(plan.sync)
        if found is None or key_of(found[0]) != key_of(plan):
            return result
        taking_part, key = found[1], key_of(plan)
        for lost in await self.attached.each(taking_part, lambda host: key in host.done):
            raise StateError(f"{lost.words} was lost before it had all payloads")
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
            counters.sent_bytes += max(0, beat.sent_bytes - before.sent_bytes)
            counters.received_bytes += max(0, beat.received_bytes - before.received_bytes)
            counters.moved_bytes += max(0, beat.moved_bytes - before.moved_bytes)
        host.beat = beat

    def heard_done(self, host: AttachedHost, done: m.Done) -> None:
        host.done[key_of(done)] = done
        self.attached.changed()

    def heard_failed(self, host: AttachedHost, failed: m.ExchangeFailed) -> None:
        """What one of them cannot do, the site cannot."""
        plan, _ = self._shared.get(failed.sync, (None, ()))
        if plan is not None and key_of(plan) == key_of(failed):
            self._fail(plan, _error(host, failed, self.site_id()))

    def lost(self, host: AttachedHost) -> None:
        """What it takes part in cannot be done any more."""
        for plan, taking_part in list(self._shared.values()):
            if host in taking_part and key_of(plan) not in host.done:
                self._fail(plan, StateError(f"{host.words} is lost, with its part of sync {plan.sync}"))

    def _fail(self, plan: m.Plan, error: AtollError) -> None:
        self._failures[key_of(plan)] = error
        self.hub.fail(plan, error)

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


def failure_of(plan: m.Plan, error: Exception) -> m.ExchangeFailed:
    """As a host says it to its leader; `_error` is its inverse, as far as the run is told of it."""
    direction, phase, peer, tensor = m.Direction.RECEIVING, LOCAL, 0, ""
    outliers: tuple[m.Outlier, ...] = ()
    match error:
        case PeerError():
            direction = m.Direction.SENDING if error.sending else direction
            phase, peer = error.phase, error.peer_site_id
        case NoRoomError():
            phase = NoRoomError.__name__
        case AverageError():
            phase, tensor = AverageError.__name__, error.tensor[:1024]
            outliers = tuple(m.Outlier(site_id=i, norm=norm, limit=limit) for i, norm, limit in error.outliers)
    return m.ExchangeFailed(
        sync=plan.sync,
        attempt=plan.attempt,
        term=plan.term,
        peer_site_id=peer,
        direction=direction,
        phase=phase[:64],
        text=str(error)[:1024],
        tensor=tensor,
        outliers=outliers,
    )


def _error(host: AttachedHost, failed: m.ExchangeFailed, site_id: int) -> AtollError:
    text = f"{host.words}: {failed.text}"
    if failed.peer_site_id and failed.peer_site_id != site_id:
        sending = failed.direction is m.Direction.SENDING
        return PeerError(text, failed.peer_site_id, sending=sending, phase=failed.phase)
    if failed.phase == NoRoomError.__name__:
        return NoRoomError(text)
    if failed.phase == AverageError.__name__:
        return AverageError(text, failed.tensor, tuple((o.site_id, o.norm, o.limit) for o in failed.outliers))
    return StateError(text)


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
                received_bytes=sum(use.received_bytes for use in uses),
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
