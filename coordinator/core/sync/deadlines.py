"""How long an exchange may take: from the sizes of its chunks, and from what its sites needed before. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from atoll.coordinator.core.sync.chunk_sizes import ChunkSizes
from atoll.protocol.messages import Tree
from atoll.protocol.plans import top_of
from atoll.protocol.time_limits import TimeLimits

SLACK = 8
"""A deadline is at least so many times the longest exchange remembered."""
FLOOR_STALLS = 8
"""Stalls and trickles are found sooner than any deadline, by the sites themselves, and named better."""


def most_link_bytes(sizes: ChunkSizes, trees: Sequence[Tree], num_contributors: int, num_receivers: int) -> int:
    """The most that one contributor sends or receives."""
    reduced = [0] * num_contributors
    for tree in trees:
        reduced[top_of(tree)] += sizes.bytes_of(tree.first_chunk, tree.num_chunks)
    total, others, factor = sizes.total_bytes, num_contributors - 1, sizes.payload_factor(num_contributors)
    # Contributions go to the other reducers and payloads come back; as a reducer it is the other way round, with all.
    most_sent = max((total - own) + factor * own * (others + num_receivers) for own in reduced)
    most_received = max(factor * (total - own) + own * others for own in reduced)
    return max(most_sent, most_received)


def exchange_deadline_s(limits: TimeLimits, link_bytes: int, longest_s: float | None, attempt: int) -> float:
    """Doubled with each attempt: reducers keep what they have got, so that a link that is slower than everything that
    was known of it is through in the end."""
    floor_s = FLOOR_STALLS * limits.stall_s
    by_size_s = floor_s + link_bytes / limits.slowest_bytes_per_s
    by_history_s = by_size_s if longest_s is None else max(floor_s, SLACK * longest_s)
    return min(by_size_s, by_history_s) * 2.0 ** min(attempt - 1, 16)
