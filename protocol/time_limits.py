"""All time limits of a run, from few named numbers. Presets for lan, wan and local."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.protocol.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLimits:
    """Seconds. Everything else derives from these; clocks of different machines are never compared."""

    lease_s: float
    """A session silent for this long is lost."""
    reconnect_grace_s: float
    """A session whose stream closed may come back within this."""
    sync_wait_s: float
    """From the first Ready: how long a sync waits for the others before it goes on with a quorum."""
    worker_floor_s: float
    """Least limit for one optimizer step; a worker silent for longer is restarted."""
    worker_start_s: float
    """From launching workers to their first step (imports, model, compilation)."""
    leave_s: float
    """A graceful leave finishes the sync it is in within this."""
    slowest_bytes_per_s: int
    """A site that gets less chunk data through its link than this makes no progress."""

    @property
    def heartbeat_s(self) -> float:
        return self.lease_s / 4

    @property
    def stall_s(self) -> float:
        """An exchange or transfer that moves no byte for this long has failed."""
        return self.lease_s * 2

    @property
    def give_up_s(self) -> float:
        """A site without a coordinator for this long ends (its state is kept)."""
        return self.lease_s * 120

    @property
    def restart_s(self) -> float:
        """From the second crash of workers in a row to new ones; twice as long after each further crash."""
        return self.lease_s

    @property
    def max_restart_s(self) -> float:
        return self.worker_floor_s

    @property
    def collective_s(self) -> float:
        """A collective of a site's ranks that takes longer has failed. The node ends ranks that hang long before; one
        may wait for another's first step, or, with the coordinator away, for its samples."""
        return max(self.worker_start_s, self.give_up_s) + self.stall_s

    @property
    def connect_s(self) -> float:
        return self.lease_s


PRESETS = {
    # One machine or one rack: connections close fast and packets are not lost.
    "local": TimeLimits(
        lease_s=3,
        reconnect_grace_s=1,
        sync_wait_s=30,
        worker_floor_s=60,
        worker_start_s=300,
        leave_s=30,
        slowest_bytes_per_s=64 << 10,
    ),
    # Sites in one building: the same, with room for a busy switch.
    "lan": TimeLimits(
        lease_s=5,
        reconnect_grace_s=1,
        sync_wait_s=60,
        worker_floor_s=120,
        worker_start_s=600,
        leave_s=60,
        slowest_bytes_per_s=64 << 10,
    ),
    # Volunteers and data centres: seconds of loss are normal.
    "wan": TimeLimits(
        lease_s=15,
        reconnect_grace_s=3,
        sync_wait_s=300,
        worker_floor_s=300,
        worker_start_s=1800,
        leave_s=300,
        slowest_bytes_per_s=16 << 10,
    ),
}


def time_limits(preset: str) -> TimeLimits:
    try:
        return PRESETS[preset]
    except KeyError:
        raise ConfigError(f"time_limits = {preset!r}: choose one of {', '.join(PRESETS)}") from None
