"""Asking one donor for hash lists, chunks of the outer state and payloads. What arrives is bounded, not verified."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

import grpc.aio
from google.protobuf.message import Message

from atoll.node.exchange.peers.counters import Counters
from atoll.node.exchange.peers.dialer import Dialer, Purpose
from atoll.node.exchange.peers.frames import MIN_PART_BYTES, Encoded, PartAssembler, parse
from atoll.node.exchange.peers.progress import Pace, Progress
from atoll.node.exchange.peers.rpc import FETCH_PAYLOADS_METHOD, FETCH_STATE_METHOD, call_errors
from atoll.protocol import wire
from atoll.protocol.digest import DIGEST_BYTES
from atoll.protocol.errors import InvalidMessage, PeerError
from atoll.protocol.messages import Donor, Header
from atoll.protocol.v1 import peer_pb2

FIRST_ANSWER_STALLS = 0.75
"""Within which a donor answers, or cannot be reached this way; what is left of the stall limit is for another."""


@dataclass(frozen=True, slots=True)
class ReceivedChunk:
    """A chunk's record as a donor sent it; `version` is the donor's word."""

    chunk: int
    version: int
    data: bytes


class Answer(Protocol):
    """Of one request; `read` and `cancel` of a call of grpc.aio."""

    async def read(self) -> object:
        """The next frame; anything but bytes: that was all. Raises grpc.RpcError or one of atoll's errors."""

    def cancel(self) -> object:
        """Nothing more is read. Also after the end."""


Ask = Callable[[Donor, str, bytes], Awaitable[Answer]]
"""A request by its method; raises PeerError if the donor cannot be reached now."""


def dialled(dialer: Dialer) -> Ask:
    """Over a connection that this site opens at the first request."""

    async def ask(donor: Donor, method: str, request: bytes) -> Answer:
        channel = await dialer.channel(donor, Purpose.FETCH)
        call: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(
            method, request_serializer=None, response_deserializer=None
        )
        return call(request)

    return ask


class DonorClient:
    """All methods raise PeerError, NotYetError (busy), StateError (not there), RefusedError or InvalidMessage."""

    def __init__(
        self,
        donor: Donor,
        *,
        ask: Ask,
        answered: Callable[[Donor], None] = lambda donor: None,
        header: Header,
        counters: Counters,
        pace: Pace,
        share: int = 1,
    ) -> None:
        """`answered` is called at the first answer. `share`: how many requests, to all donors, share this site's
        link."""
        self.donor = donor
        self.has_answered = False
        self.where = f"donor site {donor.site_id} at {donor.address} (run {header.run_id}, catching up)"
        self._ask = ask
        self._answered = answered
        self._header = header
        self._counters = counters
        self._pace = pace
        self._share = share

    async def hash_lists(self, commits: list[int], num_chunks: int) -> dict[int, list[bytes]]:
        """The chunk hashes at those of `commits` that the donor still knows, `num_chunks` each."""
        request = peer_pb2.FetchStateRequest(header=wire.to_proto(self._header), hashes_of=commits)
        found: dict[int, list[bytes]] = {}
        async for data in self._call(FETCH_STATE_METHOD, request):
            response = parse(peer_pb2.FetchStateResponse, data)
            if not response.hash_lists or response.chunks:
                raise InvalidMessage(f"{self.where}: a message that is not of the hash lists that were asked for")
            for part in response.hash_lists:
                if part.commit not in commits:
                    raise InvalidMessage(f"{self.where}: a hash list of commit {part.commit}, which was not asked for")
                hashes = found.setdefault(part.commit, [])
                count, rest = divmod(len(part.hashes), DIGEST_BYTES)
                if rest or not count or part.first_chunk != len(hashes) or len(hashes) + count > num_chunks:
                    raise InvalidMessage(
                        f"{self.where}: {len(part.hashes)} bytes of hashes from chunk {part.first_chunk} on, "
                        f"after {len(hashes)} of {num_chunks}"
                    )
                hashes.extend(part.hashes[i : i + DIGEST_BYTES] for i in range(0, len(part.hashes), DIGEST_BYTES))
        for commit, hashes in found.items():
            if len(hashes) != num_chunks:
                raise InvalidMessage(f"{self.where}: {len(hashes)} of {num_chunks} hashes at commit {commit}")
        return found

    async def chunks(self, chunks: list[int], size_bytes: Callable[[int], int]) -> AsyncIterator[ReceivedChunk]:
        """The records of `chunks`, in that order; each has exactly `size_bytes(chunk)`."""
        request = peer_pb2.FetchStateRequest(header=wire.to_proto(self._header), chunks=chunks)
        waiting = iter(chunks)
        pieces: list[bytes] = []
        received = version = 0
        chunk = -1
        async for data in self._call(FETCH_STATE_METHOD, request):
            response = parse(peer_pb2.FetchStateResponse, data)
            if not response.chunks or response.hash_lists:
                raise InvalidMessage(f"{self.where}: a message that is not of the chunks that were asked for")
            for part in response.chunks:
                if not pieces:
                    chunk, version, received = next(waiting, -1), part.version, 0
                total = size_bytes(chunk) if chunk >= 0 else 0
                if (part.chunk, part.version, part.offset_bytes, part.total_bytes) != (chunk, version, received, total):
                    raise InvalidMessage(
                        f"{self.where}: chunk {part.chunk} at version {part.version}, byte {part.offset_bytes} of "
                        f"{part.total_bytes}, where chunk {chunk} at version {version}, byte {received} of {total} "
                        "comes next"
                    )
                size = len(part.data)
                if received + size > total or (received + size < total and size < MIN_PART_BYTES):
                    raise InvalidMessage(f"{self.where}: a part of {size} bytes at {received} of {total}")
                pieces.append(part.data)
                received += size
                if received == total:
                    whole, pieces = b"".join(pieces), []
                    yield ReceivedChunk(chunk, version, whole)
        if pieces or next(waiting, -1) >= 0:
            raise PeerError(f"{self.where}: the stream ended early", self.donor.site_id)

    async def payloads(
        self, commit: int, chunks: list[int], max_bytes: Callable[[int], int]
    ) -> AsyncIterator[list[Encoded]]:
        """The payloads of `chunks` in a commit, some at a time."""
        request = peer_pb2.FetchPayloadsRequest(header=wire.to_proto(self._header), commit=commit, chunks=chunks)
        wanted = set(chunks)

        def expect(chunk: int) -> int:
            if chunk not in wanted:
                raise InvalidMessage(f"{self.where}: the payload of chunk {chunk}, which was not asked for")
            wanted.remove(chunk)
            return max_bytes(chunk)

        assembler = PartAssembler(expect)
        async for data in self._call(FETCH_PAYLOADS_METHOD, request):
            parts = parse(peer_pb2.FetchPayloadsResponse, data).parts
            if not parts:
                raise InvalidMessage(f"{self.where}: a message without payloads")
            yield [item for part in parts if (item := assembler.add(part)) is not None]
        if wanted:
            raise PeerError(f"{self.where}: the stream ended early", self.donor.site_id)

    async def _call(self, method: str, request: Message) -> AsyncIterator[bytes]:
        answer = await self._ask(self.donor, method, request.SerializeToString())
        loop = asyncio.get_running_loop()
        waited_s = 0.0  # for the donor: the time to work on what it sent is not its own
        progress = Progress(self._pace, waited_s, self._share)
        try:
            with call_errors(self.where, self.donor.site_id):
                while True:
                    began = loop.time()
                    async with asyncio.timeout(self._limit_s):
                        data = await answer.read()
                    if not isinstance(data, bytes):
                        return
                    if not self.has_answered:
                        self.has_answered = True
                        self._answered(self.donor)
                    waited_s += loop.time() - began
                    progress.moved(len(data), waited_s)
                    problem = progress.problem(waited_s)
                    if problem:
                        raise PeerError(f"{self.where}: {problem}", self.donor.site_id)
                    self._counters.received_bytes += len(data)
                    yield data
        except TimeoutError:
            raise PeerError(f"{self.where}: no byte for {self._limit_s:.1f} s", self.donor.site_id) from None
        finally:
            answer.cancel()

    @property
    def _limit_s(self) -> float:
        """Of the wait for some byte."""
        return self._pace.stall_s * (1 if self.has_answered else FIRST_ANSWER_STALLS)
