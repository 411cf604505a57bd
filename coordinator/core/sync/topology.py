"""Which contributor reduces which chunks: the direct topology, a star for each range of chunks. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from atoll.coordinator.core.sync.chunk_sizes import ChunkSizes
from atoll.protocol.errors import ConfigError
from atoll.protocol.messages import Tree


@dataclass(frozen=True, slots=True, kw_only=True)
class Reducer:
    """What a contributor offers as a reducer."""

    site_id: int
    bandwidth_bytes_per_s: int  # 0: unknown, taken as the mean of those that are known
    max_retained_bytes: int


def direct(
    sizes: ChunkSizes,
    contributors: Sequence[Reducer],
    *,
    avoid: frozenset[int] = frozenset(),
    rotation: int = 0,
) -> tuple[Tree, ...]:
    """One contiguous range of chunks a reducer, in proportion to bandwidth by bytes, ascending.

    `contributors` are all sites of the sync in the order of their ids; those in `avoid` reduce nothing. The ranges
    are given out in the order of ids, beginning at `rotation`, so that another attempt has other reducers.
    A reducer holds the contributions of all sites for its range, at most its `max_retained_bytes`.
    Raises ConfigError if the ranges do not fit.
    """
    order = [i for i, c in enumerate(contributors) if c.site_id not in avoid]
    if not order:
        raise ConfigError("no contributor may reduce")
    order = order[rotation % len(order) :] + order[: rotation % len(order)]
    capacities = [contributors[i].max_retained_bytes // len(contributors) for i in order]
    shares = _shares([contributors[i].bandwidth_bytes_per_s for i in order], capacities, sizes.total_bytes)
    ranges = _cut(sizes, shares, capacities) or _cut(sizes, capacities, capacities)
    if ranges is None:
        raise ConfigError(
            f"the reducers may retain {sum(capacities) * len(contributors)} bytes of contributions, a sync of "
            f"{len(contributors)} sites holds up to {sizes.total_bytes * len(contributors)}: "
            "give the sites more free disk or memory, raise their --max-retained-mib, or let fewer of them contribute"
        )
    trees = []
    for position, (first, count) in zip(order, ranges, strict=True):
        if count:
            trees.append(Tree(first_chunk=first, num_chunks=count, top=position))
    return tuple(sorted(trees, key=lambda tree: tree.first_chunk))


def _shares(bandwidths: Sequence[int], capacities: Sequence[int], total_bytes: int) -> list[float]:
    """Bytes for each reducer: in proportion to bandwidth, what does not fit goes to the others."""
    known = [b for b in bandwidths if b > 0]
    mean = sum(known) / len(known) if known else 1.0
    weights = [float(b) if b > 0 else mean for b in bandwidths]
    shares = [0.0] * len(weights)
    open_ones = list(range(len(weights)))
    left = float(total_bytes)
    while open_ones:
        scale = left / sum(weights[i] for i in open_ones)
        full = [i for i in open_ones if weights[i] * scale > capacities[i]]
        if not full:
            for i in open_ones:
                shares[i] = weights[i] * scale
            break
        for i in full:
            shares[i] = float(capacities[i])
            left = max(0.0, left - shares[i])
        open_ones = [i for i in open_ones if i not in full]
    return shares


def _cut(sizes: ChunkSizes, shares: Sequence[float], capacities: Sequence[int]) -> list[tuple[int, int]] | None:
    """(first chunk, number of chunks) of each reducer; None if the last chunks do not fit anywhere.

    The cut nearest to the running total of shares, so that rounding does not add up over many reducers.
    """
    ranges: list[tuple[int, int]] = []
    chunk, goal = 0, 0.0
    for i, (share, capacity) in enumerate(zip(shares, capacities, strict=True)):
        goal += share
        end = sizes.num_within(sizes.bytes_before(chunk) + capacity)
        if i < len(shares) - 1:
            end = min(end, sizes.num_nearest(goal))
        end = max(end, chunk)
        ranges.append((chunk, end - chunk))
        chunk = end
    return ranges if chunk == len(sizes) else None
