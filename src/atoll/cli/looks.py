"""Looking at a run again and again: a restart of its coordinator, or a link that is down, ends no look."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from atoll.cli.words import duration
from atoll.protocol.errors import HostError, PeerError

AWAY_LIMIT_S = 1800.0
"""A restart, a standby's turn and most links that are down are over by then."""


@dataclass(frozen=True, slots=True)
class Seen:
    document: dict[str, Any]
    """Of the run, the newest that is known."""
    problem: str = ""
    """Why none newer is; empty if this one is of now."""


def looks(look: Callable[[], dict[str, Any]], every_s: float) -> Iterator[Seen]:
    """Until the run is over. Raises what the first look raises; later, while nobody answers, it is said in place of
    what is new, and raised once that has lasted for AWAY_LIMIT_S."""
    seen, answered_s = Seen(look()), time.monotonic()
    while True:
        yield seen
        if seen.document.get("finished"):
            return
        time.sleep(every_s)
        try:
            seen, answered_s = Seen(look()), time.monotonic()
        except (HostError, PeerError) as error:
            if (away_s := time.monotonic() - answered_s) >= AWAY_LIMIT_S:
                raise PeerError(f"nobody has answered for {duration(away_s)}, so this look ends: {error}") from None
            seen = Seen(seen.document, f"nobody answers, and what is shown is of before: {error}")
