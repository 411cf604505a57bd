"""What is read of those who hear of roots and bans."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from atoll.coordinator.paces import Paces
from atoll.coordinator.watchers import Known, Watchers
from atoll.protocol.trust.names import Kind, Subject
from atoll.protocol.trust.security import Caller
from atoll.protocol.v1 import session_pb2
from tests.simulation.loop import SimLoop

FLOOD = 10_000


class Context:
    """Of a call by the site of that name."""

    def __init__(self, name: str) -> None:
        self.caller = Caller(Subject("run", Kind.SITE_IDENTITY, name), bytes(32))

    async def write(self, said: session_pb2.WatchResponse) -> None:
        pass


def test_a_site_that_floods_is_read_no_faster_however_many_streams_it_has() -> None:
    num_read = dict.fromkeys("ab", 0)

    async def flood(name: str) -> AsyncIterator[session_pb2.WatchRequest]:
        for _ in range(FLOOD):
            num_read[name] += 1
            yield session_pb2.WatchRequest(roots_digest=bytes(32))
        await asyncio.Event().wait()

    async def main() -> None:
        security: Any = Context
        security = type("Shown", (), {"caller": lambda _, context: context.caller})()
        paces = Paces()
        watchers = Watchers(security, lambda: Known([b"root"], (), ()), lambda caller: "", paces)
        calls = [asyncio.create_task(watchers.watch(flood(name), Context(name))) for name in "aab"]
        await asyncio.sleep(60.0)
        assert paces.delayed["WatchRequest"] > 0
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

    with asyncio.Runner(loop_factory=lambda: SimLoop(0)) as runner:
        runner.run(main())
    at_most = 200 + 60 * 20
    assert at_most <= num_read["b"] <= at_most + 2
    assert at_most <= num_read["a"] <= at_most + 4, "two streams have what one has"
