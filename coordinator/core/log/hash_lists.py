"""Lists of hashes, one for each chunk, as contiguous bytes: a model has a million chunks, so nothing here takes a step
for each. Pure."""

from __future__ import annotations

from atoll.coordinator.core.sync.chunk_sizes import ChunkSizes
from atoll.protocol.digest import DIGEST_BYTES, Digest

AT_ONCE_BYTES = 256 * DIGEST_BYTES


def first_difference(one: bytes | bytearray, other: bytes | bytearray) -> int | None:
    """The first chunk whose hash is not the same in two lists of one length; None if they are equal."""
    for first in range(0, len(one), AT_ONCE_BYTES):
        a, b = one[first : first + AT_ONCE_BYTES], other[first : first + AT_ONCE_BYTES]
        if a != b:
            places = range(0, len(a), DIGEST_BYTES)
            return (
                first + next(i for i in places if a[i : i + DIGEST_BYTES] != b[i : i + DIGEST_BYTES])
            ) // DIGEST_BYTES
    return None


def hash_at(hashes: bytes | bytearray, chunk: int) -> bytes:
    """The hash of one chunk in a list of those of all."""
    return bytes(hashes[DIGEST_BYTES * chunk : DIGEST_BYTES * (chunk + 1)])


class ListCheck:
    """The hash of a list that a site shows, taken as its parts arrive: to take it when the last part is here would hold
    up the event loop. With `sizes`: of payloads, which not all chunks have."""

    def __init__(self, digest: Digest, num_hashes: int, sizes: ChunkSizes | None = None) -> None:
        """`digest` of all that comes before the list."""
        self._digest = digest
        self._sizes = sizes
        self._expected = num_hashes
        self._num_hashes = 0
        self._rest = b""  # of a hash that came in part

    def more(self, part: bytes) -> None:
        """The next bytes; a hash may be cut between two parts."""
        data = self._rest + part
        end = len(data) // DIGEST_BYTES * DIGEST_BYTES
        whole, self._rest = memoryview(data)[:end], data[end:]
        pieces = [whole] if self._sizes is None else self._sizes.of_payloads(whole, self._num_hashes)
        for piece in pieces:
            self._digest.digests(piece)
        self._num_hashes += end // DIGEST_BYTES

    def finish(self) -> bytes:
        """Empty for a list of another length."""
        is_whole = self._num_hashes == self._expected and not self._rest
        return self._digest.finish() if is_whole else b""
