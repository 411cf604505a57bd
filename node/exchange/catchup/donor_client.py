"""Asking one donor for hash lists, chunks of the outer state and payloads. What arrives is bounded, not verified."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

import grpc.aio
from google.protobuf.message import Message

from atoll.node.dataplane.payload_file import AttemptKey
from atoll.node.exchange.peers.counters import Counters
from atoll.node.exchange.peers.dialer import Dialer, Purpose
from atoll.node.exchange.peers.errors_given import Given
from atoll.node.exchange.peers.frames import Encoded, PartAssembler, parse
from atoll.node.exchange.peers.progress import Pace, Progress
from atoll.node.exchange.peers.rpc import FETCH_PAYLOADS_METHOD, FETCH_STATE_METHOD, call_errors
from atoll.protocol import wire
from atoll.protocol.digest import DIGEST_BYTES
from atoll.protocol.errors import InvalidMessage, NotYetError, PeerError
from atoll.protocol.messages import Donor, Header
from atoll.protocol.v1 import peer_pb2

FIRST_ANSWER_STALLS = 0.75
"""Within which a donor answers, or cannot be reached this way; what is left of the stall limit is for another."""


class Answer(Protocol):
    """Of one request; `read` and `cancel` of a call of grpc.aio."""

    async def read(self) -> object:
        """The next frame; anything but bytes: that was all. Raises grpc.RpcError or one of atoll's errors."""

    def cancel(self) -> object:
        """Nothing more is read. Also after the end."""


Ask = Callable[[Donor, str, bytes], Awaitable[Answer]]
"""A request by its method; raises PeerError if the donor cannot be reached now."""


def dialled(dialer: Dialer, purpose: Purpose = Purpose.FETCH) -> Ask:
    """Over a connection that this site opens at the first request."""

    async def ask(donor: Donor, method: str, request: bytes) -> Answer:
        channel = await dialer.channel(donor, purpose)
        call: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(
            method, request_serializer=None, response_deserializer=None
        )
        return call(request)

    return ask


@dataclass(eq=False, kw_only=True)
class DonorClient:
    """All methods raise PeerError, NotYetError (busy), StateError (not there), RefusedError or InvalidMessage."""

    donor: Donor
    ask: Ask
    answered: Callable[[Donor], None] = lambda donor: None
    """Called at the first answer."""
    header: Header
    counters: Counters
    pace: Pace
    share: int = 1
    """How many requests, to all donors, share this site's link."""
    is_here: bool = False
    """The donor has dialled this site."""
    has_answered: bool = field(default=False, init=False)
    was_silent: bool = field(default=False, init=False)
    """It failed before the first answer."""
    num_failures: int = field(default=0, init=False)
    moved_at: float = field(default=-math.inf, init=False)
    """When bytes of a chunk or payload came, by the loop's clock."""

    @property
    def where(self) -> str:
        donor = self.donor
        return f"donor site {donor.site_id} at {donor.address} (run {self.header.run_id}, catching up)"

    async def hash_lists(self, commits: list[int], num_chunks: int) -> dict[int, list[bytes]]:
        """The chunk hashes at those of `commits` that the donor still knows, `num_chunks` each."""
        request = peer_pb2.FetchStateRequest(header=wire.to_proto(self.header), hashes_of=commits)
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

    async def chunks(self, chunks: list[int], size_bytes: Callable[[int], int]) -> AsyncIterator[Encoded]:
        """The records of `chunks`, in that order; each has exactly `size_bytes(chunk)`, and a version by the donor's
        word."""
        request = peer_pb2.FetchStateRequest(header=wire.to_proto(self.header), chunks=chunks)
        left, asked = self._asked(chunks, size_bytes)
        async for data in self._call(FETCH_STATE_METHOD, request):
            response = parse(peer_pb2.FetchStateResponse, data)
            if not response.chunks or response.hash_lists:
                raise InvalidMessage(f"{self.where}: a message that is not of the chunks that were asked for")
            self._moved(response.chunks)
            for part in response.chunks:
                if (record := asked.add(part)) is not None:
                    if record.num_bytes != size_bytes(part.chunk):
                        raise InvalidMessage(f"{self.where}: a record of {record.num_bytes} bytes, chunk {part.chunk}")
                    yield record
        self._check_end(left, asked)

    async def payloads(
        self, commit: int, chunks: list[int], max_bytes: Callable[[int], int]
    ) -> AsyncIterator[list[Encoded]]:
        """The payloads of `chunks` in a commit, in that order, some at a time."""
        request = peer_pb2.FetchPayloadsRequest(header=wire.to_proto(self.header), commit=commit, chunks=chunks)
        left, asked = self._asked(chunks, max_bytes)
        async for data in self._call(FETCH_PAYLOADS_METHOD, request):
            parts = parse(peer_pb2.FetchPayloadsResponse, data).parts
            if not parts:
                raise InvalidMessage(f"{self.where}: a message without payloads")
            self._moved(parts)
            yield [item for part in parts if (item := asked.add(part)) is not None]
        self._check_end(left, asked)

    async def contribution(self, sync: int, chunk: int, most_bytes: int) -> Encoded:
        """What that start of the donor contributed to the sync, of one chunk; with the proof that its root says it."""
        request = peer_pb2.FetchPayloadsRequest(
            header=wire.to_proto(self.header), of_sync=sync, of_incarnation=self.donor.incarnation, chunks=[chunk]
        )
        left, asked = self._asked([chunk], lambda _: most_bytes)
        found: list[Encoded] = []
        async for data in self._call(FETCH_PAYLOADS_METHOD, request):
            parts = parse(peer_pb2.FetchPayloadsResponse, data).parts
            found += [item for part in parts if (item := asked.add(part)) is not None]
        self._check_end(left, asked)
        return found[0]

    def passed_on(self, request: peer_pb2.FetchPayloadsRequest) -> AsyncGenerator[bytes]:
        """The frames that answer what another site has asked this one for. `aclose` it."""
        asked = peer_pb2.FetchPayloadsRequest()
        asked.CopyFrom(request)
        asked.for_site_id = request.header.site_id
        asked.header.CopyFrom(wire.to_proto(self.header))
        return self._call(FETCH_PAYLOADS_METHOD, asked)

    async def error(self, attempt: AttemptKey, chunk: int, num_bytes: int) -> Given:
        """What the donor added to its average of a chunk in that attempt, and what says so."""
        request = peer_pb2.FetchPayloadsRequest(
            header=wire.to_proto(self.header), of_sync=attempt.sync, of_term=attempt.term, of_attempt=attempt.attempt,
            chunks=[chunk],
        )  # fmt: skip
        _, asked = self._asked([chunk], lambda _: num_bytes)
        said: peer_pb2.ErrorGiven | None = None
        items: list[Encoded] = []
        async for data in self._call(FETCH_PAYLOADS_METHOD, request):
            response = parse(peer_pb2.FetchPayloadsResponse, data)
            if response.HasField("error") != (said is None):
                raise InvalidMessage(f"{self.where}: what says an error comes once, and first")
            said = said or response.error
            items += [item for part in response.parts if (item := asked.add(part)) is not None]
        if said is None or asked.is_amid_chunk:
            raise PeerError(f"{self.where}: the stream ended early", self.donor.site_id)
        return Given(
            error=items[0].data if items else b"",
            before_hash=said.before_hash,
            before_proof=said.before_proof,
            after_hash=said.after_hash,
            after_proof=said.after_proof,
            earlier_proof=said.earlier_proof,
        )

    def _moved(self, parts: Iterable[peer_pb2.ChunkState | peer_pb2.Part]) -> None:
        self.counters.moved_bytes += sum(len(part.data) for part in parts)
        self.moved_at = asyncio.get_running_loop().time()

    def _asked(self, chunks: list[int], max_bytes: Callable[[int], int]) -> tuple[deque[int], PartAssembler]:
        """For these chunks, one after the other; and those that have not begun yet."""
        left = deque(chunks)

        def expect(chunk: int) -> int:
            if not left or chunk != left.popleft():
                raise InvalidMessage(f"{self.where}: chunk {chunk} does not come next")
            return max_bytes(chunk)

        return left, PartAssembler(expect)

    def _check_end(self, left: deque[int], asked: PartAssembler) -> None:
        if left or asked.is_amid_chunk:
            raise PeerError(f"{self.where}: the stream ended early", self.donor.site_id)

    async def _call(self, method: str, request: Message) -> AsyncGenerator[bytes]:
        answer = await self.ask(self.donor, method, request.SerializeToString())
        loop = asyncio.get_running_loop()
        waited_s = 0.0  # for the donor: the time to work on what it sent is not its own
        progress = Progress(self.pace, waited_s, self.share)
        has_begun = False
        try:
            with call_errors(self.where, self.donor.site_id, may_lack=True):
                while True:
                    began = loop.time()
                    async with asyncio.timeout(self._limit_s):
                        data = await answer.read()
                    if not isinstance(data, bytes):
                        return
                    if not self.has_answered:
                        self.has_answered = True
                        self.answered(self.donor)
                    waited_s += loop.time() - began
                    progress.moved(len(data), waited_s)
                    problem = progress.problem(waited_s)
                    if problem:
                        raise PeerError(f"{self.where}: {problem}", self.donor.site_id)
                    self.counters.received_bytes += len(data)
                    has_begun = True
                    yield data
        except NotYetError as error:
            if not has_begun:
                raise
            # It rests then: of bytes that come for ever, and never make a chunk, nothing else would be the end.
            raise PeerError(f"{self.where}: busy amid its answer: {error}", self.donor.site_id) from None
        except TimeoutError:
            raise PeerError(f"{self.where}: no byte for {self._limit_s:.1f} s", self.donor.site_id) from None
        finally:
            answer.cancel()

    @property
    def _limit_s(self) -> float:
        """Of the wait for some byte."""
        return self.pace.stall_s * (1 if self.has_answered else FIRST_ANSWER_STALLS)
