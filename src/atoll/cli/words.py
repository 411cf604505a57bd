"""Figures as people read them. Pure."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """`3 min 20 s`"""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def count(number: int) -> str:
    """`1.05 million`"""
    for size, word in ((1e9, "billion"), (1e6, "million")):
        if number >= size:
            return f"{number / size:.2f} {word}"
    return str(number)


def share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"
