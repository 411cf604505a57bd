"""What a process says with its exit code: the one place where an error becomes a number. README has the same table."""

from __future__ import annotations

from atoll.protocol.errors import (
    AtollError,
    ConfigError,
    HostError,
    NonFiniteError,
    NotYetError,
    PeerError,
    RefusedError,
    StateError,
    WorkerError,
)

CLEAN = 0
SOMETHING_ELSE = AtollError.exit_code
ENDED_AT_ONCE = 130

MEANINGS = {
    CLEAN: "a clean end",
    SOMETHING_ELSE: "something else",
    ConfigError.exit_code: "a setting, flag or file is wrong",
    HostError.exit_code: "this machine cannot do it",
    RefusedError.exit_code: "refused by the other side",
    PeerError.exit_code: "nobody answers, or a peer makes no progress",
    NonFiniteError.exit_code: "a value that is not finite",
    StateError.exit_code: "the state on this disk cannot be used",
    WorkerError.exit_code: "the training processes failed",
    ENDED_AT_ONCE: "Ctrl-C that ended it at once",
}


def exit_code_of(error: BaseException) -> int:
    """Of a process that ends with this error."""
    if isinstance(error, AtollError):
        return error.exit_code
    if isinstance(error, OSError):
        return HostError.exit_code
    return ENDED_AT_ONCE if isinstance(error, KeyboardInterrupt) else SOMETHING_ELSE


def exit_code_on_own_disk(error: BaseException) -> int:
    """The same where no other side takes part: bytes here that do not make sense are a damaged state."""
    if isinstance(error, RefusedError | NotYetError | PeerError):
        return StateError.exit_code
    return exit_code_of(error)
