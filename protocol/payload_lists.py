"""What sites list of their payloads where these differ (rule 15): the hash of each chunk's, or where one message does
not hold all of these, one for the chunks of each tree. A reducer is known by its tree, so that tells as much. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from atoll.protocol.digest import DIGEST_BYTES, Digest
from atoll.protocol.messages import MAX_LISTED_CHUNKS, Tree


def listed(hashes: bytes, trees: Sequence[Tree]) -> bytes:
    """`hashes`: of each chunk's payload."""
    if len(hashes) <= DIGEST_BYTES * MAX_LISTED_CHUNKS:
        return hashes
    chunks = memoryview(hashes)
    return b"".join(
        Digest("atoll/payloads of a tree/v1").digests(chunks[_bytes_of(tree.first_chunk, tree.num_chunks)]).finish()
        for tree in trees
    )


def num_listed(trees: Sequence[Tree]) -> int:
    """Hashes that a list has, where the trees cover all chunks."""
    num_chunks = sum(tree.num_chunks for tree in trees)
    return num_chunks if num_chunks <= MAX_LISTED_CHUNKS else len(trees)


def places(trees: Sequence[Tree]) -> list[slice]:
    """Where in a list the payloads of each tree are."""
    if sum(tree.num_chunks for tree in trees) <= MAX_LISTED_CHUNKS:
        return [_bytes_of(tree.first_chunk, tree.num_chunks) for tree in trees]
    return [_bytes_of(i, 1) for i in range(len(trees))]


def _bytes_of(first: int, num: int) -> slice:
    return slice(DIGEST_BYTES * first, DIGEST_BYTES * (first + num))
