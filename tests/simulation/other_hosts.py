"""The other host of a simulated site, as far as the site's core meets it: it takes what it is to send of a snapshot
later than this is whole, and when it is lost it has nothing of that any more. It has no process, disk or exchange of
its own."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from atoll.node.core import outputs as out
from atoll.node.core.host_events import HostErrors, HostsChanged
from atoll.node.daemon.hosts.replicas import Keeping
from atoll.node.daemon.node import Node
from atoll.node.host_protocol import BeginAtHost
from atoll.protocol.errors import StateError
from atoll.protocol.messages import Plan
from tests.harness.site_questions import of_node
from tests.simulation.sites import Hands

WORDS = "host 1 of this site"
LEAST_S = 1e-6


class OtherHost:
    """Stands in for what the leader knows of hosts that are attached."""

    def __init__(self, node: Node, hands: Hands, seed: int) -> None:
        self._node = node
        self._hands = hands
        self._random = random.Random(f"other host {seed}")
        self._is_here = True
        self._free_at = 0.0
        self._taking: set[asyncio.Future[bool]] = set()
        self._taken: dict[int, tuple[int, int, int]] = {}
        """By fragment: generation, step and seq of the snapshot that it has its chunks of."""
        self._lost: set[tuple[int, int, int]] = set()
        """What it had taken before it was lost."""
        self._begun: dict[int, Plan] = {}
        """By sync, the newest that it takes part in."""
        replicas, exchanges = node.shell.leader.replicas, node.shell.leader.exchanges
        self._begin_alone = exchanges.begin
        replicas.share_snapshot = self._share  # type: ignore[method-assign]
        replicas.advance_errors = self._advance  # type: ignore[method-assign]
        replicas.keep = self._keep  # type: ignore[method-assign]
        exchanges.begin = self._begin  # type: ignore[method-assign]
        self._say_errors()

    # --- as the world wants it

    def lost(self) -> None:
        """Nothing that it does is waited for any more. The core hears of it first, then of what has failed."""
        self._is_here = False
        self._hands.num_lost += 1  # what is on its way from there is lost, too
        self._lost.update(self._taken.values())
        self._taken.clear()
        for taking in self._taking:
            if not taking.done():
                taking.set_result(False)
        begun, self._begun = self._begun, {}
        for plan in begun.values():
            error = StateError(f"{WORDS} is lost, with its part of sync {plan.sync}")
            self._node.shell.leader.exchanges._fail(plan, error)  # also if host 0 has not begun its own part yet
        self._node.handle(HostsChanged((1,), f"{WORDS} is lost"))

    def back(self) -> None:
        self._is_here = True
        self._say_errors()
        self._node.handle(HostsChanged(()))

    def _say_errors(self) -> None:
        """Mostly it has what the site has, before the coordinator has said what counts and after it."""
        if not self._node.core.settings.sync.error_feedback:
            return
        site, held = of_node(self._node), list[int | None]()
        for at in site.errors() or site.errors_on_disk():
            held.append(at if self._random.random() < 0.7 else self._random.choice([0, None, (at or 0) + 1]))
        self._node.handle(HostErrors(tuple(held)))

    # --- as the node wants it

    async def _share(self, output: out.ShareSnapshot, is_wanted: Callable[[], bool]) -> bool:
        """True when it has it, False if it is lost."""
        if not await self._has_done(self._hands.shares_s) or not is_wanted():
            return False
        self._taken[output.fragment] = output.generation, output.step, output.seq
        return True

    async def _keep(self, job: out.KeepContributions, is_wanted: Callable[[], bool]) -> Keeping:
        """Host 0 encodes what this host has, too: nothing of it is here."""
        if job.fragment not in self._taken:
            raise StateError(f"{WORDS} came back without what the site trained")
        if not await self._has_done(self._hands.shares_s):
            raise StateError(f"{WORDS} was lost")
        return Keeping(0, job.fragment, (), ())

    async def _has_done(self, most_s: float) -> bool:
        """One after the other. False if it is lost meanwhile."""
        if not self._is_here:
            return False
        loop = asyncio.get_running_loop()
        taking: asyncio.Future[bool] = loop.create_future()
        self._taking.add(taking)
        taking.add_done_callback(self._taking.discard)
        # Never at the same moment as the one before: the loop keeps no order among those.
        self._free_at = max(self._free_at + LEAST_S, loop.time() + self._random.uniform(0, most_s))

        def take() -> None:
            if not taking.done():
                taking.set_result(True)

        loop.call_at(self._free_at, take)
        return await taking

    def _begin(self, word: BeginAtHost) -> bool:
        plan = word.plan
        if word.tokens and plan.fragment not in self._taken:
            raise StateError(f"what this site contributes is not on all of its hosts: {WORDS}")
        if self._is_here:
            self._begun[plan.sync] = plan
        return self._begin_alone(word)

    async def _advance(self, job: out.AdvanceErrors) -> list[str]:
        return [""] if self._is_here else [f"{WORDS} is not here"]

    # --- what must hold

    def check(self, output: out.Output) -> None:
        """What a site contributes is what its other host was given last, or had before it was lost: then the exchange
        is refused, or was begun before that."""
        if isinstance(output, out.BeginExchange) and output.tokens:
            fragment = output.plan.fragment
            taken, written = self._taken.get(fragment), of_node(self._node).snapshot_written(fragment)
            has_it = taken == written or (taken is None and written in self._lost)
            assert has_it, f"of fragment {fragment} {WORDS} has {taken}, and not {written}"
