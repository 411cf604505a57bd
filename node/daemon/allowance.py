"""When a site may be in the run, as its owner says: hours of the day, and bytes a month. Wall time comes in;
its zone is this machine's."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime, timedelta

from atoll.protocol.errors import ConfigError
from atoll.protocol.text import byte_count

_HOURS = re.compile(r"(\d{1,2})(?::(\d\d))?-(\d{1,2})(?::(\d\d))?", re.ASCII)
_MONTH = re.compile(r"(\d{4}-\d\d) (\d{1,19})\n", re.ASCII)
MINUTES_OF_DAY = 24 * 60


@dataclass(frozen=True, slots=True)
class Hours:
    """Of each day, by this machine's clock and time zone; over midnight where the end comes before the beginning."""

    begin: int
    """In minutes of the day."""
    end: int

    def __str__(self) -> str:
        return "-".join(f"{minute // 60:02}:{minute % 60:02}" for minute in (self.begin, self.end))

    def has(self, at: datetime) -> bool:
        minute = at.hour * 60 + at.minute
        if self.begin < self.end:
            return self.begin <= minute < self.end
        return minute >= self.begin or minute < self.end


def hours(text: str) -> Hours | None:
    """`22-07`, `8:30-17`; None of nothing. Raises ConfigError."""
    if not text:
        return None
    found = _HOURS.fullmatch(text)
    if found is not None:
        first, first_minute, last, last_minute = (int(part or 0) for part in found.groups())
        begin, end = first * 60 + first_minute, last * 60 + last_minute
        is_time = max(first_minute, last_minute) < 60 and begin < MINUTES_OF_DAY and end <= MINUTES_OF_DAY
        if is_time and begin != end % MINUTES_OF_DAY:
            return Hours(begin, end % MINUTES_OF_DAY)
    raise ConfigError(f"--hours {text}: say from when to when on this machine's clock, as 22-07 or 8:30-17")


@dataclass(frozen=True, slots=True)
class Sent:
    """To other sites in a calendar month."""

    month: str = ""
    num_bytes: int = 0

    def plus(self, num_bytes: int, now_s: float) -> Sent:
        """A clock that went back into the month before begins none."""
        month = max(self.month, f"{datetime.fromtimestamp(now_s):%Y-%m}")
        return Sent(month, num_bytes + (self.num_bytes if month == self.month else 0))

    def text(self) -> str:
        return f"{self.month} {self.num_bytes}\n"

    @classmethod
    def of(cls, text: str) -> Sent:
        """Raises ValueError."""
        if (found := _MONTH.fullmatch(text)) is None:
            raise ValueError(text)
        return cls(found[1], int(found[2]))


@dataclass(frozen=True, slots=True)
class TimeOff:
    """The site is not in the run until then."""

    until_s: float
    reason: str

    def __str__(self) -> str:
        return f"{self.reason}; back at {datetime.fromtimestamp(self.until_s):%Y-%m-%d %H:%M} there"


@dataclass(frozen=True, slots=True)
class Allowance:
    """Of a site in the run. Without limits, nothing is ever due."""

    hours: Hours | None = None
    monthly_bytes: int = 0

    def __bool__(self) -> bool:
        return self.hours is not None or self.monthly_bytes > 0

    def time_off(self, sent: Sent, now_s: float) -> TimeOff | None:
        """What is due now. The one that lasts for longer, of two."""
        due: list[TimeOff] = []
        at, sent = datetime.fromtimestamp(now_s), sent.plus(0, now_s)
        if self.hours is not None and not self.hours.has(at):
            due.append(TimeOff(_next(at, self.hours.begin), f"outside its hours ({self.hours})"))
        if self.monthly_bytes and sent.num_bytes >= self.monthly_bytes:
            of_month = f"{byte_count(sent.num_bytes)} of {byte_count(self.monthly_bytes)}"
            due.append(TimeOff(_next_month(sent.month), f"it has sent its share of the month ({of_month})"))
        return max(due, key=lambda one: one.until_s, default=None)


def _next(at: datetime, minute: int) -> float:
    then = at.replace(hour=minute // 60, minute=minute % 60, second=0, microsecond=0)
    return (then if then > at else then + timedelta(days=1)).timestamp()


def _next_month(month: str) -> float:
    year, number = map(int, month.split("-"))
    return datetime(year + number // 12, number % 12 + 1, 1).timestamp()
