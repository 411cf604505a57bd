"""Who reduces what in the next attempt, after what failed in those before. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

from atoll.coordinator.core.sync.attempts import Signature
from atoll.coordinator.core.sync.blame import Pair
from atoll.coordinator.core.sync.chunk_sizes import ChunkSizes
from atoll.coordinator.core.sync.topology import Reducer, direct
from atoll.protocol.errors import ConfigError
from atoll.protocol.messages import Tree

MIN_TRIES = 3
"""With the same contributors, where there are fewer ways to assign them than that: a link may be bad for a moment, and
after the second failure it is known who is to receive only."""


def assign(
    sizes: ChunkSizes,
    reducers: Sequence[Reducer],
    *,
    suspects: frozenset[int],
    on_probation: frozenset[int],
    not_reducing: frozenset[int],
    tried: Sequence[Signature],
    blamed: Callable[[int], int],
) -> tuple[tuple[Tree, ...], frozenset[int]] | None:
    """Trees that were not `tried` with these contributors yet, and who was avoided for that: at first `suspects` and
    those `on_probation`; always those `not_reducing`. `blamed` says in how many failures a site had a part.

    Where there are few such trees, the first of them again. None if everything was tried. Raises ConfigError if the
    contributions fit nowhere.
    """
    ids = tuple(r.site_id for r in reducers)
    issued = [trees for others, trees in tried if others == ids]
    problem: ConfigError | None = None
    again: tuple[tuple[Tree, ...], frozenset[int]] | None = None
    for avoid, rotation in _choices(ids, suspects, on_probation, blamed):
        if avoid | not_reducing >= set(ids):
            continue
        try:
            trees = direct(sizes, reducers, avoid=avoid | not_reducing, rotation=rotation)
        except ConfigError as error:
            problem = problem or error
            continue
        if trees not in issued:
            return trees, avoid
        again = again or (trees, avoid)
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
    ids: tuple[int, ...], suspects: frozenset[int], on_probation: frozenset[int], blamed: Callable[[int], int]
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
    for only in sorted(ids, key=lambda i: (blamed(i), i)):
        yield frozenset(ids) - {only}, 0
