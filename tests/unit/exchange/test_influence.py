"""An exchange that averages by influence: what it multiplies, and whom it waits for before the coordinator speaks."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from atoll.node.dataplane.kept_contributions import check_parts
from atoll.node.exchange.sync.multiplication import AT_ONCE, Multiplication, Products
from atoll.node.tasks import Tasks
from atoll.protocol.errors import ConfigError, PeerError
from atoll.protocol.spec import spec_of
from atoll.protocol.sync_settings import SyncSettings
from tests.harness.peer_streams import MEMBERS, Disk, begin, plan, serving
from tests.harness.sites import until
from tests.simulation.loop import SimLoop

BY_INFLUENCE = spec_of(SyncSettings(robust="gram"), 0, 0)
NUM_CHUNKS = 3 * AT_ONCE


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Disk]:
    made = Disk(tmp_path_factory.mktemp("disk"))
    made.data = replace_travels(made)
    yield made
    made.log.close()


def replace_travels(disk: Disk) -> Any:
    data = disk.data
    return type(data)(data.layout, BY_INFLUENCE, data.outer, data.snapshot, data.dtypes)


# --- products


def product(chunk: int) -> Products:
    """Their sum depends on the order."""
    return (10.0 ** (chunk % 17), 1 / (chunk + 1), 1e16 * (-1) ** chunk)


def multiplied(order: list[int], at_once: list[int]) -> tuple[list[Products], int]:
    """What is said if chunks are complete in that order, and how many were multiplied at once at most."""
    said: list[Products] = []
    running = most = 0

    async def main() -> None:
        failed: list[BaseException] = []
        released = random.Random(order[0])

        async def later(work: Callable[[], Products]) -> Products:
            nonlocal running, most
            running += 1
            most = max(most, running)
            for _ in range(released.randrange(5)):
                await asyncio.sleep(0)
            running -= 1
            return work()

        attempt: Any = SimpleNamespace(num_contributors=2, tasks=Tasks(failed.append), in_pool=later)
        chunks = range(NUM_CHUNKS)
        of = Multiplication(attempt=attempt, chunks=chunks, multiply=product, made=said.append)
        of.complete(order[: at_once[0]])
        of.start()
        for first, end in zip(at_once, [*at_once[1:], NUM_CHUNKS], strict=True):
            await asyncio.sleep(0)
            of.complete(order[first:end])
        await until(lambda: bool(said or failed))

    asyncio.run(main())
    return said, most


def test_the_same_contributions_give_the_same_products_in_whatever_order_they_come() -> None:
    expected = [0.0, 0.0, 0.0]
    for chunk in range(NUM_CHUNKS):
        expected = [total + of for total, of in zip(expected, product(chunk), strict=True)]
    for seed in range(20):
        generator = random.Random(seed)
        order = generator.sample(range(NUM_CHUNKS), NUM_CHUNKS)
        said, most = multiplied(order, sorted(generator.sample(range(NUM_CHUNKS), 4)))
        assert said == [tuple(expected)], "once"
        assert most <= AT_ONCE


def test_a_reducer_of_no_trainable_chunk_says_that_its_products_are_zero(disk: Disk) -> None:
    said: list[Products] = []
    attempt: Any = SimpleNamespace(num_contributors=2)
    Multiplication(attempt=attempt, chunks=[], multiply=product, made=said.append).start()
    assert said == [(0.0, 0.0, 0.0)]


def test_a_site_in_several_parts_is_refused_by_name_a_run_that_it_cannot_be_in() -> None:
    audited = SyncSettings(audits=1, log_commits=16)
    with_errors = replace(audited, codec="sign1", error_feedback_down=0.5)
    for sync, named, taken in (
        (SyncSettings(robust="gram"), "", ((2, 1), (1, 2), (2, 2))),
        (audited, "audits = 1: one process of a host", ((1, 2), (2, 1))),
        (with_errors, "audits = 1 with sync.error_feedback_down: one process", ()),
    ):
        for parts in {(1, 1), (2, 1), (1, 2), (2, 2)}:
            if parts == (1, 1) or parts in taken:
                check_parts(sync, *parts)
            else:
                both = "audits = 1: one process of a host" if parts == (2, 2) else named
                with pytest.raises(ConfigError, match=f"{both}.*this site has {parts[0]} hosts and {parts[1]} "):
                    check_parts(sync, *parts)
            check_parts(SyncSettings(), *parts)


# --- whom it waits for


def simulated(main: Any) -> None:
    with asyncio.Runner(loop_factory=lambda: SimLoop(0)) as runner:
        runner.run(main)


@pytest.mark.parametrize("is_sent", [True, False])
def test_a_reducer_that_has_everything_is_blamed_for_nothing_before_influences_are_told(
    disk: Disk, is_sent: bool
) -> None:
    async def main() -> None:
        async with serving(disk) as hub:
            reduces = replace(plan().trees[0], parents=(1, -1))
            exchange = begin(hub, plan(trees=(reduces,)), disk.data)
            if is_sent:
                exchange.turns.sent(MEMBERS[1])
            watching = asyncio.ensure_future(exchange.watch())
            await asyncio.sleep(10 * plan().deadline_s)
            assert watching.done() == (not is_sent)
            if is_sent:
                assert exchange.waits_for() == ([], [])
                exchange.influence((1, 1))
            with pytest.raises(PeerError, match="site 2"):
                await watching

    simulated(main())


def test_whoever_hears_influences_after_the_deadline_has_it_anew(disk: Disk) -> None:
    async def main() -> None:
        async with serving(disk) as hub:
            reduces = replace(plan().trees[0], parents=(1, -1))
            exchange = begin(hub, plan(trees=(reduces,)), disk.data)
            exchange.turns.sent(MEMBERS[1])
            watching = asyncio.ensure_future(exchange.watch())
            await asyncio.sleep(3 * plan().deadline_s)
            exchange.influence((1, 1))
            await asyncio.sleep(plan().stall_limit_s / 2)
            assert not watching.done()
            with pytest.raises(PeerError, match="site 2"):
                await watching

    simulated(main())


def test_who_owes_contributions_is_blamed_before_that_too(disk: Disk) -> None:
    async def main() -> None:
        async with serving(disk) as hub:
            watching = asyncio.ensure_future(begin(hub, plan(), disk.data).watch())
            with pytest.raises(PeerError, match="site 2"):
                await watching

    simulated(main())
