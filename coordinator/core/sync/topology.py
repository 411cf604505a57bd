"""Which contributor reduces which chunks: the direct topology, a star for each range of chunks. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle, pairwise

from atoll.coordinator.core.sync.chunk_sizes import ChunkSizes
from atoll.protocol.errors import ConfigError
from atoll.protocol.messages import Tree

MOST_HALVINGS = 100
"""Of a time that is sought to the byte; beyond that it does not change any more."""
MOST_TREES = 1 << 14
"""Of a plan whose parts are cut by hosts; beyond that they are not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reducer:
    """What a contributor offers as a reducer."""

    site_id: int
    bandwidth_bytes_per_s: int  # 0: unknown, taken as the mean of those that are known
    max_retained_bytes: int
    first_chunks: tuple[int, ...] = ()
    """Of its endpoints beside its address: where another host of the site has the chunks."""


def direct(
    sizes: ChunkSizes,
    contributors: Sequence[Reducer],
    *,
    avoid: frozenset[int] = frozenset(),
    rotation: int = 0,
    num_receivers: int = 0,
) -> tuple[Tree, ...]:
    """One contiguous range of chunks a reducer, so long that no link is busy for longer than it must, ascending; where
    sites have several hosts, one in each part of the chunks that is of one host at every site.

    `contributors` are all sites of the sync in the order of their ids; those in `avoid` reduce nothing. The ranges
    are given out in the order of ids, beginning at `rotation`, so that another attempt has other reducers.
    A reducer holds the contributions of all sites for its range. Those of all syncs that are open at once have at most
    its `max_retained_bytes`.
    Raises ConfigError if the ranges do not fit.
    """
    order = [i for i, c in enumerate(contributors) if c.site_id not in avoid]
    if not order:
        raise ConfigError("no contributor may reduce")
    order = order[rotation % len(order) :] + order[: rotation % len(order)]
    # The contributions of the others, and the payload that is made of them.
    num_held = (len(contributors) - 1 + sizes.payload_factor(len(contributors))) * sizes.num_in_flight
    capacities = [contributors[i].max_retained_bytes // num_held for i in order]
    bandwidths = [contributors[i].bandwidth_bytes_per_s for i in order]
    num_sent = sizes.payload_factor(len(contributors)) * (len(contributors) - 1 + num_receivers)
    shares = _shares(bandwidths, capacities, sizes.total_bytes, max(1, num_sent - 1))
    parts = _parts(len(sizes), contributors)
    if len(parts) * len(order) > MOST_TREES:
        parts = [range(len(sizes))]
    ranges = (
        _cut(sizes, shares, capacities, parts) or _cut(sizes, shares, capacities) or _cut(sizes, capacities, capacities)
    )
    if ranges is None:
        raise ConfigError(
            f"the reducers may retain {sum(capacities) * num_held} bytes of contributions, a sync of "
            f"{len(contributors)} sites holds up to {sizes.total_bytes * len(contributors)}"
            f"{f', and {sizes.num_in_flight} are in flight at once' if sizes.num_in_flight > 1 else ''}: "
            "give the sites more free disk or memory, raise their --max-retained-mib, or let fewer of them contribute"
        )
    trees: list[Tree] = []
    end = 0
    for position, (first, count) in zip(cycle(order), ranges, strict=False):
        if sizes.bytes_of(first, count):  # nobody reduces only what does not travel: that goes with what follows
            trees.append(Tree(first_chunk=end, num_chunks=first + count - end, top=position))
            end = first + count
    trees[-1:] = [replace(last, num_chunks=len(sizes) - last.first_chunk) for last in trees[-1:]]
    return tuple(trees)


def _shares(bandwidths: Sequence[int], capacities: Sequence[int], total_bytes: int, num_more: int) -> list[float]:
    """Bytes for each reducer, such that all links are busy for the same time: a link that is busy for longer with what
    its site contributes and receives gets none, and what does not fit goes to the others.

    A site contributes what others reduce, and sends what it reduces to all of them: a byte that it reduces is so many
    bytes more on its link, in either direction.
    """
    known = [b for b in bandwidths if b > 0]
    mean = sum(known) / len(known) if known else 1.0
    weights = [float(b) if b > 0 else mean for b in bandwidths]
    goal = min(total_bytes, sum(capacities))

    def within(seconds: float) -> list[float]:
        fitting = ((w * seconds - total_bytes) / num_more for w in weights)
        return [min(max(0.0, share), capacity) for share, capacity in zip(fitting, capacities, strict=True)]

    least, most = 0.0, (num_more + 1) * total_bytes / min(weights)  # then each of them could reduce all
    seconds = (num_more + len(weights)) * total_bytes / sum(weights)  # right if all have something, and fit
    shares = within(seconds)
    for _ in range(MOST_HALVINGS):
        if abs(sum(shares) - goal) <= 1:
            break
        least, most = (seconds, most) if sum(shares) < goal else (least, seconds)
        seconds = (least + most) / 2
        shares = within(seconds)
    return shares


def _parts(num_chunks: int, contributors: Sequence[Reducer]) -> list[range]:
    """Each of one host at every site. Hosts have equal parts of the model, and are to have equal parts of what their
    site reduces."""
    firsts = {first for c in contributors for first in c.first_chunks if first < num_chunks}
    return [range(first, end) for first, end in pairwise(sorted({0, *firsts, num_chunks}))]


def _cut(
    sizes: ChunkSizes, shares: Sequence[float], capacities: Sequence[int], parts: Sequence[range] = ()
) -> list[tuple[int, int]] | None:
    """(first chunk, number of chunks) of each reducer, in one part after the other; None if the last chunks of one do
    not fit anywhere."""
    if len(parts) <= 1:
        return _cut_part(sizes, shares, capacities, range(len(sizes)))
    ranges: list[tuple[int, int]] = []
    for part in parts:
        share = sizes.bytes_of(part.start, len(part)) / max(1, sizes.total_bytes)
        found = _cut_part(sizes, [s * share for s in shares], [int(c * share) for c in capacities], part)
        if found is None:
            return None
        ranges += found
    return ranges


def _cut_part(
    sizes: ChunkSizes, shares: Sequence[float], capacities: Sequence[int], part: range
) -> list[tuple[int, int]] | None:
    """The cut nearest to the running total of shares, so that rounding does not add up over many reducers."""
    ranges: list[tuple[int, int]] = []
    chunk, goal = part.start, float(sizes.bytes_before(part.start))
    for i, (share, capacity) in enumerate(zip(shares, capacities, strict=True)):
        goal += share
        end = min(part.stop, sizes.num_within(sizes.bytes_before(chunk) + capacity))
        if i < len(shares) - 1:
            end = min(end, sizes.num_nearest(goal))
        end = max(end, chunk)
        ranges.append((chunk, end - chunk))
        chunk = end
    return ranges if chunk == part.stop else None
