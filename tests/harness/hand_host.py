"""A host of a site whose words a test says."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

import grpc
import grpc.aio

from atoll.node import host_protocol as hosts
from atoll.node import local_protocol as local
from atoll.node.dataplane.slices import Wanted, messages, new_digest, views
from atoll.node.local_protocol import Piece
from atoll.protocol import PROTOCOL_VERSION, transport, wire
from atoll.protocol.status import from_rpc_error
from atoll.protocol.v1 import hosts_pb2, local_pb2
from tests.harness.calls import ENDED, done_writing, write
from tests.harness.model_on_hosts import LAYOUT, OWNED_BY_RANK_1

T = TypeVar("T")
HAND_ADDRESS = "127.0.0.1:9"
"""At which peers would find it."""


class HandHost:
    """A host whose words a test says."""

    def __init__(self, address: str, number: int = 1, handshake: transport.Handshake | None = None) -> None:
        self._channel = transport.open_channel(address, handshake=handshake, max_message_bytes=hosts.MAX_MESSAGE_BYTES)
        attach: Any = self._channel.stream_stream(
            hosts.ATTACH_METHOD,
            request_serializer=hosts_pb2.AttachRequest.SerializeToString,
            response_deserializer=hosts_pb2.AttachResponse.FromString,
        )
        self._call = attach()
        self.number = number
        self.session = 0
        self.told = 0
        """The number of what it was told to hold, or to go back to, last."""

    async def says(self, message: hosts.HostSaid) -> None:
        await self.says_bytes(hosts.said(message))

    async def says_bytes(self, envelope: hosts_pb2.AttachRequest) -> None:
        """If the leader ends the stream meanwhile, `hears` raises what it says of that."""
        with suppress(*ENDED):
            await write(self._call, envelope)

    async def says_hello(self, **more: Any) -> None:
        hello = hosts.HostHello(
            protocol_version=PROTOCOL_VERSION, site_name="a", host=self.number, num_hosts=2, num_ranks=1, machine="b"
        )
        await self.says(replace(hello, **more))

    def ready(self, **more: Any) -> hosts.HostReady:
        """Without a state, unless it is said."""
        ready = hosts.HostReady(
            address=HAND_ADDRESS, has_state=False, commit=0, state_hash=b"", branch=0, site_address=HAND_ADDRESS
        )
        return replace(ready, **more)

    async def holds(self, commit: int, state_hash: bytes, lacks: str = "") -> None:
        await self.says(
            hosts.StateHeld(has_state=True, commit=commit, state_hash=state_hash, lacks=lacks, number=self.told)
        )

    async def hears(self, kind: type[T]) -> T:
        """The next word but beats, which is of that kind. Raises what the leader ends the stream with."""
        while True:
            try:
                envelope = await self._call.read()
            except grpc.RpcError as error:
                raise from_rpc_error(error, "host 0") from None
            assert envelope is not grpc.aio.EOF, "the stream has ended"
            word = hosts.heard_of_leader(envelope)
            if isinstance(word, hosts.HoldState | hosts.RollBackHost):
                self.told = word.number
            if isinstance(word, kind) or not isinstance(word, hosts.HostBeat):
                assert isinstance(word, kind), word
                return word

    async def ended(self) -> None:
        """When the leader has ended the stream, however."""
        try:
            while await self._call.read() is not grpc.aio.EOF:
                pass
        except grpc.RpcError:
            pass

    async def says_of_rank(self, connection: int, rank: int, generation: int, said: local.Said) -> None:
        """As the rank sends it over its local socket."""
        data = local.pack(generation, rank, said).SerializeToString()
        await self.says(hosts.RankFrame(connection=connection, data=data))

    async def rank_hears(self, connection: int) -> local_pb2.LocalResponse:
        frame = await self.hears(hosts.RankFrame)
        assert frame.connection == connection
        return local.decode(local_pb2.LocalResponse, frame.data)

    def put_of(self, generation: int, **more: Any) -> hosts.SlicesPut:
        opened = hosts.SlicesPut(
            session=self.session, generation=generation, rank=1, step=10, seq=2, fragment=0, with_frozen=True
        )
        return replace(opened, **more)

    async def put(
        self,
        opened: hosts.SlicesPut,
        source: bytes,
        *,
        pieces: Iterable[Piece] = OWNED_BY_RANK_1,
        wrong_hash: bytes = b"",
        after_opening: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """What it has in SNAPSHOT. Raises what the leader says of it."""
        method: Any = self._channel.stream_unary(
            hosts.PUT_METHOD,
            request_serializer=hosts_pb2.PutSlicesRequest.SerializeToString,
            response_deserializer=hosts_pb2.PutSlicesResponse.FromString,
        )
        wanted, digest = Wanted(fragment=opened.fragment, with_frozen=opened.with_frozen), new_digest()
        parts = [hosts_pb2.PutSlicesRequest(open=wire.to_proto(opened))]
        found = views(LAYOUT, memoryview(source), list(pieces), wanted)
        parts += [hosts_pb2.PutSlicesRequest(data=data) for data in messages(found, hosts.MAX_DATA_BYTES, digest)]
        parts.append(hosts_pb2.PutSlicesRequest(hash=wrong_hash or digest.finish()))

        call = method()
        try:
            await write(call, parts[0])
            if after_opening is not None:
                await after_opening()
            for part in parts[1:]:
                await write(call, part)
            await done_writing(call)
            await call
        except grpc.RpcError as error:
            raise from_rpc_error(error, "host 0") from None

    async def take(self, asked: hosts.TakeSnapshot, session: int | None = None) -> bytes:
        """What ranks of other hosts have written of its tensors. Raises what the leader says of it."""
        method: Any = self._channel.unary_stream(
            hosts.TAKE_METHOD,
            request_serializer=hosts_pb2.TakeSlicesRequest.SerializeToString,
            response_deserializer=hosts_pb2.TakeSlicesResponse.FromString,
        )
        of = hosts_pb2.TakeSlicesRequest(
            session=self.session if session is None else session,
            generation=asked.generation,
            fragment=asked.fragment,
            step=asked.step,
            seq=asked.seq,
        )
        try:
            parts = [part async for part in method(of)]
        except grpc.RpcError as error:
            raise from_rpc_error(error, "host 0") from None
        data = b"".join(part.data for part in parts[:-1])
        assert parts[-1].hash == new_digest().data(data).finish()
        return data

    async def put_payloads(self, of: hosts.PayloadsOf, *parts: bytes) -> None:
        """Raises what the leader says of it."""
        method: Any = self._channel.stream_unary(
            hosts.PUT_PAYLOADS_METHOD,
            request_serializer=hosts_pb2.PutPayloadsRequest.SerializeToString,
            response_deserializer=hosts_pb2.PutPayloadsResponse.FromString,
        )

        call = method()
        try:
            await write(call, hosts_pb2.PutPayloadsRequest(open=wire.to_proto(of)))
            for data in parts:
                await write(call, hosts_pb2.PutPayloadsRequest(data=data))
            await done_writing(call)
            await call
        except grpc.RpcError as error:
            raise from_rpc_error(error, "host 0") from None

    async def take_payloads(self, of: hosts.PayloadsOf, *, is_committed: bool = False) -> list[bytes]:
        """Raises what the leader says of it."""
        method: Any = self._channel.unary_stream(
            hosts.TAKE_PAYLOADS_METHOD,
            request_serializer=hosts_pb2.TakePayloadsRequest.SerializeToString,
            response_deserializer=hosts_pb2.TakePayloadsResponse.FromString,
        )
        try:
            asked = hosts_pb2.TakePayloadsRequest(of=wire.to_proto(of), is_committed=is_committed)
            return [part.data async for part in method(asked)]
        except grpc.RpcError as error:
            raise from_rpc_error(error, "host 0") from None

    async def close(self) -> None:
        self._call.cancel()
        await self._channel.close()
