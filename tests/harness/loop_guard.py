"""What waits for a disk, or grows with the model, has no place in an event loop: all of a site stands still meanwhile.

`install` makes it raise there, for all tests, by its kind. The test's own calls are its own affair, and so is what a
simulated thread runs.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import shutil
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from atoll.protocol import layout, wire
from atoll.protocol.digest import Digest
from atoll.protocol.disk import disk_error
from atoll.protocol.layout import Layout, Manifest

TESTS = f"{Path(__file__).resolve().parents[1]}{os.sep}"
SIMULATION = f"{TESTS}simulation{os.sep}"
ENDED = 97
"""An exit code that no process of the program has."""
MUCH_BYTES = 1 << 20
STARTS = ("coordinator/main.py", "coordinator/front_door.py", "node/daemon/main.py", "node/daemon/time_off.py")
IN_STARTS = ("serve", "listen", "_opened", "_begun", "_stay", "stay_off", "_run")
"""What these coroutines of theirs call themselves happens before anybody is served."""
LOOKERS_ON = ("watched", "watched_output", "allocate", "write_whole")
"""Functions of the simulator around those of the program: events, outputs, and a disk that may be full."""
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


def install(*, coordinator: bool = True, node: bool = True, ends_process: bool = False) -> None:
    """Once, for the life of this process, in which a `coordinator` or a `node` may run. `ends_process`: it raises, and
    ends at once with exit code `ENDED`, whoever would catch the error."""
    if getattr(os.fsync, "is_guarded", False):
        return
    named: list[tuple[Any, str]] = [
        (os, "fsync"),
        (os, "fdatasync"),
        (os, "posix_fallocate"),
        (os, "unlink"),
        (os, "remove"),
        (os, "pread"),
        (os, "pwrite"),
        (socket, "getaddrinfo"),  # also of a number, which takes no time
        (shutil, "rmtree"),
        (shutil, "copyfile"),
        (layout, "state_hash"),
        (Layout, "__init__"),
        (Manifest, "__post_init__"),
    ]
    named += of_the_coordinator() if coordinator else []
    named += of_the_node() if node else []
    for owner, name in named:
        kind = name.strip("_") if name != "__init__" else f"making of a {owner.__name__}"
        _put(owner, name, guarded(getattr(owner, name), kind, _always, ends_process=ends_process))
    disk_usage = guarded(shutil.disk_usage, "disk_usage", _is_in_use, ends_process=ends_process)
    _put(shutil, "disk_usage", disk_usage)
    for name in ("encode", "to_proto", "decode", "from_proto"):
        _put(wire, name, guarded(getattr(wire, name), f"{name} of a manifest", _is_manifest, ends_process=ends_process))
    for name in ("data", "more", "digests"):
        _put(Digest, name, guarded(getattr(Digest, name), "hash of much", _is_much, ends_process=ends_process))


def of_the_coordinator() -> list[tuple[Any, str]]:
    from atoll.coordinator.core.sync.chunk_sizes import ChunkSizes
    from atoll.coordinator.sqlite_store import SqliteStore

    store = ("begin", "persist", "read_commits", "commit_times")
    return [*((SqliteStore, name) for name in store), (ChunkSizes, "of")]


def of_the_node() -> list[tuple[Any, str]]:
    """Whoever copies, hashes, encodes or computes what is as large as a chunk or the model."""
    from atoll.node import threads
    from atoll.node.daemon.shared_memory import SharedBuffer
    from atoll.node.dataplane.chunk_store import ChunkStore
    from atoll.node.dataplane.outer_state import OuterState
    from atoll.node.dataplane.payload_file import PayloadFile
    from atoll.node.dataplane.payload_log import PayloadLog
    from atoll.node.dataplane.snapshot import Snapshots
    from atoll.node.dataplane.sync_data import SyncData
    from atoll.node.exchange.catchup.index import Index
    from atoll.node.exchange.sync import reduction
    from atoll.node.exchange.sync.retained import Retained
    from atoll.protocol.codecs import kernels

    return [
        *((ChunkStore, name) for name in ("replace", "damaged", "verify")),
        *((OuterState, name) for name in ("state_hash", "chunk_hashes", "freeze")),
        *((SyncData, name) for name in ("contribution", "reduce", "check", "check_payload", "payload_hash")),
        *((PayloadLog, name) for name in ("__init__", "begin", "commit", "hashes", "read", "roll_back", "drop")),
        *((PayloadLog, name) for name in ("has", "record", "commits", "open_commit")),
        *((PayloadFile, name) for name in ("put", "read", "seal", "missing", "digest")),
        (Retained, "chunks_of"),
        (Index, "add_list"),
        *((kernels, name) for name in ("encode", "decode", "accumulate", "check")),
        (Snapshots, "write"),
        (SharedBuffer, "__init__"),
        (threads, "each"),
        (reduction, "share_of"),
    ]


def _put(owner: Any, name: str, guarded: Callable[..., Any]) -> None:
    """Where modules have a function under its name, there too."""
    real = getattr(owner, name)
    setattr(owner, name, guarded)
    if isinstance(owner, ModuleType):
        for module_name, module in list(sys.modules.items()):
            if module_name.startswith("atoll.") and vars(module).get(name) is real:
                setattr(module, name, guarded)


def _always(*args: Any) -> bool:
    return True


def _is_manifest(*args: Any) -> bool:
    return isinstance(args[0], Manifest) or args[0] is Manifest


def _is_in_use(*args: Any) -> bool:
    """Not for the words of an error, with which a process ends."""
    return sys._getframe(2).f_code is not disk_error.__code__


def _is_much(*args: Any) -> bool:
    return len(args[1]) > MUCH_BYTES


def guarded(
    real: Callable[..., Any], kind: str, applies: Callable[..., bool] = _always, *, ends_process: bool = False
) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        is_part = kwargs.get("dir_fd") is not None  # of a whole folder that is removed, which was looked at
        if (
            (loop := asyncio._get_running_loop()) is not None
            and applies(*args)
            and not getattr(loop, "is_in_thread", False)  # the simulator's
            and not is_part
            and not _is_the_tests_own()
            and not _is_small(args[0])
        ):
            error = BlockingInLoop(f"{kind} of {_name(args[0])!r} in the event loop; give it to a thread")
            if ends_process:
                traceback.print_stack()
                sys.stderr.write(f"{type(error).__name__}: {error}\n")
                sys.stderr.flush()
                os._exit(ENDED)
            raise error
        return real(*args, **kwargs)

    call.is_guarded = True  # type: ignore[attr-defined]
    return call


def _name(what: object) -> str:
    if isinstance(what, int):
        what = os.readlink(f"/proc/self/fd/{what}")
    if isinstance(what, type):
        return what.__name__
    return os.fsdecode(what) if isinstance(what, str | os.PathLike) else type(what).__name__


def _is_small(what: object) -> bool:
    path = _name(what)
    if _is_small_by_name(path):
        return True
    if isinstance(what, int) and os.path.isdir(path):
        return not _leaf(path).startswith(("state", "payloads", "snapshots"))  # a home, for the names above
    return False


@lru_cache(maxsize=4096)
def _is_small_by_name(path: str) -> bool:
    """Kept: the simulator asks some thousand times a second."""
    folder, name = os.path.split(path)
    return (
        _leaf(path) in SMALL
        or name.endswith(".sock")
        or name.startswith(SMALL_FOLDERS)
        or os.path.basename(folder).startswith(SMALL_FOLDERS)
    )


def _leaf(path: str) -> str:
    return os.path.basename(path).removeprefix(".").removesuffix(".new")


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
            return code.co_filename.endswith(STARTS) and code.co_name in IN_STARTS
        frame = frame.f_back
    return False
