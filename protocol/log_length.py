"""How many commits stay in the payload log of each site, and in the log of the coordinator: a function of settings and
model, so that all parties compute the same. Pure.

A site that fetches a state is brought up to date by the commits that were made meanwhile. Where links are the limit, a
link that carries the payloads of commits as they come carries the state in the time of (bytes of the state) / (bytes of
a commit) commits. Where they are not, connections, hashes and disks take seconds, in which small models have many
commits.
"""

from __future__ import annotations

from dataclasses import dataclass

from atoll.protocol.layout import Manifest, Role, chunk_runs
from atoll.protocol.spec import Spec, spec_of
from atoll.protocol.sync_settings import MAX_LOG_COMMITS, USUAL_LOG_COMMITS, SyncSettings

FETCHES = 2
"""Fetches at that speed, in the time of which the commits of the log are made."""
STATE_BYTES = 12
"""A parameter: its value and two moments."""
LEAST_COMMITS = 16
SMALL_COMMITS, SMALL_LOG_BYTES = 1024, 1 << 28
"""So many of a small model, as far as they have no more bytes than that."""


@dataclass(frozen=True, slots=True)
class LogLength:
    """In commits."""

    num_commits: int
    num_in_warmup: int = 0
    """While commits of gradients are made, which have more bytes; 0: as many."""
    warmup_commits: int = 0

    def at(self, commit: int) -> int:
        """Of the log that ends with that commit."""
        return self.num_in_warmup if self.num_in_warmup and commit <= self.warmup_commits else self.num_commits

    def snapshot_every(self, commit: int, num_snapshots: int) -> int:
        """Commits between two snapshots, so that the log leads on from each of them; 0: none are taken."""
        return max(1, self.at(commit) // (num_snapshots + 1)) if num_snapshots else 0


def log_length(manifest: Manifest, sync: SyncSettings, num_sites: int) -> LogLength:
    """`num_sites`: that contribute to a commit."""
    if sync.log_commits:
        return LogLength(sync.log_commits)
    if not sync.steps_at_nodes:
        return LogLength(USUAL_LOG_COMMITS)
    state_bytes = STATE_BYTES * sum(t.num_elements for t in manifest.tensors if t.role is Role.TRAINABLE)

    def fitting(spec: Spec) -> int:
        num_bytes = max(1, commit_bytes(manifest, sync, spec, num_sites))
        of_state, of_small = -(-FETCHES * state_bytes // num_bytes), SMALL_LOG_BYTES // num_bytes
        return min(MAX_LOG_COMMITS, max(LEAST_COMMITS, of_state, min(SMALL_COMMITS, of_small)))

    after = fitting(spec_of(sync, sync.warmup_commits, 0))
    if not sync.warmup_commits:
        return LogLength(after)
    return LogLength(after, fitting(spec_of(sync, 0, 0)), sync.warmup_commits)


def commit_bytes(manifest: Manifest, sync: SyncSettings, spec: Spec, num_sites: int) -> int:
    """The most that the payloads of all chunks have in a commit of so many contributors."""
    runs = chunk_runs(manifest, sync.chunk_elements)
    return sum(
        count * spec.payload_bytes(tensor.role, num_elements, tensor.carried_itemsize, num_sites)
        for tensor, count, num_elements in runs
        if tensor.role is not Role.FROZEN
    )
