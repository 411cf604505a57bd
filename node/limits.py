"""What a node takes from outside, in one place: connections and calls of peers. docs/decisions/0063-limits.md says why;
handshakes and messages have the bounds of protocol/transport.py, and what one address may take is its firewall's."""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from atoll.protocol.errors import PeerError
from atoll.protocol.trust.security import Caller

MAX_PEER_CONNECTIONS = 4096
"""Or half of the descriptors: the node's own connections and files need the others."""
PEER_IDLE_LIMIT_S = 300.0
"""Of a peer's connection without a call: from sync to sync as a rule."""
MAX_CALLS_OF_SITE = 512
"""At once, on all connections: several streams in each exchange, of several fragments."""


class CallsOfSites:
    """How many calls each site has under way at this node, by its certificate."""

    def __init__(self) -> None:
        self._num: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._num)

    def let_in(self, caller: Caller, method: str, context: Any) -> AbstractContextManager[Any]:
        """The call lasts as long as that. Raises PeerError for one too many."""
        name = caller.subject.site
        if self._num[name] >= MAX_CALLS_OF_SITE:
            raise PeerError(f"{caller.subject} has {MAX_CALLS_OF_SITE} calls under way here: no more at once")
        self._num[name] += 1
        lasts = ExitStack()
        lasts.callback(self._ended, name)
        return lasts

    def _ended(self, name: str) -> None:
        self._num[name] -= 1
        if not self._num[name]:
            del self._num[name]
