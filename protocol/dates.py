"""Moments of the wall clock, for people."""

from __future__ import annotations

import re
from datetime import UTC, datetime

from atoll.protocol.errors import ConfigError

UNITS_S = {"m": 60, "h": 3600, "d": 86_400}


def date_of(wall_time_s: float) -> datetime:
    """Of seconds since 1970."""
    return datetime.fromtimestamp(wall_time_s, UTC)


def utc(wall_time_s: float) -> str:
    """`2026-11-27 15:04:05 UTC`"""
    return date_of(wall_time_s).strftime("%Y-%m-%d %H:%M:%S UTC")


def duration_s(text: str) -> int:
    """Of `90m`, `24h` or `7d`. Raises ValueError."""
    found = re.fullmatch(r"([1-9][0-9]{0,5})([mhd])", text)
    if found is None:
        raise ValueError(text)
    return int(found[1]) * UNITS_S[found[2]]


def date_s(text: str) -> float:
    """Seconds since 1970 of a date (`2026-12-24`, `2026-12-24T18:00`; UTC unless it says otherwise). Raises
    ConfigError."""
    try:
        date = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(f"{text!r} is no time: say 90m, 24h, 7d, or a date as 2026-12-24T18:00") from None
    return (date if date.tzinfo is not None else date.replace(tzinfo=UTC)).timestamp()
