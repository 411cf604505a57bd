"""What waits for a disk, or grows with the model, has no place in an event loop: all of a site stands still meanwhile.

`install` makes it raise there, for all tests, by its kind. The test's own calls are its own affair, and so is what a
simulated thread runs.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from atoll.node.dataplane import publish
from atoll.node.dataplane.outer_state import OuterState
from atoll.node.dataplane.sync_data import SyncData

TESTS = f"{Path(__file__).resolve().parents[1]}{os.sep}"
SIMULATION = f"{TESTS}simulation{os.sep}"
LOOKERS_ON = ("watched", "watched_output", "guarded")
"""Functions of the simulator around those of the program."""
SMALL = (
    "key",  # of a home, at its start
    "incarnation",
    "branch",
    "socket_folder",
    "node.sock",
    "journal.jsonl",  # bounded, and appended to
)
"""Names of files of some bytes that a node writes or removes before it serves anybody, or a line at a time."""
SMALL_FOLDERS = ("atoll-", "run-")
"""Beginnings of names: sockets and pipes."""


class BlockingInLoop(AssertionError):
    pass


def install() -> None:
    """Once, for the life of this process."""
    if getattr(os.fsync, "is_guarded", False):
        return
    for module, name in (
        (os, "fsync"),
        (os, "fdatasync"),
        (os, "posix_fallocate"),
        (os, "unlink"),
        (os, "remove"),
        (shutil, "rmtree"),
        (OuterState, "_replace"),
        (OuterState, "damaged"),
        (OuterState, "_verify"),
        (SyncData, "contribution"),
        (SyncData, "reduce"),
        (publish, "_each"),
    ):
        setattr(module, name, _guarded(getattr(module, name), name.strip("_")))


def _guarded(real: Callable[..., Any], kind: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        is_part = kwargs.get("dir_fd") is not None  # of a whole folder that is removed, which was looked at
        if (
            asyncio._get_running_loop() is not None
            and not is_part
            and not _is_small(args[0])
            and not _is_the_tests_own()
        ):
            raise BlockingInLoop(f"{kind} of {_name(args[0])!r} in the event loop; give it to a thread")
        return real(*args, **kwargs)

    call.is_guarded = True  # type: ignore[attr-defined]
    return call


def _name(what: object) -> str:
    if isinstance(what, int):
        what = os.readlink(f"/proc/self/fd/{what}")
    return os.fsdecode(what) if isinstance(what, str | bytes | os.PathLike) else type(what).__name__


def _is_small(what: object) -> bool:
    path = Path(_name(what))
    name = path.name.removeprefix(".").removesuffix(".new")
    if isinstance(what, int) and path.is_dir():
        return not name.startswith(("state", "payloads", "snapshots"))  # a home, for the names above
    return name in SMALL or path.name.startswith(SMALL_FOLDERS) or path.parent.name.startswith(SMALL_FOLDERS)


def _is_the_tests_own() -> bool:
    """Whether a test, or a thread of the simulator, comes before a coroutine of the program among the callers, and
    before the loop itself. The simulator looks on at every event and output, and is no caller then."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code is not asyncio.events.Handle._run.__code__:
        code = frame.f_code
        if code.co_filename == tempfile.__file__:
            return True  # it tries where files can be made, once in a process
        if code.co_filename.startswith(TESTS):
            if not (code.co_filename.startswith(SIMULATION) and code.co_name in LOOKERS_ON):
                return True
        elif code.co_flags & inspect.CO_COROUTINE:
            return False
        frame = frame.f_back
    return False
