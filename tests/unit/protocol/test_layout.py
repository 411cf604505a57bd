"""Manifest and chunks: canonical order, every element in exactly one chunk, hashes that notice everything."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.protocol.errors import ConfigError, InvalidMessage
from atoll.protocol.layout import Layout, Manifest, Role, TensorSpec, TiedName, chunk_hash, state_hash


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


shapes = st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), min_size=1, max_size=6)


@given(shapes, st.integers(1, 7))
def test_every_element_lies_in_exactly_one_chunk(shapes: list[tuple[int, ...]], chunk_elements: int) -> None:
    manifest = Manifest.canonical([spec(f"t{i}", shape) for i, shape in enumerate(shapes)])
    layout = Layout(manifest, chunk_elements)
    seen: set[tuple[int, int]] = set()
    bytes_seen: set[int] = set()
    for chunk in layout.chunks:
        elements = {(chunk.tensor, chunk.first_element + i) for i in range(chunk.num_elements)}
        place = set(range(chunk.offset_bytes, chunk.offset_bytes + chunk.num_bytes))
        assert not elements & seen
        assert not place & bytes_seen
        seen |= elements
        bytes_seen |= place
    assert len(seen) == sum(t.num_elements for t in manifest.tensors)
    assert max(bytes_seen, default=0) < layout.buffer_bytes


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
