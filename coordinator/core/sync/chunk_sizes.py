"""The chunks of a model: of which tensor each one is, and the most bytes that it has when encoded. Pure.

A manifest of a few bytes may name millions of chunks: they are kept as runs of equal ones, made once, where a manifest
is read. Whoever asks in the event loop goes neither through all tensors nor through all chunks.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence

from atoll.protocol.digest import DIGEST_BYTES
from atoll.protocol.errors import ConfigError
from atoll.protocol.layout import Manifest, Role, TensorSpec, chunk_runs, fragments_of
from atoll.protocol.spec import specs_of
from atoll.protocol.sync_settings import SyncSettings

_Run = tuple[TensorSpec, int, int, int]
"""Tensor, number of chunks, elements and bytes of each."""
_OTHERS = TensorSpec(name="", shape=(0,), dtype="F32", role=Role.TRAINABLE)
"""What does not travel in a sync of one fragment."""


class ChunkSizes:
    """Of runs of equal chunks, in the order of chunks: those of syncs, then those of frozen tensors."""

    def __init__(
        self,
        runs: Iterable[_Run] = (),
        fragments: Sequence[ChunkSizes] = (),
        *,
        num_in_flight: int = 1,
        are_bundled: bool = False,
    ) -> None:
        """`fragments`: the sizes in a sync of each, where there are several."""
        self._fragments = fragments
        self._are_bundled = are_bundled
        self.num_in_flight = num_in_flight
        """Syncs like this one that may be open at once: they share each site's room and link."""
        self._specs: list[TensorSpec] = []
        self._elements, self._counts, self._sizes = array("Q"), array("Q"), array("Q")
        self._firsts = array("Q")  # chunk of each run
        self._before: list[int] = []  # bytes of all chunks before it
        self._empty, self._empty_ends = array("Q"), array("Q")  # ranges of chunks of syncs that have no payload
        self._full, self._full_before = array("Q"), array("Q")  # runs of those that have one
        self.num_payloads = 0
        """Of a sync: chunks without elements have none."""
        self.num_groups = 1
        """Of parameters."""
        self.num_chunks = 0
        """Of the whole model, frozen tensors included."""
        self._num_sync_chunks = self.total_bytes = 0
        for spec, count, elements, size in runs:
            self._specs.append(spec)
            self._elements.append(elements)
            self._counts.append(count)
            self._sizes.append(size)
            self._firsts.append(self.num_chunks)
            self._before.append(self.total_bytes)
            first, self.num_chunks = self.num_chunks, self.num_chunks + count
            if spec.role is not Role.FROZEN:
                self._num_sync_chunks = self.num_chunks
                self.total_bytes += count * size
                if elements:
                    self._full.append(first)
                    self._full_before.append(self.num_payloads)
                    self.num_payloads += count
                else:
                    self._empty.append(first)
                    self._empty_ends.append(self.num_chunks)

    @classmethod
    def of(cls, manifest: Manifest, sync: SyncSettings) -> ChunkSizes:
        """Raises ConfigError if the manifest has more chunks than the run takes."""
        specs = specs_of(sync)

        def size(spec: TensorSpec, elements: int) -> int:
            if spec.role is Role.FROZEN:
                return 0
            return max(travels.max_bytes(spec.role, elements, spec.carried_itemsize) for travels in specs)

        runs = [
            (spec, n, elements, size(spec, elements)) for spec, n, elements in chunk_runs(manifest, sync.chunk_elements)
        ]
        own = _by_fragment(runs, manifest, sync.fragments) if sync.fragments > 1 else []
        are_bundled, in_flight = specs[0].trainable.aggregation.is_bundle, sync.most_in_flight
        fragments = [cls(part, num_in_flight=in_flight, are_bundled=are_bundled) for part in own]
        found = cls(runs, fragments, are_bundled=are_bundled)  # a sync of all fragments is alone
        found.num_groups = manifest.num_groups
        if found.num_chunks > sync.max_chunks:
            raise ConfigError(
                f"the model has {found.num_chunks} chunks of {sync.chunk_elements} elements, a run takes "
                f"{sync.max_chunks}: raise sync.chunk_elements, or sync.max_chunks"
            )
        return found

    def __len__(self) -> int:
        """Of a sync."""
        return self._num_sync_chunks

    def of_sync(self, fragment: int) -> ChunkSizes:
        """With all chunks of syncs, of which those of other fragments have no bytes and no payloads."""
        return self._fragments[fragment] if fragment < len(self._fragments) else self

    def at(self, chunk: int) -> tuple[TensorSpec, int]:
        """The tensor of a chunk, and its number of elements."""
        run = bisect_right(self._firsts, chunk) - 1
        return self._specs[run], self._elements[run]

    # --- their payloads

    def payload_factor(self, num_contributors: int) -> int:
        """How many times the bytes of a contribution a payload may have: a bundle holds all of them."""
        return num_contributors if self._are_bundled else 1

    def has_payload(self, chunk: int) -> bool:
        """In a sync."""
        place = bisect_right(self._empty, chunk) - 1
        return chunk < len(self) and (place < 0 or chunk >= self._empty_ends[place])

    def with_payload(self, place: int) -> int:
        """The chunk at that place among those that have one."""
        run = bisect_right(self._full_before, place) - 1
        return self._full[run] + place - self._full_before[run]

    def of_payloads(self, hashes: memoryview, first_chunk: int) -> Iterator[memoryview]:
        """What is left of a part of a list of hashes, one for each chunk of a sync, without those that have no
        payload."""
        start = 0
        end_chunk = first_chunk + len(hashes) // DIGEST_BYTES
        for place in range(bisect_right(self._empty_ends, first_chunk), bisect_left(self._empty, end_chunk)):
            yield hashes[start : DIGEST_BYTES * max(0, self._empty[place] - first_chunk)]
            start = DIGEST_BYTES * (self._empty_ends[place] - first_chunk)
        yield hashes[start:]

    # --- their bytes

    def bytes_before(self, chunk: int) -> int:
        """Of all chunks with a lower number."""
        run = bisect_right(self._firsts, chunk) - 1
        return self._before[run] + (chunk - self._firsts[run]) * self._sizes[run] if run >= 0 else 0

    def bytes_of(self, first: int, count: int) -> int:
        """Of `count` chunks from `first` on."""
        return self.bytes_before(min(first + count, len(self))) - self.bytes_before(first)

    def num_within(self, num_bytes: int) -> int:
        """How many of the first chunks have at most so many bytes together."""
        run = bisect_right(self._before, num_bytes) - 1
        if run < 0:
            return 0
        left, size = num_bytes - self._before[run], self._sizes[run]
        taken = min(self._counts[run], left // size) if size else self._counts[run]
        return min(self._firsts[run] + taken, len(self))

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
                return min(self._firsts[run] + taken, len(self))
            run -= 1
        return 0


def _by_fragment(runs: Sequence[_Run], manifest: Manifest, num_fragments: int) -> list[list[_Run]]:
    """Of each fragment its own runs, and what lies between them as one. Raises ConfigError if one has no elements."""
    fragments = fragments_of(manifest, num_fragments)
    found: list[list[_Run]] = [[] for _ in range(num_fragments)]
    ends = [0] * num_fragments
    end = 0

    def fill(fragment: int) -> None:
        if end > ends[fragment]:
            found[fragment].append((_OTHERS, end - ends[fragment], 0, 0))

    for run in runs:
        spec, count, _, _ = run
        if spec.role is Role.FROZEN:
            break  # they are the last
        fragment = fragments[spec.name]
        fill(fragment)
        found[fragment].append(run)
        end += count
        ends[fragment] = end
    for fragment in range(num_fragments):
        fill(fragment)
    return found
