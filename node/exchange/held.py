"""The contributions that a reducer holds for one sync, over all attempts. Pure."""

from __future__ import annotations

from collections.abc import Callable

from atoll.node.exchange.parts import Encoded
from atoll.protocol.errors import InvalidMessage, RefusedError

Key = tuple[int, int, int]  # site id, incarnation, chunk


class HeldContributions:
    """A contribution never changes: the first one of a key stays."""

    def __init__(self) -> None:
        self._held: dict[Key, Encoded] = {}
        self.weights: dict[tuple[int, int], int] = {}  # of each site and incarnation
        self.num_bytes = 0

    def weigh(self, site_id: int, incarnation: int, tokens: int) -> None:
        """What the header of a site's contributions says. Raises RefusedError if it said something else before."""
        known = self.weights.setdefault((site_id, incarnation), tokens)
        if known != tokens:
            raise RefusedError(f"site {site_id} says {tokens} tokens, it has {known}; a weight never changes")

    def add(self, site_id: int, incarnation: int, encoded: Encoded) -> bool:
        """Whether it is new. Raises InvalidMessage if other bytes are held under the same key."""
        key = (site_id, incarnation, encoded.chunk)
        found = self._held.get(key)
        if found is not None:
            if found.hash != encoded.hash:
                raise InvalidMessage(
                    f"site {site_id} sent chunk {encoded.chunk} again with other bytes; a contribution never changes"
                )
            return False
        self._held[key] = encoded
        self.num_bytes += len(encoded.data)
        return True

    def get(self, site_id: int, incarnation: int, chunk: int) -> Encoded | None:
        return self._held.get((site_id, incarnation, chunk))

    def chunks_of(self, site_id: int, incarnation: int) -> set[int]:
        return {chunk for site, start, chunk in self._held if (site, start) == (site_id, incarnation)}

    def keep(self, wanted: Callable[[Key], bool]) -> None:
        """Forgets what is not wanted."""
        self._held = {key: encoded for key, encoded in self._held.items() if wanted(key)}
        self.num_bytes = sum(len(encoded.data) for encoded in self._held.values())
