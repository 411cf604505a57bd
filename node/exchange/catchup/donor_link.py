"""How a donor is asked, whoever dialled: one request, and the frames of its answer."""

from __future__ import annotations

import asyncio
from typing import Protocol

import grpc
import grpc.aio

from atoll.node.exchange.peers.dialer import Dialer
from atoll.protocol.messages import Donor


class Answer(Protocol):
    """Of one request; `read` and `cancel` of a call of grpc.aio."""

    async def read(self) -> object:
        """The next frame; anything but bytes: that was all. Raises grpc.RpcError or one of atoll's errors."""

    def cancel(self) -> object:
        """Nothing more is read. Also after the end."""


class Link(Protocol):
    async def ready(self) -> None:
        """Before `ask`: until there is a connection. Raises PeerError."""

    def ask(self, method: str, request: bytes) -> Answer: ...

    def judge(self, *, answered: bool) -> None:
        """Whether it answered to what was asked."""

    async def close(self) -> None: ...


class DialledLink:
    """A connection that this site opens at the first request."""

    def __init__(self, donor: Donor, dialer: Dialer) -> None:
        self._donor = donor
        self._dialer = dialer
        self._channel: grpc.aio.Channel | None = None
        self._dialling = asyncio.Lock()

    async def ready(self) -> None:
        async with self._dialling:
            if self._channel is None:
                self._channel = await self._dialer.dial(self._donor)

    def judge(self, *, answered: bool) -> None:
        if answered:
            self._dialer.reached(self._donor)
        else:
            self._dialer.failed(self._donor)

    def ask(self, method: str, request: bytes) -> Answer:
        assert self._channel is not None, "ready() comes before ask()"
        stub: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = self._channel.unary_stream(
            method, request_serializer=None, response_deserializer=None
        )
        return stub(request)

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close()
