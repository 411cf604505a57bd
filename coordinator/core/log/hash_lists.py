"""Lists of hashes, one for each chunk, as contiguous bytes: a model has a million chunks, so nothing here takes a step
for each. Pure."""

from __future__ import annotations

from atoll.protocol.digest import DIGEST_BYTES

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
