"""Exchanges of a site of several hosts, as its leader sees them: each host does its part of an attempt, and the attempt
is done when every host has all payloads."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from atoll.node import host_protocol as hosts
from atoll.node.daemon.hosts.attached import AttachedHost, Hosts
from atoll.node.daemon.shared_exchanges import SharedExchanges
from atoll.node.dataplane.payload_log import PayloadLog
from atoll.node.exchange.sync import sharing
from atoll.node.exchange.sync.exchange import Exchange, ExchangeResult
from atoll.protocol import messages as m
from atoll.protocol.errors import StateError
from atoll.protocol.threads import run_to_its_end


@dataclass(eq=False, kw_only=True)
class LeadingExchanges(SharedExchanges[AttachedHost]):
    attached: Hosts
    log: Callable[[], PayloadLog]
    """Of host 0. Raises NotYetError before there is one."""

    # --- what the core wants

    def begin(self, word: hosts.BeginAtHost) -> bool:
        """Whether other hosts take part. As a receiver host 0 does without those that are not here, or behind; what a
        site contributes is on all of its hosts.

        Raises StateError where a contributor lacks one.
        """
        plan, ready = word.plan, self.attached.ready
        for sync in self._shared.keys() - {plan.sync, *word.in_flight}:
            self.drop(sync)  # of a site that was evicted, and never heard how it ended
        self.replace(plan)
        lacking = [f"host {number}" for number in self.attached.missing]
        if word.tokens:
            lacking += [host.words for host in ready if plan.fragment not in host.snapshots]
        else:
            lacking += [host.words for host in ready if not host.is_laid_out or not host.is_in_step]
        if lacking and word.tokens:
            raise StateError(f"what this site contributes is not on all of its hosts: {', '.join(lacking)}")
        if lacking or not ready:
            return False
        self.take_part(plan, ready)
        for host in ready:
            host.say(word)
        return True

    def drop(self, sync: int) -> None:
        """Also what hosts took part in before an attempt without them."""
        self._forget(sync)
        for host in self.attached.ready:
            host.say(hosts.DropAtHost(sync=sync))
            for key in [key for key in host.done if key[0] == sync]:
                del host.done[key]

    def _check_agrees(self, part: AttachedHost, done: m.Done, result: ExchangeResult) -> None:
        if (done.payload_digest, done.tokens) != (result.payload_digest, result.tokens):
            raise StateError(f"{part.words} has other payloads, or weights, of sync {done.sync} than host 0")

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
            held = await run_to_its_end(partial(self.log().held, of.sync, of.term, of.attempt))
            await sharing.give_file(held, self.hub.pool, write)
