"""The most bytes that each chunk of a sync has when encoded, without a list of them. Pure.

A manifest of a few bytes may name millions of chunks, nearly all of one size: they are kept as runs of equal ones.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

from atoll.coordinator.core.sync.chunk_places import ChunkPlaces
from atoll.protocol.errors import ConfigError
from atoll.protocol.layout import Manifest, Role, chunk_runs
from atoll.protocol.settings import SyncSettings
from atoll.protocol.spec import spec_of


class ChunkSizes:
    """Sizes in the order of chunks, given as (number of chunks, bytes of each)."""

    def __init__(self, runs: Iterable[tuple[int, int]] = (), places: ChunkPlaces | None = None) -> None:
        self.places = places or ChunkPlaces()
        self._counts: list[int] = []
        self._sizes: list[int] = []
        self._first: list[int] = []  # chunk of each run
        self._before: list[int] = []  # bytes of all chunks before it
        self._num_chunks = self.total_bytes = 0
        for count, size in runs:
            if self._sizes and self._sizes[-1] == size:
                self._counts[-1] += count
            else:
                self._counts.append(count)
                self._sizes.append(size)
                self._first.append(self._num_chunks)
                self._before.append(self.total_bytes)
            self._num_chunks += count
            self.total_bytes += count * size

    @classmethod
    def of(cls, manifest: Manifest, sync: SyncSettings) -> ChunkSizes:
        """Raises ConfigError if the manifest has more chunks than the run takes."""
        places = ChunkPlaces(chunk_runs(manifest, sync.chunk_elements))
        total = places.num_chunks
        if total > sync.max_chunks:
            raise ConfigError(
                f"the model has {total} chunks of {sync.chunk_elements} elements, a run takes {sync.max_chunks}: raise "
                "sync.chunk_elements, or sync.max_chunks"
            )
        travels = spec_of(sync, 0, 0)  # all syncs of a run have one
        sizes = (
            (count, travels.max_bytes(spec.role, elements, spec.carried_itemsize))
            for spec, count, elements in places.runs()
            if spec.role is not Role.FROZEN
        )
        return cls(sizes, places)

    def __len__(self) -> int:
        return self._num_chunks

    def bytes_before(self, chunk: int) -> int:
        """Of all chunks with a lower number."""
        run = bisect_right(self._first, chunk) - 1
        return self._before[run] + (chunk - self._first[run]) * self._sizes[run] if run >= 0 else 0

    def bytes_of(self, first: int, count: int) -> int:
        """Of `count` chunks from `first` on."""
        return self.bytes_before(min(first + count, self._num_chunks)) - self.bytes_before(first)

    def num_within(self, num_bytes: int) -> int:
        """How many of the first chunks have at most so many bytes together."""
        run = bisect_right(self._before, num_bytes) - 1
        if run < 0:
            return 0
        left, size = num_bytes - self._before[run], self._sizes[run]
        return self._first[run] + (min(self._counts[run], left // size) if size else self._counts[run])

    def num_nearest(self, goal_bytes: float) -> int:
        """How many of the first chunks have their middle at or before so many bytes."""
        run = bisect_right(self._before, goal_bytes) - 1
        while run >= 0:
            before, size, count = self._before[run], self._sizes[run], self._counts[run]
            taken = min(count, int((goal_bytes - before) / size + 0.5)) if size else count
            # The quotient is rounded; what counts is the comparison.
            while taken > 0 and before + (taken - 1) * size + size / 2 > goal_bytes:
                taken -= 1
            while taken < count and before + taken * size + size / 2 <= goal_bytes:
                taken += 1
            if taken:
                return self._first[run] + taken
            run -= 1
        return 0
