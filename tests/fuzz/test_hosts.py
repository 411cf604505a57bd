"""What the hosts of a site send each other: words, and slices, in any order and damaged."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message
from hypothesis import given
from hypothesis import strategies as st

from atoll.node import host_protocol as hosts
from atoll.node.core import events as e
from atoll.node.core.host_events import HostsChanged, SlicesArrived
from atoll.node.daemon.hosts.follower import Follower
from atoll.node.daemon.hosts.relay import _Rank
from atoll.node.dataplane.slices import Wanted, messages, new_digest, views
from atoll.node.local_protocol import Greeting
from atoll.node.tasks import end
from atoll.protocol import PROTOCOL_VERSION, wire
from atoll.protocol.errors import AtollError, InvalidMessage, PeerError
from atoll.protocol.settings import settings_to_json
from atoll.protocol.v1 import hosts_pb2, local_pb2
from tests.harness.fuzzing import damaged, fuzz, protos
from tests.harness.hosts import (
    LAYOUT,
    MANIFEST,
    OWNED_BY_RANK_1,
    SETTINGS,
    FakeLauncher,
    Led,
    config_of,
    copied,
    pieces_of,
    random_bytes,
)
from tests.harness.peer_streams import Aborted

ADDRESS = "127.0.0.1:1"
GENERATION = 3
HELLO = hosts.HostHello(protocol_version=PROTOCOL_VERSION, site_name="a", host=1, num_hosts=2, num_ranks=1)
WELCOME = hosts.HostWelcome(run_id="run", settings_json=settings_to_json(SETTINGS), session=1)
SOURCE = random_bytes(LAYOUT.buffer_bytes)
EVERYTHING = Wanted(fragment=0, with_frozen=True)
ONES = memoryview(b"\1" * LAYOUT.buffer_bytes)
OF_RANK_1 = copied(ONES, bytes(LAYOUT.buffer_bytes), OWNED_BY_RANK_1, EVERYTHING)
"""1 where a byte of SNAPSHOT is of what rank 1 owns."""
REFUSALS = {
    grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNAVAILABLE,
}  # fmt: skip


class Stream:
    """The near end of one; it is over after what it has to say."""

    def __init__(self, received: list[Any]) -> None:
        self.received = deque(received)
        self.sent: list[Any] = []

    async def read(self) -> Any:
        await asyncio.sleep(0)
        return self.received.popleft() if self.received else grpc.aio.EOF

    async def write(self, message: Any) -> None:
        self.sent.append(message)

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        raise Aborted(code, details)

    def cancel(self) -> None:
        self.received.clear()


def frames_of(cls: type[local_pb2.LocalRequest] | type[local_pb2.LocalResponse]) -> st.SearchStrategy[bytes]:
    whole = protos(cls).map(lambda frame: bytes(frame.SerializeToString()))
    return whole | whole.flatmap(damaged)


@st.composite
def words(draw: st.DrawFn, cls: type[Message], frames: st.SearchStrategy[bytes]) -> Any:
    """Any; those of ranks have frames that ranks could say, too."""
    word: Any = draw(protos(cls))
    if word.WhichOneof("body") == "frame" and draw(st.booleans()):
        word.frame.data = draw(frames)
    return word


@st.composite
def altered(draw: st.DrawFn, parts: list[Any]) -> list[Any]:
    """Messages of a stream, with some of them changed, left out, said twice, in another place, or quite others."""
    found = list(parts)
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, max(0, len(found) - 1)))
        match draw(st.sampled_from(["damage", "drop", "twice", "swap", "other"])):
            case "damage" if found:
                changed = type(found[at])()
                try:
                    changed.ParseFromString(draw(damaged(found[at].SerializeToString())))
                except DecodeError:
                    continue  # grpc itself refuses it
                found[at] = changed
            case "drop":
                del found[at : at + 1]
            case "twice":
                found[at:at] = found[at : at + 1]
            case "swap" if found:
                found[at], found[0] = found[0], found[at]
            case "other":
                found.insert(at, draw(protos(type(parts[0]))))
    return found


# --- a leader hears


def a_leader() -> Led:
    """With ranks that have their layout."""
    site = Led()
    site.server.serve(GENERATION, 2, Greeting(settings_json="{}", data_paths=()))
    site.starts(GENERATION)
    site.lays_out(GENERATION)
    site.leader._connected = site.server.connected
    return site


@fuzz(200)
@given(st.booleans(), st.lists(words(hosts_pb2.AttachRequest, frames_of(local_pb2.LocalRequest)), max_size=12))
def test_any_words_of_a_host_are_followed_or_end_it(says_hello: bool, said: list[hosts_pb2.AttachRequest]) -> None:
    async def main() -> None:
        site = a_leader()
        stream = Stream([hosts.said(HELLO), *said] if says_hello else said)
        try:
            await site.leader.attach(None, stream)
        except Aborted as refused:
            assert refused.args[0] in REFUSALS, refused  # noqa: PT017 one answer of two
        assert not site.leader._hosts, "it is over"
        await end(site.server._tasks)
        while not site.events.empty():
            event = site.events.get_nowait()
            assert isinstance(event, HostsChanged | e.WorkersExited | e.WorkersFailed | e.RankSaid | e.RankLost), event
        site.snapshot.close()
        site.publish.close()

    asyncio.run(main())


@fuzz(200)
@given(st.data())
def test_slices_that_are_put_are_whole_or_the_host_is_given_up(data: st.DataObject) -> None:
    opened = hosts.SlicesPut(
        session=1, generation=GENERATION, rank=1, step=10, seq=2, fragment=0, with_frozen=data.draw(st.booleans())
    )
    wanted, digest = Wanted(fragment=0, with_frozen=opened.with_frozen), new_digest()
    parts = [hosts_pb2.PutSlicesRequest(open=wire.to_proto(opened))]
    bound = data.draw(st.sampled_from([16, hosts.MAX_DATA_BYTES]))
    sent = messages(views(LAYOUT, memoryview(SOURCE), OWNED_BY_RANK_1, wanted), bound, digest)
    parts += [hosts_pb2.PutSlicesRequest(data=part) for part in sent]
    parts.append(hosts_pb2.PutSlicesRequest(hash=digest.finish()))
    parts = data.draw(altered(parts))

    async def main() -> None:
        site = a_leader()
        attached = asyncio.create_task(site.leader.attach(None, Waiting([hosts.said(HELLO)])))
        while not site.leader._hosts:  # noqa: ASYNC110 it is there at the next turn of the loop
            await asyncio.sleep(0)
        assert site.events.get_nowait() == HostsChanged(())
        before = bytes(site.snapshot.view)
        try:
            await site.leader.put_slices(None, Stream(parts))
        except Aborted as refused:
            assert refused.args[0] in REFUSALS, refused  # noqa: PT017 one answer of two
            assert site.events.empty()
        else:
            assert isinstance(site.events.get_nowait(), SlicesArrived)
        touched = {at for at, byte in enumerate(site.snapshot.view) if byte != before[at]}
        assert all(OF_RANK_1[at] for at in touched), "nothing that the rank does not own"
        await end([attached])
        site.snapshot.close()
        site.publish.close()

    asyncio.run(main())


class Waiting(Stream):
    """It goes on in silence."""

    async def read(self) -> Any:
        if not self.received:
            await asyncio.get_running_loop().create_future()
        return await super().read()


@fuzz(100)
@given(protos(hosts_pb2.TakeSlicesRequest), st.booleans())
def test_whoever_takes_slices_gets_those_that_are_published_or_is_refused(
    asked: hosts_pb2.TakeSlicesRequest, is_published: bool
) -> None:
    async def main() -> None:
        site = a_leader()
        attached = asyncio.create_task(site.leader.attach(None, Waiting([hosts.said(HELLO)])))
        while not site.leader._hosts:  # noqa: ASYNC110 it is there at the next turn of the loop
            await asyncio.sleep(0)
        published = asyncio.create_task(site.leader.publish(site.leader.ranks, 0, 2)) if is_published else attached
        await asyncio.sleep(0)
        stream = Stream([])
        is_right = is_published and (asked.session, asked.number) == (1, 1)
        try:
            await site.leader.take_slices(asked, stream)
        except Aborted as refused:
            assert refused.args[0] in REFUSALS, refused  # noqa: PT017 one answer of two
            assert not is_right
            assert not stream.sent
        else:
            assert is_right
            kinds = [message.WhichOneof("body") for message in stream.sent]
            assert kinds == ["open", "data", "hash"]
            assert len(stream.sent[1].data) <= hosts.MAX_DATA_BYTES
        await end([attached, published])
        site.snapshot.close()
        site.publish.close()

    asyncio.run(main())


# --- a follower hears


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


def a_follower(stack: AsyncExitStack) -> Any:
    """Welcome, with a rank that has connected as number 1."""
    follower: Any = Follower(config_of(1, ADDRESS), stack)
    follower._launcher = FakeLauncher()
    follower._home = SimpleNamespace(optimizer_folder=Path("/nowhere"))
    follower._welcome(WELCOME)
    follower._relay._ranks[1] = _Rank(RankHere(), rank=1, pieces=pieces_of(1))  # type: ignore[arg-type]
    follower._relay.socket.open()
    stack.push_async_callback(follower._relay.close)
    return follower


@fuzz(200)
@given(st.lists(words(hosts_pb2.AttachResponse, frames_of(local_pb2.LocalResponse)), max_size=12))
def test_any_words_of_a_leader_are_followed_or_the_host_ends_its_stream(told: list[hosts_pb2.AttachResponse]) -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            follower = a_follower(stack)
            ended = asyncio.get_running_loop().create_future()
            try:
                await follower._hear_all(Stream(told), ended)
            except AtollError:
                assert not ended.done()
            else:
                code, text = ended.result()
                assert code >= 0
                assert len(text) <= 4096

    asyncio.run(main())


class AllTaken(Exception):
    pass


class Once:
    """A queue of one number; its second reader is told that this was all."""

    def __init__(self) -> None:
        self._left = [1]

    async def get(self) -> int:
        if not self._left:
            raise AllTaken
        return self._left.pop()


@fuzz(200)
@given(st.data())
def test_slices_that_are_taken_are_whole_or_the_leader_is_given_up(data: st.DataObject) -> None:
    opened = hosts.SlicesOpen(fragment=0, with_frozen=data.draw(st.booleans()), num_moments=0)
    wanted, digest = Wanted(fragment=0, with_frozen=opened.with_frozen), new_digest()
    parts = [hosts_pb2.TakeSlicesResponse(open=wire.to_proto(opened))]
    sent = messages(views(LAYOUT, memoryview(SOURCE), pieces_of(1), wanted), hosts.MAX_DATA_BYTES, digest)
    parts += [hosts_pb2.TakeSlicesResponse(data=part) for part in sent]
    parts.append(hosts_pb2.TakeSlicesResponse(hash=digest.finish()))
    parts = data.draw(altered(parts))

    async def main() -> None:
        async with AsyncExitStack() as stack:
            follower = a_follower(stack)
            follower._relay._lay_out(MANIFEST, LAYOUT.chunk_elements)
            publish = follower._relay._buffers[1].view
            before = bytes(publish)
            follower._takes = Once()
            said: list[Any] = []
            follower._say = said.append
            channel = SimpleNamespace(unary_stream=lambda *_, **__: lambda _: Stream(parts))
            try:
                await follower._take_all(channel)
            except PeerError:
                assert not said
            except AllTaken:
                if said:
                    assert said == [hosts.SlicesTaken(number=1)]
                    listed = Wanted(fragment=0, with_frozen=parts[0].open.with_frozen)
                    if parts[0].open.fragment == 0 and not parts[0].open.num_moments:
                        assert bytes(publish) == copied(memoryview(SOURCE), before, pieces_of(1), listed)

    asyncio.run(main())


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
