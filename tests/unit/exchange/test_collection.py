"""Payloads that come while an exchange begins: it looks into its log in a thread, and does not miss them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import pytest

from atoll.node.exchange.sync.exchange import Exchange
from atoll.protocol.plans import payload_hash, with_weights
from tests.harness.peer_streams import Disk, begin, plan, serving

PLAN = plan(attempt=2)


@pytest.fixture(name="disk")
def _disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Disk]:
    made = Disk(tmp_path_factory.mktemp("disk"))
    yield made
    made.log.close()


def put(exchange: Exchange, disk: Disk, *chunks: int) -> None:
    for chunk in chunks:
        exchange.collection.file.put(chunk, disk.payloads[chunk], payload_hash(disk.payloads[chunk]))


def test_what_another_process_stores_while_an_exchange_begins_is_there_once_it_has_begun(disk: Disk) -> None:
    async def main() -> None:
        async with serving(disk) as hub:
            exchange = begin(hub, PLAN, disk.data)
            collection = exchange.collection
            hub.have_payloads(PLAN, [3])
            collection.begin()
            put(exchange, disk, 1, 3)
            hub.have_payloads(PLAN, [1])
            for void in (replace(PLAN, attempt=1), replace(PLAN, term=2), replace(PLAN, sync=2)):
                hub.have_payloads(void, [2])
            assert not collection.has(1)
            collection.open()
            assert [collection.has(chunk) for chunk in (0, 1, 2, 3)] == [False, True, False, True]
            assert await collection.arrived(0) == [1, 3]
            put(exchange, disk, 2)
            hub.have_payloads(PLAN, [2, 1])
            assert await collection.arrived(2) == [2]

    asyncio.run(main())


def test_an_exchange_whose_last_payloads_come_while_it_begins_is_complete(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with serving(disk) as hub:
            exchange = begin(hub, PLAN, disk.data)
            collection, looks = exchange.collection, exchange.collection.begin

            def is_overtaken() -> None:
                looks()
                put(exchange, disk, *disk.payloads)
                exchange.attempt.loop.call_soon_threadsafe(hub.have_payloads, PLAN, list(disk.payloads))

            monkeypatch.setattr(collection, "begin", is_overtaken)
            result = await exchange.run()
            assert result.payload_digest == collection.file.digest(with_weights(PLAN, (5, 5)))
            assert collection.file.sealed

    asyncio.run(main())
