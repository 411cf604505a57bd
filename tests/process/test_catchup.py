"""Catching up from donors over real gRPC, with the real outer state and log."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atoll.node.exchange.catchup import donor_server
from atoll.node.exchange.catchup import donors as donor_pool
from atoll.node.exchange.catchup import fetch as catchup
from atoll.node.exchange.catchup.donor_client import DonorClient, dialled
from atoll.node.exchange.catchup.fetch import Fetched
from atoll.node.exchange.peers.progress import Pace
from atoll.protocol.errors import DigestMismatch, InvalidMessage, NotYetError, PeerError, RefusedError, StateError
from atoll.protocol.layout import Layout, Manifest, Role, TensorSpec
from atoll.protocol.log_length import LogLength
from atoll.protocol.messages import Sources
from atoll.protocol.sync_settings import SyncSettings
from tests.harness.relay import Relay
from tests.harness.sites import (
    OPTIMIZER,
    PACE,
    SETTINGS,
    Run,
    Site,
    big_layout,
    commit_of,
    run_all,
    small_layout,
    star_plan,
)

of_one_or_three = pytest.mark.parametrize("num_fragments", [1, 3])


def records(site: Site) -> list[tuple[bytes, bytes]]:
    return [(r.hash, r.data) for c in site.layout.chunks for r in [site.outer.read(c.index)]]


async def fetch(
    run: Run,
    site: Site,
    donors: Sequence[Site],
    *,
    sources: Sources | None = None,
    refresh: Callable[[], Awaitable[Sources]] | None = None,
    stall_limit_s: float = 10.0,
    slowest_bytes_per_s: float = 1 << 10,
) -> Fetched:
    async def again() -> Sources:
        return run.sources(donors)

    return await site.hub.fetch_state(
        sources=sources or run.sources(donors),
        refresh=lambda _: (refresh or again)(),
        undialable=tuple,
        outer=site.outer,
        log=site.log,
        optimizer=OPTIMIZER,
        pace=Pace(stall_s=stall_limit_s, slowest_bytes_per_s=slowest_bytes_per_s),
    )


@of_one_or_three
def test_a_joiner_gets_the_newest_state_from_several_donors(
    num_fragments: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(donor_pool, "MAX_BATCH_CHUNKS", 3)

    async def main() -> None:
        async with Run(tmp_path, small_layout(num_fragments)) as run:
            donors = await run.add(2)
            await run.sync()
            last = await run.sync()
            (joiner,) = await run.add(seeded=False)
            got = await fetch(run, joiner, donors)
            assert got == Fetched(commit=2, state_hash=donors[0].outer.state_hash(), record=last)
            # Slots and outer values, all of them: the next sync of the joiner starts from what the others have.
            assert records(joiner) == records(donors[0])
            assert all(site.hub.counters.sent_bytes > 2 * 1000 for site in donors)
            await run.sync()
            assert len({site.outer.state_hash() for site in run.sites}) == 1

    asyncio.run(main())


def test_before_the_first_sync_the_seeders_state_is_fetched(tmp_path: Path) -> None:
    async def main() -> None:
        async with Run(tmp_path, small_layout()) as run:
            (seeder,) = await run.add()
            (joiner,) = await run.add(seeded=False)
            got = await fetch(run, joiner, [seeder])
            assert got == Fetched(commit=0, state_hash=seeder.outer.state_hash(), record=None)

    asyncio.run(main())


def test_a_site_that_lacks_commits_fetches_payloads_only(tmp_path: Path) -> None:
    async def main() -> None:
        async with Run(tmp_path, big_layout()) as run:
            first, second, away = await run.add(3)
            await run.sync()
            away_before = away.outer.commit
            for _ in range(2):
                await run.sync([first, second])
            received = away.hub.counters.received_bytes
            got = await fetch(run, away, [first, second], sources=run.sources([first, second], after=1))
            assert (away_before, got.commit, got.state_hash) == (1, 3, first.outer.state_hash())
            payload_bytes = 2 * sum(len(first.log.read(3, c)) for c in first.data.chunks)
            assert payload_bytes < away.hub.counters.received_bytes - received < 1.1 * payload_bytes
            assert [c.commit for c in away.log.commits()] == [1, 2, 3]  # it is a donor of payloads too

    asyncio.run(main())


def test_what_a_site_that_is_behind_has_received_is_not_fetched(tmp_path: Path) -> None:
    """It is in the exchange of commit 3 while it is at commit 1: what it fetches then is commit 2 alone."""

    async def main() -> None:
        async with Run(tmp_path, big_layout()) as run:
            first, second, behind = await run.add(3)
            await run.sync()
            await run.sync([first, second])
            plan = star_plan(run.layout, [first, second], [behind], sync=3)
            for site in (first, second):
                site.train(3)
            results = await run_all(plan, run.sites)
            record = commit_of(plan, results[0].payload_digest)
            for site in (first, second):
                site.apply(record)
            run.commits.append(record)
            run.attested[3] = first.outer.state_hash()
            received = behind.hub.counters.received_bytes
            got = await fetch(run, behind, [first, second], sources=run.sources([first, second], after=1))
            assert (got.commit, got.state_hash) == (3, first.outer.state_hash())
            payload_bytes = sum(len(first.log.read(2, c)) for c in first.data.chunks)
            assert payload_bytes < behind.hub.counters.received_bytes - received < 1.1 * payload_bytes
            assert records(behind) == records(first)

    asyncio.run(main())


def test_payloads_of_the_smallest_tensors_are_fetched(tmp_path: Path) -> None:
    """Of one element int8 is longer than fp32: it has a scale."""
    scalar = TensorSpec(name="w", shape=(), dtype="F32", role=Role.TRAINABLE)

    async def main() -> None:
        async with Run(tmp_path, Layout(Manifest.canonical([scalar]), SETTINGS.chunk_elements)) as run:
            first, away = await run.add(2)
            await run.sync()
            await run.sync([first])
            got = await fetch(run, away, [first], sources=run.sources([first], after=1))
            assert (got.commit, got.state_hash) == (2, first.outer.state_hash())
            assert away.log.has(2)

    asyncio.run(main())


@of_one_or_three
def test_a_log_that_is_too_short_means_fetching_chunks(num_fragments: int, tmp_path: Path) -> None:
    async def main() -> None:
        async with Run(tmp_path, small_layout(num_fragments)) as run:
            first, away = await run.add(2)
            first.log.length = LogLength(None, SyncSettings(log_commits=2))
            for _ in range(5):
                await run.sync([first])
            got = await fetch(run, away, [first])
            assert got.commit == 5
            assert records(away) == records(first)

    asyncio.run(main())


def test_where_some_lack_payloads_and_another_is_always_busy_chunks_are_fetched(tmp_path: Path) -> None:
    async def main() -> None:
        async with Run(tmp_path, small_layout()) as run:
            first, busy, away = await run.add(3)
            first.log.length = LogLength(None, SyncSettings(log_commits=2))
            for _ in range(5):
                await run.sync([first, busy])

            def payloads(request: Any) -> Any:
                raise NotYetError("6 requests are served here already")

            busy.hub.served_donor().payloads = payloads  # type: ignore[method-assign]
            got = await fetch(run, away, [first, busy], stall_limit_s=2)
            assert got.commit == 5
            assert records(away) == records(first)

    asyncio.run(main())


@of_one_or_three
def test_donors_at_different_commits_are_used_together(
    num_fragments: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(donor_pool, "MAX_BATCH_CHUNKS", 1)

    async def main() -> None:
        async with Run(tmp_path, small_layout(num_fragments)) as run:
            first, second = await run.add(2)
            await run.sync()
            await run.sync([first])
            (joiner,) = await run.add(seeded=False)
            got = await fetch(run, joiner, [first, second])
            assert got.commit == 2
            assert second.hub.counters.sent_bytes > 3000  # it gave chunks of commit 1
            assert records(joiner) == records(first)

    asyncio.run(main())


@of_one_or_three
def test_a_donor_that_advances_meanwhile_is_followed(
    num_fragments: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(donor_pool, "MAX_BATCH_CHUNKS", 1)
    monkeypatch.setattr(donor_pool, "REQUESTS_PER_DONOR", 1)

    async def main() -> None:
        async with Run(tmp_path, small_layout(num_fragments)) as run:
            (first,) = await run.add()
            await run.sync()
            (joiner,) = await run.add(seeded=False)
            stale = run.sources([first])
            put = joiner.outer.put
            loop = asyncio.get_running_loop()
            asked = 0

            def put_and_advance(chunk: int, version: int, data: bytes, hash: bytes) -> bytes:
                value = put(chunk, version, data, hash)
                if len(run.commits) < 3:  # the donor goes on, two commits while chunks travel
                    asyncio.run_coroutine_threadsafe(run.sync([first]), loop).result()
                return value

            joiner.outer.put = put_and_advance  # type: ignore[method-assign,assignment]

            async def refresh() -> Sources:
                nonlocal asked
                asked += 1
                if asked == 1:  # the newest commit is not attested yet
                    return run.sources([first], attested=[0, 1])
                return run.sources([first])

            got = await fetch(run, joiner, [first], sources=stale, refresh=refresh)
            assert asked >= 2
            assert got.commit == 3
            assert records(joiner) == records(first)

    asyncio.run(main())


def test_a_donor_that_dies_is_replaced_and_what_is_there_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(donor_pool, "BATCH_BYTES", 1)

    async def main() -> None:
        async with Run(tmp_path, big_layout()) as run:
            first, second = await run.add(2)
            await run.sync()
            relay = await Relay(second.address).start()
            second.address = relay.address

            def die(total: int) -> None:
                if total > 10 << 20:  # its first chunk is over, its second on the way
                    relay.refusing = True
                    relay.cut()

            relay.on_bytes = die
            (joiner,) = await run.add(seeded=False)
            got = await fetch(run, joiner, [first, second])
            assert relay.refusing
            assert got.state_hash == first.outer.state_hash()
            received = joiner.hub.counters.received_bytes
            assert received < 1.6 * sum(len(data) for _, data in records(first))
            await relay.stop()

    asyncio.run(main())


@of_one_or_three
def test_an_interrupted_fetch_goes_on(num_fragments: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(donor_pool, "MAX_BATCH_CHUNKS", 1)
    monkeypatch.setattr(donor_pool, "REQUESTS_PER_DONOR", 1)

    async def main() -> None:
        async with Run(tmp_path, small_layout(num_fragments)) as run:
            (first,) = await run.add()
            await run.sync()
            (joiner,) = await run.add(seeded=False)
            task = asyncio.create_task(fetch(run, joiner, [first]))
            put = joiner.outer.put
            loop = asyncio.get_running_loop()
            count = 0

            def put_some(chunk: int, version: int, data: bytes, hash: bytes) -> bytes:
                nonlocal count
                count += 1
                if count == 6:
                    loop.call_soon_threadsafe(task.cancel)
                return put(chunk, version, data, hash)

            joiner.outer.put = put_some  # type: ignore[method-assign,assignment]
            with pytest.raises(asyncio.CancelledError):
                await task
            missing = len(joiner.outer.missing)
            assert 0 < missing < len(joiner.layout.chunks)

            await joiner.stop()
            joiner = run.sites[1] = await Site.start(2, tmp_path, run.layout, incarnation=2)
            # Nothing is lost; a chunk that was on its way to the disk may have arrived after the count.
            assert 0 < len(joiner.outer.missing) <= missing
            await fetch(run, joiner, [first])
            assert records(joiner) == records(first)
            all_bytes = sum(len(data) for _, data in records(first))
            assert joiner.hub.counters.received_bytes < 0.9 * all_bytes

    asyncio.run(main())


@pytest.mark.parametrize("how", ["cancelled", "failed"])
def test_nothing_is_written_after_a_fetch_has_ended_in_the_middle_of_a_commit(tmp_path: Path, how: str) -> None:
    """Whoever waits for the end may roll the disk back next."""

    async def main() -> None:
        async with Run(tmp_path, small_layout()) as run:
            first, away = await run.add(2)
            await run.sync([first])
            loop, begun, go_on = asyncio.get_running_loop(), asyncio.Event(), threading.Event()
            apply = away.outer.apply

            def apply_later(chunk: int, *args: Any) -> None:
                if how == "failed" and chunk == 0:
                    raise StateError("the payload of chunk 0 is damaged")
                loop.call_soon_threadsafe(begun.set)
                assert go_on.wait(60)
                apply(chunk, *args)

            away.outer.apply = apply_later  # type: ignore[method-assign,assignment]
            task = asyncio.create_task(fetch(run, away, [first]))
            await begun.wait()
            if how == "cancelled":
                task.cancel()
            done, _ = await asyncio.wait([task], timeout=0.2)
            assert not done, "a thread writes a chunk"
            go_on.set()
            with pytest.raises((StateError, asyncio.CancelledError)):
                await task
            assert away.outer.versions.count(1) < len(away.data.chunks), "it ended before all were begun"
            away.outer.apply = apply  # type: ignore[method-assign]
            await fetch(run, away, [first])
            assert records(away) == records(first)

    asyncio.run(main())


def test_wrong_bytes_of_a_donor_are_refused_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(donor_pool, "MAX_BATCH_CHUNKS", 1)

    async def main() -> None:
        async with Run(tmp_path, small_layout()) as run:
            good, bad = await run.add(2)
            await run.sync()
            bad.outer.put(3, 1, np.ones(len(bad.outer.read(3).data) // 4, np.float32).tobytes())
            bad.outer.put(4, 1, np.ones(len(bad.outer.read(4).data) // 4, np.float32).tobytes())
            (joiner,) = await run.add(seeded=False)
            await fetch(run, joiner, [good, bad])
            assert records(joiner) == records(good)
            assert joiner.hub.counters.refused[DigestMismatch] > 0

            # Only the liar is left: an error that names it, and nothing wrong is kept.
            (other,) = await run.add(seeded=False)
            with pytest.raises(PeerError, match="attested"):
                await fetch(run, other, [bad], stall_limit_s=1)
            assert other.outer.commit is None

    asyncio.run(main())


def test_wrong_payloads_of_a_donor_are_refused(tmp_path: Path) -> None:
    async def main() -> None:
        async with Run(tmp_path, small_layout()) as run:
            good, bad, away = await run.add(3)  # site 3 asks site 2 first
            await run.sync([good, bad])
            read = bad.log.read
            bad.log.read = lambda commit, chunk: read(commit, 1 if chunk == 0 else chunk)  # type: ignore[method-assign]
            got = await fetch(run, away, [good, bad])
            assert got.state_hash == good.outer.state_hash()
            assert away.hub.counters.refused[DigestMismatch] > 0

    asyncio.run(main())


@pytest.mark.parametrize("gives", ["nothing", "a wrong one"])
def test_a_donor_of_wrong_payloads_that_falls_silent_when_it_is_asked_alone_holds_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gives: str
) -> None:
    """Nor does it at the next commit: the donor that was right is asked first."""

    async def main() -> None:
        async with Run(tmp_path, small_layout()) as run:
            good, bad, away = await run.add(3)  # site 3 asks site 2 first
            for _ in range(3):
                await run.sync([good, bad])
            read, given, asked = bad.log.read, list[int](), set[int]()
            monkeypatch.setattr(donor_server, "FRAME_BYTES", 1)  # a chunk at a time

            def wrong(commit: int, chunk: int) -> bytes:
                asked.add(commit)
                if given.count(0) > 1 or (given and chunk == 0 and gives == "nothing"):
                    raise NotYetError("6 requests are served here already")
                given.append(chunk)
                return read(commit, 1 if chunk == 0 else chunk)

            bad.log.read = wrong  # type: ignore[method-assign]
            got = await fetch(run, away, [bad, good], stall_limit_s=2)
            assert (got.commit, got.state_hash) == (3, good.outer.state_hash())
            assert asked == {1}
            assert away.log.commits() == good.log.commits()

    asyncio.run(main())


def test_a_donor_of_a_commit_that_nobody_knows_is_passed_over_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says that its chunks are of one: that will never be attested."""
    monkeypatch.setattr(donor_pool, "MAX_BATCH_CHUNKS", 1)

    async def main() -> None:
        async with Run(tmp_path, small_layout()) as run:
            good, bad = await run.add(2)
            await run.sync()
            read, num_asked = bad.outer.read, 0
            bad.outer.read = lambda chunk: replace(read(chunk), version=1 << 40)  # type: ignore[method-assign]
            (joiner,) = await run.add(seeded=False)

            async def again() -> Sources:
                nonlocal num_asked
                num_asked += 1
                return run.sources([good, bad])

            await fetch(run, joiner, [good, bad], refresh=again, stall_limit_s=3)
            assert records(joiner) == records(good)
            assert num_asked <= donor_pool.REQUESTS_PER_DONOR + 1

    asyncio.run(main())


def test_a_state_of_this_disk_that_is_not_the_attested_one_is_fetched_anew(tmp_path: Path) -> None:
    async def main() -> None:
        async with Run(tmp_path, small_layout()) as run:
            good, wrong = await run.add(2)
            await run.sync()
            wrong.outer.put(2, 1, bytes(len(wrong.outer.read(2).data)))
            assert wrong.outer.state_hash() != good.outer.state_hash()
            await fetch(run, wrong, [good])
            assert records(wrong) == records(good)

    asyncio.run(main())


@pytest.mark.parametrize("lists_asked", [catchup.LISTS_ASKED, 1], ids=["not far behind", "far behind"])
def test_commits_whose_payloads_nobody_has_any_more_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lists_asked: int
) -> None:
    """After a power cut: the coordinator has commit 3, and every site is at commit 1 again. A joiner comes to that."""
    monkeypatch.setattr(catchup, "LISTS_ASKED", lists_asked)

    async def main() -> None:
        async with Run(tmp_path, small_layout()) as run:
            (first,) = await run.add()
            await run.sync()
            (other,) = await run.add(seeded=False)
            await fetch(run, other, [first])
            for _ in range(2):
                await run.sync([first])
            (joiner,) = await run.add(seeded=False)
            sources = run.sources([other])
            asked = 0

            async def refresh() -> Sources:
                nonlocal asked
                asked += 1
                return sources

            got = await fetch(run, joiner, [other], sources=sources, refresh=refresh)
            assert asked == catchup.DONORS_ASKED_FOR
            assert (got.commit, got.state_hash) == (1, run.attested[1])
            assert joiner.outer.commit == 1

    asyncio.run(main())


def test_without_a_donor_the_wait_ends(tmp_path: Path) -> None:
    async def main() -> None:
        async with Run(tmp_path, small_layout()) as run:
            (first,) = await run.add()
            await run.sync()
            gone = run.sources([first])
            await first.server.stop(0)
            (joiner,) = await run.add(seeded=False)
            with pytest.raises(PeerError, match=f"nothing moved.*site 1 at {first.address}"):
                await fetch(run, joiner, [first], sources=gone, stall_limit_s=0.5)

    asyncio.run(main())


def test_a_donors_doors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(donor_server, "MAX_CHUNKS", 20)

    async def main() -> None:
        async with Run(tmp_path, small_layout()) as run:
            site, empty = await run.add(2)
            await run.sync([site])

            def client(to: Site, run_id: str = "sites") -> DonorClient:
                header = replace(to.hub.identity(), site_id=7)
                return DonorClient(
                    donor=site.donor() if to is site else empty.donor(),
                    ask=dialled(to.hub.dialer),
                    header=replace(header, run_id=run_id),
                    counters=empty.hub.counters,
                    pace=PACE,
                )

            async def chunks(of: DonorClient, wanted: list[int]) -> int:
                return len([c async for c in of.chunks(wanted, lambda c: len(site.outer.read(c).data))])

            async def payloads(of: DonorClient, commit: int) -> int:
                got = [i async for items in of.payloads(commit, list(site.data.chunks), lambda c: 5000) for i in items]
                return len(got)

            ask = client(site)
            assert await chunks(ask, [0, 3, 16]) == 3
            assert await payloads(ask, 1) == len(site.data.chunks)
            with pytest.raises(InvalidMessage, match="at most 20"):
                await chunks(ask, [0] * 21)
            with pytest.raises(InvalidMessage, match="chunk 99"):
                async for _ in ask.chunks([99], lambda c: 10):
                    pass
            with pytest.raises(StateError, match="commit 5"):
                await payloads(ask, 5)
            with pytest.raises(RefusedError, match="other"):
                await chunks(client(site, "other"), [0])
            assert await ask.hash_lists([0, 1, 9], len(run.layout.chunks)) == {
                0: site.outer.chunk_hashes(0),
                1: site.outer.chunk_hashes(1),
            }
            assert site.hub.counters.refused.total() == 3
            assert site.hub.donor is not None
            monkeypatch.setattr(donor_server, "MAX_REQUESTS", 0)  # all places are taken
            with pytest.raises(NotYetError, match="ask again"):
                await chunks(ask, [0])

    asyncio.run(main())
