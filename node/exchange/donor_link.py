"""How a donor is asked, whoever dialled: one request, and the frames of its answer."""

from __future__ import annotations

from typing import Protocol

import grpc
import grpc.aio

from atoll.protocol.transport import MAX_FRAME_BYTES, open_channel


class Answer(Protocol):
    """Of one request; `read` and `cancel` of a call of grpc.aio."""

    async def read(self) -> object:
        """The next frame; anything but bytes: that was all. Raises grpc.RpcError or one of atoll's errors."""

    def cancel(self) -> object:
        """Nothing more is read. Also after the end."""


class Link(Protocol):
    def ask(self, method: str, request: bytes) -> Answer: ...

    async def close(self) -> None: ...


class DialledLink:
    """A connection that this site opened, at the first request."""

    def __init__(self, address: str, credentials: grpc.ChannelCredentials | None) -> None:
        self._channel = open_channel(address, credentials=credentials, max_message_bytes=MAX_FRAME_BYTES)

    def ask(self, method: str, request: bytes) -> Answer:
        stub: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = self._channel.unary_stream(
            method, request_serializer=None, response_deserializer=None
        )
        return stub(request)

    async def close(self) -> None:
        await self._channel.close()
