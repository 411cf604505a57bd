"""What ranks print, as far as it tells why they crashed: the rank that failed first, with its whole traceback. Pure.

A rank that fails takes others with it, whose errors are of lost connections. So the ranks are told apart by when their
first sign of failure was written, and of all but the first one only the last line is shown.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

NUM_LAST_LINES = 20
HEAD_BYTES, TAIL_BYTES = 6 << 10, 18 << 10
"""Of a traceback: its beginning, where the script called, and its end, where it failed."""
NUM_LINES_AFTER = 100
"""A traceback that more lines follow was handled: the script went on."""
NUM_OTHERS = 4
OTHER_CHARACTERS = 160

FAILS = re.compile(r"atoll: rank \d+ fails with ")
"""What `atoll.join` prints as an error leaves its block, before the script's own clean-up."""
_OF_TORCH = re.compile(r"\[rank\d+\]: ?")
_BEGIN = re.compile(r"(\s*\+ Exception Group )?Traceback \(most recent call last\):")
_CHAIN = ("The above exception was the direct cause of", "During handling of the above exception, another")
_OF_THE_END = ("Exception ignored in", "Error in atexit", "Error in sys.excepthook")


@dataclass(slots=True)
class _Traceback:
    head: list[str] = field(default_factory=list)
    tail: deque[str] = field(default_factory=deque)
    num_left_out: int = 0
    head_bytes: int = 0
    tail_bytes: int = 0
    in_frames: bool = True
    num_after: int = 0
    error: str = ""
    """The line that says which exception it is."""

    def add(self, line: str) -> None:
        size = len(line.encode()) + 1
        if not self.tail and self.head_bytes + size <= HEAD_BYTES:
            self.head.append(line)
            self.head_bytes += size
            return
        self.tail.append(line)
        self.tail_bytes += size
        while self.tail_bytes > TAIL_BYTES:
            self.tail_bytes -= len(self.tail.popleft().encode()) + 1
            self.num_left_out += 1

    def lines(self) -> list[str]:
        gap = [f"... {self.num_left_out} lines ..."] if self.num_left_out else []
        return [*self.head, *gap, *self.tail]


class RankOutput:
    """Of one rank. `add` each line."""

    def __init__(self) -> None:
        self.last_lines: deque[str] = deque(maxlen=NUM_LAST_LINES)
        self._traceback: _Traceback | None = None
        self._failed_at: int | None = None  # as the rank has said itself
        self._began_at = 0
        self._before = ""  # the last line that is not empty

    @property
    def failed_at(self) -> int | None:
        """When the first sign of failure was written; None without one."""
        if self._failed_at is not None:
            return self._failed_at
        return None if self._traceback is None else self._began_at

    @property
    def error(self) -> str:
        """In one line; empty without a traceback."""
        return "" if self._traceback is None else self._traceback.error

    def add(self, line: str, at: int) -> None:
        """`at`: when it was written, in any unit that all ranks share."""
        self.last_lines.append(line)
        text = _OF_TORCH.sub("", line, count=1)
        if FAILS.match(text):
            self._failed_at, self._traceback = at, None
        elif _BEGIN.match(text) and not (self._traceback is not None and self._before.startswith(_OF_THE_END)):
            if self._traceback is None or not self._before.startswith(_CHAIN):
                self._traceback, self._began_at = _Traceback(), at
            self._traceback.in_frames = True
        if self._traceback is not None:
            self._follow(self._traceback, line, text)
        if text.strip():
            self._before = text

    def _follow(self, traceback: _Traceback, line: str, text: str) -> None:
        traceback.add(line)
        is_of_frames = text.startswith((" ", "Traceback")) or not text.strip()
        if traceback.in_frames and not is_of_frames:
            traceback.in_frames, traceback.error = False, text
        traceback.num_after = 0 if is_of_frames and text.strip() else traceback.num_after + 1
        if traceback.num_after > NUM_LINES_AFTER:
            self._traceback = None

    def lines(self) -> list[str]:
        """The traceback, or the last lines."""
        return list(self.last_lines) if self._traceback is None else self._traceback.lines()


def crash_lines(ranks: Mapping[str, RankOutput], ended: Sequence[tuple[str, bool]]) -> tuple[str, ...]:
    """What to show of a crash. `ended`: ranks that ended badly by themselves, in order, and whether by a signal that no
    other rank's failure sends; none where that is not known.

    Empty where no rank printed anything.
    """
    name = _first(ranks, ended)
    if name is None:
        return tuple(f"[{name}] {line}" for name, output in ranks.items() for line in output.last_lines)
    lines = tuple(f"[{name}] {line}" for line in ranks[name].lines())
    if len(ranks) == 1:
        return lines
    others = [(other, output.error) for other, output in ranks.items() if other != name and output.error]
    said = [f"{other}: {error[:OTHER_CHARACTERS]}" for other, error in others[:NUM_OTHERS]]
    if len(others) > NUM_OTHERS:
        said.append(f"{len(others) - NUM_OTHERS} more")
    after = f"; after it {', '.join(said)}" if said else ""
    return (f"{name} failed first{after}", *lines)


def _first(ranks: Mapping[str, RankOutput], ended: Sequence[tuple[str, bool]]) -> str | None:
    """The rank that no other one's failure has ended, as far as that can be told."""
    if by_signal := [name for name, is_own in ended if is_own]:
        return by_signal[0]
    among: Iterable[str] = [name for name, _ in ended] or ranks
    signs = [(at, name) for name in among if (at := ranks[name].failed_at) is not None]
    if signs:
        return min(signs)[1]
    return ended[0][0] if ended else None
