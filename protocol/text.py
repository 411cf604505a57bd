"""Text from outside: what a site, a rank or a peer says is shown in logs, on terminals and in metrics. Pure.

Control characters would let it forge lines of ours or drive a terminal: they are shown as escapes.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable

from atoll.protocol.dates import date_of

CONTINUED = "\n  | "
"""Before each further line of a log record: only what this process says begins a line."""


def clean(text: str) -> str:
    r"""`text` with its line ends (as \n) and tabs, and every other character that does not print (control characters,
    marks that change the direction of writing, separators) as an escape."""
    if text.isprintable():
        return text
    text = text.replace("\r\n", "\n")
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def last_line(text: str) -> str:
    """Where there is room for one: of a traceback, the last line says what is wrong."""
    lines = [line.strip() for line in clean(text).splitlines()]
    return next((line.replace("\t", " ") for line in reversed(lines) if line), "")


def byte_count(num_bytes: float) -> str:
    """`1.5 MiB`"""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def differences(one: object, other: object, where: str = "") -> list[str]:
    """Of two values as JSON has them: each place at which they are not the same, in words."""
    if isinstance(one, dict) and isinstance(other, dict):
        places = [(f"{where}.{key}".lstrip("."), one.get(key), other.get(key)) for key in {**one, **other}]
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        places = [(f"{where}[{index}]", *pair) for index, pair in enumerate(zip(one, other, strict=True))]
    else:
        return [] if one == other else [f"{where} was {json.dumps(one)}, now {json.dumps(other)}"]
    return [text for place, a, b in places for text in differences(a, b, place)]


LOG_FORMATS = ("text", "json")


class CleanFormatter(logging.Formatter):
    """Log records of one line or more, none of which can be taken for another record."""

    def __init__(self, form: str, sync: Callable[[], int | None] | None = None) -> None:
        """`sync`: the newest one, for `%(sync)s` in the form; `-` before any was opened."""
        super().__init__(form)
        self._sync = sync

    def formatMessage(self, record: logging.LogRecord) -> str:
        if self._sync is not None:
            record.sync = self._sync() or "-"
        return super().formatMessage(record)

    def format(self, record: logging.LogRecord) -> str:
        return CONTINUED.join(clean(super().format(record)).split("\n"))


class JsonFormatter(logging.Formatter):
    """For programs that read logs: one JSON object a line, with `time`, `level`, whose it is, `logger`, `sync`,
    `message`, and `traceback` where there is one."""

    def __init__(self, sync: Callable[[], int | None] | None = None, **whose: str) -> None:
        """`sync`: the newest one, if any was opened yet."""
        super().__init__()
        self._whose, self._sync = whose, sync

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": date_of(record.created).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            **self._whose,
            **({"sync": sync} if self._sync is not None and (sync := self._sync()) else {}),
            "logger": record.name,
            "message": clean(record.getMessage()),
        }
        if record.exc_info:
            line["traceback"] = clean(self.formatException(record.exc_info))
        return json.dumps(line)
