"""The tree over the hashes of contributions: each has a proof, and nothing else has."""

from __future__ import annotations

import pytest

from atoll.protocol.digest import DIGEST_BYTES
from atoll.protocol.errors import InvalidMessage
from atoll.protocol.hash_tree import HashTree, check_proof


def hashes(num: int) -> list[bytes]:
    return [bytes([i]) * DIGEST_BYTES for i in range(num)]


@pytest.mark.parametrize("num", [1, 2, 3, 5, 8, 13])
def test_each_contribution_has_a_proof_and_no_other_bytes_have_it(num: int) -> None:
    chunks = [3 * i + 1 for i in range(num)]
    tree = HashTree(chunks, hashes(num))
    for place, chunk in enumerate(chunks):
        proof, hash = tree.proof(place), hashes(num)[place]
        check_proof(tree.root, num, place, chunk, hash, proof)
        assert len(proof) <= DIGEST_BYTES * (num - 1).bit_length()
        wrong: list[tuple[int, int, bytes, bytes]] = [
            (place, chunk, b"\xff" * DIGEST_BYTES, proof),  # another contribution
            (place, chunk + 1, hash, proof),  # of another chunk
            (place, chunk, hash, proof + bytes(DIGEST_BYTES)),
            (num, chunk, hash, proof),  # at no place
        ]
        wrong += [(place ^ 1, chunk, hash, proof), (place, chunk, hash, proof[1:])] if num > 1 else []
        for at, of, what, shown in wrong:
            with pytest.raises(InvalidMessage, match="none of those"):
                check_proof(tree.root, num, at, of, what, shown)


def test_two_trees_that_differ_in_one_hash_have_different_roots() -> None:
    roots = {HashTree(range(7), [b"x" * DIGEST_BYTES if i == odd else h for i, h in enumerate(hashes(7))]).root
             for odd in range(8)}  # fmt: skip
    assert len(roots) == 8
    assert HashTree([], []).root == b""
