"""The tree over the hashes of contributions: each has a proof, and nothing else has."""

from __future__ import annotations

import itertools

import pytest

from atoll.protocol.digest import DIGEST_BYTES
from atoll.protocol.errors import InvalidMessage
from atoll.protocol.hash_tree import MAX_COVER, HashTree, check_proof, knots_over
from atoll.protocol.layout import MAX_CHUNKS


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


def cuts(num: int) -> list[list[range]]:
    """Of so many chunks into three parts, some of which may be empty."""
    return [
        [range(first), range(first, second), range(second, num)]
        for first, second in itertools.combinations_with_replacement(range(num + 1), 2)
    ]


@pytest.mark.parametrize("num", range(1, 14))
def test_hosts_that_hash_a_part_each_make_the_root_of_all_and_proofs_of_their_own(num: int) -> None:
    chunks, whole = range(3, 3 + num), HashTree(range(3, 3 + num), hashes(num))
    for parts in cuts(num):
        trees = [HashTree(chunks, hashes(num)[part.start : part.stop], part) for part in parts]
        knots = [knot for tree in trees for knot in tree.cover()]
        for tree, part in zip(trees, parts, strict=True):
            assert tree.root == (whole.root if len(part) == num else b""), "what others have is not known yet"
            assert len(tree.cover()) == len(knots_over(num, part)) <= 2 * num.bit_length()
            tree.complete(parts, knots)
            assert tree.root == whole.root
            assert [tree.proof(place) for place in part] == [whole.proof(place) for place in part]


@pytest.mark.parametrize("num", range(1, 14))
def test_the_knots_over_a_part_are_over_it_and_nothing_else_and_no_fewer_would_do(num: int) -> None:
    for first, end in itertools.combinations_with_replacement(range(num + 1), 2):
        found = knots_over(num, range(first, end))
        leaves = [range(place << level, min((place + 1) << level, num)) for level, place in found]
        assert sorted(itertools.chain(*leaves)) == list(range(first, end))
        assert not [(level, place) for level, place in found if (level, place ^ 1) in found]
    assert max(len(knots_over(MAX_CHUNKS, range(1, end))) for end in (MAX_CHUNKS - 1, MAX_CHUNKS)) <= MAX_COVER


def test_hashes_of_other_hosts_that_cannot_be_are_refused() -> None:
    parts = [range(2), range(2, 5)]
    own, other = (HashTree(range(5), hashes(5)[part.start : part.stop], part) for part in parts)
    knots = [*own.cover(), *other.cover()]
    for wrong in (knots[:-1], [*knots, knots[0]], [*knots[:-1], knots[-1][1:]], [b"x" * DIGEST_BYTES, *knots[1:]]):
        with pytest.raises(InvalidMessage, match=r"over what (a site|this host) contributes"):
            own.complete(parts, wrong)
        assert own.root == b""
    own.complete(parts, knots)
    assert own.root == HashTree(range(5), hashes(5)).root
