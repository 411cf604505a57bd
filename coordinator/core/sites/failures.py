"""Which sites cannot go on, and why: another start alone does not cure it. Of this start of the coordinator."""

from __future__ import annotations

MOST_TEXTS = 20
"""That are shown."""


class Failures:
    """`num` counts all of them. A text is there until its site is in the run again."""

    def __init__(self) -> None:
        self.num = 0
        self._texts: dict[str, str] = {}  # by name, in the order in which they failed

    @property
    def texts(self) -> tuple[str, ...]:
        """The newest last, one for each site."""
        return tuple(self._texts.values())

    def note(self, name: str, text: str) -> None:
        """That site has left for good."""
        self.num += 1
        self.is_back(name)
        self._texts[name] = text
        if len(self._texts) > MOST_TEXTS:
            del self._texts[next(iter(self._texts))]

    def is_back(self, name: str) -> None:
        """It was admitted: whatever kept it from going on is cured."""
        self._texts.pop(name, None)
