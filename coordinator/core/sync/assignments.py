"""Who reduces what in the next attempt, after what failed in those before. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from atoll.coordinator.core.sync.blame import Blame, Pair
from atoll.coordinator.core.sync.chunk_sizes import ChunkSizes
from atoll.coordinator.core.sync.exclusions import Kind
from atoll.coordinator.core.sync.syncs import Sync
from atoll.coordinator.core.sync.topology import Reducer, direct
from atoll.protocol.errors import ConfigError
from atoll.protocol.messages import Tree

MIN_TRIES = 3
"""With the same contributors, where there are fewer ways to assign them than that: a link may be bad for a moment, and
after the second failure it is known who is to receive only."""


def assign(
    sync: Sync,
    sizes: ChunkSizes,
    reducers: Sequence[Reducer],
    on_probation: frozenset[int],
    not_reducing: frozenset[int],
    *,
    num_receivers: int = 0,
) -> tuple[tuple[Tree, ...], frozenset[int]] | None:
    """Trees that were not tried with these contributors in this sync yet, and the suspects who reduce nothing in them:
    those with whom exchanges failed in the last attempt, if they can be avoided. At first those `on_probation` are as
    well; always those `not_reducing`, of whom some are left, and those without room.

    Where there are few such trees, the first of them again. None if everything was tried. Raises ConfigError if the
    contributions fit nowhere.
    """
    ids = tuple(r.site_id for r in reducers)
    not_reducing |= sync.exclusions.reasons(Kind.NO_ROOM).keys()
    found_none = sync.exclusions.ids(Kind.NO_AVERAGE)
    if not not_reducing | found_none >= set(ids):
        not_reducing |= found_none
    suspects = suspects_of(sync.attempt.failing, ids) if sync.attempt is not None else frozenset()
    issued = [attempt.plan.trees for attempt in sync.attempts if attempt.is_weighed and attempt.ids() == ids]
    problem: ConfigError | None = None
    again: tuple[tuple[Tree, ...], frozenset[int]] | None = None
    for avoid, rotation in _choices(ids, suspects, on_probation, sync.blame):
        if avoid | not_reducing >= set(ids):
            continue
        try:
            trees = direct(sizes, reducers, avoid=avoid | not_reducing, rotation=rotation, num_receivers=num_receivers)
        except ConfigError as error:
            problem = problem or error
            continue
        found = trees, suspects if suspects <= avoid else frozenset()
        if trees not in issued:
            return found
        again = again or found
    if problem is not None and again is None:
        raise problem
    return again if len(issued) < MIN_TRIES else None


def suspects_of(failing: Collection[Pair], ids: Collection[int]) -> frozenset[int]:
    """The one site that is in all failing pairs, or all that are in one; none if nobody else would be left."""
    pairs = [frozenset(pair) for pair in failing]
    if not pairs:
        return frozenset()
    common = frozenset.intersection(*pairs)
    suspects = common if len(common) == 1 else frozenset.union(*pairs)
    return suspects if not suspects >= set(ids) else frozenset()


def _choices(
    ids: tuple[int, ...], suspects: frozenset[int], on_probation: frozenset[int], blame: Blame
) -> Iterator[tuple[frozenset[int], int]]:
    """Whom to avoid, and the rotation of the others, the best first."""
    known = (suspects | on_probation) & set(ids)
    if known and known != set(ids):
        yield known, 0
    if suspects:
        yield suspects, 0
    yield frozenset(), 0
    for rotation in range(1, len(ids)):
        yield frozenset(), rotation
    # One reducer for all, the least blamed first.
    for only in sorted(ids, key=lambda i: (blame.of(i), i)):
        yield frozenset(ids) - {only}, 0
