"""A tree over the hashes of what a site contributes, one for each chunk: its root says all of them, and a proof of a
few hashes says that one is among them. Pure.

A leaf is over the chunk's number and the hash of what is encoded; a knot is over the two below it, and what has none
beside it goes up as it is. A host of a site has the hashes of its own chunks, and of all others the few knots that are
over them: so each host makes the whole root, and proofs of its own chunks. docs/decisions/0069-audited-reducers.md says
what it is for.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from atoll.protocol.digest import DIGEST_BYTES, Digest
from atoll.protocol.errors import InvalidMessage
from atoll.protocol.layout import MAX_CHUNKS

MAX_PROOF_BYTES = DIGEST_BYTES * MAX_CHUNKS.bit_length()
MAX_COVER = 2 * MAX_CHUNKS.bit_length()
"""Knots that are over the chunks of one host."""


def _leaf(chunk: int, hash: bytes) -> bytes:
    return Digest("atoll/contribution/v1").uint(chunk).data(hash).finish()


def _knot(left: bytes, right: bytes) -> bytes:
    return Digest("atoll/contributions/v1").data(left).data(right).finish()


def knots_over(num_chunks: int, part: range) -> list[tuple[int, int]]:
    """Of a tree of so many chunks, the fewest knots that are over those at these places and over no others: the level
    of each, from the leaves up, and its place there."""
    found: list[tuple[int, int]] = []
    level, num, first, end = 0, num_chunks, part.start, part.stop
    while first < end:
        if first % 2:
            found.append((level, first))
            first += 1
        if end % 2 and (end < num or num == 1):
            end -= 1
            found.append((level, end))
        level, num, first, end = level + 1, (num + 1) // 2, first // 2, (end + 1) // 2
    return found


class HashTree:
    def __init__(self, chunks: Sequence[int], hashes: Sequence[bytes], part: range | None = None) -> None:
        """Of `chunks`, ascending, and the hash of each. `part`: these are hashes of the chunks at these places alone;
        `complete` it."""
        self.chunks = chunks
        self._part = range(len(chunks)) if part is None else part
        of_part = (_leaf(chunks[at], hash) for at, hash in zip(self._part, hashes, strict=True))
        leaves: list[bytes | None] = [None] * self._part.start
        leaves += of_part
        self._levels = [leaves + [None] * (len(chunks) - len(leaves))]
        while len(level := self._levels[-1]) > 1:
            self._levels.append([None] * ((len(level) + 1) // 2))
        self._fill()

    def _fill(self) -> None:
        for below, level in pairwise(self._levels):
            for place, found in enumerate(level):
                under = below[2 * place : 2 * place + 2]
                known = [knot for knot in under if knot is not None]
                if found is None and len(known) == len(under):
                    level[place] = _knot(*known) if len(known) == 2 else known[0]

    def cover(self) -> list[bytes]:
        """What others need of the part whose hashes are here: the knots over it, as `knots_over` lists them."""
        knots = [self._levels[level][place] for level, place in knots_over(len(self.chunks), self._part)]
        return [knot for knot in knots if knot is not None]

    def complete(self, parts: Sequence[range], knots: Sequence[bytes]) -> None:
        """`knots`: the cover of each of these parts, one after the other, which are all chunks together. Raises
        InvalidMessage for others than can be."""
        places = [knot for part in parts for knot in knots_over(len(self.chunks), part)]
        if len(places) != len(knots) or any(len(knot) != DIGEST_BYTES for knot in knots):
            raise InvalidMessage(f"{len(knots)} hashes over what a site contributes, {len(places)} are expected")
        for (level, place), knot in zip(places, knots, strict=True):
            if self._levels[level][place] not in (None, knot):
                raise InvalidMessage("a hash over what this host contributes itself, and another one than it has")
            self._levels[level][place] = knot
        self._fill()

    @property
    def root(self) -> bytes:
        """Empty if there is no chunk, or a part of it is not known."""
        return (self._levels[-1][0] or b"") if self._levels[0] else b""

    def proof(self, place: int) -> bytes:
        """Of the chunk at that place: the hash beside it on each level, from the leaves up. The tree has a root."""
        found = []
        for level in self._levels[:-1]:
            if (beside := place ^ 1) < len(level):
                found.append(level[beside] or b"")
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
