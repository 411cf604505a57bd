"""Sizes of chunks as runs of equal ones: what a list of them says, without the list."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.cli.status import notes
from atoll.coordinator.core.sync.chunk_sizes import ChunkSizes
from atoll.coordinator.core.sync.topology import Reducer, direct
from atoll.protocol.codecs import max_encoded_bytes
from atoll.protocol.errors import ConfigError
from atoll.protocol.layout import Layout, Manifest, Role, TensorSpec
from atoll.protocol.spec import spec_of
from atoll.protocol.sync_settings import SyncSettings
from tests.harness.chunk_runs import sizes_of_runs
from tests.harness.coordinator_story import Story, some_settings
from tests.harness.fuzzing import fuzz

RUNS = st.lists(st.tuples(st.integers(1, 6), st.sampled_from([0, 1, 16, 20, 1000])), max_size=6)


def w(*shape: int, role: Role = Role.TRAINABLE, dtype: str = "F32", name: str = "w") -> TensorSpec:
    return TensorSpec(name=name, shape=shape, dtype=dtype, role=role)


def test_sizes_are_those_of_the_codec_of_each_role() -> None:
    manifest = Manifest.canonical(
        [
            w(1000),
            w(10, name="m", dtype="BF16", role=Role.BUFFER_MEAN),
            w(name="n", dtype="I64", role=Role.BUFFER_LOWEST),
            w(50, name="frozen", role=Role.FROZEN),
        ]
    )
    sizes = ChunkSizes.of(manifest, SyncSettings(codec="int8"))
    assert len(sizes) == 3
    assert [sizes.bytes_of(i, 1) for i in range(3)] == [
        max_encoded_bytes("int8", 1000),
        max_encoded_bytes("fp32", 10),
        max_encoded_bytes("raw", 1, 8),
    ]


def test_an_audit_may_be_of_any_chunk_that_has_a_payload() -> None:
    manifest = Manifest.canonical(
        [
            w(1000),
            w(0, name="empty"),
            w(700, name="v"),
            w(10, name="m", role=Role.BUFFER_MEAN),
            w(name="n", dtype="I64", role=Role.BUFFER_LOWEST),
            w(50, name="frozen", role=Role.FROZEN),
        ]
    )
    for sync in (SyncSettings(chunk_elements=300), SyncSettings(chunk_elements=300, fragments=2)):
        sizes = ChunkSizes.of(manifest, sync)
        for part in (sizes, *(sizes.of_sync(fragment) for fragment in range(sync.fragments))):
            chunks = [part.with_payload(place) for place in range(part.num_payloads)]
            assert chunks == [chunk for chunk in range(len(part)) if part.has_payload(chunk)]
    assert {sizes.at(sizes.with_payload(place))[0].name for place in range(sizes.num_payloads)} == {"w", "v", "m", "n"}


def test_a_bundle_has_as_many_contributions_as_there_are() -> None:
    manifest = Manifest.canonical([w(1000), w(3000, name="v")])
    for sync, factor in ((SyncSettings(codec="topk2", fragments=2), 7), (SyncSettings(codec="int2", fragments=2), 1)):
        sizes = ChunkSizes.of(manifest, sync)
        for part in (sizes, sizes.of_sync(0), sizes.of_sync(1), sizes.of_sync(2)):
            assert part.payload_factor(7) == factor
        assert sizes.bytes_of(0, 1) == max_encoded_bytes(sync.codec, 3000)


SHAPES = st.tuples(st.integers(0, 40)) | st.tuples(st.integers(0, 9), st.integers(0, 9))


@given(st.lists(st.tuples(SHAPES, st.sampled_from(list(Role))), max_size=6), st.integers(1, 9))
@fuzz(200)
def test_they_are_those_of_the_chunks_of_the_layout(
    tensors: list[tuple[tuple[int, ...], Role]], chunk_elements: int
) -> None:
    specs = [w(*shape, role=role, name=f"t{i}") for i, (shape, role) in enumerate(tensors)]
    manifest = Manifest.canonical(specs)
    layout = Layout(manifest, chunk_elements)
    settings = SyncSettings(codec="int8", chunk_elements=chunk_elements)
    sizes, travels = ChunkSizes.of(manifest, settings), spec_of(settings, 0, 0)
    expected = [
        travels.max_bytes(c.role, c.num_elements, manifest.tensors[c.tensor].carried_itemsize)
        for c in layout.chunks[: layout.num_sync_chunks]
    ]
    assert [sizes.bytes_of(i, 1) for i in range(len(sizes))] == expected


@given(st.lists(st.tuples(SHAPES, st.sampled_from(list(Role))), max_size=8), st.integers(1, 9), st.integers(2, 4))
@fuzz(200)
def test_in_a_sync_of_a_fragment_the_other_chunks_have_nothing(
    tensors: list[tuple[tuple[int, ...], Role]], chunk_elements: int, num_fragments: int
) -> None:
    manifest = Manifest.canonical([w(*shape, role=role, name=f"t.{i}") for i, (shape, role) in enumerate(tensors)])
    settings = SyncSettings(codec="int8", chunk_elements=chunk_elements, fragments=num_fragments)
    try:
        layout = Layout(manifest, chunk_elements, num_fragments)
    except ConfigError:
        with pytest.raises(ConfigError, match=r"would be empty.*choose sync\.fragments = "):
            ChunkSizes.of(manifest, settings)
        return
    whole = ChunkSizes.of(manifest, settings)
    for fragment in range(num_fragments + 1):
        sizes, places = whole.of_sync(fragment), range(layout.num_sync_chunks)
        assert len(sizes) == len(places)
        own = [fragment in (layout.fragment_of[i], num_fragments) for i in places]
        assert [sizes.bytes_of(i, 1) for i in places] == [whole.bytes_of(i, 1) * own[i] for i in places]
        assert [sizes.has_payload(i) for i in places] == [layout.travels(i, fragment) for i in places]
        assert sizes.num_payloads == len(layout.chunks_of(fragment))
        reducers = [Reducer(site_id=i, bandwidth_bytes_per_s=0, max_retained_bytes=1 << 60) for i in range(3)]
        trees = direct(sizes, reducers)
        assert sum(tree.num_chunks for tree in trees) == len(places)
        assert all(sizes.bytes_of(tree.first_chunk, tree.num_chunks) for tree in trees)


@given(RUNS, st.data())
@fuzz(300)
def test_what_is_asked_of_them_is_what_a_list_says(runs: list[tuple[int, int]], data: st.DataObject) -> None:
    sizes, listed = sizes_of_runs(runs), [size for count, size in runs for _ in range(count)]
    assert (len(sizes), sizes.total_bytes) == (len(listed), sum(listed))
    first = data.draw(st.integers(0, len(listed)))
    count = data.draw(st.integers(0, len(listed)))
    assert sizes.bytes_of(first, count) == sum(listed[first : first + count])
    limit = data.draw(st.integers(0, sum(listed) + 10))
    assert sizes.num_within(limit) == max(n for n in range(len(listed) + 1) if sum(listed[:n]) <= limit)
    goal = data.draw(st.floats(0, sum(listed) + 10))
    middles = [sum(listed[:n]) + listed[n] / 2 for n in range(len(listed))]
    assert sizes.num_nearest(goal) == sum(1 for middle in middles if middle <= goal)


def test_a_manifest_of_a_few_bytes_with_millions_of_chunks_costs_no_list() -> None:
    manifest = Manifest.canonical([w(1 << 42)])
    sizes = ChunkSizes.of(manifest, SyncSettings(codec="fp32", max_chunks=1 << 22))
    assert len(sizes) == 1 << 22
    assert len(sizes._counts) == 1
    reducers = [Reducer(site_id=i, bandwidth_bytes_per_s=0, max_retained_bytes=1 << 60) for i in (1, 2)]
    assert [tree.num_chunks for tree in direct(sizes, reducers)] == [1 << 21, 1 << 21]


def test_more_chunks_than_the_run_takes_are_refused_by_name() -> None:
    manifest = Manifest.canonical([w(100)])
    assert len(ChunkSizes.of(manifest, SyncSettings(chunk_elements=10, max_chunks=10))) == 10
    with pytest.raises(ConfigError, match=r"has 10 chunks of 10 elements, a run takes 9: .*sync\.max_chunks"):
        ChunkSizes.of(manifest, SyncSettings(chunk_elements=10, max_chunks=9))


# --- bundles, of which each site gets as many contributions as there are


@pytest.mark.parametrize(
    ("codec", "num_sites", "is_said"), [("topk2", 46, False), ("topk2", 47, True), ("int4", 47, False)]
)
def test_the_status_says_above_how_many_sites_bundles_are_no_gain(codec: str, num_sites: int, is_said: bool) -> None:
    names = [f"s{i:02}" for i in range(num_sites)]
    story = Story(some_settings(codec=codec, min_sites=num_sites, quorum=num_sites))
    story.start(*names)
    assert not story.view.too_many_bundled
    story.commit_one(*names, state="s0", following="s1")
    text = story.view.too_many_bundled
    assert bool(text) == is_said
    if is_said:
        assert text.startswith("with 47 sites topk2 sends more than 4 bits a parameter")
        assert text.endswith("Above 46 sites take codec int4, or up sign1, in another run: the codec of this one stays")
        assert text in notes(story.view)
