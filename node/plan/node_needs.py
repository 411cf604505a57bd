"""What the node of a site needs beside its GPUs: memory, disk, and bytes written for each sync. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.node.dataplane.footprint import Footprint, footprint
from atoll.protocol.layout import Layout, Manifest
from atoll.protocol.log_length import LogLength
from atoll.protocol.recompute import record_bytes
from atoll.protocol.settings import RunSettings

FAR_COMMIT = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeNeeds:
    footprint: Footprint
    written: tuple[tuple[str, int], ...]
    """For each sync, in words; snapshots by their share of it."""

    @property
    def written_bytes(self) -> int:
        return sum(num_bytes for _, num_bytes in self.written)


def node_needs(manifest: Manifest, settings: RunSettings, *, read_in_place: bool = False) -> NodeNeeds:
    """`read_in_place`: by all ranks, as far as run and model let them."""
    sync = settings.sync
    layout = Layout(manifest, sync.chunk_elements)
    needs = footprint(layout, settings, read_in_place=read_in_place)
    tensors = manifest.tensors
    state_bytes = sum(
        record_bytes(c.role, tensors[c.tensor].dtype, c.num_elements, settings.outer) for c in layout.chunks
    )
    written = [
        ("outer state", state_bytes // sync.fragments),
        ("payloads", needs.payload_bytes // sync.fragments),
    ]
    if sync.snapshots:
        interval = max(1, LogLength(manifest, sync).num_kept(FAR_COMMIT, {}) // (sync.snapshots + 1))
        written.append((f"snapshots, one in {interval} syncs", state_bytes // interval))
    if sync.error_feedback:
        written.append(("error feedback", 4 * manifest.num_trainable // sync.fragments))
    return NodeNeeds(footprint=needs, written=tuple(written))
