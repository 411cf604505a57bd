"""Who leads, as one coordinator knows it; on simulated time."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Any

from atoll.coordinator.lease import LEASE_S, LOOK_EVERY_S, RENEW_EVERY_S, Held, Leading, Standby
from atoll.coordinator.stage import NoRoots, Stage
from atoll.protocol.errors import ConfigError, HostError, StaleError
from tests.simulation.loop import MOST_THREAD_S, THREAD_S, SimLoop

LATE_S = 1e-3
HANGS_S = 100.0


class ALease:
    """`renews` and `left_s` say what the database says."""

    def __init__(self, loop: SimLoop) -> None:
        self._loop = loop
        self.asked_at: list[float] = []
        self.left_s: Callable[[], float] = lambda: 0.0
        self.renews: Callable[[], tuple[Standby, ...] | None] = lambda: ()
        self.stage: Stage | None = None

    def stand_by(self, roots: frozenset[str]) -> Held:
        self.asked_at.append(self._loop.time())
        return Held("x", "there:1", self.left_s(), self.stage)

    def keep_stage(self, stage: Stage) -> bool:
        raise AssertionError("it does not lead")

    def renew(self) -> tuple[Standby, ...] | None:
        self.asked_at.append(self._loop.time())
        return self.renews()

    def end(self) -> None:
        pass


def played(story: Callable[[SimLoop, ALease], Coroutine[Any, Any, None]]) -> None:
    loop = SimLoop(0)
    asyncio.set_event_loop(loop)
    try:
        loop.run_until_complete(story(loop, ALease(loop)))
        loop.run_until_complete(asyncio.sleep(2 * HANGS_S))  # threads end
    finally:
        asyncio.set_event_loop(None)
        loop.close()


def fails() -> tuple[Standby, ...] | None:
    raise HostError("the store: the connection broke")


async def lost_at(loop: SimLoop, lease: ALease, before_s: float = 0.0) -> tuple[float, str]:
    """When this process would end, and why. `before_s`: from when the store took the lease until it is kept."""
    found: asyncio.Future[tuple[float, str]] = loop.create_future()
    async with AsyncExitStack() as stack:
        leading = Leading(lease, "the store", NoRoots(), lambda error: found.set_result((loop.time(), repr(error))))
        leading.takes()
        await asyncio.sleep(before_s)
        leading.start(stack)
        return await found


def test_a_leader_that_does_not_reach_the_database_ends_before_the_lease_does() -> None:
    """Counted from the moment in which the last renewal that came through was asked for."""

    async def story(loop: SimLoop, lease: ALease) -> None:
        began, renewed = loop.time(), []

        def renews() -> tuple[Standby, ...] | None:
            if loop.time() > began + 20:
                return fails()
            renewed.append(loop.time())
            return ()

        lease.renews = renews
        at, why = await lost_at(loop, lease)
        assert len(renewed) >= 20 / (RENEW_EVERY_S + 2 * MOST_THREAD_S), "it went on for as long as it could"
        assert renewed[-1] + LEASE_S - 2 * MOST_THREAD_S < at < renewed[-1] + LEASE_S + LATE_S
        assert StaleError.__name__ in why
        assert "did not renew the lease" in why
        assert "the connection broke" in why

    played(story)


def test_a_renewal_that_hangs_is_not_waited_for() -> None:
    async def story(loop: SimLoop, lease: ALease) -> None:
        began = loop.time()
        THREAD_S.set(HANGS_S)
        at, _ = await lost_at(loop, lease)
        assert began + LEASE_S <= at < began + LEASE_S + LATE_S

    played(story)


def test_the_first_lease_counts_from_before_it_was_taken_however_long_a_coordinator_takes_to_begin() -> None:
    async def story(loop: SimLoop, lease: ALease) -> None:
        began = loop.time()
        lease.renews = fails
        at, _ = await lost_at(loop, lease, before_s=LEASE_S - 1)
        assert began + LEASE_S - 2 * MOST_THREAD_S <= at < began + LEASE_S + LATE_S

    played(story)


def test_a_renewal_that_waits_while_the_store_takes_the_lease_anew_is_waited_for() -> None:
    """As after a restore: the database holds up the renewal until the next term has begun."""

    async def story(loop: SimLoop, lease: ALease) -> None:
        leading, context = Leading(lease, "the store", NoRoots()), contextvars.copy_context()
        leading.takes()
        context.run(THREAD_S.set, LEASE_S + 1)
        keeping = asyncio.create_task(leading.keep(), context=context)
        await asyncio.sleep(LEASE_S - 1)
        leading.takes()
        context.run(THREAD_S.set, THREAD_S.get())
        await asyncio.sleep(3 * LEASE_S)
        assert len(lease.asked_at) > LEASE_S
        assert not keeping.done()
        keeping.cancel()

    played(story)


def test_a_lease_that_is_another_ones_is_lost_at_once() -> None:
    async def story(loop: SimLoop, lease: ALease) -> None:
        began = loop.time()
        lease.renews = lambda: None
        at, why = await lost_at(loop, lease)
        assert at < began + 1
        assert "another coordinator may lead" in why

    played(story)


def test_whoever_stands_by_looks_until_the_lease_is_over_by_the_clock_of_the_database() -> None:
    async def story(loop: SimLoop, lease: ALease) -> None:
        until, leading = loop.time() + 12, Leading(lease, "the store", NoRoots())
        lease.left_s = lambda: until - loop.time()
        assert await leading.wait(asyncio.Event())
        assert until <= loop.time() <= until + LOOK_EVERY_S + 2 * MOST_THREAD_S
        assert max(b - a for a, b in zip(lease.asked_at, lease.asked_at[1:], strict=False)) < 1

    played(story)


def test_whoever_stands_by_waits_for_a_database_that_does_not_answer_and_ends_when_it_is_asked_to() -> None:
    async def story(loop: SimLoop, lease: ALease) -> None:
        asked, leading, began = asyncio.Event(), Leading(lease, "the store", NoRoots()), loop.time()

        def left_s() -> float:
            if loop.time() < began + 3:
                fails()
            return 100.0

        lease.left_s = left_s
        waiting = asyncio.create_task(leading.wait(asked))
        await asyncio.sleep(2)
        assert leading.state.startswith("it stands by, and does not know who leads: the store: the connection broke")
        await asyncio.sleep(2)
        assert leading.state == "it stands by: the coordinator at there:1 leads, for 100.0 s more"
        asked.set()
        assert not await waiting

    played(story)


def test_whoever_stands_by_follows_the_roots_of_the_leader_and_does_not_lead_without_them() -> None:
    async def story(loop: SimLoop, lease: ALease) -> None:
        class Held(NoRoots):
            has: bool = False

            def follow(self, stage: Stage) -> bool:
                if not self.has:
                    raise ConfigError("the run's root is another one")
                was, self.stage = self.stage, stage
                return was != stage

        roots, told = Held(), [0]
        roots.told.append(lambda: told.append(told[-1] + 1))
        leading, asked = Leading(lease, "the store", roots), asyncio.Event()
        lease.stage = Stage(("aa",), "aa")
        waiting = asyncio.create_task(leading.wait(asked))
        await asyncio.sleep(3)
        assert not waiting.done(), "though the lease is over"
        assert leading.state == "it stands by, and cannot lead: the run's root is another one"
        lease.left_s, roots.has = lambda: 100.0, True
        await asyncio.sleep(3)
        assert (roots.stage, told) == (lease.stage, [0, 1])
        lease.stage, lease.left_s = Stage(("aa", "bb"), "aa"), lambda: 0.0
        assert await waiting
        assert (roots.stage, told) == (lease.stage, [0, 1, 2])

    played(story)
