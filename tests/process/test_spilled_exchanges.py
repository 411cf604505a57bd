"""Exchanges between hubs over real gRPC whose reducers keep nothing in memory, and what may go wrong on the disk."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from atoll.node.exchange.sync.exchange import Exchange, ExchangeResult
from atoll.node.exchange.sync.spill import Spill, Spilled
from atoll.protocol.errors import HostError, RefusedError, StaleError
from atoll.protocol.messages import Plan, Tree
from tests.harness.sites import Run, Site, expected_payloads, next_attempt, run_all, small_layout, star_plan, until
from tests.harness.small_disk import small_disk

Task = asyncio.Task[ExchangeResult]


class SlowDisk:
    """The first that reads a spilled contribution to chunk 3 waits until it is allowed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_read = threading.Event()
        self.may_go_on = threading.Event()
        self.path = Path()
        self.error: Exception | None = None
        read = Spilled.read

        def slow(spilled: Spilled) -> bytes:
            if self.is_read.is_set() or spilled.chunk != 3:
                return read(spilled)
            self.path = spilled.path
            self.is_read.set()
            assert self.may_go_on.wait(60)
            try:
                return read(spilled)
            except Exception as error:
                self.error = error
                raise

        monkeypatch.setattr(Spilled, "read", slow)

    async def reading(self) -> None:
        assert await asyncio.to_thread(self.is_read.wait, 30)


async def trained(run: Run, folder: Path, count: int, memory_limit_bytes: int = 0) -> list[Site]:
    sites = await run.add(count)
    for site in sites:
        site.train(1)
        site.hub.spill = Spill(folder / f"spill-{site.site_id}", memory_limit_bytes)
    return sites


def is_on_disk(site: Site, num_bytes: int) -> bool:
    assert site.hub.spill is not None
    return site.hub.spill.disk_bytes == site.hub.retained_bytes == num_bytes


async def on_disk_before_the_last_comes(plan: Plan, sites: list[Site]) -> tuple[list[Exchange], list[Task]]:
    """All but the last begin, and have each other's contributions on the disk; then the last begins."""
    exchanges = [site.begin(plan) for site in sites[:-1]]
    tasks: list[Task] = [asyncio.create_task(exchange.run()) for exchange in exchanges]
    for me, exchange in zip(sites[:-1], exchanges, strict=True):
        others = [site for site in sites[:-1] if site is not me]
        size = sum(len(site.data.contribution(chunk)) for site in others for chunk in exchange.reducer.own.chunks)
        await until(lambda me=me, size=size: is_on_disk(me, size))  # type: ignore[misc]
    exchanges.append(sites[-1].begin(plan))
    return exchanges, [*tasks, asyncio.create_task(exchanges[-1].run())]


def test_what_comes_before_the_plan_has_weights_is_on_the_disk_too(tmp_path: Path) -> None:
    async def main() -> None:
        async with Run(tmp_path, small_layout()) as run:
            sites = await trained(run, tmp_path, 3)
            plan = star_plan(run.layout, sites)

            def begin(site: Site) -> Exchange:
                own = (c if c.site_id == site.site_id else replace(c, tokens=0) for c in plan.contributors)
                return site.begin(replace(plan, contributors=tuple(own)))

            first, second = begin(sites[0]), begin(sites[1])
            tasks = [asyncio.create_task(exchange.run()) for exchange in (first, second)]
            # The third still trains. What the first has of the second counts, though its weights are not complete.
            sizes = sum(len(sites[1].data.contribution(chunk)) for chunk in first.reducer.own.chunks)
            await until(lambda: is_on_disk(sites[0], sizes))
            spill = sites[0].hub.spill
            assert spill is not None
            assert spill.memory_bytes == 0
            assert len(list(spill.folder.iterdir())) == len(first.reducer.own.chunks)
            tasks.append(asyncio.create_task(begin(sites[2]).run()))
            results = await asyncio.gather(*tasks)
            assert len({result.payload_digest for result in results}) == 1
            for site in sites:
                assert site.payloads(plan) == expected_payloads(plan, sites)

    asyncio.run(main())


def test_a_sync_that_ends_while_its_contributions_are_read_is_no_error_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = SlowDisk(monkeypatch)

    async def main() -> None:
        async with Run(tmp_path, small_layout()) as run:
            sites = await trained(run, tmp_path, 3)
            _, tasks = await on_disk_before_the_last_comes(star_plan(run.layout, sites), sites)
            await slow.reading()
            for site in sites:
                site.hub.drop_sync(1)
            for site_id in (1, 2, 3):
                folder = tmp_path / f"spill-{site_id}"
                await until(lambda folder=folder: not list(folder.iterdir()))  # type: ignore[misc]
            slow.may_go_on.set()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert [type(result) for result in results] == [asyncio.CancelledError] * 3
            await until(lambda: slow.error is not None)
            assert isinstance(slow.error, StaleError)
            assert all(not file.sealed for site in sites for file in site.log._files.values())

    asyncio.run(main())


def test_an_attempt_without_a_site_is_right_though_the_one_before_still_reads_its_contribution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = SlowDisk(monkeypatch)

    async def main() -> None:
        async with Run(tmp_path, small_layout()) as run:
            sites = await trained(run, tmp_path, 3)
            plan = star_plan(run.layout, sites)
            exchanges, tasks = await on_disk_before_the_last_comes(plan, sites)
            await slow.reading()
            await until(lambda: all(exchange.retained.chunks_of(3, 1) for exchange in exchanges[:2]))
            # There is room for what the next attempt needs, and not for the rest beside it: the third site's, and those
            # to chunk 3, which the first does not reduce any more.
            again = next_attempt(plan, run.layout, sites[:2])
            for site in sites[:2]:
                tops = [chunk for chunk in site.data.chunks if chunk % 2 == site.site_id - 1]
                site.hub.max_retained_bytes = 2 * sum(site.data.max_bytes(chunk) for chunk in tops)
            begun = [site.begin(again) for site in sites[:2]]
            asked = asyncio.create_task(
                begun[0].reducer.held_of(replace(sites[1].member(5), incarnation=9))
            )  # it holds none
            await asyncio.sleep(0)
            for exchange in begun:
                assert not asked.done(), "what a stream brings has no room before"
                await exchange.reducer.make_room()
                assert not exchange.retained.chunks_of(3, 1)
            sites[2].hub.drop_sync(1)
            await until(lambda: not slow.path.exists())
            slow.may_go_on.set()
            results = await asyncio.gather(*(exchange.run() for exchange in begun))
            assert results[0].payload_digest == results[1].payload_digest
            for site in sites[:2]:
                assert site.payloads(again) == expected_payloads(again, sites[:2])
            old = await asyncio.gather(*tasks, return_exceptions=True)
            assert {type(result) for result in old} == {asyncio.CancelledError}
            await until(lambda: slow.error is not None)
            assert isinstance(slow.error, StaleError)

    asyncio.run(main())


def test_a_chunk_is_never_averaged_without_a_contribution_that_was_dropped(tmp_path: Path) -> None:
    async def main() -> None:
        async with Run(tmp_path, small_layout()) as run:
            sites = await trained(run, tmp_path, 2)
            exchange = sites[0].begin(star_plan(run.layout, sites))
            chunk = exchange.reducer.own.chunks[0]
            with pytest.raises(StaleError, match=f"contribution of site 2 to chunk {chunk} was dropped"):
                await exchange.reducer._reduce(chunk)
            assert not exchange.reducer.payloads

    asyncio.run(main())


def test_what_a_site_holds_of_a_sync_whose_end_it_missed_goes_with_the_next_plan(tmp_path: Path) -> None:
    async def main() -> None:
        async with Run(tmp_path, small_layout()) as run:
            sites = await trained(run, tmp_path, 2)
            await run_all(star_plan(run.layout, sites), sites)
            hub, spill = sites[0].hub, sites[0].hub.spill
            assert spill is not None
            assert hub.retained_bytes > 0
            sites[0].begin(star_plan(run.layout, sites, sync=2))  # evicted meanwhile, it heard of no commit
            assert hub.retained_bytes == 0
            await until(lambda: not list(spill.folder.iterdir()))
            with pytest.raises(StaleError, match="sync 1 is over here"):
                sites[0].begin(star_plan(run.layout, sites))

    asyncio.run(main())


@pytest.mark.root
def test_a_disk_that_is_full_ends_the_exchange_and_nothing_is_committed(tmp_path: Path) -> None:
    async def main() -> None:
        async with Run(tmp_path, small_layout()) as run:
            sites = await trained(run, tmp_path, 3)
            with small_disk(tmp_path / "disk", 1 << 20) as fill:
                sites[0].hub.spill = Spill(tmp_path / "disk" / "spill", 0)
                plan = star_plan(run.layout, sites)
                exchanges = [site.begin(plan) for site in sites]  # there was room when the plan came
                fill()
                tasks = [asyncio.create_task(exchange.run()) for exchange in exchanges]
                with pytest.raises(HostError, match=r"disk/spill/\d+: no space is left, .* make room, or choose"):
                    await tasks[0]
                for task in tasks[1:]:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                assert all(not file.sealed for site in sites for file in site.log._files.values())
                await sites[0].hub.close()
            again = next_attempt(plan, run.layout, sites[1:])
            await run_all(again, sites[1:])
            assert sites[1].payloads(again) == sites[2].payloads(again) == expected_payloads(again, sites[1:])

    asyncio.run(main())


def test_a_plan_that_the_disk_has_no_room_for_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with Run(tmp_path, small_layout()) as run:
            sites = await trained(run, tmp_path, 2, memory_limit_bytes=1000)
            plan = star_plan(run.layout, sites)
            exchange = sites[0].begin(plan)
            data = exchange.attempt.data
            on_disk = sum(data.max_bytes(chunk) for chunk in exchange.reducer.own.chunks) - 1000
            log = sum(data.max_bytes(chunk) for chunk in data.chunks)
            monkeypatch.setattr(Spill, "free_bytes", lambda spill: on_disk + log)
            sites[0].begin(replace(plan, attempt=2))
            monkeypatch.setattr(Spill, "free_bytes", lambda spill: on_disk + log - 1)
            with pytest.raises(
                RefusedError,
                match=rf"hold up to {on_disk} bytes of contributions in \S+spill-1, beside 1000 in memory, and {log} "
                rf"of payloads, and {on_disk + log - 1} are free there; make room",
            ):
                sites[0].begin(replace(plan, attempt=3))
            # Who reduces nothing holds nothing.
            last = run.layout.num_sync_chunks
            sites[0].begin(replace(plan, attempt=3, trees=(Tree(first_chunk=0, num_chunks=last, top=1),)))

    asyncio.run(main())
