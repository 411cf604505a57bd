"""What the coordinator's shell does for a person without its core, or refuses: in the audit log before the person is
answered, as all that the core decides."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from atoll.coordinator.core.asked import Asked, NoteAsked
from atoll.coordinator.core.audit import DONE, words_of
from atoll.coordinator.core.events import Answer

log = logging.getLogger("atoll.coordinator")

TOLD_TO_END = "the coordinator was told to end before that was decided; ask again when it is back"
"""Of what has been asked by then. It may be decided all the same."""
Ask = Callable[[Asked], Awaitable[Answer]]


async def noted(ask: Ask, by: str, what: str, answer: Answer, *, how: str = "refused") -> Answer:
    """The answer, once it is in the log. `how`: what has become of it where there is a problem."""
    if by:
        outcome = f"{how}: {answer.problem}" if answer.problem else answer.found or DONE
        if (kept := await ask(NoteAsked(by=by, what=what, outcome=outcome))).problem:
            log.warning("not in the audit log: %s: %s: %s (%s)", by, what, outcome, kept.problem)
    return answer


async def refused(ask: Ask, asked: Asked, problem: str, *, how: str = "refused") -> Answer:
    """The same, of what the core would have decided, or of what has failed since it did."""
    return await noted(ask, asked.by, words_of(asked), Answer(asked.request, problem), how=how)
