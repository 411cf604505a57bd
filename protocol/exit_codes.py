"""What a process says with its exit code: the one place where an error becomes a number. README has the same table."""

from __future__ import annotations

from atoll.protocol.errors import AtollError, HostError, NotYetError, PeerError, RefusedError, StateError

ENDED_AT_ONCE = 130


def exit_code_of(error: BaseException) -> int:
    """Of a process that ends with this error."""
    if isinstance(error, AtollError):
        return error.exit_code
    if isinstance(error, OSError):
        return HostError.exit_code
    return ENDED_AT_ONCE if isinstance(error, KeyboardInterrupt) else AtollError.exit_code


def exit_code_on_own_disk(error: BaseException) -> int:
    """The same where no other side takes part: bytes here that do not make sense are a damaged state."""
    if isinstance(error, RefusedError | NotYetError | PeerError):
        return StateError.exit_code
    return exit_code_of(error)
