"""What of a run's settings does not fit its length, for a person. Pure."""

from __future__ import annotations

from atoll.protocol.outer import SHORT_SYNCS, num_syncs
from atoll.protocol.presets import PRESETS
from atoll.protocol.settings import RunSettings


def too_short(settings: RunSettings) -> str:
    """Why the run is too short for what its settings say; empty where it is not. One line."""
    sync, number = settings.sync, num_syncs(settings)
    if 0 < number <= sync.warmup_commits:
        return (
            f"the run has {number} commits, and sync.warmup_commits = {sync.warmup_commits}: it never leaves its "
            f"warm-up; choose about {max(1, number // 6)}, or a longer run"
        )
    if not sync.steps_at_nodes and number == 1:
        return (
            f"with sync.every = {sync.every} the run has a single sync, at its end: choose a smaller sync.every, or a "
            "longer run"
        )
    momentum = PRESETS[settings.preset].outer.get("momentum", 0.0) if settings.preset in PRESETS else 0.0
    if not sync.steps_at_nodes and momentum and settings.outer.momentum == momentum and number < SHORT_SYNCS:
        return (
            f"the run has {number} syncs of each parameter, and preset {settings.preset} an outer momentum of "
            f'{momentum:g}, which does not settle in fewer than {SHORT_SYNCS}: choose outer.optimizer = "auto", a '
            "smaller sync.every, or a longer run"
        )
    return ""
