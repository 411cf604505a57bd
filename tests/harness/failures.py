"""For what is not meant to fail."""

from __future__ import annotations


def unexpected(error: BaseException) -> None:
    """In place of a handler of failures: the test ends with it."""
    raise error
