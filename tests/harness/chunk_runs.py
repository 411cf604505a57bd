"""Chunks of given sizes, of one tensor."""

from __future__ import annotations

from collections.abc import Iterable

from atoll.coordinator.core.sync.chunk_sizes import ChunkSizes
from atoll.protocol.layout import Role, TensorSpec


def sizes_of_runs(runs: Iterable[tuple[int, int]], *, are_bundled: bool = False) -> ChunkSizes:
    """`runs`: number of chunks, bytes of each."""
    spec = TensorSpec(name="w", shape=(1,), dtype="F32", role=Role.TRAINABLE)
    return ChunkSizes(((spec, count, size, size) for count, size in runs), are_bundled=are_bundled)
