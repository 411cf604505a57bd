"""What a host of a site sends the one that leads: words, slices and payloads, in any order and damaged."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.node import host_protocol as hosts
from atoll.node.core import events as e
from atoll.node.core.host_events import HostErrors, HostsChanged, SlicesArrived
from atoll.node.daemon.hosts.host_exchanges import HostExchanges
from atoll.node.dataplane.slices import Wanted, messages, new_digest, views
from atoll.node.exchange import hub as hub_module
from atoll.node.exchange.hub import Hub
from atoll.node.exchange.peers.frames import Encoded, pack_frames
from atoll.node.local_protocol import Greeting
from atoll.node.tasks import end
from atoll.protocol import PROTOCOL_VERSION, wire
from atoll.protocol.errors import AtollError, InvalidMessage
from atoll.protocol.plans import payload_digest, payload_hash
from atoll.protocol.v1 import hosts_pb2, local_pb2
from tests.harness.data_plane import filled
from tests.harness.failures import unexpected
from tests.harness.fuzzing import fuzz, protos
from tests.harness.hand_host import HAND_ADDRESS
from tests.harness.host_exchanges import begun, no_processes, on_host_0
from tests.harness.hostile_hosts import REFUSALS, Stream, Waiting, altered, frames_of, words
from tests.harness.hosts import Led
from tests.harness.model_on_hosts import (
    COUNT,
    FOR_HOST_0,
    LAYOUT,
    OWNED_BY_RANK_1,
    SETTINGS,
    W,
    copied,
    payloads_of,
    random_bytes,
)
from tests.harness.peer_streams import Aborted
from tests.harness.ranks import ServedRanks

GENERATION = 3
HELLO = hosts.HostHello(protocol_version=PROTOCOL_VERSION, site_name="a", host=1, num_hosts=2, num_ranks=1)
READY = hosts.HostReady(
    address=HAND_ADDRESS, has_state=False, commit=0, state_hash=b"", branch=0, site_address=HAND_ADDRESS
)
SOURCE = random_bytes(LAYOUT.buffer_bytes)
EVERYTHING = Wanted(fragment=0, with_frozen=True)
ONES = memoryview(b"\1" * LAYOUT.buffer_bytes)
OF_RANK_1 = copied(ONES, bytes(LAYOUT.buffer_bytes), OWNED_BY_RANK_1, EVERYTHING)
"""1 where a byte of SNAPSHOT is of what rank 1 owns."""
HEARD = (
    HostsChanged | HostErrors | SlicesArrived | e.WorkersExited | e.WorkersFailed | e.NodeFailed
    | e.RankSaid | e.RankLost
)  # fmt: skip


class Site:
    """Host 0 of a site with a state, whose ranks have their layout: in a loop that all examples share."""

    def __init__(self, folder: Path) -> None:
        self.runner = asyncio.Runner()
        self.run = self.runner.run
        self.run(self._make(folder))
        self.syncs = itertools.count(1)

    async def _make(self, folder: Path) -> None:
        self.led = Led(folder)
        await self.led.has_state()

    @asynccontextmanager
    async def example(self) -> AsyncIterator[Led]:
        """With a leader that knows of nobody. Nothing has failed in the end."""
        led = self.led
        led.leader = led.a_leader()
        led.server = ServedRanks(led.events.put_nowait, unexpected)
        led.server.serve(GENERATION, 2, Greeting(settings_json="{}", data_paths=()))
        led.starts(GENERATION)
        led.lays_out()
        led.leader._connected = led.server.connected
        yield led
        await end(led.server._tasks)
        await asyncio.gather(*led.tasks, return_exceptions=True)
        assert not led.failures
        while not led.events.empty():
            event = led.events.get_nowait()
            assert isinstance(event, HEARD), event

    @asynccontextmanager
    async def with_host(self) -> AsyncIterator[Led]:
        async with self.example() as led:
            attached = asyncio.create_task(led.leader.attach(None, Waiting([hosts.said(HELLO), hosts.said(READY)])))
            assert await led.events.get() == HostsChanged(())
            try:
                yield led
            finally:  # an example may be given up in the middle
                led.hub.abandon()
                await end([attached, *led.server._tasks])

    @property
    def session(self) -> int:
        """Of the host that is here."""
        return self.led.leader._hosts[1].session


@pytest.fixture(scope="module", name="site")
def _site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hub_module, "EARLY_HOLD_S", 0.0)
        site = Site(tmp_path_factory.mktemp("hosts"))
        yield site
        site.run(site.led.close())
        site.runner.close()


async def is_refused(answer: Coroutine[Any, Any, Any]) -> bool:
    """Or taken."""
    try:
        await answer
    except Aborted as refused:
        assert refused.args[0] in REFUSALS, refused  # noqa: PT017 one answer of two
        return True
    return False


@fuzz(300)
@given(st.integers(0, 2), st.lists(words(hosts_pb2.AttachRequest, frames_of(local_pb2.LocalRequest)), max_size=12))
def test_any_words_of_a_host_are_followed_or_end_it(
    site: Site, num_right: int, said: list[hosts_pb2.AttachRequest]
) -> None:
    """After its greeting and what its disk holds, or instead."""

    async def main() -> None:
        async with site.example() as led:
            stream = Stream([*(hosts.said(word) for word in (HELLO, READY)[:num_right]), *said])
            await is_refused(led.leader.attach(None, stream))
            assert not led.leader._hosts, "it is over"

    site.run(main())


@fuzz(200)
@given(st.data())
def test_slices_that_are_put_are_whole_or_the_host_is_given_up(site: Site, data: st.DataObject) -> None:
    with_frozen, bound = data.draw(st.booleans()), data.draw(st.sampled_from([16, hosts.MAX_DATA_BYTES]))

    async def main() -> None:
        async with site.with_host() as led:
            opened = hosts.SlicesPut(
                session=site.session, generation=GENERATION, rank=1, step=10, seq=2, fragment=0, with_frozen=with_frozen
            )
            wanted, digest = Wanted(fragment=0, with_frozen=with_frozen), new_digest()
            parts = [hosts_pb2.PutSlicesRequest(open=wire.to_proto(opened))]
            listed = OWNED_BY_RANK_1 if with_frozen else FOR_HOST_0
            sent = messages(views(LAYOUT, memoryview(SOURCE), listed, wanted), bound, digest)
            parts += [hosts_pb2.PutSlicesRequest(data=part) for part in sent]
            parts.append(hosts_pb2.PutSlicesRequest(hash=digest.finish()))
            parts = data.draw(altered(parts))
            before = bytes(led.snapshot.view)
            if await is_refused(led.leader._moving.put_slices(None, Stream(parts))):
                assert led.events.empty() or isinstance(led.events.get_nowait(), HostsChanged)
            else:
                assert isinstance(led.events.get_nowait(), SlicesArrived)
            touched = {at for at, byte in enumerate(led.snapshot.view) if byte != before[at]}
            assert all(OF_RANK_1[at] for at in touched), "nothing that the rank does not own"

    site.run(main())


@fuzz(100)
@given(protos(hosts_pb2.TakeSlicesRequest), st.booleans())
def test_whoever_takes_slices_gets_those_of_its_tensors_or_is_refused(
    site: Site, asked: hosts_pb2.TakeSlicesRequest, is_right: bool
) -> None:
    async def main() -> None:
        async with site.with_host() as led:
            if is_right:
                asked.session, asked.generation = site.session, GENERATION
            stream = Stream([])
            is_right_now = (asked.session, asked.generation) == (site.session, GENERATION)
            assert await is_refused(led.leader._moving.take_slices(asked, stream)) is not is_right_now
            if not is_right_now:
                assert not stream.sent
            else:
                kinds = [message.WhichOneof("body") for message in stream.sent]
                assert kinds[-1] == "hash"
                assert set(kinds[:-1]) <= {"data"}
                assert all(len(message.data) <= hosts.MAX_DATA_BYTES for message in stream.sent)

    site.run(main())


@dataclass(frozen=True)
class Exchanging:
    """An exchange of both hosts, and what its payloads are."""

    led: Led
    sync: int
    running: asyncio.Task[Any]
    payloads: dict[int, bytes]

    def frames(self, bound: int) -> Iterator[bytes]:
        items = [Encoded(chunk, found, payload_hash(found)) for chunk, found in self.payloads.items()]
        return pack_frames(items, bound, wrapped=False)


@asynccontextmanager
async def exchanging(site: Site) -> AsyncIterator[Exchanging]:
    sync = next(site.syncs)
    async with site.with_host() as led:
        wanted = begun(led, alone=True, sync=sync)
        led.leader._hosts[1].snapshots[0] = (GENERATION, 10, 2)
        led.leader.exchanges.begin(wanted)
        running = on_host_0(led, wanted)
        led.snapshot.view[:] = filled(LAYOUT, 0)  # other tests put anything there
        data = led.plane.sync_data(0, 0, ())
        payloads = {chunk: data.reduce(chunk, [(100, data.contribution(chunk))]) for chunk in (W, COUNT)}
        yield Exchanging(led, sync, running, payloads)
        led.leader.exchanges.drop(sync)
        led.hub.drop_sync(sync)
        await asyncio.gather(running, return_exceptions=True)


BOUNDS = st.sampled_from([256, 1 << 16])


@fuzz(150)
@given(st.data())
def test_payloads_that_are_put_are_those_of_the_host_or_refused(site: Site, data: st.DataObject) -> None:
    async def main() -> None:
        async with exchanging(site) as found:
            moving = found.led.leader._moving
            of = hosts.PayloadsOf(session=site.session, sync=found.sync, term=1, attempt=1)
            parts = [hosts_pb2.PutPayloadsRequest(open=wire.to_proto(of))]
            parts += [hosts_pb2.PutPayloadsRequest(data=frame) for frame in found.frames(data.draw(BOUNDS))]
            is_bad = await is_refused(moving.put_payloads(None, Stream(data.draw(altered(parts)))))
            if found.running.done() or not is_bad:
                assert not found.running.done() or found.running.result().tokens == (100,)
            await is_refused(moving.take_payloads(data.draw(protos(hosts_pb2.TakePayloadsRequest)), Stream([])))

    site.run(main())


def following(hub: Hub, channel: Any, said: list[Any]) -> HostExchanges:
    return HostExchanges(
        hub=hub,
        channel=channel,
        session=1,
        say=said.append,
        level=0,
        failed=unexpected,
        processes=no_processes(hub),
        kept=lambda: None,
    )


@fuzz(100)
@given(st.data())
def test_payloads_that_are_taken_are_those_of_other_hosts_or_refused(site: Site, data: st.DataObject) -> None:
    """By a host: here it is the exchange of host 0 that takes them."""

    async def main() -> None:
        async with exchanging(site) as found:
            exchange = await found.led.hub.running(found.sync, 1, 1)
            frames = found.frames(data.draw(BOUNDS))
            parts = data.draw(altered([hosts_pb2.TakePayloadsResponse(data=frame) for frame in frames]))
            said: list[Any] = []
            channel: Any = SimpleNamespace(unary_stream=lambda *_, **__: lambda _: Stream(parts))
            taking = following(found.led.hub, channel, said)
            taking._own = exchange.attempt.data.own or range(0)
            with suppress(AtollError):
                await taking._take(exchange)
            for chunk, payload in found.payloads.items():
                if exchange.collection.has(chunk):
                    assert exchange.collection.file.read(chunk) == payload

    site.run(main())


@fuzz(100)
@given(st.data())
def test_payloads_of_a_commit_that_are_taken_are_its_own_or_refused(site: Site, data: st.DataObject) -> None:
    async def main() -> None:
        led = site.led
        led.snapshot.view[:] = filled(LAYOUT, 0)  # other tests put anything there
        made, payloads = payloads_of(led.plane, 1)
        of, hashes = replace(made, sync=next(site.syncs)), [payload_hash(payload) for payload in payloads.values()]
        commit = replace(of, payload_digest=payload_digest(SETTINGS.run_id, of, hashes))
        items = [Encoded(chunk, payload, payload_hash(payload)) for chunk, payload in payloads.items()]
        frames = pack_frames(items, data.draw(BOUNDS), wrapped=False)
        parts = data.draw(altered([hosts_pb2.TakePayloadsResponse(data=frame) for frame in frames]))
        channel: Any = SimpleNamespace(unary_stream=lambda *_, **__: lambda _: Stream(parts))
        said: list[Any] = []
        taking = following(led.hub, channel, said)
        log = led.plane.log
        try:
            await taking.take_committed(commit, led.plane)
            held = log.held(commit.sync, commit.term, commit.attempt)
            read = {chunk: held.read(chunk) for chunk in payloads}  # each has its hash
            assert held.sealed
            assert read == payloads or held.digest(commit) != commit.payload_digest
        except AtollError:
            assert not log.held(commit.sync, commit.term, commit.attempt).sealed
        finally:
            log.drop(commit.sync)
        assert not said

    site.run(main())


@fuzz(100)
@given(protos(hosts_pb2.AttachRequest) | protos(hosts_pb2.AttachResponse))
def test_any_content_is_a_word_or_refused(envelope: Any) -> None:
    is_request = isinstance(envelope, hosts_pb2.AttachRequest)
    try:
        if is_request:
            said = hosts.heard_of_host(envelope)
            assert hosts.heard_of_host(hosts.said(said)) == said
        else:
            told = hosts.heard_of_leader(envelope)
            assert hosts.heard_of_leader(hosts.told(told)) == told
    except InvalidMessage:
        pass
