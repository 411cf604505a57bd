"""What a plan asks of one site: the chunks that it reduces, and those that each other reducer does."""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass

from atoll.node.exchange.sync.ports import SyncData
from atoll.node.exchange.sync.retained import Site
from atoll.node.exchange.sync.spill import Spill
from atoll.protocol.messages import Member, Plan
from atoll.protocol.plans import reducers


@dataclass(frozen=True, slots=True, kw_only=True)
class ReducersShare:
    """What one reducer averages."""

    member: Member
    chunks: list[int]
    """Ascending."""
    expected: frozenset[int]
    """The same."""
    num_bytes: int
    """The most that their contributions can have, and their payloads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Of one (sync, attempt); grows with the model, and is made in a thread."""

    own_chunks: list[int]
    """Reduced here, ascending."""
    of_reducers: tuple[ReducersShare, ...]
    """The other reducers, in the order in which this site begins with them."""
    others: tuple[Member, ...]
    """Whose contributions to `own_chunks` are needed; none where this site reduces nothing."""
    lacking: dict[int, set[int]]
    """Of each own chunk: the contributors (site ids) whose contribution is not here yet."""
    complete: list[int]
    """The own chunks that lack nothing."""
    num_lacking: dict[int, int]
    """The same by contributor."""
    payload_bytes: int
    """The most that the payloads of `own_chunks` can have."""
    log_bytes: int
    """The most that all payloads can have."""
    free_bytes: int
    """On the disk to which contributions go; 0 without one."""


def share_of(
    plan: Plan, data: SyncData, site_id: int, held: Iterable[tuple[Site, list[int]]], spill: Spill | None
) -> Share:
    """`held`: chunks of each site whose contributions are here already. One that arrives meanwhile is noted when its
    site opens a stream.

    Raises InvalidMessage if the plan's trees are not right, HostError for the disk.
    """
    tops = reducers(plan, data.layout.num_sync_chunks)
    by_reducer: dict[int, list[int]] = {}
    for chunk in data.chunks:
        by_reducer.setdefault(tops[chunk].site_id, []).append(chunk)
    own_chunks = by_reducer.pop(site_id, [])
    others = tuple(m for m in plan.contributors if m.site_id != site_id) if own_chunks else ()
    # Each site begins with the reducer after itself, so that they do not all begin with the same one.
    turn = bisect.bisect([m.site_id for m in plan.contributors], site_id)
    in_turn = (*plan.contributors[turn:], *plan.contributors[:turn])
    ids = [m.site_id for m in others]
    lacking = {chunk: set(ids) for chunk in own_chunks}
    num_lacking = dict.fromkeys(ids, len(own_chunks))
    wanted = {(m.site_id, m.incarnation) for m in others}
    for site, chunks in held:
        for chunk in chunks if site in wanted else ():
            if site[0] in lacking.get(chunk, ()):
                lacking[chunk].remove(site[0])
                num_lacking[site[0]] -= 1
    return Share(
        own_chunks=own_chunks,
        of_reducers=tuple(
            ReducersShare(
                member=member,
                chunks=theirs,
                expected=frozenset(theirs),
                num_bytes=sum(data.max_bytes(chunk) for chunk in theirs),
            )
            for member in in_turn
            if (theirs := by_reducer.get(member.site_id))
        ),
        others=others,
        lacking=lacking,
        complete=[chunk for chunk in own_chunks if not lacking[chunk]],
        num_lacking=num_lacking,
        payload_bytes=sum(data.max_bytes(chunk) for chunk in own_chunks),
        log_bytes=sum(data.max_bytes(chunk) for chunk in data.chunks),
        free_bytes=0 if spill is None else spill.free_bytes(),
    )
