"""Which of the sites that hold the state another is told of as donors: a few, and others when it asks again. Pure.

A crowd that joins together would otherwise be told of everybody, each of them: for 2,000 sites these were 120 MB of
messages, and the event loop stood still for 5 s.
"""

from __future__ import annotations

from collections.abc import Collection

from atoll.coordinator.core.sites.membership import Site
from atoll.protocol import ring
from atoll.protocol.messages import MAX_DONORS, MAX_LISTED_DONORS

OF_ALL_EVERY = 4
"""Times that a site asks."""


def chosen(holders: list[Site], asking: Site, undialled_ids: Collection[int]) -> list[Site]:
    """Of `holders`, in the order of ids, which is that of the result too.

    Those that `asking` cannot dial are kept, because they are to dial it. The others are the newest ones, from a place
    in the ring of ids that is another for each site and moves on whenever the site asks; each fourth time any, because
    the newest may all be of no use.
    """
    if len(holders) <= MAX_LISTED_DONORS:
        return holders
    to_dial = [s for s in holders if s.site_id in undialled_ids]
    others = [s for s in holders if s.site_id not in undialled_ids]
    times = asking.num_sources_asked
    is_of_all = times % OF_ALL_EVERY == 0 and len({s.applied for s in others}) > 1
    moved = (times // OF_ALL_EVERY if is_of_all else times) * (MAX_LISTED_DONORS - MAX_DONORS)
    first = (ring.place(asking.site_id, len(others)) + moved) % len(others)
    others = others[first:] + others[:first]
    if not is_of_all:
        others.sort(key=lambda s: -(s.applied or 0))
    return sorted(to_dial + others[: MAX_LISTED_DONORS - len(to_dial)], key=lambda s: s.site_id)
