"""What a model needs on a site's machine, by the formulas of docs/memory.md. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.node.dataplane.slots import SlotMap
from atoll.protocol.codecs import codec_of, max_encoded_bytes
from atoll.protocol.layout import Layout, Role
from atoll.protocol.settings import RunSettings

OUTER_SLOTS = {"sgd": 0, "nesterov": 1}
"""Of each outer optimizer; the same as its `slots`, but known without numpy and compiled kernels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """In bytes."""

    shared_bytes: int
    """SNAPSHOT and PUBLISH: allocated, and never dropped."""
    outer_bytes: int
    """The outer file with its spare places: on the disk, and mapped."""
    sync_bytes: int
    """The most that one encoding of all chunks of a sync has: what a site sends, and what it holds as a reducer where
    the chunks are spread evenly."""
    log_bytes: int
    """Payloads of the last commits, on the disk, with those of the sync under way."""
    snapshots_bytes: int
    """Of the outer state, on the disk, with the one that is being written."""
    model_bytes: int
    """A saved model."""

    @property
    def disk_bytes(self) -> int:
        return self.outer_bytes + self.log_bytes + self.snapshots_bytes + self.model_bytes


def footprint(layout: Layout, settings: RunSettings) -> Footprint:
    num_slots = OUTER_SLOTS[settings.outer.optimizer]
    records = [c.num_bytes * (1 + num_slots if c.role is Role.TRAINABLE else 1) for c in layout.chunks]
    dtypes = layout.manifest.tensors
    sync_bytes = sum(
        max_encoded_bytes(codec_of(c.role, settings.sync.codec), c.num_elements, dtypes[c.tensor].carried_itemsize)
        for c in layout.chunks[: layout.num_sync_chunks]
    )
    num_snapshots = settings.sync.snapshots + 1 if settings.sync.snapshots else 0
    return Footprint(
        shared_bytes=2 * layout.buffer_bytes,
        outer_bytes=SlotMap(records).file_bytes,
        sync_bytes=sync_bytes,
        log_bytes=sync_bytes * (settings.sync.log_commits + 1),
        snapshots_bytes=sum(records) * num_snapshots,
        model_bytes=sum(records),
    )
