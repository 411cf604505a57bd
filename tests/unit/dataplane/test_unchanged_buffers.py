"""Buffers that a sync leaves as they are: no contributor sends their values, and none of their bits change."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.node.dataplane import publish
from atoll.node.dataplane.averages import recomputed_buffer
from atoll.node.dataplane.bases import cast_base
from atoll.node.dataplane.outer_state import OuterState
from atoll.node.dataplane.sync_data import SyncData
from atoll.protocol.codecs import HEADER_BYTES, kernels, peek_codec, unchanged
from atoll.protocol.errors import AverageError, InvalidMessage
from atoll.protocol.layout import Layout, Manifest, Role, TensorSpec
from atoll.protocol.spec import check_payload, spec_of
from atoll.protocol.sync_settings import SyncSettings
from tests.harness.data_plane import RUN, apply_all, tensor, update_of, values_of
from tests.harness.fuzzing import damaged, fuzz

LEAST = np.finfo(np.float32).min
MASK = np.array([LEAST, -np.inf, 1.0, 0.1, -0.0, np.nan], np.float32)

LAYOUT = Layout(
    Manifest.canonical(
        [
            TensorSpec(name="count", shape=(2,), dtype="I64", role=Role.BUFFER_LOWEST),
            TensorSpec(name="half", shape=(6,), dtype="BF16", role=Role.BUFFER_MEAN),
            TensorSpec(name="mask", shape=(6,), dtype="F32", role=Role.BUFFER_MEAN),
            TensorSpec(name="weight", shape=(6,), dtype="F32", role=Role.TRAINABLE),
        ]
    ),
    6,
)
WEIGHT, HALF, MASK_CHUNK, COUNT = range(4)
BUFFERS = (HALF, MASK_CHUNK, COUNT)


def check_in_the_log(chunk: int, data: bytes) -> None:
    place = LAYOUT.chunks[chunk]
    check_payload(place.role, data, place.num_elements, LAYOUT.wire_dtype(place))


def values(mask: npt.NDArray[np.float32] = MASK) -> memoryview:
    """A snapshot of what the base holds."""
    buffer = memoryview(bytearray(LAYOUT.buffer_bytes))
    tensor(LAYOUT, buffer, "weight")[:] = np.arange(6)
    tensor(LAYOUT, buffer, "half")[:] = np.float32(0.1)  # no bf16 number: an average
    tensor(LAYOUT, buffer, "mask")[:] = mask
    place = LAYOUT.chunks[COUNT]
    buffer[place.offset_bytes : place.offset_bytes + place.num_bytes] = np.array([7, 1 << 40], "<i8").tobytes()
    return buffer


def site(outer: OuterState, snapshot: memoryview, codec: str = "int8") -> SyncData:
    return SyncData(LAYOUT, spec_of(SyncSettings(codec=codec), 0, 0), outer, snapshot, {"weight": "F32"})


def seeded(folder: Path, first: memoryview) -> OuterState:
    outer = OuterState.create(folder, LAYOUT, ("momentum",), RUN)
    publish.seed_from_snapshot(outer, first)
    return outer


def received(outer: OuterState) -> memoryview:
    """A snapshot of workers that took the base and changed nothing."""
    snapshot = memoryview(bytearray(LAYOUT.buffer_bytes))
    publish.publish_replace(outer, snapshot, outer.layout.sync_chunks, None)
    half = tensor(LAYOUT, snapshot, "half")
    cast_base(half.copy(), "BF16", half)
    return snapshot


def averaged(sites: list[SyncData], tokens: list[int]) -> dict[int, bytes]:
    """What an auditor computes, too."""
    found = {}
    for chunk in sites[0].chunks:
        contributions = [(t, s.contribution(chunk)) for t, s in zip(tokens, sites, strict=True)]
        found[chunk] = sites[0].reduce(chunk, contributions)
        if chunk in BUFFERS:
            spec, outer = LAYOUT.chunks[chunk], sites[0].outer
            way, dtype = sites[0].travels.of(spec.role), LAYOUT.manifest.tensors[spec.tensor].dtype
            assert isinstance(outer, OuterState)
            held = partial(values_of, outer, chunk)
            assert recomputed_buffer(way, spec.num_elements, dtype, contributions, held) == found[chunk]
    return found


@pytest.mark.parametrize("tokens", [[1, 1, 1], [100, 7, 3000], [3, 5, 8191]])
def test_a_buffer_that_nobody_changed_keeps_every_bit_and_sends_none(tmp_path: Path, tokens: list[int]) -> None:
    """Its fp32 average would be -inf, NaN, or a bit away from 1.0, whenever the weights do not sum to exactly 1."""
    outer = seeded(tmp_path, values())
    before = {chunk: outer.read(chunk) for chunk in BUFFERS}
    sites = [site(outer, received(outer)) for _ in tokens]
    for data in sites:
        for chunk in BUFFERS:
            contribution = data.contribution(chunk)
            assert (len(contribution), peek_codec(contribution)) == (HEADER_BYTES, "unchanged")
            data.check(chunk, contribution)
    payloads = averaged(sites, tokens)
    for chunk in BUFFERS:
        assert len(payloads[chunk]) == HEADER_BYTES
        sites[0].check(chunk, payloads[chunk])
        check_in_the_log(chunk, payloads[chunk])
    apply_all(outer, payloads, 1)
    for chunk in BUFFERS:
        after = outer.read(chunk)
        assert (after.version, after.data, after.hash) == (1, before[chunk].data, before[chunk].hash)


def test_a_trainable_tensor_is_never_unchanged(tmp_path: Path) -> None:
    """Nobody trained, and its momentum still moves it."""
    outer = seeded(tmp_path, values())
    moved = received(outer)
    tensor(LAYOUT, moved, "weight")[:] -= np.float32(1)
    apply_all(outer, averaged([site(outer, moved)], [1]), 1)
    before = values_of(outer, WEIGHT).copy()
    idle = site(outer, received(outer))
    assert peek_codec(idle.contribution(WEIGHT)) == "int8"
    apply_all(outer, averaged([idle, idle], [1, 2]), 2)
    assert (values_of(outer, WEIGHT) != before).all()


@pytest.mark.parametrize("chunk", [WEIGHT])
def test_a_trainable_tensor_that_is_said_to_be_unchanged_is_refused(tmp_path: Path, chunk: int) -> None:
    outer = seeded(tmp_path, values())
    data, marker = site(outer, received(outer)), unchanged(6, "F32")
    with pytest.raises(InvalidMessage, match="codec unchanged, the run's layout asks for int8"):
        data.check(chunk, marker)
    with pytest.raises(InvalidMessage):
        data.reduce(chunk, [(1, data.contribution(chunk)), (1, marker)])
    with pytest.raises(InvalidMessage, match="carries no average of pseudo-gradients"):
        check_in_the_log(chunk, marker)
    with pytest.raises(InvalidMessage, match="carries no average of pseudo-gradients"):
        outer.apply(chunk, marker, update_of(1))


def test_who_did_not_change_a_buffer_counts_with_the_base(tmp_path: Path) -> None:
    first = values(np.array([1, 2, 3, 4, 5, 6], np.float32))
    outer = seeded(tmp_path, first)
    moved = received(outer)
    tensor(LAYOUT, moved, "mask")[:] += np.float32(0.3)
    tensor(LAYOUT, moved, "half")[:] = np.float32(4)
    idle, busy = site(outer, received(outer)), site(outer, moved)
    payloads = averaged([idle, busy], [100, 7])
    weights = np.float32(100 / 107), np.float32(7 / 107)
    mask = weights[0] * tensor(LAYOUT, first, "mask") + weights[1] * tensor(LAYOUT, moved, "mask")
    assert payloads[MASK_CHUNK] == kernels.encode("fp32", mask)
    base = tensor(LAYOUT, received(outer), "half")  # as the workers hold it, cast included
    assert payloads[HALF] == kernels.encode("fp32", weights[0] * base + weights[1] * tensor(LAYOUT, moved, "half"))


def test_the_lowest_contributor_decides_over_a_buffer_of_integers(tmp_path: Path) -> None:
    outer = seeded(tmp_path, values())
    moved = received(outer)
    place = LAYOUT.chunks[COUNT]
    moved[place.offset_bytes] = 99
    idle, busy = site(outer, received(outer)), site(outer, moved)
    before = outer.read(COUNT).data
    payload = averaged([busy, idle], [1, 1])[COUNT]
    assert payload == busy.contribution(COUNT) != idle.contribution(COUNT)
    apply_all(outer, {COUNT: averaged([idle, busy], [1, 1])[COUNT]}, 1)
    assert outer.read(COUNT).data == before


def test_an_average_of_finite_buffers_is_finite(tmp_path: Path) -> None:
    """All of them made the same mask in this window, and in fp32 their weights may sum to a little more than 1."""
    outer = seeded(tmp_path, values(np.zeros(6, np.float32)))
    masked = received(outer)
    tensor(LAYOUT, masked, "mask")[:] = np.array([LEAST, -LEAST, 0, 1, LEAST, LEAST], np.float32)
    overflows = 0
    for other in range(1, 60):
        tokens, total = [100, other, 2 * other + 1, 3], np.float32(0)
        with np.errstate(over="ignore"):
            for count in tokens:
                total = total + np.float32(count / sum(tokens)) * LEAST
        overflows += not np.isfinite(total)
        payload = averaged([site(outer, masked)] * 4, tokens)[MASK_CHUNK]
        found = np.empty(6, np.float32)
        kernels.decode(payload, "fp32", 6, found)
        np.testing.assert_allclose(found, tensor(LAYOUT, masked, "mask"), rtol=1e-6)
    assert overflows, "or this test shows nothing"


def test_a_base_that_is_not_finite_and_was_changed_by_some_has_no_average(tmp_path: Path) -> None:
    """Who changed it is to blame."""
    outer = seeded(tmp_path, values())
    moved = received(outer)
    tensor(LAYOUT, moved, "mask")[:] = 1
    for kinds, to_blame in (("ib", [1]), ("ibi", [1]), ("bbi", [0, 1])):
        idle, busy = site(outer, received(outer)), site(outer, moved)  # of one attempt
        sites = [idle if kind == "i" else busy for kind in kinds]
        with pytest.raises(AverageError, match="'mask', elements 0 to 5 of norm inf") as refused:
            averaged(sites, [1] * len(sites))
        assert refused.value.tensor == "mask"
        assert [place for place, _, _ in refused.value.outliers] == to_blame
    busy = site(outer, moved)
    assert averaged([busy, busy], [1, 1])[MASK_CHUNK] == busy.contribution(MASK_CHUNK), "all of them made it another"


@fuzz(200)
@given(data=st.data(), chunk=st.sampled_from([WEIGHT, *BUFFERS]))
def test_only_the_whole_marker_of_its_place_is_taken(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, chunk: int
) -> None:
    dtype = data.draw(st.sampled_from(["F32", "I64", "BF16"]))
    marker = unchanged(data.draw(st.sampled_from([0, 2, 6, 1 << 60])), dtype)
    arrived = data.draw(damaged(marker)) if data.draw(st.booleans()) else marker
    right = {WEIGHT: None, HALF: unchanged(6, "F32"), MASK_CHUNK: unchanged(6, "F32"), COUNT: unchanged(2, "I64")}
    outer = seeded(tmp_path_factory.mktemp("outer"), values())
    used = site(outer, received(outer))
    before = outer.read(chunk)
    for take in (
        lambda: used.check(chunk, arrived),
        lambda: used.reduce(chunk, [(1, arrived)]),
        lambda: check_in_the_log(chunk, arrived),
        lambda: outer.apply(chunk, arrived, update_of(1)),
    ):
        if arrived == right[chunk]:
            take()
            assert outer.read(chunk).data == before.data
        else:
            with pytest.raises(InvalidMessage):
                take()
            assert outer.read(chunk) == before
