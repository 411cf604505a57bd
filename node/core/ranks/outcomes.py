"""What follows from what ranks say: events of the site, replies to ranks, and work that takes a thread."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.node.core.events import Answer, FromRanks, WorkersJoined, WorkersLost
from atoll.node.core.ranks.pieces import RankTensors, SitePieces, merge_ranks
from atoll.protocol.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """Send this answer to this rank."""

    rank: int
    step: int
    seq: int
    answer: Answer


@dataclass(frozen=True, slots=True, kw_only=True)
class AllJoined:
    """Every rank has said what it holds. What `site_pieces` gives, in a thread, goes to `WorkerGroup.put_together`."""

    ranks: tuple[RankTensors, ...]


def site_pieces(joined: AllJoined) -> SitePieces | str:
    """Or why the ranks' pieces make no model."""
    try:
        return merge_ranks(joined.ranks)
    except ConfigError as error:
        return str(error)


GroupEvent = WorkersJoined | FromRanks | WorkersLost
Outcome = list[GroupEvent | Reply | AllJoined]
