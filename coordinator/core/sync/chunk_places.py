"""Which tensor each chunk of a model is of, without a list of chunks. Pure.

Made once, where a manifest is read: whoever asks in the event loop neither goes through all tensors nor all chunks.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator

from atoll.protocol.digest import DIGEST_BYTES
from atoll.protocol.layout import Role, TensorSpec


class ChunkPlaces:
    """Of runs of equal chunks in the order of chunks, as `layout.chunk_runs` gives them."""

    def __init__(self, runs: Iterable[tuple[TensorSpec, int, int]] = ()) -> None:
        self._specs: list[TensorSpec] = []
        self._counts, self._elements = array("Q"), array("Q")
        self._firsts = array("Q")  # chunk of each run
        self._empty = array("Q")  # chunks of syncs that have no elements
        self.num_chunks = 0
        """Of the whole model, frozen tensors included."""
        self.num_sync_chunks = 0
        for spec, count, elements in runs:
            self._specs.append(spec)
            self._counts.append(count)
            self._elements.append(elements)
            self._firsts.append(self.num_chunks)
            if not elements and spec.role is not Role.FROZEN:
                self._empty.append(self.num_chunks)
            self.num_chunks += count
            if spec.role is not Role.FROZEN:
                self.num_sync_chunks = self.num_chunks

    def runs(self) -> Iterator[tuple[TensorSpec, int, int]]:
        """(tensor, number of chunks, elements of each), in the order of chunks."""
        return zip(self._specs, self._counts, self._elements, strict=True)

    def at(self, chunk: int) -> tuple[TensorSpec, int]:
        """The tensor of a chunk, and its number of elements."""
        run = bisect_right(self._firsts, chunk) - 1
        return self._specs[run], self._elements[run]

    @property
    def num_payloads(self) -> int:
        """Of a sync: chunks without elements have none."""
        return self.num_sync_chunks - len(self._empty)

    def of_payloads(self, hashes: memoryview, first_chunk: int) -> Iterator[memoryview]:
        """What is left of a part of a list of hashes, one for each chunk of a sync, without those that have no
        payload."""
        start = 0
        end_chunk = first_chunk + len(hashes) // DIGEST_BYTES
        for place in range(bisect_left(self._empty, first_chunk), bisect_left(self._empty, end_chunk)):
            end = DIGEST_BYTES * (self._empty[place] - first_chunk)
            yield hashes[start:end]
            start = end + DIGEST_BYTES
        yield hashes[start:]
