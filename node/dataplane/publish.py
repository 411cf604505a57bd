"""Between the outer state and the buffers shared with the workers, chunk by chunk. `num_threads` share the work."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np

from atoll.node.dataplane.bases import base_of
from atoll.node.dataplane.blocks import gathered, scatter
from atoll.node.dataplane.outer_state import OuterState
from atoll.node.threads import each, pool_of
from atoll.protocol.layout import Chunk, Role


def publish_replace(outer: OuterState, buffer: memoryview, *, frozen: bool = True, num_threads: int = 1) -> None:
    """`buffer` := the outer values, for REPLACE and MERGE. `frozen=False` leaves out what never changes, when the
    buffer has it already."""
    target = np.frombuffer(buffer, np.uint8)

    def copy(chunk: Chunk) -> None:
        with outer.pinned(chunk.index) as record:
            scatter(record.data[: chunk.num_bytes], target, chunk)

    _each_filled(copy, (c for c in outer.layout.chunks if frozen or c.role is not Role.FROZEN), num_threads)


def publish_shift(outer: OuterState, buffer: memoryview, dtypes: Mapping[str, str], *, num_threads: int = 1) -> None:
    """Trainable tensors of `buffer` := base(new) - base(old), for SHIFT; the rest is not touched.

    `buffer` must hold the outer values of the version that the workers have. Afterwards it does not hold outer values
    any more: once every rank has taken the shift, call `publish_replace`, or the next shift has nothing to start from.
    `dtypes` maps trainable names to the workers' dtype.
    """
    target = np.frombuffer(buffer, np.uint8)

    def shift(chunk: Chunk) -> None:
        values = gathered(target, chunk)  # the old ones, then the difference
        place = values.view(np.float32)
        dtype = dtypes[outer.layout.name_of(chunk.index)]
        with outer.pinned(chunk.index) as record:
            new, old = base_of(record.values, dtype, "new base"), base_of(place, dtype, "old base")
            np.subtract(new, old, out=place)
        if chunk.num_strips > 1:  # a copy
            scatter(values, target, chunk)

    _each_filled(shift, (c for c in outer.layout.chunks if c.role is Role.TRAINABLE), num_threads)


def seed_from_snapshot(outer: OuterState, buffer: memoryview, *, num_threads: int = 1) -> None:
    """Commit 0 of every chunk from `buffer`, with slots of zero."""
    source = np.frombuffer(buffer, np.uint8)

    def seed(chunk: Chunk) -> None:
        outer.seed(chunk.index, gathered(source, chunk))

    _each_filled(seed, outer.layout.chunks, num_threads)


def _each_filled(work: Callable[[Chunk], None], chunks: Iterable[Chunk], num_threads: int) -> None:
    with pool_of(num_threads) as pool:
        each(work, [c for c in chunks if c.num_elements], pool)
