"""One tool's thread: it may be slow, away or not installed, and neither the event loop nor the run waits for it."""

from __future__ import annotations

import json
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from atoll.coordinator.tracking.tracker import Point, Tracker
from atoll.protocol.disk import PRIVATE_FILE, REAL_DISK, make_folder
from atoll.protocol.errors import HostError
from atoll.protocol.text import last_line

log = logging.getLogger("atoll.coordinator")
MAX_WAITING = 1 << 17
"""Points: all that the curves of a run can have at once (512 of 256)."""
AT_ONCE = 1 << 10
"""Points that a tool is told together."""
AGAIN_S = 30.0
"""A tool that failed is asked again after so long."""
CLOSE_LIMIT_S = 10.0
MAX_TOLD_BYTES = 1 << 20


class MissingLibrary(Exception):
    """Of a tool. It says what to install; another try would not help."""


class Feed:
    """What comes while `MAX_WAITING` points wait drops the oldest of them, which is counted."""

    def __init__(self, name: str, opened: Callable[[], Tracker], told_path: Path, key: str) -> None:
        """`opened`, in the thread: a tool may take its time. `told_path`: step and time of the last value that the tool
        has of each curve, over restarts of the coordinator, for the run and place that `key` names."""
        self.name = name
        self._opened, self._told_path, self._key = opened, told_path, key
        self._changed = threading.Condition()
        self._waiting: deque[Point] = deque()
        self._is_closing = False
        self._told = self._read_told()
        self._told_before = dict(self._told)  # by an earlier start of the coordinator
        self.num_told = self.num_dropped = 0
        self.problem = ""
        self._thread = threading.Thread(target=self._run, name=f"track-{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def lacks(self, point: Point) -> bool:
        """No earlier start of the coordinator has told it. After a rollback a new value has a step that was told, and a
        later time."""
        step, time_s = self._told_before.get(point.name, (-1, 0.0))
        return point.step > step or point.time_s > time_s

    def put(self, points: Sequence[Point]) -> None:
        """Returns at once."""
        with self._changed:
            self._waiting += points
            self._drop(len(self._waiting) - MAX_WAITING)
            self._changed.notify()

    def close(self, limit_s: float = CLOSE_LIMIT_S) -> None:
        """What waits is told yet, within that time; what is left then is said. Blocks."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(limit_s)
        if self._thread.is_alive() or self.num_dropped:
            log.warning("%s", self.in_words())

    def in_words(self) -> str:
        left = f", {len(self._waiting)} still wait" if self._waiting else ""
        why = f"; the last problem: {self.problem}" if self.problem else ""
        return f"{self.name} was told {self.num_told} values of curves, {self.num_dropped} were dropped{left}{why}"

    def document(self) -> dict[str, Any]:
        """For people."""
        return {
            "name": self.name,
            "told": self.num_told,
            "dropped": self.num_dropped,
            "waiting": len(self._waiting),
            "problem": self.problem,
        }

    # --- in the thread

    def _run(self) -> None:
        tracker: Tracker | None = None
        while points := self._next():
            try:
                tracker = tracker or self._opened()
                tracker.write(points)
            except MissingLibrary as error:
                self._said(str(error), logging.ERROR)
                return self._never(len(points))
            except Exception as error:  # of a library that is not ours: none of its faults ends a run
                self._said(f"{type(error).__name__}: {last_line(str(error))}", logging.WARNING)
                self._put_back(points)
            else:
                self._note_told(points)
        try:
            if tracker is not None:
                tracker.close()
        except Exception as error:
            self._said(f"{type(error).__name__}: {last_line(str(error))}", logging.WARNING)

    def _next(self) -> list[Point]:
        """What is told next; nothing at the end."""
        with self._changed:
            while not self._waiting and not self._is_closing:
                self._changed.wait()
            return [self._waiting.popleft() for _ in range(min(AT_ONCE, len(self._waiting)))]

    def _note_told(self, points: Sequence[Point]) -> None:
        if self.problem:
            log.info("%s is told of the run again", self.name)
        self.num_told, self.problem = self.num_told + len(points), ""
        self._told |= {point.name: (point.step, point.time_s) for point in points}
        text = json.dumps({"key": self._key, "told": self._told})
        try:
            make_folder(self._told_path.parent)
            REAL_DISK.write_whole(self._told_path, text.encode(), fsync=False, mode=PRIVATE_FILE)
        except (HostError, OSError) as error:
            self._said(f"another start of the coordinator would tell it all again: {error}", logging.WARNING)

    def _read_told(self) -> dict[str, tuple[int, float]]:
        """Nothing, where it cannot be read: then all curves are told from their beginning."""
        try:
            if self._told_path.stat().st_size > MAX_TOLD_BYTES:
                return {}
            kept = json.loads(self._told_path.read_bytes())
        except (OSError, ValueError, RecursionError):
            return {}
        if not isinstance(kept, dict) or kept.get("key") != self._key or not isinstance(kept.get("told"), dict):
            return {}
        try:
            return {name: (int(step), float(time_s)) for name, (step, time_s) in kept["told"].items()}
        except (TypeError, ValueError, OverflowError):
            return {}

    def _put_back(self, points: list[Point]) -> None:
        """They come first when the tool is asked again. At the end nothing more is tried."""
        with self._changed:
            self._waiting.extendleft(reversed(points))
            self._drop(len(self._waiting) if self._is_closing else len(self._waiting) - MAX_WAITING)
            self._changed.wait_for(lambda: self._is_closing, AGAIN_S)

    def _never(self, num_in_hand: int) -> None:
        """The tool is told nothing: all that comes is dropped."""
        with self._changed:
            self.num_dropped += num_in_hand
            while not self._is_closing:
                self._drop(len(self._waiting))
                self._changed.wait()
            self._drop(len(self._waiting))

    def _drop(self, num: int) -> None:
        for _ in range(num):
            self._waiting.popleft()
        self.num_dropped += max(0, num)

    def _said(self, problem: str, level: int) -> None:
        """Once, until it is another one."""
        if problem != self.problem:
            self.problem = problem
            log.log(level, "%s is not told of the run, which goes on: %s", self.name, problem)
