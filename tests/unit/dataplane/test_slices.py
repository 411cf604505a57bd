"""Slices that move between two hosts of a site: exactly those that are listed, in bounded messages, or not at all."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from atoll.node.dataplane.slices import Filling, Wanted, messages, new_digest, views
from atoll.node.local_protocol import Piece
from atoll.protocol.errors import ConfigError, InvalidMessage
from atoll.protocol.layout import DTYPE_BYTES, Layout, Manifest, Role, TensorSpec

SYNC_ROLES = (Role.TRAINABLE, Role.BUFFER_MEAN, Role.BUFFER_LOWEST)
DTYPES_OF = {
    Role.TRAINABLE: ("F32",),
    Role.BUFFER_MEAN: ("F32", "BF16"),
    Role.BUFFER_LOWEST: ("U8", "BF16", "I32", "I64"),
    Role.BUFFER_LOCAL: ("I64",),
    Role.FROZEN: ("F8_E4M3", "F16", "F32", "F64"),
}
NAMES = ("norm", "embed", "layers.0.w", "layers.1.w", "layers.1.b", "layers.2.w", "head")


@dataclass(frozen=True)
class Moved:
    """What is to move, and the memory at both ends."""

    layout: Layout
    pieces: tuple[Piece, ...]
    wanted: Wanted
    max_bytes: int
    source: bytes
    target: bytearray

    def sent(self) -> tuple[list[bytes], bytes]:
        """The messages and their hash."""
        digest = new_digest()
        from_views = views(self.layout, memoryview(self.source), self.pieces, self.wanted)
        return list(messages(from_views, self.max_bytes, digest)), digest.finish()

    def receive(self, data: list[bytes], expected: bytes) -> None:
        into = views(self.layout, memoryview(self.target), self.pieces, self.wanted)
        filling = Filling(into, self.max_bytes)
        for message in data:
            filling.take(message)
        filling.finish(expected)

    def elements(self) -> dict[int, int]:
        """By where each element starts that is to move, how many bytes it has: one by one, and not as the code does."""
        found: dict[int, int] = {}
        places = {spec.name: place for place, spec in enumerate(self.layout.manifest.tensors)}
        for piece in self.pieces:
            place = places[piece.name]
            spec = self.layout.manifest.tensors[place]
            if not self._is_wanted(spec):
                continue
            starts = [self.layout.tensor_offsets_bytes[place]]
            if spec.role is Role.TRAINABLE:
                moments = self.layout.buffer_bytes + self.layout.moment_offsets_bytes[place]
                starts += [moments + n * self.layout.moment_bytes for n in range(self.wanted.num_moments)]
            for index in itertools.product(*map(range, piece.sizes)):
                flat = 0
                for first, i, length in zip(piece.offsets, index, spec.shape, strict=True):
                    flat = flat * length + first + i
                found |= {start + flat * spec.carried_itemsize: spec.carried_itemsize for start in starts}
        return found

    def _is_wanted(self, spec: TensorSpec) -> bool:
        if spec.role not in SYNC_ROLES:
            return spec.role is Role.FROZEN and self.wanted.with_frozen
        of_all = len(self.layout.fragments) > 1 and self.wanted.fragment == len(self.layout.fragments)
        return of_all or self.layout.fragment_of_tensor[spec.name] == self.wanted.fragment


@st.composite
def tensors(draw: st.DrawFn, name: str) -> TensorSpec:
    role = draw(st.sampled_from(Role))
    shape = tuple(draw(st.lists(st.integers(0, 5) | st.integers(1, 5), max_size=3)))
    return TensorSpec(name=name, shape=shape, dtype=draw(st.sampled_from(DTYPES_OF[role])), role=role)


@st.composite
def boxes(draw: st.DrawFn, spec: TensorSpec) -> Piece:
    """The whole of it, rows, columns, or any slice."""
    ends = [(0, length) for length in spec.shape]
    for d in draw(st.sets(st.integers(0, max(0, len(spec.shape) - 1)))):
        if d < len(spec.shape):
            first = draw(st.integers(0, spec.shape[d]))
            ends[d] = first, draw(st.integers(first, spec.shape[d]))
    offsets, sizes = tuple(first for first, _ in ends), tuple(end - first for first, end in ends)
    return Piece(name=spec.name, offsets=offsets, sizes=sizes, dtype=spec.dtype)


@st.composite
def moves(draw: st.DrawFn) -> Moved:
    names = draw(st.lists(st.sampled_from(NAMES), min_size=1, unique=True))
    manifest = Manifest.canonical([draw(tensors(name)) for name in names])
    num_fragments = draw(st.integers(1, 3))
    try:
        layout = Layout(manifest, 8, num_fragments)
    except ConfigError:  # a fragment would be empty
        layout, num_fragments = Layout(manifest, 8), 1
    pieces: list[Piece] = []
    for spec in manifest.tensors:
        pieces += draw(st.lists(boxes(spec), max_size=3))
    pieces += draw(st.lists(st.sampled_from(pieces), max_size=3)) if pieces else []  # replicas
    wanted = Wanted(
        fragment=draw(st.integers(0, num_fragments if num_fragments > 1 else 0)),
        with_frozen=draw(st.booleans()),
        num_moments=draw(st.integers(0, 2)),
    )
    size = layout.buffer_bytes + wanted.num_moments * layout.moment_bytes
    random = np.random.default_rng(draw(st.integers(0, 9)))
    source = random.bytes(size)
    return Moved(
        layout=layout,
        pieces=tuple(draw(st.permutations(pieces))),
        wanted=wanted,
        max_bytes=draw(st.integers(1, 12) | st.integers(1, 200)),
        source=source,
        target=bytearray(byte ^ 0xFF for byte in source),  # no byte is right by chance
    )


@given(moves())
def test_what_is_listed_moves_and_nothing_else_is_touched(moved: Moved) -> None:
    elements, before = moved.elements(), bytes(moved.target)
    data, digest = moved.sent()
    moved.receive(data, digest)
    expected = bytearray(before)
    for start, size in elements.items():
        expected[start : start + size] = moved.source[start : start + size]
    assert moved.target == expected


@given(moves())
def test_no_message_is_empty_or_larger_than_allowed_but_for_one_element(moved: Moved) -> None:
    sizes = set(moved.elements().values())
    for message in moved.sent()[0]:
        assert 0 < len(message) <= moved.max_bytes or len(message) in sizes


def test_small_slices_travel_together_and_a_large_one_is_cut() -> None:
    shapes = {"a": (3,), "b": (2,), "c": (5, 4), "d": (1,)}
    specs = [TensorSpec(name=n, shape=shape, dtype="F32", role=Role.TRAINABLE) for n, shape in shapes.items()]
    layout = Layout(Manifest.canonical(specs))
    pieces = tuple(Piece(name=n, offsets=(0,) * len(s), sizes=s, dtype="F32") for n, s in shapes.items())
    wanted = Wanted(fragment=0, with_frozen=True)
    moved = Moved(layout, pieces, wanted, 40, bytes(layout.buffer_bytes), bytearray())
    assert [len(message) for message in moved.sent()[0]] == [20, 32, 32, 20], "a and b; rows of c; its last one and d"


@given(moves())
def test_a_piece_that_several_ranks_have_travels_once(moved: Moved) -> None:
    """Also where slices overlap that are not the same: each of these travels."""
    places = {spec.name: spec for spec in moved.layout.manifest.tensors}
    num_bytes = 0
    for name, sizes in {(p.name, p.offsets, p.sizes): p.sizes for p in moved.pieces}.items():
        spec = places[name[0]]
        if moved._is_wanted(spec):
            copies = 1 + (moved.wanted.num_moments if spec.role is Role.TRAINABLE else 0)
            num_bytes += copies * spec.carried_itemsize * int(np.prod(sizes, dtype=int))
    assert sum(map(len, moved.sent()[0])) == num_bytes


def flipped(data: list[bytes], pick: Callable[[int], int]) -> list[bytes]:
    at = pick(len(data))
    changed = bytearray(data[at])
    changed[pick(len(changed))] ^= 1 << pick(8)
    return [*data[:at], bytes(changed), *data[at + 1 :]]


def without_one(data: list[bytes], pick: Callable[[int], int]) -> list[bytes]:
    at = pick(len(data))
    return data[:at] + data[at + 1 :]


def with_one_twice(data: list[bytes], pick: Callable[[int], int]) -> list[bytes]:
    at = pick(len(data))
    return [*data[: at + 1], *data[at:]]


def cut_short(data: list[bytes], pick: Callable[[int], int]) -> list[bytes]:
    at = pick(len(data))
    return [*data[:at], data[at][: pick(len(data[at]))], *data[at + 1 :]]


def with_more_at_the_end(data: list[bytes], pick: Callable[[int], int]) -> list[bytes]:
    return [*data, bytes(1 + pick(8))]


@pytest.mark.parametrize("damage", [flipped, without_one, with_one_twice, cut_short, with_more_at_the_end])
@settings(max_examples=40)
@given(moved=moves(), draw=st.data())
def test_what_does_not_come_as_it_was_sent_is_refused(
    damage: Callable[[list[bytes], Callable[[int], int]], list[bytes]], moved: Moved, draw: st.DataObject
) -> None:
    data, digest = moved.sent()
    assume(data)
    damaged = damage(data, lambda below: draw.draw(st.integers(0, below - 1)))
    with pytest.raises(InvalidMessage):
        moved.receive(damaged, digest)


@given(moves(), st.data())
def test_slices_of_a_sender_that_lists_fewer_are_refused(moved: Moved, draw: st.DataObject) -> None:
    """Their hash is right."""
    assume(moved.elements())
    fewer = draw.draw(st.integers(0, len(moved.pieces) - 1))
    data, digest = replace(moved, pieces=moved.pieces[:fewer]).sent()
    assume(data != moved.sent()[0])
    with pytest.raises(InvalidMessage):
        moved.receive(data, digest)


@given(moves(), st.binary(max_size=32))
def test_another_hash_is_refused(moved: Moved, wrong: bytes) -> None:
    data, digest = moved.sent()
    assume(wrong != digest)
    with pytest.raises(InvalidMessage, match="their hash is another one"):
        moved.receive(data, wrong)


@given(moves(), st.lists(st.binary(max_size=20), max_size=4))
def test_any_bytes_touch_what_is_listed_alone(moved: Moved, data: list[bytes]) -> None:
    may_change = {at for start, size in moved.elements().items() for at in range(start, start + size)}
    before = bytes(moved.target)
    with pytest.raises(InvalidMessage):
        moved.receive(data, b"")
    changed = {at for at, byte in enumerate(moved.target) if byte != before[at]}
    assert changed <= may_change


def test_more_moments_than_the_buffer_has_are_refused() -> None:
    spec = TensorSpec(name="w", shape=(4,), dtype="F32", role=Role.TRAINABLE)
    layout = Layout(Manifest.canonical([spec]))
    pieces = [Piece(name="w", offsets=(0,), sizes=(4,), dtype="F32")]
    buffer = memoryview(bytes(layout.buffer_bytes + 2 * layout.moment_bytes))

    def listed(num_moments: int) -> int:
        return len(list(views(layout, buffer, pieces, Wanted(fragment=0, with_frozen=True, num_moments=num_moments))))

    assert listed(2) == 3
    with pytest.raises(InvalidMessage, match="3 moments are wanted of a buffer of"):
        listed(3)


def test_dtypes_of_every_size_are_drawn() -> None:
    assert {DTYPE_BYTES[name] for names in DTYPES_OF.values() for name in names} == {1, 2, 4, 8}
