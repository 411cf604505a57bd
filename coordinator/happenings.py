"""What has happened in a run, newest last, as its log says it: for people who were not there. Pure."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import asdict, dataclass

from atoll.protocol.text import clean, last_line

KEPT = 128
MAX_CHARACTERS = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Happening:
    number: int
    """1, 2, 3 ... since this start of the coordinator."""
    time_s: float
    """Since 1970."""
    level: str
    """info, warning or error."""
    text: str


class Happenings:
    def __init__(self) -> None:
        self._kept: deque[Happening] = deque(maxlen=KEPT)
        self._num = 0

    def note(self, level: int, text: str, time_s: float) -> None:
        """What is for those alone who look for a fault is left out."""
        if level >= logging.INFO:
            self._num += 1
            # The first line says whose words the others are.
            first, last = last_line(clean(text).strip().partition("\n")[0]), last_line(text)
            words = (first if first == last else f"{first[: MAX_CHARACTERS // 2]} ... {last}")[:MAX_CHARACTERS]
            name = logging.getLevelName(level).lower()
            self._kept.append(Happening(number=self._num, time_s=round(time_s, 3), level=name, text=words))

    def document(self) -> list[dict[str, object]]:
        """The newest, ascending."""
        return [asdict(one) for one in self._kept]
