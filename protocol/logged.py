"""What scripts log of themselves: values by name, of which a run has few. Pure.

Used through `messages`, as all other messages are.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from atoll.protocol.fields import SiteMessage, bounded

MAX_LOGGED = 64
"""Values of one message."""
MAX_NAMES = 16
"""Of one site, each of its own parameters and of the outer ones: each is a curve, and a metric's label."""
MAX_NAME_CHARACTERS = 64
MAX_STEP = 1 << 48
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./-]{0,63}")
"""That may be a label, a tag and a column's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedValue:
    name: str = bounded(MAX_NAME_CHARACTERS)
    step: int
    value: float
    of_outer: bool = False

    @property
    def problem(self) -> str:
        """Why no curve has it; empty if one may."""
        if NAME.fullmatch(self.name) is None:
            return f"a value by the name {self.name!r}: a name is 1 to 64 letters, digits and _ - . /"
        return f"a value of step {self.step}" if self.step >= MAX_STEP else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """A saved model that is the best so far by what was logged of it."""

    commit: int
    run_step: int
    site_id: int
    """Whose word it is."""
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Logged(SiteMessage):
    """Nothing is decided by it."""

    values: tuple[LoggedValue, ...] = bounded(MAX_LOGGED, ())
