"""Moments of the wall clock, for people."""

from __future__ import annotations

from datetime import UTC, datetime


def date_of(wall_time_s: float) -> datetime:
    """Of seconds since 1970."""
    return datetime.fromtimestamp(wall_time_s, UTC)


def utc(wall_time_s: float) -> str:
    """`2026-11-27 15:04:05 UTC`"""
    return date_of(wall_time_s).strftime("%Y-%m-%d %H:%M:%S UTC")
