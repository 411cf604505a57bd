"""File descriptors: as many as this process may have, and how many of them connections from outside may take.

A process without a free descriptor cannot open a file, a store or a connection of its own: whoever opens enough
connections would end it.
"""

from __future__ import annotations

import logging
import resource

log = logging.getLogger(__name__)

MOST = 1 << 20
RESERVED = 256
"""Kept for this process: files, store, admin socket, pages, and what libraries open."""


def raise_limit() -> int:
    """The soft limit becomes the hard one. Returns what it is now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError) as error:
            log.warning("the limit of file descriptors stays at %d: %s", soft, error)
        else:
            soft = wanted
    return MOST if soft == resource.RLIM_INFINITY else soft


def for_connections(limit: int, wanted: int, what: str, each: int = 1) -> int:
    """How many connections from outside a server takes: what it wants, if the limit leaves as many. `each`:
    descriptors of a connection."""
    room = max(limit - RESERVED, limit // 2) // each
    if room < wanted:
        log.warning(
            "%s: this process may have %d file descriptors, %d connections need %d; more are refused. Raise the hard "
            "limit (ulimit -Hn, or LimitNOFILE= of its unit)",
            what,
            limit,
            wanted,
            each * wanted + RESERVED,
        )
    return min(wanted, room)
