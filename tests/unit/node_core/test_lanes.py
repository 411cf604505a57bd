"""What the ranks are told where several fragments have a word for them."""

from __future__ import annotations

import itertools

from atoll.node.core.events import Answer, AnswerKind, Values
from atoll.node.core.lanes.answers import Decision, Hold, most_urgent
from atoll.node.core.outputs import PublishState

SNAPSHOT = Answer(kind=AnswerKind.SNAPSHOT, fragment=1)
APPLY = Answer(kind=AnswerKind.APPLY, version=3)
SOON = Answer(kind=AnswerKind.CONTINUE, next_step=11)
LATER = Answer(kind=AnswerKind.CONTINUE, next_step=20)
HOLD = Hold("waiting for the commit")
STOP = Answer(kind=AnswerKind.STOP, reason="the run is complete")


def test_what_a_fragment_needs_now_comes_before_what_another_waits_for() -> None:
    rows: list[tuple[Decision, ...]] = [
        (SNAPSHOT, HOLD, SOON, LATER, STOP),
        (APPLY, HOLD, SOON, LATER, STOP),
        (PublishState(Values(3)), HOLD, SOON, LATER, STOP),
    ]
    for row in rows:
        for more, less in itertools.combinations(row, 2):
            assert most_urgent([more, less]) == more
            assert most_urgent([less, more]) == more
