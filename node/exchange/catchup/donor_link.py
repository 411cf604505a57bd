"""How a donor is asked, whoever dialled: one request, and the frames of its answer."""

from __future__ import annotations

from typing import Protocol

import grpc.aio

from atoll.node.exchange.peers.dialer import Dialer, Purpose
from atoll.protocol.messages import Donor


class Answer(Protocol):
    """Of one request; `read` and `cancel` of a call of grpc.aio."""

    async def read(self) -> object:
        """The next frame; anything but bytes: that was all. Raises grpc.RpcError or one of atoll's errors."""

    def cancel(self) -> object:
        """Nothing more is read. Also after the end."""


class Link(Protocol):
    async def ask(self, method: str, request: bytes) -> Answer:
        """Raises PeerError if the donor cannot be dialled now."""

    def answered(self) -> None:
        """The donor answered as itself."""

    def close(self) -> None: ...


class DialledLink:
    """A connection that this site opens at the first request."""

    def __init__(self, donor: Donor, dialer: Dialer) -> None:
        self._donor = donor
        self._dialer = dialer

    async def ask(self, method: str, request: bytes) -> Answer:
        channel = await self._dialer.channel(self._donor, Purpose.FETCH)
        stub: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(
            method, request_serializer=None, response_deserializer=None
        )
        return stub(request)

    def answered(self) -> None:
        self._dialer.reached(self._donor)

    def close(self) -> None:
        self._dialer.disconnect(self._donor, Purpose.FETCH)
