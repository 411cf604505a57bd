"""A tree over the hashes of what a site contributes, one for each chunk: its root says all of them, and a proof of a
few hashes says that one is among them. Pure.

A leaf is over the chunk's number and the hash of what is encoded; a knot is over the two below it, and what has none
beside it goes up as it is. docs/decisions/0069-audited-reducers.md says what it is for.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from atoll.protocol.digest import DIGEST_BYTES, Digest
from atoll.protocol.errors import InvalidMessage
from atoll.protocol.layout import MAX_CHUNKS

MAX_PROOF_BYTES = DIGEST_BYTES * MAX_CHUNKS.bit_length()


def _leaf(chunk: int, hash: bytes) -> bytes:
    return Digest("atoll/contribution/v1").uint(chunk).data(hash).finish()


def _knot(left: bytes, right: bytes) -> bytes:
    return Digest("atoll/contributions/v1").data(left).data(right).finish()


class HashTree:
    """Of `chunks`, ascending, and the hash of each."""

    def __init__(self, chunks: Sequence[int], hashes: Sequence[bytes]) -> None:
        level = [_leaf(chunk, hash) for chunk, hash in zip(chunks, hashes, strict=True)]
        self._levels = [level]
        while len(level) > 1:
            pairs = zip_longest(level[::2], level[1::2])
            level = [left if right is None else _knot(left, right) for left, right in pairs]
            self._levels.append(level)

    @property
    def root(self) -> bytes:
        """Empty if there is no chunk."""
        return self._levels[-1][0] if self._levels[0] else b""

    def proof(self, place: int) -> bytes:
        """Of the chunk at that place: the hash beside it on each level, from the leaves up."""
        found = []
        for level in self._levels[:-1]:
            if (beside := place ^ 1) < len(level):
                found.append(level[beside])
            place //= 2
        return b"".join(found)


def check_proof(  # noqa: PLR0917
    root: bytes, num_chunks: int, place: int, chunk: int, hash: bytes, proof: bytes
) -> None:
    """Raises InvalidMessage unless a tree of so many chunks with that root has this hash of the chunk at this place."""
    level, at, num = _leaf(chunk, hash), place, num_chunks
    left = memoryview(proof)
    while num > 1 and len(left) <= MAX_PROOF_BYTES:
        if at ^ 1 < num:
            beside, left = bytes(left[:DIGEST_BYTES]), left[DIGEST_BYTES:]
            level = _knot(beside, level) if at % 2 else _knot(level, beside)
        at, num = at // 2, (num + 1) // 2
    if level != root or left or not 0 <= place < num_chunks:
        raise InvalidMessage(f"chunk {chunk}: the contribution is none of those that its site's root is over")
