"""Between the outer state and the buffers shared with the workers, chunk by chunk. `pool` shares the work, if given."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor

import numpy as np

from atoll.node.dataplane.bases import base_of
from atoll.node.dataplane.blocks import gathered, scatter
from atoll.node.dataplane.outer_state import OuterState
from atoll.node.threads import each
from atoll.protocol.layout import Chunk, Role


def publish_replace(
    outer: OuterState, buffer: memoryview, chunks: Iterable[int], pool: Executor | None, num_moments: int = 0
) -> None:
    """`buffer` := the outer values of these chunks, for all modes but SHIFT; behind them so many moments of trainable
    ones."""
    layout, target = outer.layout, np.frombuffer(buffer, np.uint8)
    starts = [layout.buffer_bytes + place * layout.moment_bytes for place in range(num_moments)]

    def copy(chunk: Chunk) -> None:
        with outer.pinned(chunk.index) as record:
            values, *moments = record.data.reshape(-1, chunk.num_bytes)
            scatter(values, target, chunk)
            for moment, start in zip(moments, starts, strict=False):
                scatter(moment, target[start:], layout.in_moment(chunk))

    _each_filled(copy, map(outer.layout.chunks.__getitem__, chunks), pool)


def publish_shift(
    outer: OuterState, buffer: memoryview, chunks: Iterable[int], dtypes: Mapping[str, str], pool: Executor | None
) -> None:
    """Of these chunks trainable ones in `buffer` := base(new) - base(old), for SHIFT; the rest is not touched.

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

    trainable = (c for c in map(outer.layout.chunks.__getitem__, chunks) if c.role is Role.TRAINABLE)
    _each_filled(shift, trainable, pool)


def seed_from_snapshot(outer: OuterState, buffer: memoryview) -> None:
    """Commit 0 of every chunk from `buffer`, with slots of zero."""
    source = np.frombuffer(buffer, np.uint8)

    def seed(chunk: Chunk) -> None:
        outer.seed(chunk.index, gathered(source, chunk))

    _each_filled(seed, outer.layout.chunks, None)


def _each_filled(work: Callable[[Chunk], None], chunks: Iterable[Chunk], pool: Executor | None) -> None:
    each(work, [c for c in chunks if c.num_elements], pool)
