"""Encoded chunks <-> frames of the wire. Pure.

Frames are written as protobuf by hand around the chunk's bytes, which are copied once (a generated message copies them
twice); tests hold them equal to the generated code's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from atoll.protocol.digest import DIGEST_BYTES
from atoll.protocol.errors import InvalidMessage
from atoll.protocol.hash_tree import MAX_PROOF_BYTES
from atoll.protocol.v1 import peer_pb2

FRAME_BYTES = 512 << 10
"""Of one message that carries chunks; large enough to be cheap, small enough to overlap with the work on it."""
MIN_FRAME_BYTES = 64 << 10
"""Smaller ones cost more than they are worth."""
MIN_PART_BYTES = 4 << 10
"""Of every part but a chunk's last, so that a chunk cannot come as a million objects."""
LEAD_BYTES = MIN_PART_BYTES + 128
"""Of the first frame of a series: once it is there, the others take as long as the link needs for them."""
MAX_HAS_PAYLOADS = 1 << 17
"""Listed in an ExchangeOpen, so that it is a small message."""
NOT_FOLLOWING = b"\x20\x00"
"""After a frame: what it says of `follows` does not count, as the last value of a field does."""
_PART_OVERHEAD_BYTES = 80  # more than the other fields of a Part have

_Message = TypeVar("_Message", bound=Message)


@dataclass(frozen=True, slots=True)
class Encoded:
    """An encoded chunk, contribution or payload, with its hash; or a record as a donor sends it, without."""

    chunk: int
    data: bytes
    hash: bytes
    version: int = 0
    """Of a record."""
    proof: bytes = b""
    """Of a contribution in a run with audits."""

    @property
    def num_bytes(self) -> int:
        return len(self.data)


def parse(cls: type[_Message], data: bytes) -> _Message:
    """Raises InvalidMessage."""
    try:
        return cls.FromString(data)
    except DecodeError as error:
        raise InvalidMessage(f"{len(data)} bytes that are no {cls.DESCRIPTOR.name}: {error}") from None


def batches(
    chunks: Iterable[int], size_bytes: Callable[[int], int], most_bytes: int, most_chunks: int
) -> Iterator[list[int]]:
    """Chunks that have so many bytes together, and are not more than so many; or one larger chunk."""
    batch: list[int] = []
    size = 0
    for chunk in chunks:
        more = size_bytes(chunk)
        if batch and (size + more > most_bytes or len(batch) == most_chunks):
            yield batch
            batch, size = [], 0
        batch.append(chunk)
        size += more
    if batch:
        yield batch


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def slices(items: Iterable[Encoded], first_bytes: int, frame_bytes: int) -> Iterator[list[tuple[Encoded, int, int]]]:
    """(chunk, first byte, end) of each part, one list a frame; the first frame has at most `first_bytes`."""
    frame: list[tuple[Encoded, int, int]] = []
    room = first_bytes
    for item in items:
        start, size = 0, len(item.data)
        overhead = _PART_OVERHEAD_BYTES + len(item.proof)
        while start < size:
            if frame and room < overhead + min(size - start, MIN_PART_BYTES):
                yield frame
                frame, room = [], frame_bytes
            end = min(size, start + max(MIN_PART_BYTES, room - overhead))
            frame.append((item, start, end))
            room -= end - start + overhead
            start = end
    if frame:
        yield frame


def pack_frames(items: Iterable[Encoded], frame_bytes: int = FRAME_BYTES, *, wrapped: bool = True) -> Iterator[bytes]:
    """Serialized messages of at most `frame_bytes` that carry `items` in order.

    `wrapped`: an ExchangeRequest with `contribution`, or an ExchangeResponse with `payload` (the same bytes); all but
    the first follow on it. Else: a FetchPayloadsResponse.
    """
    lead_bytes = LEAD_BYTES if wrapped else frame_bytes
    for place, frame in enumerate(slices(items, lead_bytes, frame_bytes)):
        pieces: list[bytes | memoryview] = []
        size = 0
        for item, start, end in frame:
            total = len(item.data)
            last = end == total
            hash, proof = (item.hash, item.proof) if last else (b"", b"")
            part = peer_pb2.Part(chunk=item.chunk, offset_bytes=start, total_bytes=total, hash=hash, proof=proof)
            head = part.SerializeToString()
            head += b"\x22" + _varint(end - start)  # field 4, data
            pieces.append(b"\x0a" + _varint(len(head) + end - start) + head)
            pieces.append(item.data if end - start == total else memoryview(item.data)[start:end])
            size += len(pieces[-2]) + end - start
        if wrapped:
            pieces.insert(0, b"\x12" + _varint(size))
            if place:
                pieces.append(b"\x20\x01")  # follows
        yield b"".join(pieces)


class PartAssembler:
    """Puts the parts of one stream together. One chunk at a time: a stream cannot make this side hold more.

    `max_bytes(chunk)` is the bound on an encoded chunk; it raises InvalidMessage for a chunk that may not come here.
    """

    def __init__(self, max_bytes: Callable[[int], int]) -> None:
        self._max_bytes = max_bytes
        self._chunk = -1
        self._total = 0
        self._received = 0
        self._pieces: list[bytes] = []

    @property
    def is_amid_chunk(self) -> bool:
        return bool(self._pieces)

    def add(self, part: peer_pb2.Part | peer_pb2.ChunkState) -> Encoded | None:
        """The chunk if this part completes it. Its hash is not checked yet. Raises InvalidMessage."""
        carried, version, proof = b"", 0, b""
        if isinstance(part, peer_pb2.Part):
            carried, proof = part.hash, part.proof
        else:
            version = part.version
        data = part.data
        chunk, total = part.chunk, part.total_bytes
        if not self._pieces:
            limit = self._max_bytes(chunk)
            if not 0 < total <= limit:
                raise InvalidMessage(f"chunk {chunk}: {total} bytes announced, 1 to {limit} are possible")
            self._chunk, self._total, self._received = chunk, total, 0
        if (chunk, total, part.offset_bytes) != (self._chunk, self._total, self._received):
            raise InvalidMessage(
                f"a part of chunk {chunk} at byte {part.offset_bytes} of {total}, where chunk {self._chunk} at byte "
                f"{self._received} of {self._total} goes on"
            )
        if not data or self._received + len(data) > total:
            raise InvalidMessage(f"chunk {chunk}: a part of {len(data)} bytes at {self._received} of {total}")
        last = self._received + len(data) == total
        if not last and len(data) < MIN_PART_BYTES:
            raise InvalidMessage(f"chunk {chunk}: a part of {len(data)} bytes, all but the last have {MIN_PART_BYTES}")
        if len(carried) != (DIGEST_BYTES if last and isinstance(part, peer_pb2.Part) else 0):
            raise InvalidMessage(f"chunk {chunk}: the last part, and no other, carries a hash of {DIGEST_BYTES} bytes")
        if len(proof) > (MAX_PROOF_BYTES if last else 0):
            raise InvalidMessage(
                f"chunk {chunk}: a proof of {len(proof)} bytes, at the end it has {MAX_PROOF_BYTES} at most"
            )
        self._pieces.append(data)
        self._received += len(data)
        if not last:
            return None
        whole = b"".join(self._pieces) if len(self._pieces) > 1 else data
        self._pieces = []
        return Encoded(chunk, whole, carried, version, proof)
