"""What a session says of the messages on it: the core judges by the count what a site has heard."""

from __future__ import annotations

import asyncio

import pytest

from atoll.coordinator import limits
from atoll.coordinator.paces import Paces
from atoll.coordinator.streams import Bodies, Stream
from atoll.protocol import messages as m
from atoll.protocol import sources_parts, wire
from atoll.protocol.v1 import session_pb2
from tests.unit.protocol.test_sources_parts import commits, members

HEADER = m.Header(protocol_version=1, run_id="run")


class Context:
    def __init__(self) -> None:
        self.written: list[session_pb2.SessionResponse] = []

    async def write(self, data: bytes) -> None:
        self.written.append(wire.parse(session_pb2.SessionResponse, data))


def test_parts_of_a_message_count_as_one_and_deposits_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """A site acknowledges the number that it heard last. With a part for each it would have heard, by its word, what
    the core sent later: a commit that it applied before it heard of a rollback counted as one of the new branch."""
    monkeypatch.setattr(sources_parts, "MAX_PART_BYTES", 1)
    sources = m.Sources(commits=commits(3, members(2), ()))

    async def main() -> list[tuple[str | None, int]]:
        stream, bodies, context = Stream(1, Paces()), Bodies(), Context()
        stream.say(m.Pulse(), bodies)
        await stream.say_sources(sources)
        stream.deposit(m.Deposits(), bodies)
        stream.say(m.RolledBack(branch=1, commit=0, reason="?"), bodies)
        stream.put(None)
        await stream.write(context, HEADER, lambda: ())
        return [(response.WhichOneof("body"), response.seq) for response in context.written]

    assert asyncio.run(main()) == [
        ("pulse", 1), ("sources", 1), ("sources", 1), ("sources", 2), ("deposits", 2), ("rolled_back", 3)
    ]  # fmt: skip


@pytest.mark.parametrize("reads", [True, False])
def test_a_site_that_asks_for_what_is_large_and_reads_nothing_is_cut_off(
    monkeypatch: pytest.MonkeyPatch, *, reads: bool
) -> None:
    """It may ask again and again, and say that it has heard the answers; a site that reads may ask as often."""
    sources = m.Sources(commits=commits(20, members(2), ()))
    monkeypatch.setattr(limits, "MAX_QUEUED_BYTES", 3 * len(wire.response_body(sources).data))

    async def main() -> tuple[int, str]:
        stream, context = Stream(1, Paces()), Context()
        reading = asyncio.create_task(stream.write(context, HEADER, lambda: ())) if reads else None
        for _ in range(8):
            await stream.say_sources(sources)
            if reads:
                await stream.outgoing.join()
        if reading is not None:
            reading.cancel()
        return stream.outgoing.qsize(), stream.cut_off.result() if stream.cut_off.done() else ""

    num_queued, why = asyncio.run(main())
    assert num_queued == (0 if reads else 3)
    assert why.endswith("" if reads else "MiB of messages wait for a site that does not read")
    assert bool(why) is not reads
