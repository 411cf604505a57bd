"""What a plan asks of one site: its place in the reduction of each chunk, and how much room that takes."""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from atoll.node.dataplane.sync_data import SyncData
from atoll.node.exchange.sync.retained import Site
from atoll.node.exchange.sync.spill import Spill
from atoll.protocol.endpoints import place_of
from atoll.protocol.errors import NoRoomError
from atoll.protocol.messages import Member, Plan
from atoll.protocol.plans import reducers

MAX_STREAMS = 6
"""Of one site to all others together, if there are fewer others. A link of 2 Gbit/s and 100 ms holds 25 MB, a
connection at most a few. More than six in all were slower: each of them begins slowly."""
MIN_STREAM_BYTES = 4 << 20
"""A stream of less gains nothing: one connection has that on its way (Linux: 4 MiB of a sender)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """One site's place in the tree of some chunks: contributions of `children` come in, go with its own to `parent`, or
    are averaged here where there is none, and payloads go back down. In a star all but the top have no children."""

    chunks: list[int]
    """Ascending."""
    expected: frozenset[int]
    """The same."""
    children: tuple[Member, ...]
    parent: Member | None
    num_bytes: int
    """The most that one site's contributions to them can have."""
    payload_bytes: int
    """The most that their payloads can have."""
    streams: tuple[range, ...] = ()
    """Chunks by the stream to `parent` that carries them; none where there is no parent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Of one (sync, attempt); grows with the model, and is made in a thread."""

    own: Reduction
    """Whose top this site is, of no chunks if it reduces nothing."""
    made: tuple[int, ...]
    """The chunks that this site reduces, at all of its places."""
    of_others: tuple[Reduction, ...]
    """One for each other reducer, and each of its places, in the order in which this site begins with them."""
    missing: dict[int, set[int]]
    """Of each own chunk: the children (site ids) whose contribution is not here yet."""
    complete: list[int]
    """The own chunks of which none is missing."""
    num_missing: dict[int, int]
    """The same by child."""
    sent_bytes: int
    """The most that this site's contributions to other reducers can have."""
    log_bytes: int
    """The most that all payloads can have."""
    free_bytes: int
    """On the disk to which contributions go, for this process; 0 without one."""

    def bytes_to_retain(self, where: str, max_retained_bytes: int, spill: Spill | None) -> int:
        """The most that this site retains for it. Raises NoRoomError if that is too much."""
        num_children, num_bytes = len(self.own.children), self.own.num_bytes
        need = num_children * num_bytes + self.own.payload_bytes
        if need > max_retained_bytes:
            raise NoRoomError(
                f"{where}: this site would hold up to {need} bytes as reducer of {len(self.own.chunks)} chunks, "
                f"its bound is {max_retained_bytes}; raise --max-retained-mib, give it more free disk, or let more "
                "sites reduce"
            )
        on_disk = 0 if spill is None else num_children * num_bytes - spill.memory_limit_bytes
        if spill is not None and on_disk > 0:
            # All payloads of this attempt go to the same disk.
            free_bytes = self.free_bytes + spill.disk_bytes
            if on_disk + self.log_bytes > free_bytes:
                raise NoRoomError(
                    f"{where}: this site would hold up to {on_disk} bytes of contributions in {spill.folder}, "
                    f"beside {spill.memory_limit_bytes} in memory, and {self.log_bytes} of payloads, and "
                    f"{free_bytes} are free there; make room, raise --reduce-buffer-mib, or lower --max-retained-mib "
                    "so that other sites reduce more"
                )
        return need


def split(chunks: list[int], sizes: list[int], num: int) -> tuple[range, ...]:
    """Ranges that have `chunks` between them, each about the same bytes: at most so many, none without a chunk."""
    total, before = sum(sizes), 0
    first_of: dict[int, int] = {}  # by range
    for chunk, size in zip(chunks, sizes, strict=True):
        first_of.setdefault((2 * before + size) * num // (2 * total), chunk)  # where its middle is
        before += size
    firsts = [*first_of.values(), chunks[-1] + 1]
    return tuple(range(first, end) for first, end in pairwise(firsts))


def share_of(
    plan: Plan,
    data: SyncData,
    site_id: int,
    retained: Iterable[tuple[Site, list[int]]],
    spill: Spill | None,
    *,
    num_processes: int = 1,
) -> Share:
    """`num_processes`: that share the free disk. `retained`: chunks of each site whose contributions are here already.
    One that arrives meanwhile is noted when its site opens a stream.

    Raises InvalidMessage if the plan's trees are not right, HostError for the disk.
    """
    tops = reducers(plan, data.layout.num_sync_chunks)
    own_chunks: list[int] = []
    by_top: dict[int, dict[Member, list[int]]] = {}  # by site, and by where it has them
    for chunk in filter(data.is_own, data.chunks):
        if (top := tops[chunk]).site_id == site_id:
            own_chunks.append(chunk)
        else:
            by_top.setdefault(top.site_id, {}).setdefault(place_of(top, chunk), []).append(chunk)

    num_others = max(1, len(plan.contributors) + len(plan.receivers) - 1)

    def reduction(chunks: list[int], children: tuple[Member, ...], parent: Member | None) -> Reduction:
        sizes = [data.max_bytes(chunk) for chunk in chunks]
        num_streams = max(1, min(MAX_STREAMS // num_others, sum(sizes) // MIN_STREAM_BYTES))
        return Reduction(
            chunks=chunks,
            expected=frozenset(chunks),
            children=children,
            parent=parent,
            num_bytes=sum(sizes),
            payload_bytes=sum(data.payload_bytes(chunk, len(plan.contributors)) for chunk in chunks),
            streams=() if parent is None else split(chunks, sizes, num_streams),
        )

    own = reduction(own_chunks, tuple(m for m in plan.contributors if m.site_id != site_id) if own_chunks else (), None)
    # Each site begins with the reducer after itself, so that they do not all begin with the same one.
    turn = bisect.bisect([m.site_id for m in plan.contributors], site_id)
    in_turn = (*plan.contributors[turn:], *plan.contributors[:turn])
    of_others = tuple(
        reduction(chunks, (), place) for top in in_turn for place, chunks in by_top.get(top.site_id, {}).items()
    )
    missing = {chunk: {child.site_id for child in own.children} for chunk in own_chunks}
    num_missing = dict.fromkeys((child.site_id for child in own.children), len(own_chunks))
    wanted = {(m.site_id, m.incarnation) for m in own.children}
    for site, chunks in retained:
        for chunk in chunks if site in wanted else ():
            if site[0] in missing.get(chunk, ()):
                missing[chunk].remove(site[0])
                num_missing[site[0]] -= 1
    return Share(
        own=own,
        made=tuple(chunk for chunk in data.all_chunks if tops[chunk].site_id == site_id),
        of_others=of_others,
        missing=missing,
        complete=[chunk for chunk in own_chunks if not missing[chunk]],
        num_missing=num_missing,
        sent_bytes=sum(other.num_bytes for other in of_others),
        log_bytes=sum(data.payload_bytes(chunk, len(plan.contributors)) for chunk in data.chunks),
        free_bytes=0 if spill is None else spill.free_bytes() // num_processes,
    )
