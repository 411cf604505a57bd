"""How many commits stay in the payload log of each site, and in the log of the coordinator: from settings, manifest and
the records of commits, so that all parties keep the same. Pure.

A site that fetches a state is brought up to date by the commits that were made meanwhile. While an exchange sends,
donors give a ninth of their links (node/exchange/peers/uplink.py). So where links are the limit, and two sites are all
donors there are, commits with four times the bytes of the state are made during a fetch; with more donors fewer. A log
has twice that. Where links are not the limit, connections, hashes and disks take seconds, in which small models have
many commits.
"""

from __future__ import annotations

from collections.abc import Mapping

from atoll.protocol.layout import Manifest, Role, chunk_runs
from atoll.protocol.messages import Commit
from atoll.protocol.spec import spec_of
from atoll.protocol.sync_settings import MAX_LOG_COMMITS, USUAL_LOG_COMMITS, SyncSettings

STATES = 8
STATE_BYTES = 12
"""A parameter: its value and two moments."""
LEAST_COMMITS = 16
SMALL_COMMITS, SMALL_LOG_BYTES = 1024, 1 << 28
"""So many of a small model, as far as they have no more bytes than that."""
TABLE_BYTES = 200
"""A chunk of a commit, beside its payload: on the disk and in memory."""


class LogLength:
    def __init__(self, manifest: Manifest | None, sync: SyncSettings) -> None:
        """`manifest` None: the model is not known, the log as long as with any."""
        is_fixed = sync.log_commits or manifest is None or not sync.steps_at_nodes
        self.num_commits = sync.log_commits or (MAX_LOG_COMMITS if sync.steps_at_nodes else USUAL_LOG_COMMITS)
        """At most."""
        self._sync = sync
        self._sizes = None if is_fixed or manifest is None else _Sizes(manifest, sync)

    @property
    def counts_bytes(self) -> bool:
        """And not commits."""
        return self._sizes is not None

    def bytes_of(self, commit: Commit) -> int:
        """The most that its payloads and their table have; 0 where commits are counted."""
        if self._sizes is None:
            return 0
        return self._sizes.of(self._sync.moves_variance(commit.commit - 1), len(commit.contributors))

    def num_kept(self, last: int, num_bytes: Mapping[int, int]) -> int:
        """Of a log that ends with commit `last`. `num_bytes`: of the commits that are there; others count as those that
        follow them, also before the first one."""
        if self._sizes is None:
            return self.num_commits
        size = total = 0
        for num in range(1, self.num_commits):
            size = num_bytes.get(last - num + 1, size)
            total += size
            is_small = num < SMALL_COMMITS and total < SMALL_LOG_BYTES
            if num >= LEAST_COMMITS and total >= self._sizes.wanted_bytes and not is_small:
                return num
        return self.num_commits

    def most_read_bytes(self, num_kept: int, record_bytes: int) -> int:
        """Of one chunk in such a log of `num_kept` commits, whose record in a state has so many."""
        all_bytes = num_kept * record_bytes
        return all_bytes if self._sizes is None else min(all_bytes, STATES * record_bytes + SMALL_LOG_BYTES)

    def most_bytes(self, num_sites: int) -> int:
        """Of the payload log and the sync under way, where so many sites contribute."""
        assert self._sizes is not None, "bytes are counted"
        one = max(self._sizes.of(moves_variance, num_sites) for moves_variance in (False, True))
        wanted = max(self._sizes.wanted_bytes, LEAST_COMMITS * one, min(SMALL_LOG_BYTES, SMALL_COMMITS * one))
        return min(wanted + one, self.num_commits * one) + one


class _Sizes:
    """Of the payloads of a commit, with their table."""

    def __init__(self, manifest: Manifest, sync: SyncSettings) -> None:
        trained = (tensor.num_elements for tensor in manifest.tensors if tensor.role is Role.TRAINABLE)
        self.wanted_bytes = STATES * STATE_BYTES * sum(trained)
        self._sync = sync
        runs = chunk_runs(manifest, sync.chunk_elements)
        self._runs = [(t.role, num, t.carried_itemsize, count) for t, count, num in runs if t.role is not Role.FROZEN]
        self._known: dict[tuple[bool, int], int] = {}

    def of(self, moves_variance: bool, num_sites: int) -> int:
        key = moves_variance, num_sites
        if key not in self._known:
            spec = spec_of(self._sync, 0 if moves_variance else self._sync.warmup_commits, 0)
            self._known[key] = sum(
                count * (TABLE_BYTES + spec.payload_bytes(role, num_elements, itemsize, num_sites))
                for role, num_elements, itemsize, count in self._runs
            )
        return self._known[key]
