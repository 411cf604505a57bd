"""The figures of a site, declared once for all places that carry or show them. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What a node measures of its site and people are shown: in heartbeats, metrics and on the status page alike."""

    inner_step: int = 0
    steps_per_s: float = 0.0
    sent_bytes: int = 0
    """Peer traffic since the node started; so are the next three."""
    received_bytes: int = 0
    train_s: float = 0.0
    wait_s: float = 0.0
    num_ranks: int = 0
    error_share: float = 0.0
    """Norm of the error feedback over that of what was to be sent, of the fragment with the largest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncPhases:
    """What one sync took at a site, for people: ranks train, write SNAPSHOT, wait; the node exchanges and applies."""

    sync: int
    train_s: float = 0.0
    snapshot_s: float = 0.0
    exchange_s: float = 0.0
    apply_s: float = 0.0
    wait_s: float = 0.0

    @property
    def seconds(self) -> tuple[float, ...]:
        """In the order of `PHASES`."""
        return self.train_s, self.snapshot_s, self.exchange_s, self.apply_s, self.wait_s


MAX_CRASH_CHARACTERS = 400
PHASES = ("train", "snapshot", "exchange", "apply", "wait")


@dataclass(frozen=True, slots=True, kw_only=True)
class Readings:
    """What a node says of itself and its ranks now and then, for people alone. Counts are since the node started; 0 is
    said of what is not known."""

    trained_tokens: int = 0
    sent_contribution_bytes: int = 0
    sent_average_bytes: int = 0
    sent_state_bytes: int = 0
    """To others that fetch it; and the little that is none of these."""
    exchange_total_s: float = 0.0
    num_applied: int = 0
    """Commits, each exchanged or fetched before."""
    apply_total_s: float = 0.0
    num_crashes: int = 0
    """Of its workers."""
    last_crash: str = field(default="", metadata={"max": MAX_CRASH_CHARACTERS})
    """Why the last of them was: how the reason begins and ends, in a line."""
    num_reconnects: int = 0
    """Streams to peers that broke and were opened again."""
    num_failed_checkpoints: int = 0
    model_flops: float = 0.0
    """Floating-point operations of its training: 6 for each trainable parameter and token."""
    peak_flops_per_s: float = 0.0
    """Of its ranks' GPUs together, by their data sheets."""
    node_memory_bytes: int = 0
    """Resident, of the node's process."""
    rank_memory_bytes: int = 0
    """Resident, of its ranks' processes together."""
    num_gpus: int = 0
    gpu_used_bytes: int = 0
    """Of its ranks' GPUs together, by whomever."""
    gpu_total_bytes: int = 0
    disk_free_bytes: int = 0
    """Where its home is."""
    disk_total_bytes: int = 0
    certificate_until_s: float = 0.0
    """When its identity expires, in seconds since 1970."""
    metrics_address: str = field(default="", metadata={"max": 256})
    """Where other machines find its metrics; empty if they do not."""
