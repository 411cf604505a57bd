"""What a host of a site hears of the one that leads: words and slices, in any order and damaged."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.node import host_protocol as hosts
from atoll.node.daemon.hosts import follower as follower_module
from atoll.node.daemon.hosts.endpoint import Endpoint
from atoll.node.daemon.hosts.host_exchanges import HostExchanges
from atoll.node.daemon.hosts.rank_socket import _Rank
from atoll.node.daemon.hosts.slices_between import SlicesServed, _received
from atoll.node.dataplane.slices import Items, Wanted, messages, new_digest, views
from atoll.node.local_protocol import Piece
from atoll.protocol import wire
from atoll.protocol.errors import AtollError, InvalidMessage
from atoll.protocol.settings import settings_to_json
from atoll.protocol.trust.security import PLAIN
from atoll.protocol.v1 import hosts_pb2, local_pb2
from tests.fuzz.test_hosts import is_refused
from tests.harness.following import FakeLauncher, seeded
from tests.harness.fuzzing import fuzz, protos
from tests.harness.host_exchanges import no_processes
from tests.harness.hostile_hosts import Stream, altered, frames_of, words
from tests.harness.hosts import SITE_ID, config_of
from tests.harness.model_on_hosts import (
    FOR_HOST_1,
    LAYOUT,
    MANIFEST,
    SETTINGS,
    copied,
    pieces_of,
    pieces_of_site,
    random_bytes,
)

ADDRESS = "127.0.0.1:1"
AUDITED = replace(SETTINGS, sync=replace(SETTINGS.sync, audits=2))
WELCOME = hosts.HostWelcome(run_id="run", settings_json=settings_to_json(AUDITED), session=1, incarnation=1)
LAID_OUT = hosts.SiteLaidOut(
    generation=1,
    site_id=SITE_ID,
    manifest=MANIFEST,
    chunk_elements=SETTINGS.sync.chunk_elements,
    dtypes=tuple(pieces_of_site().dtypes[spec.name] for spec in MANIFEST.tensors),
    pieces=FOR_HOST_1,
    num_pieces=(len(FOR_HOST_1), 0),
    host_addresses=("", "127.0.0.1:9"),
    key=bytes(hosts.KEY_BYTES),
)
SOURCE = random_bytes(LAYOUT.buffer_bytes)
CHANGING = Wanted(fragment=0, with_frozen=False)
TAKE = hosts.TakeSnapshot(generation=1, fragment=0, step=10, seq=2)
NOT_HERE: Any = SimpleNamespace(
    unary_stream=lambda *_, **__: lambda _: Stream([]), stream_unary=lambda *_, **__: lambda: Stream([])
)
"""In the place of a channel to the leader, which ends each call at once."""


class RankHere:
    """The near end of a rank's socket."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []

    def send_frame(self, frame: bytes, fds: tuple[int, ...] = ()) -> None:
        assert len(fds) in (0, 2)
        self.frames.append(frame)

    def shut(self) -> None:
        pass

    def close(self) -> None:
        pass


class Here:
    """A host that is welcome, and its endpoint with a state and buffers: in a loop that all examples share."""

    def __init__(self, folder: Path) -> None:
        self.runner = asyncio.Runner()
        self.run = self.runner.run
        self.said: list[Any] = []
        self.run(self._make(folder))

    async def _make(self, folder: Path) -> None:
        self.stack = AsyncExitStack()
        follower: Any = follower_module.Follower(config_of(1, ADDRESS, home=folder / "host1"), self.stack)
        self.follower = follower
        follower._launcher = FakeLauncher()
        follower._say = self.said.append
        follower._rank_socket.socket.open()
        follower._welcome(WELCOME)
        self.stack.push_async_callback(follower._rank_socket.close)
        self.endpoint: Endpoint = await follower._make_endpoint()
        follower._endpoint = self.endpoint
        await self.endpoint.lay_out(LAID_OUT)
        assert self.endpoint.plane is not None
        self.plane = self.endpoint.plane

    @asynccontextmanager
    async def example(self) -> AsyncIterator[Any]:
        """With a rank that has connected as number 1."""
        self.said.clear()
        follower = self.follower
        follower._rank_socket._ranks.clear()
        follower._rank_socket._ranks[1] = _Rank(RankHere(), rank=1, pieces=pieces_of(1))  # type: ignore[arg-type]
        follower._launches = asyncio.Queue()
        self.endpoint._jobs, self.endpoint._sources, self.endpoint._is_behind = asyncio.Queue(), None, False
        yield follower
        follower._rank_socket._ranks.clear()


@pytest.fixture(scope="module", name="here")
def _here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Here]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(follower_module, "prepare_kernels", lambda: None)
        here = Here(tmp_path_factory.mktemp("followers"))
        yield here
        here.run(here.stack.aclose())
        here.runner.close()


@fuzz(300)
@given(st.lists(words(hosts_pb2.AttachResponse, frames_of(local_pb2.LocalResponse)), max_size=12))
def test_any_words_of_a_leader_are_followed_or_the_host_ends_its_stream(
    here: Here, told: list[hosts_pb2.AttachResponse]
) -> None:
    async def main() -> None:
        async with here.example() as follower:
            ended = asyncio.get_running_loop().create_future()
            try:
                await follower._hear_all(Stream(told), ended)
            except AtollError:
                assert not ended.done()
            else:
                heard = ended.result()
                assert heard.exit_code >= 0
                assert len(heard.text) <= 4096

    here.run(main())


STATE_WORDS = ("apply", "publish", "take_snapshot", "advance_errors", "keep", "kept_by_site", "roll_back")
EXCHANGE_WORDS = ("begin_exchange", "weights", "hurry_exchange", "cancel_exchange", "drop_sync")


@st.composite
def jobs(draw: st.DrawFn) -> Any:
    """Any word that an endpoint follows, but those that let it fetch: these are fuzzed with what donors say."""
    envelope = hosts_pb2.AttachResponse()
    name = draw(st.sampled_from((*STATE_WORDS, *EXCHANGE_WORDS)))
    part = getattr(envelope, name)
    part.SetInParent()
    part.CopyFrom(draw(protos(type(part))))
    return envelope


@fuzz(300)
@given(st.booleans(), st.lists(jobs(), min_size=1, max_size=4))
def test_any_job_is_done_or_refused(here: Here, has_buffers: bool, told: list[hosts_pb2.AttachResponse]) -> None:
    """Before the host knows the model, too."""

    async def main() -> None:
        async with here.example():
            failed: list[BaseException] = []
            endpoint = here.endpoint
            if here.plane.held() is None:
                await seeded(here.plane, seed=0)
            endpoint.plane = here.plane if has_buffers else None
            exchanges = HostExchanges(
                hub=endpoint._hub,
                channel=NOT_HERE,
                session=1,
                say=here.said.append,
                level=10,
                failed=failed.append,
                processes=no_processes(endpoint._hub),
                kept=lambda: endpoint._kept,
            )
            try:
                for envelope in told:
                    try:
                        word: Any = hosts.heard_of_leader(envelope)
                    except InvalidMessage:
                        continue
                    try:
                        await endpoint._do(word, exchanges, NOT_HERE, 1)
                    except AtollError:
                        break  # the stream ends
            finally:
                await exchanges.close()
                endpoint.plane = here.plane
            for said in here.said:
                assert hosts.heard_of_host(hosts.said(said)) == said

    here.run(main())


@fuzz(200)
@given(st.data())
def test_slices_that_are_taken_are_whole_or_the_leader_is_given_up(here: Here, data: st.DataObject) -> None:
    digest = new_digest()
    parts = [
        hosts_pb2.TakeSlicesResponse(data=part)
        for part in messages(views(LAYOUT, memoryview(SOURCE), FOR_HOST_1, CHANGING), 24, digest)
    ]
    parts.append(hosts_pb2.TakeSlicesResponse(hash=digest.finish()))
    parts = data.draw(altered(parts))
    asked: list[hosts_pb2.TakeSlicesRequest] = []

    def called(request: hosts_pb2.TakeSlicesRequest) -> Stream:
        asked.append(request)
        return Stream(parts)

    async def main() -> None:
        async with here.example():
            await here.endpoint.lay_out(LAID_OUT)  # other tests leave any layout there
            plane = here.plane
            assert plane.snapshot is not None
            plane.snapshot.view[:] = before = bytes(LAYOUT.buffer_bytes)
            channel: Any = SimpleNamespace(unary_stream=lambda *_, **__: called)
            try:
                await here.endpoint._take_snapshot(TAKE, channel, 5)
            except AtollError:
                assert not here.said
            else:
                assert here.said == [hosts.SnapshotTaken(generation=1, fragment=0, step=10, seq=2)]
                assert bytes(plane.snapshot.view) == copied(memoryview(SOURCE), before, FOR_HOST_1, CHANGING)
            mask = copied(memoryview(b"\1" * LAYOUT.buffer_bytes), before, FOR_HOST_1, CHANGING)
            assert all(mask[at] or not byte for at, byte in enumerate(plane.snapshot.view))
            expected = hosts_pb2.TakeSlicesRequest(session=5, generation=1, fragment=0, step=10, seq=2)
            assert asked == [expected]

    here.run(main())


@fuzz(100)
@given(st.data())
def test_slices_that_another_host_gives_are_whole_or_refused(here: Here, data: st.DataObject) -> None:
    digest = new_digest()
    parts = [
        hosts_pb2.TakeFromHostResponse(data=part)
        for part in messages(views(LAYOUT, memoryview(SOURCE), FOR_HOST_1, CHANGING), 24, digest)
    ]
    parts.append(hosts_pb2.TakeFromHostResponse(hash=digest.finish()))
    call: Any = Stream(data.draw(altered(parts)))
    into = bytearray(LAYOUT.buffer_bytes)

    async def main() -> None:
        listed = list(views(LAYOUT, memoryview(into), FOR_HOST_1, CHANGING))
        try:
            await _received(call, listed, 60, "host 2 of this site")
        except AtollError:
            pass
        else:
            assert bytes(into) == copied(memoryview(SOURCE), bytes(LAYOUT.buffer_bytes), FOR_HOST_1, CHANGING)

    here.run(main())


@fuzz(100)
@given(protos(hosts_pb2.TakeFromHostRequest), st.booleans(), st.integers(0, 3))
def test_whoever_asks_a_host_for_slices_gets_its_own_or_is_refused(
    here: Here, asked: hosts_pb2.TakeFromHostRequest, is_right: bool, host: int
) -> None:
    """The rank of this host has `w` for itself, and `v` for host 0."""

    async def main() -> None:
        async with here.example() as follower:
            await follower._lay_out(LAID_OUT)
            ranks, pieces = follower._rank_socket, pieces_of(1)
            rank = ranks._ranks[1]
            rank.owned, rank.sealed = tuple(range(len(pieces))), {0: (10, 2)}
            if is_right:
                asked.key, asked.fragment, asked.step, asked.seq, asked.host = LAID_OUT.key, 0, 10, 2, host
            served = SlicesServed(
                here.endpoint._config, PLAIN, here.endpoint._limits, here.endpoint._hub, ranks.written_for
            )
            stream = Stream([])
            is_of_site = is_right and host == 1
            assert await is_refused(served.take_from_host(asked, stream)) is not is_of_site
            data = b"".join(message.data for message in stream.sent)
            assert len(data) == (sum(view.nbytes for view in of_host_1(here, pieces)) if is_of_site else 0)

    here.run(main())


def of_host_1(here: Here, pieces: tuple[Piece, ...]) -> list[Items]:
    assert here.plane.snapshot is not None
    return list(views(LAYOUT, here.plane.snapshot.view, [p for p in pieces if p.name in ("count", "w")], CHANGING))


@fuzz(100)
@given(st.data())
def test_any_layout_is_taken_or_refused(here: Here, data: st.DataObject) -> None:
    """Of a site whose model is that of before, or another one."""
    told = data.draw(protos(hosts_pb2.SiteLaidOut))
    if data.draw(st.booleans()):
        told.manifest.CopyFrom(wire.to_proto(MANIFEST))
    try:
        laid_out = wire.from_proto(hosts.SiteLaidOut, told)
    except InvalidMessage:
        return

    async def main() -> None:
        async with here.example():
            try:
                await here.endpoint.lay_out(replace(laid_out, generation=1))
            except AtollError:
                pass
            await here.endpoint.lay_out(LAID_OUT)
            assert here.endpoint.plane is here.plane

    here.run(main())
