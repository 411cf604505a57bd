"""What a model needs on a site's machine, by the formulas of docs/memory.md. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.node.dataplane.pages import can_read_in_place
from atoll.node.dataplane.places import PlaceMap, error_sizes, spares_for
from atoll.protocol.codecs.table import SPARSE
from atoll.protocol.digest import DIGEST_BYTES
from atoll.protocol.layout import DTYPE_BYTES, Layout, Role
from atoll.protocol.log_length import LogLength, most_ahead
from atoll.protocol.recompute import record_bytes
from atoll.protocol.settings import RunSettings
from atoll.protocol.spec import specs_of

INDEX_BYTES = 128
"""For each chunk, in the index of the outer state ..."""
ENTRY_BYTES = 52
"""... and before the payloads of a commit and the records of a snapshot."""


NODE_CONSTANT_BYTES = 150 << 20
"""Python, gRPC, numpy, compiled kernels."""
THREAD_ARRAYS = 4
"""Of the largest chunk in fp32, that a thread computes in as a rule (`protocol/codecs/scratch.py`)."""
MAX_CHECKPOINTS = 5
"""Of a rank's inner optimizer, which it keeps beside the state: docs/memory.md."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """In bytes."""

    shared_bytes: int
    """SNAPSHOT, and PUBLISH with moments if it has them unless ranks read in place: allocated, and never dropped."""
    reads_in_place: bool
    """Ranks take outer values from the outer file, and PUBLISH is on the disk."""
    outer_bytes: int
    """The outer file with its spare places: on the disk, and mapped."""
    sync_bytes: int
    """The most that one encoding of all chunks of a sync has: what a site sends, and what it holds as a reducer where
    the chunks are spread evenly."""
    payload_bytes: int
    """The most that all payloads of a sync have, where `min_sites` contribute."""
    thread_bytes: int
    """What threads compute in: as many that exchange as apply commits, and one job of the disk."""
    disk_parts: tuple[tuple[str, int], ...]
    """The most of each kind, in words, that may lie on the disk at one time."""

    @property
    def shared_in_words(self) -> str:
        where = "SNAPSHOT; PUBLISH is on the disk, as they read in place"
        return where if self.reads_in_place else "SNAPSHOT and PUBLISH"

    @property
    def memory_bytes(self) -> int:
        """Of the node, without the training processes."""
        return NODE_CONSTANT_BYTES + self.outer_bytes + self.shared_bytes + self.sync_bytes + self.thread_bytes

    @property
    def disk_bytes(self) -> int:
        return sum(num_bytes for _, num_bytes in self.disk_parts)


def footprint(layout: Layout, settings: RunSettings, num_threads: int = 1, *, read_in_place: bool = False) -> Footprint:
    """`num_threads`: that apply commits, and as many that exchange. `read_in_place`: by all ranks, as far as run and
    model let them."""
    read_in_place = read_in_place and can_read_in_place(layout, settings.sync)
    num_spares = spares_for(num_threads)
    num_synced = layout.num_sync_chunks
    tensors = layout.manifest.tensors
    records = [record_bytes(c.role, tensors[c.tensor].dtype, c.num_elements, settings.outer) for c in layout.chunks]
    specs = specs_of(settings.sync)
    synced = [(c.role, c.num_elements, tensors[c.tensor].carried_itemsize) for c in layout.chunks[:num_synced]]
    payload_bytes = max(sum(spec.payload_bytes(*chunk, settings.min_sites) for chunk in synced) for spec in specs)
    outer_bytes = PlaceMap(records, num_spares).file_bytes
    sync_bytes = max(sum(spec.max_bytes(*chunk) for chunk in synced) for spec in specs)
    largest_bytes = 4 * max((chunk.num_elements for chunk in layout.chunks), default=0)
    return Footprint(
        shared_bytes=(2 - read_in_place) * layout.buffer_bytes + settings.sync.num_shared_moments * layout.moment_bytes,
        reads_in_place=read_in_place,
        outer_bytes=outer_bytes,
        sync_bytes=sync_bytes,
        payload_bytes=payload_bytes,
        thread_bytes=(2 * num_threads + 1) * THREAD_ARRAYS * largest_bytes,
        disk_parts=(
            ("outer state", outer_bytes + INDEX_BYTES * len(records)),
            # After a rollback ranks have the outer file of before open until they take the next version.
            *([("what ranks may still read of the state before", layout.buffer_bytes + outer_bytes)] * read_in_place),
            *_errors(layout, settings, num_spares),
            _payloads(layout, settings, payload_bytes + ENTRY_BYTES * num_synced),
            *_kept(settings, sync_bytes + ENTRY_BYTES * num_synced),
            _snapshots(sum(records[:num_synced]), sum(records[num_synced:]), len(records), settings),
            _models(sum(records) + _rounded_bytes(layout), sum(records[:num_synced]), len(records), settings),
        ),
    )


def _errors(layout: Layout, settings: RunSettings, num_spares: int) -> list[tuple[str, int]]:
    """Errors of averages: of the last commit and of the attempt under way, for a site that reduces every chunk; with
    audits, of the syncs before too."""
    sizes, found = error_sizes(layout), []
    if settings.sync.error_feedback:
        found.append(("error feedback", PlaceMap(sizes, num_spares).file_bytes + INDEX_BYTES * len(sizes)))
    if settings.sync.error_feedback_down:
        num_kept = settings.sync.num_kept_syncs if settings.sync.audits else 0
        found.append(("error feedback of averages, at most", (2 + num_kept) * sum(sizes)))
    return found


def _kept(settings: RunSettings, file_bytes: int) -> list[tuple[str, int]]:
    """A new one is whole before the oldest goes."""
    if not settings.sync.audits:
        return []
    num_syncs = settings.sync.num_kept_syncs
    return [(f"contributions to {num_syncs} syncs, for audits", file_bytes * (num_syncs + 1))]


def _payloads(layout: Layout, settings: RunSettings, file_bytes: int) -> tuple[str, int]:
    sync, length = settings.sync, LogLength(layout.manifest, settings.sync)
    sites = f", of {settings.min_sites} sites" if sync.codec_up in SPARSE else ""
    if length.counts_bytes:
        return f"payloads of commits and of the sync under way{sites}", length.most_bytes(
            settings.min_sites, settings.max_sites
        )
    num_commits = length.num_commits
    num_ahead = most_ahead(num_commits)
    return f"payloads of {num_commits} commits, and of {num_ahead} syncs and the one under way{sites}", file_bytes * (
        num_commits + num_ahead + 1
    )


def _snapshots(synced_bytes: int, frozen_bytes: int, num_chunks: int, settings: RunSettings) -> tuple[str, int]:
    """A new one is whole before the oldest goes, and frozen tensors are there once."""
    num_kept = settings.sync.snapshots
    if not num_kept:
        return "no snapshots", 0
    one_bytes = synced_bytes + ENTRY_BYTES * num_chunks
    return (
        f"{num_kept} snapshots, one that is being written and one while the run goes back",
        one_bytes * (num_kept + 2) + frozen_bytes,
    )


def _models(model_bytes: int, synced_bytes: int, num_chunks: int, settings: RunSettings) -> tuple[str, int]:
    """A new one is whole before the one in its place goes, and later commits replace chunks while it is written."""
    one_bytes = model_bytes + DIGEST_BYTES * num_chunks
    if not settings.save_every:
        return "a saved model", one_bytes
    num_kept = settings.keep_models + bool(settings.best_by)
    what = "a saved model" if num_kept == 1 else f"{num_kept} saved models"
    return f"{what}, the next one and the chunks that change while it is written", (
        (num_kept + 1) * one_bytes + synced_bytes
    )


def _rounded_bytes(layout: Layout) -> int:
    """Averaged buffers in half precision are saved as they are averaged, too."""
    tensors = layout.manifest.tensors
    return sum(
        t.num_elements * DTYPE_BYTES[t.dtype] for t in tensors if t.role is Role.BUFFER_MEAN and t.dtype != "F32"
    )
