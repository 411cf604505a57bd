"""Rule 35: each distinct slice has one writer, and the slices tile every tensor exactly once."""

from __future__ import annotations

import itertools
import random
import re
from dataclasses import replace

import pytest

from atoll.node.core.ranks.pieces import Holder, merge_ranks
from atoll.node.local_protocol import LocalJoin, Piece
from atoll.protocol.errors import ConfigError
from atoll.protocol.layout import Manifest, Role, TensorSpec, TiedName
from tests.harness.ranks import offer


def spec(name: str, *shape: int, dtype: str = "F32", role: Role = Role.TRAINABLE) -> TensorSpec:
    return TensorSpec(name=name, shape=shape, dtype=dtype, role=role)


def piece(name: str, offsets: tuple[int, ...], sizes: tuple[int, ...], dtype: str = "F32") -> Piece:
    return Piece(name=name, offsets=offsets, sizes=sizes, dtype=dtype)


def rank(specs: list[TensorSpec], *pieces: Piece, tied: list[TiedName] | None = None) -> LocalJoin:
    return offer(Manifest.canonical(specs, tied), pieces)


def test_replicas_are_written_by_one_rank() -> None:
    full = piece("a", (0, 0), (4, 2), "BF16")
    site = merge_ranks([rank([spec("a", 4, 2)], full), rank([spec("a", 4, 2)], full)])
    assert site.owned == ((0,), ())
    assert site.dtypes == {"a": "BF16"}
    assert [s.holders for s in site.shared] == [(Holder(0, 0), Holder(1, 0))]
    assert site.shared_of(1) == (0,)


def test_each_host_keeps_what_its_ranks_hold_of_the_optimizer() -> None:
    """Its checkpoints are all that its ranks find when they come back."""
    specs = [spec("a", 4, 2), spec("b", 4, 2)]
    both = piece("a", (0, 0), (4, 2)), piece("b", (0, 0), (4, 2))
    ranks = [rank(specs, *both) for _ in range(4)]
    assert merge_ranks(ranks).kept == ((0,), (1,), (), ())
    assert merge_ranks(ranks, 2).kept == ((0,), (1,), (0,), (1,))
    assert merge_ranks(ranks, 1).kept == ((0, 1),) * 4
    assert merge_ranks(ranks, 2).owned == ((0,), (1,), (), ()), "of the first host that has it"


def test_each_host_has_what_its_ranks_hold_in_its_own_snapshot() -> None:
    """There they find what they have trained since. Of buffers, which may differ, the lowest rank's are the host's."""
    specs = [spec("a", 4), spec("mean", 2, role=Role.BUFFER_MEAN)]
    ranks = [rank(specs, piece("a", (0,), (4,)), piece("mean", (0,), (2,))) for _ in range(4)]
    site = merge_ranks(ranks, 2)
    assert site.kept == ((0, 1), (), (0, 1), ())
    assert site.owned == ((0, 1), (), (), ())


def test_what_ranks_have_alike_is_written_by_all_of_them() -> None:
    """Each copies over a link of its own; but of buffers, which may differ, the lowest rank's are the site's."""
    names = [f"t{i}" for i in range(9)]
    specs = [*(spec(name, 4) for name in names), spec("mean", 2, role=Role.BUFFER_MEAN)]
    pieces = [*(piece(name, (0,), (4,)) for name in names), piece("mean", (0,), (2,))]
    site = merge_ranks([rank(specs, *pieces) for _ in range(4)])
    assert [len(owned) for owned in site.owned] == [4, 2, 2, 2]
    assert sorted(index for owned in site.owned for index in owned) == list(range(10))
    assert 9 in site.owned[0]
    assert site.shared
    for shared in site.shared:
        assert shared.holders[0].piece in site.owned[shared.holders[0].rank]
        assert sorted(holder.rank for holder in shared.holders) == [0, 1, 2, 3]


def test_uneven_and_empty_shards_and_a_scalar() -> None:
    specs = [spec("a", 5, 2), spec("s")]
    scalar = piece("s", (), ())
    site = merge_ranks(
        [
            rank(specs, piece("a", (0, 0), (3, 2)), scalar),
            rank(specs, scalar, piece("a", (3, 0), (2, 2))),
            rank(specs, piece("a", (5, 0), (0, 2)), scalar),
        ]
    )
    assert site.owned == ((0,), (1,), (1,)), "the scalar is of the rank that has nothing else"
    assert site.shared_of(2) == (1,)


def test_stages_of_a_pipeline_make_one_manifest() -> None:
    tied = [TiedName(alias="z", name="b")]
    site = merge_ranks(
        [
            rank([spec("b", 2)], piece("b", (0,), (2,)), tied=tied),
            rank([spec("a", 3), spec("n", 1, dtype="I64", role=Role.BUFFER_LOWEST)],
                 piece("n", (0,), (1,), "I64"), piece("a", (0,), (3,))),
        ]
    )  # fmt: skip
    assert [t.name for t in site.manifest.tensors] == ["a", "b", "n"]
    assert site.manifest.tied == tuple(tied)
    assert site.owned == ((0,), (0, 1))


def test_stages_that_were_cut_out_of_a_list_are_asked_about() -> None:
    """The first block of the second one would be taken for a copy of the model's first."""
    first = rank(
        [spec("embedding", 3), spec("layers.0", 2)], piece("embedding", (0,), (3,)), piece("layers.0", (0,), (2,))
    )
    second = rank([spec("head", 3), spec("layers.0", 2)], piece("head", (0,), (3,)), piece("layers.0", (0,), (2,)))
    with pytest.raises(
        ConfigError, match=r"ranks 0 and 1 both hold 'layers\.0'.*\(rank 1 has no 'embedding'\).*names="
    ):
        merge_ranks([first, second])
    said = [replace(entry, names_are_said=True) for entry in (first, second)]
    assert [t.name for t in merge_ranks(said).manifest.tensors] == ["embedding", "head", "layers.0"]
    with pytest.raises(ConfigError, match="names="):
        merge_ranks([said[0], second])


def test_only_what_is_trained_tells_stages_from_copies() -> None:
    """A buffer of rank 0 alone, as of a best loss, is no stage."""
    block, best = piece("w", (0,), (2,)), spec("best", 1, role=Role.BUFFER_LOCAL)
    first = rank([spec("w", 2), best], block, piece("best", (0,), (1,)))
    assert len(merge_ranks([first, rank([spec("w", 2)], block)]).shared) == 1


@pytest.mark.parametrize("data_ranks", [(0, 0), (0, 1)])
def test_slices_that_are_tensors_of_their_own_are_asked_about(data_ranks: tuple[int, int]) -> None:
    """Copies begin alike, whatever batches their ranks see: else one of them would be overwritten without a word."""
    full = piece("w", (0,), (4,))
    entries = [
        replace(rank([spec("w", 4)], replace(full, first_values=bytes([number]))), data_rank=data_rank)
        for number, data_rank in enumerate(data_ranks)
    ]
    batch = r"the same batch \(data rank 0\)" if data_ranks == (0, 0) else "different batches"
    with pytest.raises(ConfigError, match=rf"ranks 0 and 1 see {batch}.*'w' \[4\].*the same seed.*DTensor.*names="):
        merge_ranks(entries)
    said = [replace(entry, names_are_said=True) for entry in entries]
    with pytest.raises(ConfigError, match="with different first values"):
        merge_ranks(said)
    one_says_nothing = [entries[0], replace(entries[1], pieces=(full,))]
    assert len(merge_ranks(one_says_nothing).shared) == 1, "a copy that is a DTensor says itself what it is"
    alike = [replace(entry, pieces=(replace(full, first_values=b"a"),)) for entry in entries]
    assert len(merge_ranks(alike).shared) == 1


def test_buffers_of_replicas_may_differ() -> None:
    specs = [spec("mean", 2, role=Role.BUFFER_MEAN)]
    site = merge_ranks([rank(specs, piece("mean", (0,), (2,)))] * 2)
    assert site.shared == ()


def test_an_empty_tensor_needs_no_piece() -> None:
    assert merge_ranks([rank([spec("e", 0, 3)])]).owned == ((),)


SHARDS = [spec("w", 4, 6)]


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([rank(SHARDS, piece("w", (0, 0), (4, 2))), rank(SHARDS, piece("w", (0, 3), (4, 3)))],
         r"'w' \[4, 6\]: \[0:4, 2:3\] is held by no rank"),
        ([rank(SHARDS, piece("w", (0, 0), (3, 6))), rank(SHARDS, piece("w", (2, 0), (2, 6)))],
         r"\[2:3, 0:6\] is in different slices of ranks 0, 1"),
        ([rank(SHARDS)], r"\[0:4, 0:6\] is held by no rank"),
        ([rank(SHARDS, piece("w", (0, 0), (4, 6))), rank([spec("w", 6, 4)])],
         r"trainable F32 \[4, 6\] on rank 0 and trainable F32 \[6, 4\] on rank 1"),
        ([rank(SHARDS, piece("w", (0, 0), (4, 6))), rank(SHARDS, piece("w", (0, 0), (4, 6), "BF16"))],
         r"F32 on rank 0 and BF16 on rank 1"),
        ([rank(SHARDS, piece("w", (0, 0), (5, 6)))], r"is not inside \[4, 6\]"),
        ([rank(SHARDS, piece("w", (0,), (4,)))], r"is not inside"),
        ([rank(SHARDS, piece("v", (0,), (4,)))], r"'v', which its manifest does not list"),
        ([rank(SHARDS, piece("w", (0, 0), (4, 6), "I32"))], r"I32 cannot be averaged"),
        ([rank(SHARDS, piece("w", (0, 0), (4, 6), "COMPLEX"))], r"COMPLEX is not supported"),
        ([rank(SHARDS, piece("w", (0, 0), (4, 6)), tied=[TiedName(alias="x", name="y")])], r"ties 'x' to 'y'"),
    ],
)  # fmt: skip
def test_refused_by_name(ranks: list[LocalJoin], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        merge_ranks(ranks)


@pytest.mark.parametrize("seed", range(30))
def test_faults_are_found_where_they_are(seed: int) -> None:
    """Against a count of how often each element is held."""
    random_ = random.Random(seed)
    shape = (random_.randint(1, 5), random_.randint(1, 5), random_.randint(1, 3))
    pieces = []
    for _ in range(random_.randint(1, 5)):
        offsets = tuple(random_.randint(0, n - 1) for n in shape)
        sizes = tuple(random_.randint(1, n - o) for n, o in zip(shape, offsets, strict=True))
        pieces.append(piece("t", offsets, sizes))
    held = dict.fromkeys(itertools.product(*map(range, shape)), 0)
    for p in {(p.offsets, p.sizes): p for p in pieces}.values():
        for element in itertools.product(*(range(o, o + s) for o, s in zip(p.offsets, p.sizes, strict=True))):
            held[element] += 1
    ranks = [rank([spec("t", *shape)], p) for p in pieces]
    if set(held.values()) == {1}:
        merge_ranks(ranks)
        return
    with pytest.raises(ConfigError) as caught:
        merge_ranks(ranks)
    box = re.findall(r"(\d+):(\d+)", str(caught.value))
    inside = {held[e] for e in itertools.product(*(range(int(first), int(last)) for first, last in box))}
    assert inside == {0} if "no rank" in str(caught.value) else min(inside) > 1


def test_many_shards_of_many_tensors() -> None:
    num_ranks = 256
    specs = [spec(f"t{i:03}", num_ranks * 2, 8) for i in range(20)]
    ranks = [rank(specs, *(piece(s.name, (r * 2, 0), (2, 8)) for s in specs)) for r in range(num_ranks)]
    assert all(len(owned) == 20 for owned in merge_ranks(ranks).owned)
