"""What this site's scripts log: each value to the journal, and to the coordinator with the next heartbeat."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import asdict

from atoll.node.daemon.journal import Journal
from atoll.protocol.logged import MAX_LOGGED, MAX_NAMES, Logged, LoggedValue

MAX_WAITING = 1024
"""While there is no coordinator; the oldest go then."""


class LoggedValues:
    """Ranks are bounded here too: a script may speak to the socket without `site.log`."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self.is_wanted = False
        """By the coordinator of this stream: one of an older version would take it for no message."""
        self._names: set[str] = set()
        self._waiting: deque[LoggedValue] = deque(maxlen=MAX_WAITING)

    def heard(self, rank: int, said: Logged) -> None:
        """From that rank."""
        taken = [value for value in said.values if self._is_taken(value)]
        if taken:
            values = [{key: found for key, found in asdict(value).items() if found is not False} for value in taken]
            self._journal.write("logged", rank=rank, values=values)
            self._waiting += taken

    def _is_taken(self, value: LoggedValue) -> bool:
        if value.problem or (value.name not in self._names and len(self._names) == MAX_NAMES):
            return False
        self._names.add(value.name)
        return True

    def beat(self, say: Callable[[Logged], None]) -> None:
        """With each heartbeat. Of more than one message holds, the newest of each curve: all are in the journal."""
        if not self.is_wanted:
            return
        waiting, self._waiting = list(self._waiting), deque(maxlen=MAX_WAITING)
        if len(waiting) > MAX_LOGGED:
            waiting = list({(value.name, value.of_outer): value for value in waiting}.values())
        if waiting:
            say(Logged(values=tuple(waiting)))
