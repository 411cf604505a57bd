"""Ranks that read the outer values in the outer file: what they find is what was published, to the bit, whatever the
node does meanwhile."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import weakref
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from atoll.node.daemon.publish_file import PublishFile
from atoll.node.dataplane import publish
from atoll.node.dataplane.in_place import InPlace
from atoll.node.dataplane.outer_state import OuterState
from atoll.node.dataplane.pages import has_pages
from atoll.node.local_protocol import words_of
from atoll.node.worker.in_place import PublishInPlace
from atoll.protocol.codecs import kernels
from atoll.protocol.disk import Disk
from atoll.protocol.errors import StateError
from atoll.protocol.layout import LARGE_BYTES, PAGE_BYTES, Layout, Manifest, Role, TensorSpec
from tests.harness.data_plane import RUN, update_of
from tests.harness.mappings import mapped_bytes

LAYOUT = Layout(
    Manifest.canonical(
        [
            TensorSpec(name="bias", shape=(7,), dtype="F32", role=Role.TRAINABLE),
            TensorSpec(name="buffer", shape=(5000,), dtype="F32", role=Role.BUFFER_MEAN),
            TensorSpec(name="frozen", shape=(20_000,), dtype="F32", role=Role.FROZEN),
            TensorSpec(name="matrix", shape=(192, 128), dtype="F32", role=Role.TRAINABLE),
            TensorSpec(name="vector", shape=(20_001,), dtype="F32", role=Role.TRAINABLE),
            TensorSpec(name="wide", shape=(64, 512), dtype="F32", role=Role.TRAINABLE),  # in blocks of columns
        ]
    ),
    8192,
)
CHUNKS = LAYOUT.fragments[0]
IN_PLACE = [chunk for chunk in CHUNKS if has_pages(LAYOUT.chunks[chunk])]
Values = npt.NDArray[np.uint8]


class Site:
    """A node's outer state and PUBLISH, and a rank of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.outer = self.seeded(0)
        self.file = PublishFile(LAYOUT, folder, folder / "state", Disk())
        self.in_place = InPlace(LAYOUT, self.file.view, OuterState.path(folder / "state"))
        fds = map(os.dup, self.file.fds)
        self.rank = PublishInPlace(next(fds), next(fds), LAYOUT, OuterState.path(folder / "state").name)

    def seeded(self, seed: int) -> OuterState:
        outer = OuterState.create(self.folder / "state", LAYOUT, ("momentum",), RUN)
        numbers = np.random.default_rng(seed).standard_normal(LAYOUT.buffer_bytes // 4, np.float32)
        publish.seed_from_snapshot(outer, numbers.data.cast("B"))
        return outer

    def apply(self, commit: int) -> None:
        numbers = np.random.default_rng(commit)
        for chunk in CHUNKS:
            spec = LAYOUT.chunks[chunk]
            values = numbers.standard_normal(spec.num_elements, np.float32)
            self.outer.apply(chunk, kernels.encode("fp32", values), update_of(commit))

    def publish(self) -> Values:
        """What the ranks are to find."""
        rest = self.in_place.publish(self.outer, CHUNKS)
        publish.publish_replace(self.outer, self.file.view, [*rest, *LAYOUT.frozen_chunks], None)
        copied = np.zeros(LAYOUT.buffer_bytes, np.uint8)
        publish.publish_replace(self.outer, copied.data, [*CHUNKS, *LAYOUT.frozen_chunks], None)
        return copied

    def found(self) -> Values:
        """By the rank, which looks again if it has to."""
        while True:
            self.rank.refresh()
            values = np.frombuffer(self.rank.view, np.uint8).copy()
            if self.rank.is_current:
                return values


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_large_tensors_begin_at_pages_and_most_of_their_chunks_are_whole_pages() -> None:
    for spec, offset in zip(LAYOUT.manifest.tensors, LAYOUT.tensor_offsets_bytes, strict=True):
        assert spec.num_elements * 4 < LARGE_BYTES or offset % PAGE_BYTES == 0
    names = [LAYOUT.name_of(chunk) for chunk in IN_PLACE]
    assert names == ["matrix"] * 3 + ["vector"] * 2, "not the rest of the vector, nor blocks of columns"


def test_what_is_read_in_place_is_what_was_published(site: Site) -> None:
    published = site.publish()
    assert site.in_place.num_chunks == len(IN_PLACE)
    np.testing.assert_array_equal(site.found(), published)
    for chunk in IN_PLACE:
        spec = LAYOUT.chunks[chunk]
        assert not any(site.file.view[spec.offset_bytes : spec.offset_bytes + spec.num_bytes]), "nothing is copied"
    site.apply(1)
    assert not site.rank.is_current
    assert site.in_place.num_chunks == 0, "their places were wanted"
    np.testing.assert_array_equal(site.found(), published)
    site.apply(2)
    np.testing.assert_array_equal(site.found(), published)
    published = site.publish()
    np.testing.assert_array_equal(site.found(), published)


def test_what_is_moved_away_is_not_memory_of_the_node(site: Site) -> None:
    published = site.publish()
    before = mapped_bytes(site.file.view)
    site.apply(1)
    assert site.in_place.num_chunks == 0, "all was moved to the buffer"
    assert mapped_bytes(site.file.view) <= before
    np.testing.assert_array_equal(np.frombuffer(site.file.view, np.uint8, LAYOUT.buffer_bytes), published)
    assert mapped_bytes(site.file.view) > before, "what was read is mapped"
    site.in_place.unmap()
    assert mapped_bytes(site.file.view) <= before
    np.testing.assert_array_equal(site.found(), published)


def test_what_is_let_go_is_not_copied_and_no_rank_reads_it(site: Site) -> None:
    published = site.publish()
    np.testing.assert_array_equal(site.found(), published)
    site.in_place.let_go()
    site.apply(1)
    with pytest.raises(StateError, match="the node has gone on from the outer values that this rank reads"):
        site.rank.refresh()
    spec = LAYOUT.chunks[IN_PLACE[0]]
    assert not any(site.file.view[spec.offset_bytes : spec.offset_bytes + spec.num_bytes])
    published = site.publish()
    np.testing.assert_array_equal(site.found(), published)


def test_a_difference_starts_from_what_was_read_in_place(site: Site) -> None:
    before = site.publish()
    site.apply(1)
    site.in_place.move_all()
    dtypes = {spec.name: "BF16" if spec.name == "matrix" else "F32" for spec in LAYOUT.manifest.tensors}
    publish.publish_shift(site.outer, site.file.view, CHUNKS, dtypes, None)
    expected = before.data
    publish.publish_shift(site.outer, expected, CHUNKS, dtypes, None)
    np.testing.assert_array_equal(site.found(), before)


def test_a_state_that_is_made_anew_is_another_file(site: Site) -> None:
    """As after a rollback. What was published before stays readable until then, and the new one is found."""
    published = site.publish()
    np.testing.assert_array_equal(site.found(), published)
    site.in_place.move_all()
    OuterState.discard(site.folder / "state")
    site.outer = site.seeded(5)
    np.testing.assert_array_equal(site.found(), published)
    again = site.publish()
    assert (again != published).any()
    np.testing.assert_array_equal(site.found(), again)
    site.apply(1)
    np.testing.assert_array_equal(site.found(), again)


def test_whoever_reads_while_commits_are_applied_finds_what_was_published(site: Site) -> None:
    """Each commit takes the places of the one before, and the rank reads all the time."""
    for commit in range(1, 12):
        published = site.publish()
        applying = threading.Thread(target=site.apply, args=(commit,))
        applying.start()
        while applying.is_alive():
            np.testing.assert_array_equal(site.found(), published)
        applying.join()
        np.testing.assert_array_equal(site.found(), published)


def test_pages_that_are_locked_in_memory_change_all_the_same(site: Site) -> None:
    """As with mlockall, of a rank that wants no page to be missing: a private page would be the rank's own then."""
    published = site.publish()
    np.testing.assert_array_equal(site.found(), published)
    libc = ctypes.CDLL(None, use_errno=True)
    address, num_bytes = ctypes.c_void_p(site.rank._address), ctypes.c_size_t(LAYOUT.buffer_bytes)
    assert libc.mlock(address, num_bytes) == 0, os.strerror(ctypes.get_errno())
    try:
        site.apply(1)
        published = site.publish()
        np.testing.assert_array_equal(site.found(), published)
    finally:
        libc.munlock(address, num_bytes)


def test_a_rank_finds_the_file_wherever_it_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "home").mkdir()
    site = Site(Path("home"))
    published = site.publish()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    with monkeypatch.context() as script:
        script.chdir(elsewhere)
        np.testing.assert_array_equal(site.found(), published)


def test_numbers_of_files_beyond_a_word_with_a_sign_fit_the_table() -> None:
    assert np.array(words_of((1 << 63) + 7, (1 << 64) - 1), np.int64).tolist() == [7, (1 << 63) - 1]


def test_a_file_that_is_made_anew_is_held_by_no_node(site: Site) -> None:
    """Its blocks would be missing where the disk is nearly full."""
    site.publish()
    outer = weakref.ref(site.outer)
    site.in_place.leave()
    OuterState.discard(site.folder / "state")
    site.outer = site.seeded(5)
    gc.collect()
    assert outer() is None
