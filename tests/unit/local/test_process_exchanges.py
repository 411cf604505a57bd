"""A node and its exchange processes in an exchange, as the node sees it; a test speaks for the processes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atoll.node import host_protocol as hosts
from atoll.node import process_protocol as processes
from atoll.node.daemon.exchange_processes.attached import AttachedProcess, Processes
from atoll.node.daemon.exchange_processes.process_exchanges import ProcessExchanges
from atoll.node.daemon.followed_exchanges import FollowedExchanges
from atoll.node.daemon.shared_exchanges import LARGEST_NORM, together
from atoll.node.dataplane import payload_part
from atoll.node.dataplane.payload_file import AttemptKey
from atoll.node.dataplane.payload_part import PartFile
from atoll.node.dataplane.sync_data import SyncData
from atoll.node.exchange.sync.exchange import Exchange, ExchangeResult
from atoll.protocol import messages as m
from atoll.protocol import transport, wire
from atoll.protocol.errors import AtollError, InvalidMessage, StateError
from atoll.protocol.plans import payload_hash
from tests.harness.host_exchanges import begun
from tests.harness.hosts import SITE_ID, Led, led
from tests.harness.model_on_hosts import COUNT, LAYOUT, SETTINGS, V, W, payloads_of

KEY = AttemptKey(1, 1, 1)


class HandConnection:
    """What a process would hear."""

    def __init__(self) -> None:
        self.told: list[processes.ProcessTold] = []

    def send_frame(self, frame: bytes, fds: tuple[int, ...] = ()) -> None:
        self.told.append(processes.heard_of_node(frame[4:]))


class Beside:
    """A node of three exchange processes, of which a test speaks for two."""

    def __init__(self, site: Led) -> None:
        self.site, self.plane = site, site.plane
        self.plane.parts = [range(V, W), range(W, COUNT), range(COUNT, len(LAYOUT.chunks))]
        self.plane.own_part = self.plane.parts[0]
        self.attached = Processes(2)
        self.exchanges = ProcessExchanges(
            attached=self.attached,
            hub=site.hub,
            own_of=lambda number: self.plane.parts[number],
            site_id=lambda: SITE_ID,
            tasks=site.tasks,
        )
        self.word = begun(site, alone=True)

    def comes(self, number: int) -> AttachedProcess:
        connection: Any = HandConnection()
        process = AttachedProcess(number=number, words=f"exchange process {number} of this host", connection=connection)
        process.is_laid_out = True
        self.attached[number] = process
        self.attached.changed()
        return process

    def told(self, number: int) -> list[processes.ProcessTold]:
        connection: Any = self.attached[number].connection
        return list(connection.told)

    async def begins(self, word: hosts.BeginAtHost | None = None) -> SyncData:
        word = word or self.word
        await self.exchanges.wait_for(word.plan)
        data = self.plane.sync_data(word.plan.base_commit, word.plan.fragment, (), self.plane.own_part)
        await self.exchanges.begin(word, self.plane, data)
        return data

    async def own_part(self, data: SyncData) -> tuple[Exchange, asyncio.Task[Any]]:
        """Of the exchange, that of the node."""
        hub, word = self.site.hub, self.word
        share = hub.share(word.plan, data)()
        exchange = hub.begin(word.plan, data, share, tokens=word.tokens, weights=word.weights)
        return exchange, asyncio.create_task(exchange.run())

    def begin_at(self, number: int) -> processes.BeginInProcess:
        (found,) = (told for told in self.told(number) if isinstance(told, processes.BeginInProcess))
        return found

    def puts(self, number: int, payloads: dict[int, bytes]) -> processes.PayloadsStored:
        """The process has these in its region, and says so."""
        told = self.begin_at(number)
        region = range(told.region_start, told.region_end)
        folder = self.site.home.payload_folder
        file = PartFile(folder, LAYOUT, SETTINGS.run_id, KEY, own=list(payloads), region=region)
        for chunk, payload in payloads.items():
            file.put(chunk, payload, payload_hash(payload))
        return processes.PayloadsStored(sync=1, term=1, attempt=1, entries=payload_part.stored(file, list(payloads)))


DONE = m.Done(sync=1, attempt=1, term=1, payload_digest=bytes(32), last_commit=0, state_hash=bytes(32), tokens=(100,))


@asynccontextmanager
async def beside(folder: Path) -> AsyncIterator[Beside]:
    async with led(folder, site_hosts=1) as site:
        await site.has_state()
        yield Beside(site)


def test_each_has_a_part_of_the_chunks_and_a_region_of_its_own(tmp_path: Path) -> None:
    async def main() -> None:
        async with beside(tmp_path) as node:
            for number in (1, 2):
                node.comes(number)
            data = await node.begins()
            assert data.own == range(V, W)
            told = [node.begin_at(number) for number in (1, 2)]
            assert [word.begun for word in told] == [node.word] * 2
            regions = [range(word.region_start, word.region_end) for word in told]
            assert regions[0].stop <= regions[1].start
            for region, chunk in zip(regions, (W, COUNT), strict=True):
                assert len(region) == 2 * data.payload_bytes(chunk, 1)
            assert not any(word.held or word.last for word in told), "nothing is in the file, and no commit in the log"

    transport.run(main())


def test_an_exchange_is_done_when_the_payloads_of_all_are_in_the_file_and_all_have_said_so(tmp_path: Path) -> None:
    async def main() -> None:
        async with beside(tmp_path) as node:
            both = [node.comes(number) for number in (1, 2)]
            _, payloads = payloads_of(node.plane, 1)
            data = await node.begins()
            # One process is faster than the node itself.
            node.exchanges.stored(both[0], node.puts(1, {W: payloads[W]}))
            exchange, running = await node.own_part(data)
            await exchange.collection.arrived(1)
            assert not exchange.collection.is_complete
            node.exchanges.stored(both[1], node.puts(2, {COUNT: payloads[COUNT]}))
            result = await running
            finished = asyncio.create_task(node.exchanges.done(node.word.plan, result))
            node.exchanges.heard_done(both[0], DONE)
            await asyncio.sleep(0)
            assert not finished.done()
            node.exchanges.heard_done(both[1], DONE)
            assert (await finished).payload_digest == result.payload_digest
            file = node.plane.log.held(1, 1, 1)
            assert file.sealed
            assert {chunk: file.read(chunk) for chunk in (V, W, COUNT)} == payloads

    transport.run(main())


def test_a_process_that_has_other_weights_fails_the_exchange(tmp_path: Path) -> None:
    async def main() -> None:
        async with beside(tmp_path) as node:
            both = [node.comes(number) for number in (1, 2)]
            _, payloads = payloads_of(node.plane, 1)
            _, running = await node.own_part(await node.begins())
            for process, chunk in zip(both, (W, COUNT), strict=True):
                node.exchanges.stored(process, node.puts(process.number, {chunk: payloads[chunk]}))
                node.exchanges.heard_done(process, replace(DONE, tokens=(99,)))
            with pytest.raises(StateError, match="exchange process 1 of this host has other weights of sync 1"):
                await node.exchanges.done(node.word.plan, await running)

    transport.run(main())


def test_payloads_of_chunks_of_others_are_refused_and_those_of_another_attempt_count_for_nothing(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        async with beside(tmp_path) as node:
            both = [node.comes(number) for number in (1, 2)]
            _, payloads = payloads_of(node.plane, 1)
            await node.begins()
            with pytest.raises(InvalidMessage, match=f"process 1 .* has the payload of chunk {COUNT}, .*not its own"):
                node.exchanges.stored(both[0], node.puts(1, {COUNT: payloads[COUNT]}))
            with pytest.raises(InvalidMessage, match="is not within what was set aside for it"):
                node.exchanges.stored(both[1], replace(node.puts(1, {COUNT: payloads[COUNT]})))
            file = node.plane.log.held(1, 1, 1)
            node.exchanges.stored(both[0], replace(node.puts(1, {W: payloads[W]}), attempt=2))
            node.exchanges.stored(both[0], replace(node.puts(1, {W: payloads[W]}), sync=2))
            assert file.missing() == [V, W, COUNT]

    transport.run(main())


def test_an_exchange_waits_for_a_process_that_is_started_anew(tmp_path: Path) -> None:
    async def main() -> None:
        async with beside(tmp_path) as node:
            node.comes(1)
            beginning = asyncio.create_task(node.begins())
            await asyncio.sleep(0)
            assert not node.told(1)
            node.comes(2)
            await beginning
            assert node.begin_at(1).begun == node.begin_at(2).begun == node.word

    transport.run(main())


def test_a_process_that_does_not_come_back_is_named(tmp_path: Path) -> None:
    async def main() -> None:
        async with beside(tmp_path) as node:
            node.comes(1)
            plan = replace(node.word.plan, stall_limit_s=0.0)
            with pytest.raises(StateError, match="exchange process 2 of this host is not ready"):
                await node.exchanges.wait_for(plan)
            node.comes(2)
            assert not await node.exchanges.wait_for(plan)

    transport.run(main())


def test_a_node_that_lacks_payloads_of_its_processes_alone_lets_them_say_first_who_is_late(tmp_path: Path) -> None:
    async def main() -> None:
        async with beside(tmp_path) as node:
            for number in (1, 2):
                node.comes(number)
            exchange, running = await node.own_part(await node.begins())
            await exchange.collection.arrived(0)
            assert [exchange._overdue(num_stalls=number) for number in (0, 1)] == [None, None]
            error = exchange._overdue(num_stalls=2)
            assert error is not None
            assert (error.peer_site_id, error.phase) == (0, "local")
            running.cancel()

    transport.run(main())


def test_what_is_over_meanwhile_does_not_fail_what_is_begun_again(tmp_path: Path) -> None:
    async def main() -> None:
        async with beside(tmp_path) as node:
            both = [node.comes(number) for number in (1, 2)]
            await node.begins()
            for process in both:
                node.exchanges.heard_done(process, DONE)
            result: Any = object()
            await node.begins()  # the same attempt, as after a new session
            assert not any(process.done for process in both)
            finished = asyncio.create_task(node.exchanges.done(node.word.plan, result))
            await asyncio.sleep(0)
            await node.begins()
            await asyncio.wait({finished})
            assert finished.cancelled(), "it is not the failure of the next one"

    transport.run(main())


def test_a_process_stops_when_another_one_has_failed(tmp_path: Path) -> None:
    async def main() -> None:
        async with beside(tmp_path) as node:
            both = [node.comes(number) for number in (1, 2)]
            await node.begins()
            node.exchanges.lost(both[0])
            assert node.told(2)[-1] == hosts.CancelAtHost(sync=1, attempt=1)

    transport.run(main())


def test_syncs_of_which_the_node_never_hears_an_end_are_dropped_with_the_next_one(tmp_path: Path) -> None:
    async def main() -> None:
        async with beside(tmp_path) as node:
            for number in (1, 2):
                node.comes(number)
            await node.begins()
            await node.begins(replace(node.word, plan=replace(node.word.plan, sync=3), in_flight=(1,)))
            assert set(node.exchanges._collected) == {1, 3}
            await node.begins(replace(node.word, plan=replace(node.word.plan, sync=5), in_flight=(3,)))
            assert set(node.exchanges._collected) == {3, 5}
            await asyncio.gather(*node.site.tasks)
            assert processes.DropInProcess(sync=1) in node.told(1)

    transport.run(main())


def test_a_process_that_is_lost_takes_what_it_has_not_done_along(tmp_path: Path) -> None:
    async def main() -> None:
        async with beside(tmp_path) as node:
            both = [node.comes(number) for number in (1, 2)]
            _, running = await node.own_part(await node.begins())
            node.exchanges.heard_done(both[0], DONE)
            node.exchanges.lost(both[0])
            await asyncio.sleep(0)
            assert not running.done(), "it had done its part"
            node.exchanges.lost(both[1])
            with pytest.raises(StateError, match="exchange process 2 of this host is lost, with its part of sync 1"):
                await running

    transport.run(main())


def test_what_a_process_fails_by_is_what_the_node_fails_by(tmp_path: Path) -> None:
    async def main() -> None:
        async with beside(tmp_path) as node:
            both = [node.comes(number) for number in (1, 2)]
            _, running = await node.own_part(await node.begins())
            failed = m.ExchangeFailed(
                sync=1, attempt=1, term=1, peer_site_id=7, direction=m.Direction.SENDING, phase="payloads", text="slow"
            )
            node.exchanges.heard_failed(both[0], replace(failed, attempt=2))
            node.exchanges.heard_failed(both[0], failed)
            with pytest.raises(AtollError, match="exchange process 1 of this host: slow"):
                await running

    transport.run(main())


def test_processes_hear_what_becomes_of_an_exchange(tmp_path: Path) -> None:
    async def main() -> None:
        async with beside(tmp_path) as node:
            both = [node.comes(number) for number in (1, 2)]
            await node.begins()
            plan = node.word.plan
            node.exchanges.weigh(plan, (100,), ())
            node.exchanges.hurry(1)
            node.exchanges.cancel(1, 1)
            node.exchanges.heard_done(both[0], DONE)
            node.exchanges.drop(1)
            await asyncio.gather(*node.site.tasks)
            assert not both[0].done
            for number in (1, 2):
                assert node.told(number)[1:] == [
                    m.Weights(sync=1, attempt=1, term=1, tokens=(100,)),
                    hosts.HurryAtHost(sync=1),
                    hosts.CancelAtHost(sync=1, attempt=1),
                    processes.DropInProcess(sync=1),
                ]
            node.exchanges.hurry(1)
            assert len(node.told(1)) == 5, "it is over"

    transport.run(main())


def test_a_next_attempt_cancels_the_one_before_and_says_what_is_in_the_file(tmp_path: Path) -> None:
    async def main() -> None:
        async with beside(tmp_path) as node:
            both = [node.comes(number) for number in (1, 2)]
            _, payloads = payloads_of(node.plane, 1)
            await node.begins()
            node.exchanges.stored(both[0], node.puts(1, {W: payloads[W]}))
            later = replace(node.word, plan=replace(node.word.plan, attempt=2))
            await node.begins(later)
            assert hosts.CancelAtHost(sync=1, attempt=1) in node.told(1)
            assert not [told for told in node.told(1) if isinstance(told, processes.BeginInProcess)][1].held
            # The first one is begun again, as after a new session.
            await node.begins(node.word)
            again = [told for told in node.told(1) if isinstance(told, processes.BeginInProcess)][2]
            assert [chunk for chunk, _ in payload_part.heard(again.held)] == [W]

    transport.run(main())


def test_a_host_that_has_lost_its_leader_abandons_what_processes_do(tmp_path: Path) -> None:
    async def main() -> None:
        async with beside(tmp_path) as node:
            both = [node.comes(number) for number in (1, 2)]
            _, payloads = payloads_of(node.plane, 1)
            await node.begins()
            said = node.puts(1, {W: payloads[W]})
            node.exchanges.abandon()
            assert node.told(1)[-1] == node.told(2)[-1] == processes.AbandonAll()
            node.exchanges.stored(both[0], said)
            assert node.plane.log.held(1, 1, 1).missing() == [V, W, COUNT]

    transport.run(main())


class Odd(FollowedExchanges):
    """Of a part in which something goes wrong that nothing was prepared for."""

    async def move(self, exchange: Exchange) -> None:
        raise LookupError("an odd one")


def test_a_failure_that_nothing_was_prepared_for_is_heard(tmp_path: Path) -> None:
    async def main() -> None:
        async with beside(tmp_path) as node:
            said: list[Any] = []
            failed: list[BaseException] = []
            odd = Odd(hub=node.site.hub, say=said.append, level=logging.DEBUG, failed=failed.append)
            data = node.plane.sync_data(0, 0, (), None)
            await odd.begin_on(node.word, data)
            await asyncio.gather(*odd._tasks.values())
            assert [str(error) for error in failed] == ["an odd one"]
            await odd.begin_on(replace(node.word, plan=replace(node.word.plan, attempt=2), weights=(1, 2)), data)
            (refused,) = said
            assert refused.text == "2 weights of 1 contributors"

    transport.run(main())


def test_norms_of_parts_are_what_the_wire_can_carry_together() -> None:
    half = m.Averaged(num_chunks=1, norms=(3e38,), num_high=(0,))
    result = ExchangeResult(payload_digest=bytes(32), tokens=(100,), links=(), averaged=half)
    both = together(result, [replace(DONE, averaged=half)]).averaged
    assert both is not None
    assert wire.decode(m.Averaged, wire.encode(both)).norms == both.norms == (LARGEST_NORM,)


def test_processes_hear_what_led_to_the_base(tmp_path: Path) -> None:
    async def main() -> None:
        async with beside(tmp_path) as node:
            for number in (1, 2):
                node.comes(number)
            commit, payloads = payloads_of(node.plane, 1)
            file = node.plane.log.begin(commit.sync, commit.term, commit.attempt)
            for chunk, payload in payloads.items():
                file.put(chunk, payload, payload_hash(payload))
            file.seal()
            commit = replace(commit, payload_digest=file.digest(commit))
            await node.plane.apply(commit)
            later = replace(node.word.plan, sync=commit.sync + 1, base_commit=1)
            await node.begins(replace(node.word, plan=later))
            told = node.begin_at(1)
            assert told.last == (processes.LastCommit(fragment=0, commit=commit),)
            key = AttemptKey(commit.sync, commit.term, commit.attempt)
            assert [attempt.key for attempt in told.left_errors] == [attempt.key for attempt in told.in_force] == [key]

    transport.run(main())


def test_where_the_node_takes_all_chunks_processes_take_no_part(tmp_path: Path) -> None:
    """As a receiver whose other hosts are not here."""

    async def main() -> None:
        async with beside(tmp_path) as node:
            for number in (1, 2):
                node.comes(number)
            await node.begins()
            later = replace(node.word, plan=replace(node.word.plan, attempt=2))
            await node.exchanges.begin(later, node.plane, node.plane.sync_data(0, 0, (), None))
            assert node.told(1)[1:] == [hosts.CancelAtHost(sync=1, attempt=1)]
            result: Any = object()
            assert await node.exchanges.done(later.plan, result) is result

    transport.run(main())
