"""How many commits stay in the payload log of each site, and in the log of the coordinator: from settings, manifest and
the records of commits, so that all parties keep the same. Pure.

A site that fetches a state is brought up to date by the commits that were made meanwhile. What donors give it in a
second must be more than the payloads of a second, or it never catches up. So while a state is fetched, commits of fewer
bytes than its own are made. A log has twice that, and twice again: so snapshots, of which there are two as a rule, one
at each third of a log, have fewer bytes than payloads. Of small models commits are made in the seconds that
connections, hashes and disks take.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from atoll.protocol.layout import Manifest, Role, chunk_runs
from atoll.protocol.messages import Commit
from atoll.protocol.spec import spec_of
from atoll.protocol.sync_settings import MAX_LOG_COMMITS, SyncSettings

STATES = 4
STATE_BYTES, LEAST_STATE_BYTES = 12, 4
"""A parameter: its value and two moments, or its value alone."""
LEAST_COMMITS = 16
SMALL_COMMITS, SMALL_LOG_BYTES = 1024, 1 << 28
"""So many of a small model, as far as they have no more bytes than that."""
TABLE_BYTES = 200
"""A chunk of a commit, beside its payload: on the disk and in memory."""
TABLE_ENTRIES, PARAMETERS_PER_ENTRY = 1 << 20, 150
"""A log has more entries of tables than the first, in the memory of each node, only where a model is so large that
they are at most one byte a parameter."""
USUAL_SITES = 2
"""That a commit has, where none is known."""


def most_ahead(num_kept: int) -> int:
    """Syncs whose payloads a site keeps beside a log of so many commits, while it is behind these syncs."""
    return max(1, num_kept // 4)


class LogLength:
    def __init__(self, manifest: Manifest | None, sync: SyncSettings) -> None:
        """`manifest` None: the model is not known, the log as long as with any."""
        is_fixed = sync.log_commits or manifest is None or not sync.steps_at_nodes
        self._sync = sync
        self._sizes = None if is_fixed or manifest is None else _Sizes(manifest, sync)
        self.num_commits = sync.most_log_commits if self._sizes is None else self._sizes.most_commits
        """At most."""

    @property
    def counts_bytes(self) -> bool:
        """And not commits."""
        return self._sizes is not None

    def bytes_of(self, commit: Commit) -> int:
        """The most that its payloads and their table have; 0 where commits are counted."""
        return self._bytes_of(commit.commit, len(commit.contributors))

    def _bytes_of(self, number: int, num_sites: int) -> int:
        if self._sizes is None:
            return 0
        return self._sizes.of(self._sync.moves_variance(number - 1), num_sites)

    def num_kept(self, last: int, num_bytes: Mapping[int, int]) -> int:
        """Of a log that ends with commit `last`. `num_bytes`: of the commits that are there; others count as those that
        follow them, also before the first one."""
        if self._sizes is None:
            return self.num_commits
        total, size = 0, self._bytes_of(max(1, last), USUAL_SITES)
        for num in range(1, self.num_commits):
            size = num_bytes.get(last - num + 1, size)
            total += size
            is_small = num < SMALL_COMMITS and total < SMALL_LOG_BYTES
            if num >= LEAST_COMMITS and total >= self._sizes.wanted_bytes and not is_small:
                return num
        return self.num_commits

    def most_read_bytes(self, num_kept: int, record_bytes: int, role: Role) -> int:
        """Of one chunk in such a log of `num_kept` commits, whose record in a state has so many."""
        all_bytes = num_kept * record_bytes
        if self._sizes is None or role is not Role.TRAINABLE:
            return all_bytes
        return min(all_bytes, STATES * STATE_BYTES // LEAST_STATE_BYTES * record_bytes + SMALL_LOG_BYTES)

    def most_bytes(self, num_sites: int, max_sites: int) -> int:
        """Of the payload log, the sync under way and those that a site receives while it is behind. Commits may have up
        to `max_sites` contributors; the two newest and the least number of commits count as having `num_sites`."""
        assert self._sizes is not None, "bytes are counted"
        one, largest = (
            max(self._sizes.of(moves_variance, num) for moves_variance in (False, True))
            for num in (num_sites, max_sites)
        )
        small_bytes = min(SMALL_LOG_BYTES, SMALL_COMMITS * largest)
        wanted_bytes = min(max(self._sizes.wanted_bytes, small_bytes), self.num_commits * largest)
        log_bytes = max(wanted_bytes, LEAST_COMMITS * one)
        return log_bytes + log_bytes // 4 + 2 * one


class _Sizes:
    """Of the payloads of a commit, with their table."""

    def __init__(self, manifest: Manifest, sync: SyncSettings) -> None:
        trained = sum(tensor.num_elements for tensor in manifest.tensors if tensor.role is Role.TRAINABLE)
        self.wanted_bytes = STATES * STATE_BYTES * trained
        self._chunks: Counter[tuple[Role, int, int]] = Counter()  # how many there are of a role and a size
        for tensor, count, num_elements in chunk_runs(manifest, sync.chunk_elements):
            if tensor.role is not Role.FROZEN:
                self._chunks[tensor.role, num_elements, tensor.carried_itemsize] += count
        num_entries = max(TABLE_ENTRIES, trained // PARAMETERS_PER_ENTRY)
        self.most_commits = min(MAX_LOG_COMMITS, max(LEAST_COMMITS, num_entries // max(1, self._chunks.total())))
        self._specs = spec_of(sync, sync.warmup_commits, 0), spec_of(sync, 0, 0)
        self._known: dict[tuple[bool, int], int] = {}

    def of(self, moves_variance: bool, num_sites: int) -> int:
        spec = self._specs[moves_variance]
        key = moves_variance, num_sites if spec.trainable.aggregation.is_bundle else 1
        if key not in self._known:
            self._known[key] = sum(
                count * (TABLE_BYTES + spec.payload_bytes(*chunk, num_sites)) for chunk, count in self._chunks.items()
            )
        return self._known[key]
