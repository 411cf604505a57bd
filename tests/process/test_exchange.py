"""The exchange of one sync between hubs over real gRPC, with the real data plane."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from atoll.node.dataplane.payload_file import PayloadFile
from atoll.node.dataplane.sync_data import SyncData
from atoll.node.exchange.peers.rpc import EXCHANGE_METHOD, Stream
from atoll.node.exchange.sync import downstream, reducer
from atoll.node.exchange.sync.spill import Spill
from atoll.node.exchange.sync.upstream import Upstream
from atoll.protocol import PROTOCOL_VERSION
from atoll.protocol.codecs import kernels
from atoll.protocol.errors import (
    AverageError,
    DigestMismatch,
    HostError,
    InvalidMessage,
    NonFiniteError,
    NotYetError,
    PeerError,
    RefusedError,
    StaleError,
)
from atoll.protocol.layout import Role
from atoll.protocol.messages import Plan, Tree
from atoll.protocol.plans import plan_digest, weights
from atoll.protocol.status import from_rpc_error
from atoll.protocol.transport import MAX_FRAME_BYTES, open_channel
from atoll.protocol.v1 import common_pb2, peer_pb2
from tests.harness.calls import write
from tests.harness.chunks import paste
from tests.harness.relay import Relay
from tests.harness.sites import (
    DTYPES,
    TRAVELS,
    Run,
    Site,
    big_layout,
    commit_of,
    expected_payloads,
    next_attempt,
    run_all,
    small_layout,
    star_plan,
    until,
)

Turn = Callable[[bytes], Coroutine[Any, Any, bytes]]


class WatchedData(SyncData):
    """Counts the contributions that are encoded; may stop before one, or spoil what a reducer makes."""

    def __init__(self, site: Site) -> None:
        super().__init__(site.layout, TRAVELS, site.outer, site.snapshot, site.data.dtypes)
        self.encoded: list[int] = []

    def contribution(self, chunk: int) -> bytes:
        self.encoded.append(chunk)
        return super().contribution(chunk)


@pytest.mark.parametrize("layout", [small_layout, big_layout])
def test_all_sites_hold_the_reference_payloads(tmp_path: Path, layout) -> None:  # type: ignore[no-untyped-def]
    async def main() -> None:
        async with Run(tmp_path, layout()) as run:
            sites = await run.add(3)
            for site in sites:
                site.train(1)
            plan = star_plan(run.layout, sites)
            await run_all(plan, sites)
            expected = expected_payloads(plan, sites)
            for site in sites:
                assert site.payloads(plan) == expected
            for site in sites:  # every chunk crosses a site's downlink twice, little else does
                assert 1 < site.hub.counters.received_bytes / (4 / 3 * sum(map(len, expected))) < 1.5
            assert all(site.hub.counters.refused.total() == 0 and site.hub.counters.reconnects == 0 for site in sites)

    asyncio.run(main())


def test_all_that_a_site_sends_has_its_turn_and_nobody_lets_one_that_waits_wait(tmp_path: Path) -> None:
    """At the pace of the slowest link it would take hours."""

    async def main() -> None:
        async with Run(tmp_path, big_layout()) as run:
            sites = await run.add(3)
            for site in sites:
                site.train(1)
            plan = star_plan(run.layout, sites, stall_limit_s=1e5, slowest_bytes_per_s=1)
            exchanges = [site.begin(plan, spread_s=0.0 if site is sites[2] else 1e5) for site in sites]
            had_turns: list[list[int]] = [[] for _ in sites]
            for exchange, sizes in zip(exchanges, had_turns, strict=True):
                exchange.attempt.turn = watched(exchange.attempt.turn, sizes)  # type: ignore[assignment, method-assign]
            await asyncio.gather(*(exchange.run() for exchange in exchanges))
            for site, sizes in zip(sites, had_turns, strict=True):
                assert 0 <= site.hub.counters.sent_bytes - sum(sizes) < 2000, "all but openings and what is held"

    def watched(turn: Turn, sizes: list[int]) -> Turn:
        async def turn_and_note(frame: bytes) -> bytes:
            frame = await turn(frame)
            sizes.append(len(frame))
            return frame

        return turn_and_note

    asyncio.run(main())


def test_a_lone_contributor_needs_nobody(tmp_path: Path) -> None:
    async def main() -> None:
        async with Run(tmp_path, small_layout()) as run:
            (site,) = await run.add(1)
            site.train(1)
            plan = star_plan(run.layout, [site])
            await run_all(plan, [site])
            assert site.hub.counters.sent_bytes == site.hub.counters.received_bytes == 0
            assert site.payloads(plan) == expected_payloads(plan, [site])

    asyncio.run(main())


def test_a_receiver_takes_payloads_and_gives_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        async with Run(tmp_path, small_layout()) as run:
            first, second, receiver = await run.add(3)
            for site in (first, second):
                site.train(1)
            plan = star_plan(run.layout, [first, second], [receiver])
            await run_all(plan, [first, second, receiver])
            assert receiver.payloads(plan) == expected_payloads(plan, [first, second])
            assert receiver.hub.retained_bytes == 0

    asyncio.run(main())


def test_a_late_receiver_is_served_after_the_others_are_done(tmp_path: Path) -> None:
    async def main() -> None:
        async with Run(tmp_path, small_layout()) as run:
            first, second, receiver = await run.add(3)
            for site in (first, second):
                site.train(1)
            plan = star_plan(run.layout, [first, second], [receiver])
            done = await run_all(plan, [first, second])
            late = await receiver.begin(plan).run()
            assert late.payload_digest == done[0].payload_digest

    asyncio.run(main())


def test_a_site_that_begins_late_is_waited_for(tmp_path: Path) -> None:
    async def main() -> None:
        async with Run(tmp_path, small_layout()) as run:
            sites = await run.add(3)
            for site in sites:
                site.train(1)
            plan = star_plan(run.layout, sites)
            early = [asyncio.create_task(site.begin(plan).run()) for site in sites[:2]]
            await until(lambda: sites[2].hub._num_early == 2)  # both are held at its door
            last = await sites[2].begin(plan).run()
            assert {(await task).payload_digest for task in early} == {last.payload_digest}

    asyncio.run(main())


def test_a_broken_stream_is_opened_again_and_goes_on(tmp_path: Path) -> None:
    async def main() -> None:
        async with Run(tmp_path, big_layout()) as run:
            sites = await run.add(2)
            for site in sites:
                site.train(1)
            relay = await Relay(sites[1].address).start()
            sites[1].address = relay.address
            plan = star_plan(run.layout, sites)
            watched = WatchedData(sites[0])
            first, second = sites[0].begin(plan, watched), sites[1].begin(plan)
            arrived: set[int] = set()

            def cut_once(total: int) -> None:
                if not arrived and second.retained.num_bytes:
                    arrived.update(second.retained.chunks_of(1, 1))
                    relay.cut()

            relay.on_bytes = cut_once
            results = await asyncio.gather(first.run(), second.run())
            assert arrived  # the cut happened
            assert 1 < relay.num_connections <= 1 + len(first.upstreams[0].strands)
            assert results[0].payload_digest == results[1].payload_digest
            assert sites[0].hub.counters.reconnects > 0
            assert all(watched.encoded.count(chunk) == 1 for chunk in arrived)
            assert sites[0].payloads(plan) == sites[1].payloads(plan) == expected_payloads(plan, sites)
            await relay.stop()

    asyncio.run(main())


def test_a_link_that_hangs_is_found_out(tmp_path: Path) -> None:
    async def main() -> None:
        async with Run(tmp_path, big_layout()) as run:
            sites = await run.add(2)
            for site in sites:
                site.train(1)
            relay = await Relay(sites[1].address).start()
            sites[1].address = relay.address
            plan = star_plan(run.layout, sites, stall_limit_s=1)
            relay.on_bytes = lambda total: relay.hang() if total > 1 << 20 else None
            other = asyncio.create_task(sites[1].begin(plan).run())
            with pytest.raises(PeerError, match=r"site 2.*no byte for 1\.0 s") as caught:
                await sites[0].begin(plan).run()
            assert caught.value.peer_site_id == 2
            other.cancel()
            await asyncio.gather(other, return_exceptions=True)
            await relay.stop()

    asyncio.run(main())


@pytest.mark.parametrize("in_memory_bytes", [0, 300_000])
def test_payloads_beyond_what_stays_in_memory_are_sent_from_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_memory_bytes: int
) -> None:
    monkeypatch.setattr(reducer, "MADE_IN_MEMORY_BYTES", in_memory_bytes)
    monkeypatch.setattr(downstream, "READ_BYTES", 100_000)

    async def main() -> None:
        async with Run(tmp_path, big_layout()) as run:
            sites = await run.add(3)
            for site in sites:
                site.train(1)
            plan = star_plan(run.layout, sites)
            exchanges = [site.begin(plan) for site in sites]
            await asyncio.gather(*(exchange.run() for exchange in exchanges))
            assert [site.payloads(plan) for site in sites] == [expected_payloads(plan, sites)] * 3
            for exchange in exchanges:
                made = exchange.reducer.payloads
                in_memory = [item.num_bytes for item in made if item.data is not None]
                assert sum(in_memory) <= in_memory_bytes
                assert len(in_memory) < len(made) == len(exchange.reducer.own.chunks)
                assert exchange.reducer.payload_bytes == sum(item.num_bytes for item in made)

    asyncio.run(main())


def test_a_payload_that_its_own_log_has_not_any_more_ends_the_attempt_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be damaged at everybody's, and this site blamed by the hash."""
    monkeypatch.setattr(reducer, "MADE_IN_MEMORY_BYTES", 0)
    put = PayloadFile.put

    def damaged(file: PayloadFile, chunk: int, data: bytes, hash: bytes, version: int = 0) -> None:
        put(file, chunk, data, hash, version)
        if "site-2" in str(file.path) and chunk in own:
            entry = file.entry_of(chunk)
            assert entry is not None
            with file.path.open("r+b") as of_other_threads_too:
                of_other_threads_too.seek(int.from_bytes(entry[:8], "little"))
                of_other_threads_too.write(bytes([data[0] ^ 1]))

    own: set[int] = set()

    async def main() -> None:
        async with Run(tmp_path, small_layout()) as run:
            sites = await run.add(2)
            for site in sites:
                site.train(1)
            exchanges = [site.begin(star_plan(run.layout, sites)) for site in sites]
            own.update(exchanges[1].reducer.own.chunks)
            monkeypatch.setattr(PayloadFile, "put", damaged)
            tasks = [asyncio.create_task(exchange.run()) for exchange in exchanges]
            with pytest.raises(
                HostError, match=r"chunk \d+ is damaged.*which this node has written.*look after its disk"
            ):
                await tasks[1]
            tasks[0].cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(main())


def test_a_connection_that_hung_is_not_used_again(tmp_path: Path) -> None:
    async def main() -> None:
        async with Run(tmp_path, big_layout()) as run:
            sites = await run.add(2)
            for site in sites:
                site.train(1)
            relay = await Relay(sites[1].address).start()
            sites[1].address = relay.address
            plan = star_plan(run.layout, sites, stall_limit_s=1)

            def hang_once(total: int) -> None:
                if total > 1 << 20:
                    relay.on_bytes = lambda total: None
                    relay.hang_old()

            relay.on_bytes = hang_once
            other = asyncio.create_task(sites[1].begin(plan).run())
            with pytest.raises(PeerError, match=r"site 2.*no byte for 1\.0 s"):
                await sites[0].begin(plan).run()
            await asyncio.gather(other, return_exceptions=True)
            again = replace(next_attempt(plan, run.layout, sites), stall_limit_s=3.0)
            await run_all(again, sites)
            assert sites[0].payloads(again) == sites[1].payloads(again) == expected_payloads(again, sites)
            await relay.stop()

    asyncio.run(main())


@pytest.mark.parametrize("on_disk", [False, True])
def test_the_next_attempt_does_not_send_again_what_a_reducer_holds(tmp_path: Path, on_disk: bool) -> None:
    async def main() -> None:
        async with Run(tmp_path, small_layout()) as run:
            first, second, _ = await run.add(3)
            for site in run.sites:
                site.train(1)
                if on_disk:
                    site.hub.spill = Spill(tmp_path / f"spill-{site.site_id}", memory_limit_bytes=0)
            plan = star_plan(run.layout, run.sites, stall_limit_s=60)
            watched = WatchedData(first)
            exchange, other = first.begin(plan, watched), second.begin(plan)
            tasks = [asyncio.create_task(e.run()) for e in (exchange, other)]  # the third never begins
            own = {c for c in watched.chunks if c % 3 == 1}
            await until(
                lambda: (
                    other.retained.chunks_of(1, 1) == own
                    and exchange.retained.chunks_of(2, 1) == set(exchange.reducer.own.chunks)
                )
            )
            exchange.cancel()
            other.cancel()
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                assert isinstance(result, asyncio.CancelledError)
            held = other.retained.chunks_of(1, 1)
            if on_disk:
                # A stream that broke brought some twice, and the second copies are removed in a thread.
                for spill, retained in ((first.hub.spill, exchange.retained), (second.hub.spill, other.retained)):
                    assert spill is not None
                    assert retained.num_bytes > 0
                    await until(lambda s=spill, r=retained: s.disk_bytes == r.num_bytes)  # type: ignore[misc]

            again = next_attempt(plan, run.layout, [first, second])
            watched = WatchedData(first)
            begun = [first.begin(again, watched), second.begin(again)]
            resent = set(begun[1].reducer.own.chunks) & held
            assert resent  # else this test shows nothing
            results = await asyncio.gather(*(e.run() for e in begun))
            assert results[0].payload_digest == results[1].payload_digest
            assert not resent & set(watched.encoded)
            assert first.payloads(again) == expected_payloads(again, [first, second])

            first.hub.drop_sync(1)
            assert first.hub.retained_bytes == 0
            assert begun[0].reducer.payloads == [], (
                "exchanges are in reference cycles, and live on until the collector comes"
            )
            assert begun[0].retained.num_bytes == 0
            if on_disk:
                await until(lambda: not list((tmp_path / "spill-1").iterdir()))
            with pytest.raises(StaleError, match="sync 1"):
                first.begin(again)

    asyncio.run(main())


def test_an_attempt_that_is_cancelled_before_it_began_leaves_nothing_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it runs, and while it waits for a thread."""

    async def main() -> None:
        async with Run(tmp_path, small_layout()) as run:
            first, second = await run.add(2)
            for site in (first, second):
                site.train(1)
            plan = star_plan(run.layout, [first, second])
            exchange = first.begin(plan)
            exchange.cancel()
            with pytest.raises(asyncio.CancelledError):
                await exchange.run()

            exchange = first.begin(plan)
            queued, go_on = threading.Event(), threading.Event()
            in_pool = exchange.attempt.in_pool

            def later(work: Callable[[], Any]) -> asyncio.Future[Any]:
                queued.set()
                return in_pool(lambda: (go_on.wait(), work())[1])

            monkeypatch.setattr(exchange.attempt, "in_pool", later)
            task = asyncio.create_task(exchange.run())
            await until(queued.is_set)
            exchange.cancel()
            go_on.set()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(main())
    assert not list((tmp_path / "site-1" / "log").iterdir())


class ObservedLock:
    """`waits` is set when somebody waits for it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.waits = threading.Event()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self.waits.set()
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_an_attempt_that_is_dropped_while_it_begins_leaves_nothing_in_the_log(tmp_path: Path) -> None:
    """It waits for the log, and whoever drops the sync has it first."""

    async def main() -> None:
        async with Run(tmp_path, small_layout()) as run:
            first, second = await run.add(2)
            for site in (first, second):
                site.train(1)
            lock: Any = ObservedLock()
            first.log._lock = lock
            has_it, go_on = threading.Event(), threading.Event()

            def drop() -> None:
                with lock:
                    has_it.set()
                    assert go_on.wait(60)
                    first.log.drop(1)

            dropping = asyncio.create_task(asyncio.to_thread(drop))
            await until(has_it.is_set)
            task = asyncio.create_task(first.begin(star_plan(run.layout, [first, second])).run())
            await until(lock.waits.is_set)
            first.hub.drop_sync(1)
            go_on.set()
            await dropping
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(main())
    assert not list((tmp_path / "site-1" / "log").iterdir())


def test_an_attempt_that_is_begun_again_goes_on_from_the_log(tmp_path: Path) -> None:
    async def main() -> None:
        async with Run(tmp_path, small_layout()) as run:
            sites = await run.add(2)
            for site in sites:
                site.train(1)
            plan = star_plan(run.layout, sites)
            done = await run_all(plan, sites)
            watched = WatchedData(sites[0])
            again = await sites[0].begin(plan, watched).run()
            assert again.payload_digest == done[0].payload_digest
            assert not watched.encoded

    asyncio.run(main())


def test_an_attempt_that_is_begun_again_keeps_its_peers(tmp_path: Path) -> None:
    async def main() -> None:
        async with Run(tmp_path, small_layout()) as run:
            first, second, third = await run.add(3)
            for site in run.sites:
                site.train(1)
            plan = star_plan(run.layout, run.sites)
            stopped = first.begin(plan)
            broken = asyncio.create_task(stopped.run())
            waiting = asyncio.create_task(second.begin(plan).run())
            await until(lambda: stopped.retained.num_bytes > 0)
            again = first.begin(plan)
            with pytest.raises(asyncio.CancelledError):
                await broken
            results = await asyncio.gather(again.run(), waiting, third.begin(plan).run())
            assert len({result.payload_digest for result in results}) == 1

    asyncio.run(main())


def test_a_peer_that_never_answers_is_named(tmp_path: Path) -> None:
    async def main() -> None:
        async with Run(tmp_path, small_layout()) as run:
            first, second = await run.add(2)
            first.train(1)
            plan = star_plan(run.layout, [first, second], stall_limit_s=1)
            with pytest.raises(PeerError, match=f"site 2 at {second.address}.*sync 1, attempt 1") as caught:
                await first.begin(plan).run()
            assert caught.value.peer_site_id == 2
            assert caught.value.phase

    asyncio.run(main())


def test_a_reducer_that_says_not_yet_for_ever_is_named(tmp_path: Path) -> None:
    """Each new stream writes an Open, which is no progress."""

    async def main() -> None:
        async with Run(tmp_path, small_layout()) as run:
            first, second = await run.add(2)
            first.train(1)
            plan = star_plan(run.layout, [first, second], stall_limit_s=2.5)
            plan = replace(plan, trees=tuple(replace(tree, parents=(1, -1)) for tree in plan.trees))
            with pytest.raises(PeerError, match="no plan for it is here yet") as caught:
                await first.begin(plan).run()
            assert caught.value.peer_site_id == 2

    asyncio.run(main())


class GatedData(SyncData):
    """The check of what arrives waits for `gate`."""

    def __init__(self, site: Site) -> None:
        super().__init__(site.layout, TRAVELS, site.outer, site.snapshot, DTYPES)
        self.gate = threading.Event()
        self.num_waiting = 0

    def check(self, chunk: int, data: bytes | bytearray | memoryview) -> None:
        self.num_waiting += 1
        self.gate.wait(60)
        super().check(chunk, data)


def test_a_contribution_that_is_checked_while_the_next_attempt_begins_counts_in_it(tmp_path: Path) -> None:
    async def main() -> None:
        async with Run(tmp_path, small_layout()) as run:
            first, second, _ = await run.add(3)
            for site in run.sites:
                site.train(1)
            plan = star_plan(run.layout, run.sites, stall_limit_s=60)
            gated = GatedData(second)
            tasks = [asyncio.create_task(e.run()) for e in (first.begin(plan), second.begin(plan, gated))]
            await until(lambda: gated.num_waiting > 0)
            again = next_attempt(plan, run.layout, [first, second])
            begun = [first.begin(again), second.begin(again)]
            gated.gate.set()
            await asyncio.gather(*tasks, return_exceptions=True)
            results = await asyncio.gather(*(e.run() for e in begun))
            assert results[0].payload_digest == results[1].payload_digest
            assert first.payloads(again) == expected_payloads(again, [first, second])

    asyncio.run(main())


def test_a_peer_that_is_not_there_is_named(tmp_path: Path) -> None:
    async def main() -> None:
        async with Run(tmp_path, small_layout()) as run:
            first, second = await run.add(2)
            first.train(1)
            await second.server.stop(0)
            plan = star_plan(run.layout, [first, second], stall_limit_s=1)
            with pytest.raises(PeerError, match="site 2") as caught:
                await first.begin(plan).run()
            assert caught.value.peer_site_id == 2

    asyncio.run(main())


def test_a_value_that_is_not_finite_is_this_sites_own_failure(tmp_path: Path) -> None:
    async def main() -> None:
        async with Run(tmp_path, small_layout()) as run:
            sites = await run.add(2)
            for site in sites:
                site.train(1)
            sites[0].snapshot[: 4 * 2000] = b"\xff" * 8000
            plan = star_plan(run.layout, sites)
            other = asyncio.create_task(sites[1].begin(plan).run())
            with pytest.raises(NonFiniteError, match="'a'"):
                await sites[0].begin(plan).run()
            other.cancel()
            await asyncio.gather(other, return_exceptions=True)

    asyncio.run(main())


def test_an_absurd_contribution_fails_the_attempt_by_name_and_costs_one_more(tmp_path: Path) -> None:
    """Its site receives what the others agree on, bit for bit; nobody else ends."""

    async def main() -> None:
        async with Run(tmp_path, small_layout()) as run:
            sites = await run.add(4)
            for site in sites:
                site.train(1)
            values = np.frombuffer(sites[1].snapshot, np.float32)[: run.layout.chunks[0].num_elements]
            values[7] = 1e30
            plan = star_plan(run.layout, sites)
            exchanges = [site.begin(plan).run() for site in sites]
            results = [asyncio.ensure_future(exchange) for exchange in exchanges]
            with pytest.raises(AverageError, match="of site 2") as caught:
                await results[0]  # site 1 reduces chunk 0
            for result in results[1:]:
                result.cancel()
            rest = await asyncio.gather(*results[1:], return_exceptions=True)
            assert all(isinstance(result, asyncio.CancelledError | PeerError) for result in rest)
            ((site_id, norm, limit),) = caught.value.outliers
            assert (site_id, caught.value.tensor) == (2, "a")
            assert norm == pytest.approx(1e30, rel=0.01)
            assert limit < 1e6
            good = [sites[0], sites[2], sites[3]]
            second = star_plan(run.layout, good, [sites[1]], attempt=2)
            ends = await run_all(second, sites)
            expected = expected_payloads(second, good)
            for site in sites:
                assert site.payloads(second) == expected
                site.apply(commit_of(second, ends[0].payload_digest))
            assert len({site.outer.state_hash() for site in sites}) == 1

    asyncio.run(main())


def test_a_reducer_that_makes_absurd_payloads_is_named_by_all(tmp_path: Path) -> None:
    """Outer updates would overflow by them: they are refused before Done."""

    class Absurd(WatchedData):
        def reduce(self, chunk: int, contributions: Any, *errors: Any) -> bytes:
            size = self.layout.chunks[chunk].num_elements
            if self.layout.chunks[chunk].role is not Role.TRAINABLE:
                return super().reduce(chunk, contributions)
            return kernels.encode("int8", np.full(size, 2.0**100, np.float32))

    async def main() -> None:
        async with Run(tmp_path, small_layout()) as run:
            sites = await run.add(3)
            for site in sites:
                site.train(1)
            plan = star_plan(run.layout, sites)
            bad = asyncio.ensure_future(sites[1].begin(plan, Absurd(sites[1])).run())
            others = [site.begin(plan).run() for site in (sites[0], sites[2])]
            for error in await asyncio.gather(*others, return_exceptions=True):
                assert isinstance(error, PeerError)
                assert "too large" in str(error)
                assert error.peer_site_id == 2
            bad.cancel()
            await asyncio.gather(bad, return_exceptions=True)

    asyncio.run(main())


def test_a_buffer_that_nobody_changed_travels_as_its_header(tmp_path: Path) -> None:
    async def main() -> None:
        async with Run(tmp_path, small_layout()) as run:
            sites = await run.add(3)
            buffers = [c for c in run.layout.chunks if c.role in (Role.BUFFER_MEAN, Role.BUFFER_LOWEST)]
            before = [sites[0].outer.read(c.index).data for c in buffers]
            for site in sites:
                site.train(1)
                for chunk, data in zip(buffers, before, strict=True):
                    paste(site.snapshot, chunk, data)
            plan = star_plan(run.layout, sites)
            results = await run_all(plan, sites)
            for site in sites:
                payloads = dict(zip(site.data.chunks, site.payloads(plan), strict=True))
                assert [len(payloads[c.index]) for c in buffers] == [16, 16]
                site.apply(commit_of(plan, results[0].payload_digest))
                assert [site.outer.read(c.index).data for c in buffers] == before
            assert len({site.outer.state_hash() for site in sites}) == 1

    asyncio.run(main())


def test_a_plan_over_the_bound_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        async with Run(tmp_path, small_layout()) as run:
            sites = await run.add(2)
            sites[0].hub.max_retained_bytes = 1000
            with pytest.raises(RefusedError, match="its bound is 1000"):
                sites[0].begin(star_plan(run.layout, sites))

    asyncio.run(main())


def test_old_plans_and_foreign_ones_are_refused(tmp_path: Path) -> None:
    async def main() -> None:
        async with Run(tmp_path, small_layout()) as run:
            sites = await run.add(2)
            plan = star_plan(run.layout, sites)
            sites[0].begin(replace(plan, attempt=2))
            with pytest.raises(StaleError, match="attempt 1 comes after"):
                sites[0].begin(plan)
            sites[0].hub.site_id = 9
            share = sites[0].hub.share(plan, sites[0].data)()
            with pytest.raises(RefusedError, match="does not list site 9"):
                sites[0].hub.begin(replace(plan, sync=2), sites[0].data, share, tokens=1, weights=())

    asyncio.run(main())


class Door:
    """Opens a raw stream to a site, as a peer that may send anything."""

    def __init__(self, site: Site, plan, **header) -> None:  # type: ignore[no-untyped-def]
        self.site = site
        fields = {"protocol_version": PROTOCOL_VERSION, "run_id": "sites", "site_id": 2, "incarnation": 1, **header}
        self.open = peer_pb2.ExchangeOpen(
            header=common_pb2.Header(**fields),
            sync=plan.sync,
            attempt=plan.attempt,
            plan_term=plan.term,
            plan_digest=plan_digest(plan),
            tokens=102,
            reducer_site_id=1,
            reducer_incarnation=1,
            num_chunks=site.layout.num_sync_chunks,
        )

    async def send(self, *messages: bytes) -> Exception:
        """The error that the site answers with."""
        channel = open_channel(self.site.address, handshake=None, max_message_bytes=2 * MAX_FRAME_BYTES)
        method: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(EXCHANGE_METHOD)
        try:
            call = method()
            for message in (peer_pb2.ExchangeRequest(open=self.open).SerializeToString(), *messages):
                await write(call, message)
            while isinstance(await call.read(), bytes):
                pass
            raise AssertionError("the stream ended without an error")
        except grpc.RpcError as error:
            return from_rpc_error(error, "peer")
        finally:
            await channel.close()


def test_who_opens_a_stream_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.node.exchange.hub.EARLY_HOLD_S", 0.05)

    async def main() -> None:
        async with Run(tmp_path, small_layout()) as run:
            sites = await run.add(2)
            plan = replace(star_plan(run.layout, sites), attempt=2, sync=5)
            sites[0].begin(plan)
            hub = sites[0].hub

            async def answer(cls: type[Exception], *texts: str, **fields: object) -> None:
                header = {k: fields.pop(k) for k in list(fields) if k in ("run_id", "site_id", "incarnation")}
                if "protocol_version" in fields:
                    header["protocol_version"] = fields.pop("protocol_version")
                door = Door(sites[0], plan, **header)
                for key, value in fields.items():
                    setattr(door.open, key, value)
                error = await door.send()
                assert type(error) is cls, error
                for text in texts:
                    assert text in str(error)

            await answer(RefusedError, "run 'other'", "'sites'", run_id="other")
            await answer(RefusedError, "protocol version 7", f"speaks {PROTOCOL_VERSION}", protocol_version=7)
            await answer(RefusedError, "site 3 is not in", site_id=3)
            await answer(StaleError, "incarnation 1", "not 4", incarnation=4)
            await answer(StaleError, "attempt 1", "attempt 2", attempt=1)
            await answer(NotYetError, "attempt 3 is early", attempt=3)
            await answer(NotYetError, "sync 6", sync=6)
            await answer(RefusedError, "5 tokens", "102", tokens=5)
            await answer(RefusedError, "plan 0000", plan_digest=bytes(32))
            await answer(RefusedError, "meant for site 2", reducer_site_id=2)
            await answer(StaleError, "meant for incarnation 2", reducer_incarnation=2)
            hub.drop_sync(5)
            await answer(StaleError, "that sync is over here")
            assert hub.counters.refused.total() == 10

    asyncio.run(main())


def test_bad_parts_are_refused_and_counted_and_the_sync_goes_on(tmp_path: Path) -> None:
    async def main() -> None:
        async with Run(tmp_path, small_layout()) as run:
            sites = await run.add(2)
            for site in sites:
                site.train(1)
            plan = star_plan(run.layout, sites)
            exchange = sites[0].begin(plan)
            running = asyncio.create_task(exchange.run())
            chunk = exchange.reducer.own.chunks[0]
            good = sites[1].data.contribution(chunk)
            value = sites[1].data.payload_hash(good)
            door = Door(sites[0], plan)

            def part(**fields: object) -> bytes:
                values = {"chunk": chunk, "total_bytes": len(good), "data": good, "hash": value, **fields}
                parts = peer_pb2.Parts(parts=[peer_pb2.Part(**values)])  # type: ignore[arg-type]
                return peer_pb2.ExchangeRequest(contribution=parts).SerializeToString()

            bad = [
                (part(total_bytes=1 << 31), "announced"),
                (part(total_bytes=0), "announced"),
                (part(chunk=1 << 20), "not reduced"),
                (part(chunk=exchange.upstreams[0].chunks[0]), "not reduced"),
                (part(offset_bytes=5), "byte 5"),
                (part(data=good + b"x"), "a part of"),
                (part(data=good[:-1]), "all but the last"),
                (part(data=b""), "a part of 0"),
                (part(hash=b"short"), "hash of 32 bytes"),
                (part(hash=bytes(32)), "do not have their hash"),
                (part(data=b"\xff" * len(good)), "do not have their hash"),
                (
                    part(data=b"\xff" * len(good), hash=sites[1].data.payload_hash(b"\xff" * len(good))),
                    "format version",
                ),
                (b"\xff\xff\xff", "no ExchangeRequest"),
                (b"", "does not belong"),
            ]
            for message, text in bad:
                error = await door.send(message)
                assert isinstance(error, InvalidMessage), (text, error)
                assert text in str(error)
            assert sites[0].hub.counters.refused.total() == len(bad)
            assert exchange.retained.num_bytes == 0

            # The first contribution stays; another one for the same chunk is refused.
            flipped = bytearray(good)
            flipped[-1] ^= 1
            other = part(data=bytes(flipped), hash=sites[1].data.payload_hash(bytes(flipped)))
            error = await door.send(part(), part(), other)
            assert "a contribution never changes" in str(error)

            too_large = await door.send(b"x" * (MAX_FRAME_BYTES + 1))
            assert isinstance(too_large, InvalidMessage | PeerError)

            digest = (await sites[1].begin(plan).run()).payload_digest
            assert (await running).payload_digest == digest
            assert sites[0].payloads(plan) == expected_payloads(plan, sites)

    asyncio.run(main())


def test_a_corrupted_payload_is_fetched_again(tmp_path: Path) -> None:
    async def main() -> None:
        async with Run(tmp_path, small_layout()) as run:
            sites = await run.add(2)
            for site in sites:
                site.train(1)
            plan = star_plan(run.layout, sites)

            class Spoiled(WatchedData):
                def __init__(self, site: Site) -> None:
                    super().__init__(site)
                    self.wrong = itertools.count()

                def payload_hash(self, data: bytes | bytearray | memoryview) -> bytes:
                    value = super().payload_hash(data)
                    return bytes(32) if len(data) > 100 and next(self.wrong) < 2 else value

            # Two hashes that the second site makes are wrong: of what it sends, or of what it got.
            results = await asyncio.gather(sites[0].begin(plan).run(), sites[1].begin(plan, Spoiled(sites[1])).run())
            assert results[0].payload_digest == results[1].payload_digest
            refused = sum((s.hub.counters.refused for s in sites), start=sites[0].hub.counters.refused.__class__())
            assert refused[DigestMismatch] > 0
            assert sites[0].payloads(plan) == sites[1].payloads(plan) == expected_payloads(plan, sites)

    asyncio.run(main())


@pytest.mark.parametrize("num_turns", range(6))
def test_a_stream_that_waits_for_a_change_ends_when_it_is_cancelled(tmp_path: Path, num_turns: int) -> None:
    """Also if the change comes some turns of the loop before; else a stream that failed would never say so."""

    async def main() -> None:
        async with Run(tmp_path, small_layout()) as run:
            sites = await run.add(2)
            exchange = sites[0].begin(star_plan(run.layout, sites))

            async def wait_for_ever() -> None:
                with exchange.turns.served(2) as peer:
                    while True:
                        peer.changed.clear()
                        await peer.wait(60)

            waiting = asyncio.create_task(wait_for_ever())
            for _ in range(5):
                await asyncio.sleep(0)
            exchange.turns.wake_all()
            for _ in range(num_turns):
                await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait({waiting})
            assert waiting.cancelled()

    asyncio.run(main())


def test_a_peer_whose_bytes_stay_wrong_has_failed(tmp_path: Path) -> None:
    async def main() -> None:
        async with Run(tmp_path, small_layout()) as run:
            sites = await run.add(2)
            for site in sites:
                site.train(1)
            plan = star_plan(run.layout, sites)

            class Wrong(WatchedData):
                def payload_hash(self, data: bytes | bytearray | memoryview) -> bytes:
                    return bytes(32)

            wrong = asyncio.create_task(sites[0].begin(plan, Wrong(sites[0])).run())
            right = asyncio.create_task(sites[1].begin(plan).run())
            done, _ = await asyncio.wait({wrong, right}, return_when=asyncio.FIRST_COMPLETED)
            with pytest.raises(PeerError, match="refused bytes"):
                done.pop().result()
            for task in (wrong, right):
                task.cancel()
            await asyncio.gather(wrong, right, return_exceptions=True)

    asyncio.run(main())


def test_a_site_that_has_everything_serves_its_peers_before_its_senders_come_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The payloads of a small sync may be back before the sender notes that it is done; peers wait for that note."""
    first: list[Upstream] = []
    write_all = Upstream._write_all

    async def slow_to_note(self: Upstream, call: Stream, frames: list[bytes]) -> None:
        await write_all(self, call, frames)
        if not first:
            first.append(self)
        if self is first[0]:
            await asyncio.Event().wait()

    monkeypatch.setattr(Upstream, "_write_all", slow_to_note)

    async def main() -> None:
        async with Run(tmp_path, small_layout()) as run:
            sites = await run.add(3)
            for site in sites:
                site.train(1)
            results = await run_all(star_plan(run.layout, sites), sites)
            assert len({r.payload_digest for r in results}) == 1

    asyncio.run(main())
    assert first


def ahead_of(plan: Plan, site: Site) -> Plan:
    """As it came with the commit before, and this site begins it: without the others' weights."""
    return replace(
        plan,
        contributors=tuple(c if c.site_id == site.site_id else replace(c, tokens=0) for c in plan.contributors),
    )


def test_12_weights_come_in_the_headers_where_the_plan_has_none(tmp_path: Path) -> None:
    async def main() -> None:
        async with Run(tmp_path, small_layout()) as run:
            sites = await run.add(3)
            for site in sites:
                site.train(1)
            plan = star_plan(run.layout, sites)
            results = await asyncio.gather(*(site.begin(ahead_of(plan, site)).run() for site in sites))
            expected = expected_payloads(plan, sites)
            for site, result in zip(sites, results, strict=True):
                assert site.payloads(plan) == expected
                assert result.tokens == tuple(c.tokens for c in plan.contributors)
            assert len({result.payload_digest for result in results}) == 1

    asyncio.run(main())


def test_12_a_site_that_reduces_nothing_has_the_weights_from_the_plan(tmp_path: Path) -> None:
    async def main() -> None:
        async with Run(tmp_path, small_layout()) as run:
            sites = await run.add(2)
            for site in sites:
                site.train(1)
            plan = star_plan(run.layout, sites)
            plan = replace(plan, trees=(Tree(first_chunk=0, num_chunks=run.layout.num_sync_chunks, top=0),))
            reducer, other = (site.begin(ahead_of(plan, site)) for site in sites)
            first, second = asyncio.create_task(reducer.run()), asyncio.create_task(other.run())
            done = await first
            await until(lambda: other.collection.is_complete)
            assert not second.done()
            sites[1].hub.weigh(plan, weights(plan))
            got = await second
            assert (got.payload_digest, got.tokens) == (done.payload_digest, done.tokens)

    asyncio.run(main())


def test_12_a_weight_that_ready_does_not_say_fails_the_exchange(tmp_path: Path) -> None:
    async def main() -> None:
        async with Run(tmp_path, small_layout()) as run:
            sites = await run.add(3)
            for site in sites:
                site.train(1)
            plan = star_plan(run.layout, sites)
            exchange = sites[0].begin(ahead_of(plan, sites[0]))
            tasks = [asyncio.create_task(e.run()) for e in (exchange, sites[1].begin(ahead_of(plan, sites[1])))]
            await until(lambda: len(exchange.retained.weights) == 2)
            first, second, third = weights(plan)
            sites[0].hub.weigh(plan, (first, second + 1, third))
            with pytest.raises(PeerError, match=r"site 2.*its Ready says otherwise"):
                await tasks[0]
            tasks[1].cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(main())


def test_those_who_still_train_are_not_taken_for_hanging(tmp_path: Path) -> None:
    """The coordinator says when all are ready; only from then on a peer that does not come has failed."""

    async def main() -> None:
        async with Run(tmp_path, small_layout()) as run:
            sites = await run.add(2)
            for site in sites:
                site.train(1)
            plan = star_plan(run.layout, sites, stall_limit_s=0.3)
            exchange = sites[0].begin(ahead_of(plan, sites[0]))
            task = asyncio.create_task(exchange.run())
            tries = sites[1].hub
            for _ in range(2):  # each is held for longer than the limit
                await until(lambda: tries._num_early == 1)
                await until(lambda: tries._num_early == 0)
            assert not task.done()
            sites[0].hub.weigh(plan, weights(plan))
            with pytest.raises(PeerError, match="site 2"):
                await task

    asyncio.run(main())
