"""What sites list of payloads that differ: with any number of chunks it fits one message and names the reducer."""

from __future__ import annotations

import os

import pytest

from atoll.protocol.digest import DIGEST_BYTES
from atoll.protocol.messages import MAX_LISTED_CHUNKS, Tree
from atoll.protocol.payload_lists import listed, num_listed, places


def trees_of(*num_chunks: int) -> tuple[Tree, ...]:
    firsts = [sum(num_chunks[:i]) for i in range(len(num_chunks))]
    return tuple(Tree(first_chunk=first, num_chunks=num) for first, num in zip(firsts, num_chunks, strict=True))


def differing(one: bytes, other: bytes, trees: tuple[Tree, ...]) -> list[int]:
    return [i for i, place in enumerate(places(trees)) if one[place] != other[place]]


@pytest.mark.parametrize("beyond", [False, True])
def test_whose_chunk_is_another_one_is_seen_whatever_the_number_of_chunks(beyond: bool) -> None:
    trees = trees_of(5, MAX_LISTED_CHUNKS - 12, 1, 0, 6 + beyond)
    num_chunks = MAX_LISTED_CHUNKS + beyond
    hashes = bytearray(os.urandom(DIGEST_BYTES * num_chunks))
    sent = listed(bytes(hashes), trees)
    assert len(sent) == DIGEST_BYTES * num_listed(trees) <= DIGEST_BYTES * MAX_LISTED_CHUNKS
    assert num_listed(trees) == (len(trees) if beyond else num_chunks)
    assert listed(bytes(hashes), trees) == sent
    for tree, chunk in (
        (0, 0),
        (0, 4),
        (1, 5),
        (1, num_chunks - 8 - beyond),
        (2, MAX_LISTED_CHUNKS - 7),
        (4, num_chunks - 1),
    ):
        hashes[DIGEST_BYTES * chunk + 31] ^= 1
        assert differing(listed(bytes(hashes), trees), sent, trees) == [tree]
        hashes[DIGEST_BYTES * chunk + 31] ^= 1


def test_lists_of_trees_differ_where_a_hash_is_moved_over_their_border() -> None:
    """Each is over its own chunks: what one has more and the other one less is no less than a difference of both."""
    hashes = os.urandom(DIGEST_BYTES * (MAX_LISTED_CHUNKS + 1))
    one, other = trees_of(10, MAX_LISTED_CHUNKS - 9), trees_of(11, MAX_LISTED_CHUNKS - 10)
    assert differing(listed(hashes, one), listed(hashes, other), one) == [0, 1]
