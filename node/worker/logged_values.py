"""What a script logs of itself (`Site.log`), from the call until it is said to the node. No torch."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from typing import SupportsFloat

from atoll.protocol.errors import ConfigError
from atoll.protocol.logged import MAX_LOGGED, MAX_NAMES, LoggedValue


class LoggedValues:
    """Said together, so that a script that logs at every step costs a message a second."""

    def __init__(self, say: Callable[[tuple[LoggedValue, ...]], None]) -> None:
        self._say = say
        self._waiting: list[LoggedValue] = []
        self._names: set[str] = set()
        self._is_closed = False
        self._warned: set[str] = set()  # of which a line was written: names, and that there are more

    def log(self, values: Mapping[str, SupportsFloat], step: int, *, of_outer: bool) -> None:
        """Raises ConfigError for what is no name or no number."""
        if self._is_closed:
            names = ", ".join(map(str, values))
            self._warn("closed", f"was called after this site has left its run, so nobody hears of {names}: log before")
            return
        for name, given in values.items():
            try:
                value = LoggedValue(name=name, step=step, value=float(given), of_outer=of_outer)
                problem = value.problem
            except (TypeError, ValueError, RuntimeError, OverflowError) as error:
                problem = f"{given!r:.100} as {name!r:.100}, which is no number ({error})"
            if problem:
                raise ConfigError(f"site.log got {problem}")
            if self._is_taken(value):
                self._waiting.append(value)
                if len(self._waiting) == MAX_LOGGED:
                    self.flush()

    def _is_taken(self, value: LoggedValue) -> bool:
        if value.name not in self._names and len(self._names) == MAX_NAMES:
            self._warn("more names", f"keeps the first {MAX_NAMES} names, and {value.name!r} is one more")
            return False
        if not math.isfinite(value.value):
            self._warn(value.name, f"leaves out {value.name} where it is {value.value}, first at step {value.step}")
            return False
        self._names.add(value.name)
        return True

    def _warn(self, about: str, text: str) -> None:
        if about not in self._warned:
            self._warned.add(about)
            sys.stderr.write(f"atoll: site.log {text}\n")

    def flush(self) -> None:
        """Say what waits."""
        if self._waiting:
            waiting, self._waiting = tuple(self._waiting), []
            self._say(waiting)

    def close(self) -> None:
        """Say what waits; what comes later is said to be lost."""
        self.flush()
        self._is_closed = True
