"""One sync's arithmetic: contributions against the base, weighted averages in the order of sites, refusals by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from atoll.node.dataplane.bases import cast_base, check_base_dtypes
from atoll.node.dataplane.outer_update import updated
from atoll.node.dataplane.sync_data import SyncData
from atoll.protocol.codecs import (
    HEADER_BYTES,
    EncodedHeader,
    bundles,
    kernels,
    max_encoded_bytes,
    parse_header,
    peek_codec,
)
from atoll.protocol.codecs.table import CODECS, DENSE, TABLE
from atoll.protocol.digest import Digest
from atoll.protocol.errors import AverageError, ConfigError, InvalidMessage, NonFiniteError
from atoll.protocol.layout import Layout, Manifest, Role, TensorSpec
from atoll.protocol.spec import spec_of
from atoll.protocol.sync_settings import SyncSettings
from tests.harness.chunks import cut_out, elements_of
from tests.harness.data_plane import (
    DTYPES,
    apply_all,
    filled,
    layout,
    payloads,
    seeded,
    sync_data,
    tensor,
    update_of,
    values_of,
)
from tests.harness.reference_codecs import average_of, decode_sparse, finished


def chunks_of(used: Layout, role: Role) -> list[int]:
    return [c.index for c in used.chunks if c.role is role and c.num_elements]


def test_chunks_are_those_with_elements(tmp_path: Path) -> None:
    used = layout()
    data = sync_data(seeded(tmp_path, used), filled(used))
    assert list(data.chunks) == sorted(
        c for role in (Role.TRAINABLE, Role.BUFFER_MEAN, Role.BUFFER_LOWEST) for c in chunks_of(used, role)
    )
    empty = next(c.index for c in used.chunks if not c.num_elements)
    for chunk in (empty, used.num_sync_chunks, -1, 10**6):
        with pytest.raises(InvalidMessage, match="no part"):
            data.contribution(chunk)


@pytest.mark.parametrize("codec", CODECS)
def test_a_contribution_is_base_minus_local(tmp_path: Path, codec: str) -> None:
    used = layout()
    outer = seeded(tmp_path, used)
    snapshot = filled(used, 1)
    data = sync_data(outer, snapshot, codec)
    for chunk in chunks_of(used, Role.TRAINABLE):
        spec = used.chunks[chunk]
        local = np.frombuffer(cut_out(snapshot, spec), np.float32)
        base = np.empty_like(local)
        cast_base(values_of(outer, chunk), DTYPES[used.name_of(chunk)], base)
        assert data.contribution(chunk) == kernels.encode(codec, base - local) == data.contribution(chunk)
        assert len(data.contribution(chunk)) <= data.max_bytes(chunk) == max_encoded_bytes(codec, spec.num_elements)
        data.check(chunk, data.contribution(chunk))


def test_a_site_that_did_not_train_contributes_nothing(tmp_path: Path) -> None:
    """With bf16 parameters local holds rounded values: the base must be rounded alike, or an idle model moves."""
    used = layout()
    outer = seeded(tmp_path, used)
    snapshot = filled(used)
    weight = tensor(used, snapshot, "weight")
    rounded = np.empty_like(weight)
    cast_base(weight.copy(), "BF16", rounded)
    assert (rounded != weight).any()
    weight[:] = rounded
    data = sync_data(outer, snapshot, "fp32")
    for chunk in chunks_of(used, Role.TRAINABLE):
        values = np.empty(used.chunks[chunk].num_elements, np.float32)
        kernels.decode(data.contribution(chunk), "fp32", values.size, values)
        assert not values.any()


def test_buffers_travel_as_values_and_bytes(tmp_path: Path) -> None:
    used = layout()
    snapshot = filled(used, 1)
    data = sync_data(seeded(tmp_path, used), snapshot)
    (mean,), (lowest,) = chunks_of(used, Role.BUFFER_MEAN), chunks_of(used, Role.BUFFER_LOWEST)
    assert data.contribution(mean) == kernels.encode("fp32", tensor(used, snapshot, "mean"))
    spec = used.chunks[lowest]
    assert data.contribution(lowest)[16:] == cut_out(snapshot, spec)
    assert data.max_bytes(lowest) == 16 + 3 * 8


@pytest.mark.parametrize("codec", DENSE)
def test_the_average_is_weighted_summed_in_order_and_encoded_once(tmp_path: Path, codec: str) -> None:
    used = layout()
    outer = seeded(tmp_path, used)
    tokens = [100, 7, 3000]
    sites = [sync_data(outer, filled(used, i), codec) for i in (1, 2, 3)]
    for chunk in chunks_of(used, Role.TRAINABLE) + chunks_of(used, Role.BUFFER_MEAN):
        role = used.chunks[chunk].role
        used_codec = codec if role is Role.TRAINABLE else "fp32"
        parts = [(t, site.contribution(chunk)) for t, site in zip(tokens, sites, strict=True)]
        average = np.zeros(used.chunks[chunk].num_elements, np.float32)
        for count, data in parts:
            values = np.empty_like(average)
            kernels.decode(data, used_codec, values.size, values)
            average = average + np.float32(count / sum(tokens)) * values
        payload = sites[0].reduce(chunk, parts)
        assert payload == kernels.encode(used_codec, average)
        sites[0].check(chunk, payload)


@pytest.mark.parametrize("mean_over", ["senders", "all"])
def test_what_carries_some_of_the_values_is_bundled_and_averaged_where_it_is_applied(
    tmp_path: Path, mean_over: str
) -> None:
    used = Layout(
        Manifest.canonical([TensorSpec(name="weight", shape=(130, 128), dtype="F32", role=Role.TRAINABLE)]), 1 << 14
    )
    outer = seeded(tmp_path / "outer", used)
    tokens = (100, 7, 3000)
    travels = spec_of(SyncSettings(codec="topk2", mean_over=mean_over), 0, 0)
    sites = [SyncData(used, travels, outer, filled(used, i), {"weight": "F32"}) for i in (1, 2, 3)]
    twin = seeded(tmp_path / "twin", used)
    for chunk, columns in zip(sites[0].chunks, (128, 128), strict=True):
        size = used.chunks[chunk].num_elements
        parts = [site.contribution(chunk) for site in sites]
        assert [parse_header(part, codec="topk2", num_elements=size).columns for part in parts] == [columns] * 3
        for part in parts:
            sites[0].check(chunk, part)
            assert len(part) == sites[0].max_bytes(chunk)
        payload = sites[0].reduce(chunk, list(zip(tokens, parts, strict=True)))
        assert [bytes(part) for part in bundles.split(payload, size).contributions] == parts
        assert len(payload) == sites[0].payload_bytes(chunk, 3)
        sites[1].check_payload(chunk, payload, 3)
        for wrong, number in (
            (payload, 2),
            (parts[0], 1),
            (bundles.join(size, parts, over_all=mean_over != "all"), 3),
            (bundles.join(size, parts[:2], over_all=mean_over == "all"), 3),
        ):
            with pytest.raises(InvalidMessage):
                sites[1].check_payload(chunk, wrong, number)
        before = outer.read(chunk).data
        outer.apply(chunk, payload, update_of(1, tokens=tokens))
        decoded = [decode_sparse("topk2", part[HEADER_BYTES:], size) for part in parts]
        average = average_of(decoded, list(tokens), over_all=mean_over == "all")
        average = finished("topk2", average, size, columns)
        header = EncodedHeader(codec="fp32", zstd=False, dtype="F32", num_elements=size).pack()
        twin.apply(chunk, header + average.tobytes(), update_of(1))
        assert outer.read(chunk).data == twin.read(chunk).data != before
        with pytest.raises(InvalidMessage, match="3 contributions for the weights"):
            updated(used, chunk, before, payload, update_of(1, tokens=tokens[:2]))


def test_bytes_are_the_lowest_contributors(tmp_path: Path) -> None:
    used = layout()
    outer = seeded(tmp_path, used)
    (lowest,) = chunks_of(used, Role.BUFFER_LOWEST)
    parts = [(100, sync_data(outer, filled(used, i)).contribution(lowest)) for i in (1, 2)]
    data = sync_data(outer, filled(used))
    assert data.reduce(lowest, parts) == parts[0][1]
    with pytest.raises(InvalidMessage):
        data.reduce(lowest, [(100, parts[0][1][:-1])])


def test_weights_must_be_positive(tmp_path: Path) -> None:
    used = layout()
    data = sync_data(seeded(tmp_path, used), filled(used, 1))
    part = data.contribution(0)
    for contributions in ([], [(0, part)], [(5, part), (0, part)]):
        with pytest.raises(InvalidMessage, match="tokens"):
            data.reduce(0, contributions)


@pytest.mark.parametrize("name", ["weight", "weight.scale", "mean"])
def test_values_that_are_not_finite_are_refused_by_name(tmp_path: Path, name: str) -> None:
    used = layout()
    snapshot = filled(used, 1)
    tensor(used, snapshot, name)[-1] = np.nan
    data = sync_data(seeded(tmp_path, used), snapshot)
    refused = 0
    for chunk in data.chunks:
        spec = used.chunks[chunk]
        last = used.manifest.tensors[spec.tensor].num_elements - 1
        if used.name_of(chunk) == name and last in elements_of(spec):
            way_out = r'.*atoll\.join\(\.\.\., buffers=\{"mean": "local"\}\)' if name == "mean" else ""
            with pytest.raises(NonFiniteError, match=f"this site's '{name}'{way_out}"):
                data.contribution(chunk)
            refused += 1
        else:
            data.contribution(chunk)
    assert refused == 1


def test_an_average_that_is_not_finite_is_refused_by_name(tmp_path: Path) -> None:
    used = layout()
    data = sync_data(seeded(tmp_path, used), filled(used, 1))
    chunk = data.contribution(0)
    poisoned = chunk[:16] + np.array([np.inf], np.float32).tobytes() + chunk[20:]
    with pytest.raises(InvalidMessage, match="chunk 0 of '"):
        data.check(0, poisoned)
    where = r"'weight', elements 0 to 969 \(20 rows of 20\)"
    with pytest.raises(AverageError, match=f"contributions to {where} of norm inf") as refused:
        data.reduce(0, [(1, chunk), (1, poisoned)])
    assert refused.value.tensor == "weight"
    assert [place for place, _, _ in refused.value.outliers] == [1]


def test_what_does_not_fit_the_layout_is_refused(tmp_path: Path) -> None:
    used = layout()
    outer = seeded(tmp_path, used)
    data = sync_data(outer, filled(used, 1))
    other = sync_data(outer, filled(used, 1), "bf16")
    good = data.contribution(0)
    for bad in (good[:-1], good + b"x", b"", other.contribution(0), data.contribution(data.chunks[-1])):
        with pytest.raises(InvalidMessage):
            data.check(0, bad)
        with pytest.raises(InvalidMessage):
            data.reduce(0, [(1, good), (1, bad)])


def test_hashes_cover_the_bytes_that_travel(tmp_path: Path) -> None:
    used = layout()
    data = sync_data(seeded(tmp_path, used), filled(used, 1))
    part = data.contribution(0)
    assert data.payload_hash(part) == Digest("atoll/payload/v1").data(part).finish()
    assert data.payload_hash(memoryview(part)) == data.payload_hash(part)


def test_zstd_gives_the_same_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used = layout()
    outer, twin = seeded(tmp_path / "a", used), seeded(tmp_path / "b", used)
    apply_all(outer, payloads(outer, (1,)), 1)
    monkeypatch.setitem(TABLE, "int8", replace(TABLE["int8"], zstd_level=3))
    packed = sync_data(twin, filled(used, 1))
    apply_all(twin, {c: packed.reduce(c, [(100, packed.contribution(c))]) for c in packed.chunks}, 1)
    assert outer.state_hash() == twin.state_hash()


def test_contributions_and_averages_have_codecs_of_their_own(tmp_path: Path) -> None:
    used = layout()
    outer = seeded(tmp_path, used)
    data = sync_data(outer, filled(used, 1), up="sign1", down="bf16")
    for chunk in chunks_of(used, Role.TRAINABLE):
        part = data.contribution(chunk)
        data.check(chunk, part)
        payload = data.reduce(chunk, [(1, part)])
        data.check_payload(chunk, payload, 1)
        assert (peek_codec(part), peek_codec(payload)) == ("sign1", "bf16")
        assert data.max_bytes(chunk) >= max(len(part), len(payload))
        with pytest.raises(InvalidMessage, match="codec sign1"):
            data.check_payload(chunk, part, 1)
        with pytest.raises(InvalidMessage, match="codec bf16"):
            data.check(chunk, payload)


def test_a_dtype_without_a_base_is_refused_by_name() -> None:
    manifest = layout().manifest
    check_base_dtypes(manifest, DTYPES)
    with pytest.raises(ConfigError, match="'weight' is trained as F8_E5M2"):
        check_base_dtypes(manifest, DTYPES | {"weight": "F8_E5M2"})


def test_odd_sizes_lose_no_tensor(tmp_path: Path) -> None:
    """Sizes 6 and 6 in chunks of 10, 1 and 4: every element is in exactly one contribution."""
    specs = [TensorSpec(name=n, shape=(6,), dtype="F32", role=Role.TRAINABLE) for n in "ab"]
    for chunk_elements in (10, 1, 4):
        used = Layout(Manifest.canonical(specs), chunk_elements)
        outer = seeded(tmp_path / str(chunk_elements), used)
        snapshot = filled(used)
        for name in "ab":
            tensor(used, snapshot, name)[:] -= np.float32(1)
        data = SyncData(used, spec_of(SyncSettings(codec="fp32"), 0, 0), outer, snapshot, {"a": "F32", "b": "F32"})
        found = np.concatenate([np.frombuffer(data.contribution(c), np.float32, offset=16) for c in data.chunks])
        assert found.size == 12
        assert np.allclose(found, 1)
