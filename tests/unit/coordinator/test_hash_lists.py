"""Lists of hashes: what is computed of them part by part, and many at once, is what one by one would give."""

from __future__ import annotations

import hashlib
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.coordinator.core.log.hash_lists import ListCheck, first_difference, hash_at
from atoll.coordinator.core.sync.chunk_sizes import ChunkSizes
from atoll.protocol.digest import DIGEST_BYTES, Digest
from atoll.protocol.layout import Layout, Manifest, Role, TensorSpec
from atoll.protocol.sync_settings import SyncSettings
from tests.harness.fuzzing import fuzz


def some_hashes(count: int) -> list[bytes]:
    return [hashlib.sha256(bytes([i & 255, i >> 8])).digest() for i in range(count)]


@pytest.mark.parametrize("count", [0, 1, 2, 4095, 4096, 4097, 9000])
def test_digests_are_the_data_of_each(count: int) -> None:
    hashes, expected = some_hashes(count), Digest("x")
    for value in hashes:
        expected.data(value)
    assert Digest("x").digests(b"".join(hashes)).finish() == expected.finish()


def test_what_is_no_list_of_digests_is_refused() -> None:
    with pytest.raises(ValueError, match="33 bytes are no digests"):
        Digest("x").digests(bytes(33))


@pytest.mark.parametrize("chunk", [0, 1, 255, 256, 999])
def test_the_first_difference(chunk: int) -> None:
    one = b"".join(some_hashes(1000))
    other = bytearray(one)
    for place in {chunk, 999}:
        other[DIGEST_BYTES * place + 31] ^= 1
    assert first_difference(one, other) == chunk
    assert first_difference(one, bytearray(one)) is None
    assert hash_at(other, chunk) != hash_at(one, chunk) == some_hashes(1000)[chunk]


def sizes_of(shapes: list[int], num_fragments: int = 1) -> tuple[ChunkSizes, Layout]:
    roles = [Role.TRAINABLE, Role.BUFFER_MEAN, Role.FROZEN]
    specs = [
        TensorSpec(name=f"{i:03d}", shape=(size,), dtype="F32", role=roles[i % 3]) for i, size in enumerate(shapes)
    ]
    manifest = Manifest.canonical(specs)
    sync = SyncSettings(chunk_elements=4, fragments=num_fragments)
    return ChunkSizes.of(manifest, sync), Layout(manifest, 4, num_fragments)


SHAPES = st.lists(st.integers(0, 11), min_size=1, max_size=12)


@fuzz(50)
@given(SHAPES)
def test_sizes_are_those_of_the_layout(shapes: list[int]) -> None:
    sizes, layout = sizes_of(shapes)
    found = [sizes.at(chunk) for chunk in range(sizes.num_chunks)]
    assert [(spec.name, count) for spec, count in found] == [
        (layout.name_of(chunk.index), chunk.num_elements) for chunk in layout.chunks
    ]
    assert len(sizes) == layout.num_sync_chunks
    assert sizes.num_payloads == len(layout.sync_chunks)


@fuzz(50)
@given(SHAPES, st.lists(st.integers(0, 12 * 4 * DIGEST_BYTES), max_size=6), st.booleans())
def test_a_list_is_checked_in_parts_of_any_size(shapes: list[int], cuts: list[int], of_payloads: bool) -> None:
    sizes, layout = sizes_of(shapes)
    num_hashes = len(sizes) if of_payloads else sizes.num_chunks
    hashes = some_hashes(num_hashes)
    listed = [hashes[chunk] for chunk in layout.sync_chunks] if of_payloads else hashes
    data, expected = b"".join(hashes), Digest("x").digests(b"".join(listed)).finish()
    for end, is_right in ((len(data), True), (len(data) - 1, False), (len(data) - DIGEST_BYTES, False)):
        if end < 0:
            continue
        check = ListCheck(Digest("x"), num_hashes, sizes if of_payloads else None)
        bounds = sorted({0, end, *(cut for cut in cuts if cut < end)})
        for first, last in itertools.pairwise(bounds):
            check.more(data[first:last])
        assert (check.finish() == expected) is is_right


@fuzz(100)
@given(st.lists(st.integers(1, 11), min_size=6, max_size=12), st.lists(st.integers(0, 12 * 4), max_size=6))
def test_a_list_of_a_fragment_is_that_of_its_payloads(shapes: list[int], cuts: list[int]) -> None:
    whole, layout = sizes_of(shapes, 2)
    for fragment in range(3):
        hashes, sizes = some_hashes(len(whole)), whole.of_sync(fragment)
        expected = Digest("x").digests(b"".join(hashes[chunk] for chunk in layout.chunks_of(fragment))).finish()
        check = ListCheck(Digest("x"), len(sizes), sizes)
        for first, last in itertools.pairwise(sorted({0, len(hashes), *(cut for cut in cuts if cut < len(hashes))})):
            check.more(b"".join(hashes[first:last]))
        assert check.finish() == expected
