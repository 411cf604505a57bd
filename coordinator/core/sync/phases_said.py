"""What the newest syncs took at each site, as sites say it with their heartbeats: for people, and nothing else."""

from __future__ import annotations

from statistics import median

from atoll.protocol.figures import PHASES, SyncPhases

KEPT_SYNCS = 48
MAX_SITES = 64
"""Of one sync, those that say it first: of a thousand the others tell a person no more."""
MOST_S = 1e9
"""Of a phase. The median of two larger values may be infinite, for which there is no JSON."""


def bounded(seconds: float) -> float:
    """Of one phase, whatever a site says; 0 if that is no number."""
    return min(max(0.0, seconds), MOST_S)


class PhasesSaid:
    def __init__(self) -> None:
        self._by_sync: dict[int, dict[int, tuple[float, ...]]] = {}

    def note(self, site_id: int, said: SyncPhases, last_sync: int) -> None:
        """`last_sync`: the newest one that was opened. Later syncs, and those older than are kept, are left out."""
        if not last_sync - KEPT_SYNCS < said.sync <= last_sync:
            return
        for sync in [sync for sync in self._by_sync if sync <= last_sync - KEPT_SYNCS]:
            del self._by_sync[sync]
        of_sites = self._by_sync.setdefault(said.sync, {})
        if site_id in of_sites or len(of_sites) < MAX_SITES:
            of_sites[site_id] = tuple(round(bounded(seconds), 3) for seconds in said.seconds)

    def of_sites(self) -> list[tuple[int, dict[int, tuple[float, ...]]]]:
        """By sync, ascending, and site id: seconds of each phase, in the order of `PHASES`."""
        return [(sync, dict(self._by_sync[sync])) for sync in sorted(self._by_sync)]

    def medians(self) -> dict[int, dict[str, float]]:
        """By sync: of each phase the median site's seconds, which of three sites and more no single one can falsify."""
        return {
            sync: {name: median(found[place] for found in of_sites.values()) for place, name in enumerate(PHASES)}
            for sync, of_sites in self._by_sync.items()
        }
