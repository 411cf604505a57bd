"""Manifest and chunks: canonical order, every element in exactly one chunk, hashes that notice everything."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.protocol.errors import ConfigError, InvalidMessage
from atoll.protocol.layout import (
    Layout,
    Manifest,
    Role,
    TensorSpec,
    TiedName,
    chunk_hash,
    chunk_runs,
    fragments_of,
    state_hash,
)
from tests.harness.chunks import cut_out, elements_of, paste

PAGE = Path(__file__).parents[3] / "docs" / "protocol.md"


def spec(name: str, shape: tuple[int, ...], role: Role = Role.TRAINABLE, dtype: str = "F32") -> TensorSpec:
    return TensorSpec(name=name, shape=shape, dtype=dtype, role=role)


MANIFEST = Manifest.canonical(
    [
        spec("b.weight", (3, 5)),
        spec("a.weight", (7,)),
        spec("scale", ()),
        spec("empty", (0, 4)),
        spec("bn.mean", (3,), Role.BUFFER_MEAN),
        spec("bn.count", (), Role.BUFFER_LOWEST, "I64"),
        spec("own", (2,), Role.BUFFER_LOCAL),
        spec("frozen", (6,), Role.FROZEN, "BF16"),
    ]
)


def test_the_order_is_by_the_bytes_of_the_names() -> None:
    names = [t.name for t in MANIFEST.tensors]
    assert names == sorted(names, key=str.encode)
    with pytest.raises(InvalidMessage, match="'a' is out of canonical order"):
        Manifest(tensors=(spec("b", (1,)), spec("a", (1,))))
    with pytest.raises(InvalidMessage, match="listed twice"):
        Manifest(tensors=(spec("a", (1,)), spec("a", (1,))))


def test_sync_chunks_come_first_and_local_buffers_have_none() -> None:
    layout = Layout(MANIFEST, 4)
    roles = [c.role for c in layout.chunks]
    assert roles == sorted(roles)
    assert Role.BUFFER_LOCAL not in roles
    assert all(c.role is not Role.FROZEN for c in layout.chunks[: layout.num_sync_chunks])
    assert all(c.role is Role.FROZEN for c in layout.chunks[layout.num_sync_chunks :])


def test_scalars_and_empty_tensors_have_one_chunk() -> None:
    layout = Layout(MANIFEST, 4)
    sizes = {layout.name_of(c.index): c.num_elements for c in layout.chunks}
    assert sizes["scale"] == 1
    assert sizes["empty"] == 0


shapes = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=6)
matrices = st.tuples(st.integers(1, 300), st.integers(1, 300)) | st.tuples(st.integers(1, 9), st.integers(1, 20_000))


def test_the_fragments_of_the_page() -> None:
    (block,) = re.findall(r"```json fragment-vector\n(.*?)```", PAGE.read_text(), re.S)
    for case in json.loads(block):
        manifest = Manifest.canonical([spec(name, tuple(shape), Role(r)) for name, r, shape, _ in case["tensors"]])
        found = fragments_of(manifest, case["num_fragments"])
        assert found == {name: fragment for name, _, _, fragment in case["tensors"]}


@pytest.mark.parametrize("num_fragments", [1, 2, 3])
def test_each_chunk_of_a_sync_is_in_one_fragment(num_fragments: int) -> None:
    layout = Layout(MANIFEST, 4, num_fragments)
    assert sorted(chunk for chunks in layout.fragments for chunk in chunks) == list(layout.sync_chunks)
    assert len(layout.fragment_of) == layout.num_sync_chunks
    assert num_fragments == 1 or layout.chunks_of(num_fragments) == layout.sync_chunks
    for fragment in range(num_fragments):
        assert layout.chunks_of(fragment) == tuple(c for c in layout.sync_chunks if layout.fragment_of[c] == fragment)
    beyond = num_fragments + (num_fragments > 1)
    for fragment in range(beyond):
        assert [c.index for c in layout.chunks if layout.travels(c.index, fragment)] == list(layout.chunks_of(fragment))
    with pytest.raises(InvalidMessage, match=f"fragment {beyond}: this run has {num_fragments}"):
        layout.chunks_of(beyond)


def test_no_fragment_is_empty() -> None:
    with pytest.raises(ConfigError, match=r"fragments = 9 .* 5 would be empty, .* choose sync\.fragments = 5$"):
        Layout(MANIFEST, 4, 9)
    assert Layout(Manifest(tensors=())).fragments == ((),)


def test_the_vectors_of_the_page() -> None:
    (block,) = re.findall(r"```json cut-vector\n(.*?)```", PAGE.read_text(), re.S)
    for case in json.loads(block):
        shape = tuple(case["shape"])
        columns = shape[-1] if shape else 1
        layout = Layout(Manifest.canonical([spec("w", shape)]), case["chunk_elements"])
        found = []
        for chunk in layout.chunks:
            elements = elements_of(chunk) if chunk.num_elements else np.zeros(0, np.int64)
            rows, first_columns = np.unique(elements // max(columns, 1)), np.unique(elements % max(columns, 1))
            first = divmod(chunk.first_element, max(columns, 1))
            found.append([*first, rows.size, first_columns.size])
        assert found == case["blocks"], case


@given(shapes, st.integers(1, 30))
def test_every_element_lies_in_exactly_one_chunk(shapes: list[tuple[int, ...]], chunk_elements: int) -> None:
    manifest = Manifest.canonical([spec(f"t{i}", shape) for i, shape in enumerate(shapes)])
    layout = Layout(manifest, chunk_elements)
    for i, tensor in enumerate(manifest.tensors):
        chunks = [c for c in layout.chunks if c.tensor == i]
        assert sorted(e for c in chunks for e in elements_of(c)) == list(range(tensor.num_elements))
        assert all(c.num_elements or not tensor.num_elements for c in chunks)
    assert max(c.num_elements for c in layout.chunks) <= chunk_elements
    assert [c.index for c in layout.chunks] == list(range(len(layout.chunks)))
    runs = list(chunk_runs(manifest, chunk_elements))
    listed = [(tensor.name, size) for tensor, count, size in runs for _ in range(count)]
    assert listed == [(layout.name_of(c.index), c.num_elements) for c in layout.chunks]
    assert len(runs) <= 4 * len(shapes)


@given(shapes, st.integers(1, 30))
def test_no_byte_of_a_shared_buffer_is_of_two_chunks(shapes: list[tuple[int, ...]], chunk_elements: int) -> None:
    layout = Layout(Manifest.canonical([spec(f"t{i}", shape) for i, shape in enumerate(shapes)]), chunk_elements)
    buffer = memoryview(bytearray(layout.buffer_bytes))
    for chunk in layout.chunks:
        assert not any(cut_out(buffer, chunk))
        paste(buffer, chunk, b"\1" * chunk.num_bytes)
    assert sum(buffer) == sum(4 * t.num_elements for t in layout.manifest.tensors)


@given(matrices, st.integers(64 * 64, 20_000))
def test_a_matrix_is_cut_into_tiles(shape: tuple[int, int], chunk_elements: int) -> None:
    """Tiles of 64 x 64, and whole rows where 64 of them fit."""
    rows, columns = shape
    layout = Layout(Manifest.canonical([spec("w", shape)]), chunk_elements)
    tile_of = np.add.outer(np.arange(rows) // 64 * math.ceil(columns / 64), np.arange(columns) // 64).ravel()
    chunk_of = np.empty(rows * columns, np.int64)
    for chunk in layout.chunks:
        chunk_of[elements_of(chunk)] = chunk.index
    assert len(set(zip(tile_of.tolist(), chunk_of.tolist(), strict=True))) == len(set(tile_of.tolist()))
    if min(64, rows) * columns <= chunk_elements:
        assert all(c.num_strips == 1 for c in layout.chunks)
    sizes = [c.num_elements for c in layout.chunks]
    assert len(sizes) == 1 or 2 * max(sizes) > chunk_elements, "more would not fit"


def test_the_digest_notices_names_shapes_dtypes_roles_and_ties() -> None:
    base = Manifest.canonical([spec("a", (2, 3))])
    others = [
        Manifest.canonical([spec("b", (2, 3))]),
        Manifest.canonical([spec("a", (3, 2))]),
        Manifest.canonical([spec("a", (2, 3), Role.BUFFER_MEAN)]),
        Manifest.canonical([spec("a", (2, 3), Role.FROZEN, "BF16")]),
        Manifest.canonical([spec("a", (2, 3))], [TiedName(alias="b", name="a")]),
    ]
    assert len({m.digest for m in [base, *others]}) == 6


def test_what_cannot_be_is_refused() -> None:
    for bad, text in [
        (spec("a", (1,), dtype="BF16"), "must be listed as F32"),
        (spec("a", (1,), Role.FROZEN, "F12"), "dtype F12"),
        (spec("a", (1,), Role.BUFFER_MEAN, "I64"), "cannot be averaged"),
        (spec("a", (1 << 30, 1 << 30)), "impossible shape"),
    ]:
        with pytest.raises(InvalidMessage, match=text):
            Manifest(tensors=(bad,))
    with pytest.raises(ConfigError, match="chunk_elements is 0"):
        Layout(MANIFEST, 0)
    with pytest.raises(ConfigError, match=r"raise sync\.chunk_elements"):
        Layout(Manifest(tensors=(spec("a", (1 << 30,)),)), 1)


def test_the_state_hash_covers_manifest_slots_and_chunks() -> None:
    hashes = [chunk_hash(b"1"), chunk_hash(b"2")]
    other = Manifest.canonical([spec("z", (1,))])
    values = {
        state_hash(MANIFEST, ("momentum",), hashes),
        state_hash(MANIFEST, (), hashes),
        state_hash(other, ("momentum",), hashes),
        state_hash(MANIFEST, ("momentum",), hashes[::-1]),
    }
    assert len(values) == 4
