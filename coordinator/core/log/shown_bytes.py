"""The hash of what a site shows, taken as its parts arrive: to check a list of a million hashes when the last part is
here would hold up the event loop. Pure."""

from __future__ import annotations

from atoll.coordinator.core.sync.chunk_places import ChunkPlaces
from atoll.protocol.digest import DIGEST_BYTES, Digest


class ListCheck:
    """Of a list of hashes, one for each chunk, as `Digest` is of anything else. With `places`: of payloads, which
    chunks without elements have not."""

    def __init__(self, digest: Digest, num_hashes: int, places: ChunkPlaces | None = None) -> None:
        """`digest` of all that comes before the list."""
        self._digest = digest
        self._places = places
        self._expected = num_hashes
        self._num_hashes = 0
        self._rest = b""  # of a hash that came in part

    def more(self, part: bytes) -> None:
        """The next bytes; a hash may be cut between two parts."""
        data = self._rest + part
        end = len(data) // DIGEST_BYTES * DIGEST_BYTES
        whole, self._rest = memoryview(data)[:end], data[end:]
        pieces = [whole] if self._places is None else self._places.of_payloads(whole, self._num_hashes)
        for piece in pieces:
            self._digest.digests(piece)
        self._num_hashes += end // DIGEST_BYTES

    def finish(self) -> bytes:
        """Empty for a list of another length."""
        is_whole = self._num_hashes == self._expected and not self._rest
        return self._digest.finish() if is_whole else b""
