"""How long the links from peers were in use in one exchange, and for how many bytes. Pure.

A peer that waits for others sends nothing, and a reader that is busy takes nothing: neither is the link. A message that
follows right after another one is all that shows the link, and of it only the time that this site waited for it.
"""

from __future__ import annotations

from atoll.protocol.messages import MAX_LINKS, LinkUse


class LinkUses:
    def __init__(self) -> None:
        self._of: dict[int, tuple[int, float, float]] = {}  # bytes, seconds, until when these were counted

    def note(self, site_id: int, num_bytes: int, since: float, now: float) -> None:
        """So much came from that peer, right after what it sent before. This site has waited for it `since`. Streams of
        one peer share its link: their times count once."""
        known_bytes, seconds, until = self._of.get(site_id, (0, 0.0, since))
        self._of[site_id] = (known_bytes + num_bytes, seconds + max(0.0, now - max(since, until)), now)

    def longest(self) -> tuple[LinkUse, ...]:
        """Of the peers for which it took longest, as many as a message names."""
        found = (
            LinkUse(site_id=site_id, received_bytes=num_bytes, seconds=seconds)
            for site_id, (num_bytes, seconds, _) in self._of.items()
        )
        return tuple(sorted(found, key=lambda use: (-use.seconds, use.site_id))[:MAX_LINKS])
