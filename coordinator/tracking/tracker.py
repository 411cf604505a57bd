"""What a tool for curves is to this coordinator. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

RUN = "run"
"""The run's own series; sites have theirs. A run id or a site's name has no slash: `sites/NAME` is no other one."""


class Point(NamedTuple):
    series: str
    tag: str
    step: int
    """Of the run; of one series and tag they rise, except after a rollback."""
    run_tokens: int
    time_s: float
    """Since 1970."""
    value: float

    @property
    def name(self) -> str:
        """For tools that have one name for both."""
        return f"{self.series}/{self.tag}"


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """The run, for a tool that shows how it was set."""

    run_id: str
    settings: Mapping[str, Any]
    """Tables of run.toml."""


class Tracker(Protocol):
    """It is asked from one thread, which it may keep waiting. Whatever it raises is said, and it is asked again."""

    def write(self, points: Sequence[Point]) -> None:
        """Others can read them when it returns, or soon after. After an error they come again."""

    def close(self) -> None:
        """Nothing more comes."""


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`sync.every` and the like, for tools without tables."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found
