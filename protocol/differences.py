"""What both ends of a session remember of the last plan on it, so that what follows leaves out what is the same. Pure.

A plan and a commit mostly name the members of the plan before them: in a run that goes on as it is, only the weights
change, and those come as Weights. Both ends advance `Told` with every message of the stream, in its order; a new stream
starts from NOTHING.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from atoll.protocol.errors import InvalidMessage
from atoll.protocol.messages import Commit, CoordinatorMessage, Influences, Member, Plan, Tree, Weights
from atoll.protocol.plans import weighed


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What the last Plan on this stream named, and the weights that were said of it since, if they were."""

    contributors: tuple[Member, ...] = ()
    trees: tuple[Tree, ...] = ()
    tokens: tuple[int, ...] = ()
    influences: tuple[int, ...] = ()
    """Said after the weights, if they are."""

    @property
    def weighed(self) -> tuple[Member, ...]:
        """As a commit names them; nobody while their weights are not told."""
        return weighed(self.contributors, self.tokens, self.influences) if self.tokens else ()


NOTHING = Told()


@dataclass(frozen=True, slots=True, kw_only=True)
class Same:
    """What a message leaves out because it was told."""

    contributors: bool = False
    trees: bool = False


WHOLE = Same()


def shorten(message: CoordinatorMessage, told: Told) -> tuple[CoordinatorMessage, Same]:
    """`message` without what `told` says, and what that is."""
    match message:
        case Plan(contributors=contributors, trees=trees):
            same = Same(
                contributors=bool(told.contributors) and contributors == told.contributors,
                trees=bool(told.trees) and trees == told.trees,
            )
            short = replace(
                message,
                contributors=() if same.contributors else contributors,
                trees=() if same.trees else trees,
            )
            return short, same
        case Commit(contributors=contributors) if contributors and contributors == told.weighed:
            return replace(message, contributors=()), Same(contributors=True)
    return message, WHOLE


def complete(message: CoordinatorMessage, same: Same, told: Told) -> CoordinatorMessage:
    """The whole of a message that came shortened. Raises InvalidMessage if it leaves out what was never told."""
    if same == WHOLE:
        return message
    what = type(message).__name__
    if (same.contributors and not told.contributors) or (same.trees and not told.trees):
        raise InvalidMessage(f"a {what} that leaves out what no plan on this session has told")
    match message:
        case Plan(contributors=contributors, trees=trees):
            if (same.contributors and contributors) or (same.trees and trees):
                raise InvalidMessage("a Plan that names what it says it leaves out")
            return replace(
                message,
                contributors=told.contributors if same.contributors else contributors,
                trees=told.trees if same.trees else trees,
            )
        case Commit(contributors=()) if told.tokens and not same.trees:
            return replace(message, contributors=told.weighed)
    raise InvalidMessage(f"a {what} that leaves out what it cannot")


def after(message: CoordinatorMessage, told: Told) -> Told:
    """What is told once this message, whole, has been."""
    match message:
        case Plan(contributors=contributors, trees=trees):
            return Told(contributors=contributors, trees=trees)
        case Weights(tokens=tokens) if len(tokens) == len(told.contributors):
            return replace(told, tokens=tokens, influences=())
        case Influences(influences=influences) if len(influences) == len(told.contributors):
            return replace(told, influences=influences)
    return told
