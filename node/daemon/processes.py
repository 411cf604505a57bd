"""Process trees on Linux: finding every process of one, and ending it. Processes are held by pidfd, never by number."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from atoll.protocol.errors import HostError

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
KILL_ROUNDS = 20
KILL_ROUND_S = 0.5


def become_subreaper() -> None:
    """Orphans below this process become its children, instead of init's."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """The kernel kills this process when the thread that started it ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    """Raises HostError."""
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise HostError(f"prctl({option}): {os.strerror(ctypes.get_errno())}")


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process by number and start time (in ticks since boot); numbers are used again, pairs are not."""

    pid: int
    start_ticks: int


@dataclass(frozen=True, slots=True)
class _Stat:
    parent: int
    state: str
    start_ticks: int


def _stat(pid: int) -> _Stat | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name before it may hold anything
    return _Stat(int(fields[1]), fields[0], int(fields[19]))


def find_tree(mark: str) -> set[ProcessId]:
    """Living processes whose environment holds `mark` (NAME=VALUE), and all their descendants."""
    stats = {int(p): s for p in os.listdir("/proc") if p.isdigit() and (s := _stat(int(p))) is not None}
    wanted = mark.encode()
    found: set[int] = set()
    for pid in stats:
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            continue  # gone, or another user's
        if wanted in environment.split(b"\0"):
            found.add(pid)
    children: dict[int, list[int]] = {}
    for pid, stat in stats.items():
        children.setdefault(stat.parent, []).append(pid)
    new = list(found)
    while new:
        below = [c for c in children.get(new.pop(), ()) if c not in found]
        found.update(below)
        new += below
    found.discard(os.getpid())
    return {ProcessId(pid, stats[pid].start_ticks) for pid in found if stats[pid].state not in "ZX"}


def open_process(process: ProcessId) -> int | None:
    """A pidfd, readable when the process has ended; None if it is gone."""
    try:
        fd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return None
    stat = _stat(process.pid)
    if stat is None or stat.start_ticks != process.start_ticks:
        os.close(fd)
        return None
    return fd


async def ended(fds: Iterable[int], limit_s: float | None) -> bool:
    """Wait until all processes behind these pidfds have ended; False if the limit (None: for ever) came first."""
    loop = asyncio.get_running_loop()
    waiting: dict[int, asyncio.Future[None]] = {fd: loop.create_future() for fd in fds}

    def over(fd: int) -> None:
        loop.remove_reader(fd)
        waiting[fd].set_result(None)

    for fd in waiting:
        loop.add_reader(fd, over, fd)
    if not waiting:
        return True
    try:
        _, pending = await asyncio.wait(waiting.values(), timeout=limit_s)
        return not pending
    finally:
        for fd, future in waiting.items():
            if not future.done():
                loop.remove_reader(fd)


async def end_tree(mark: str, term_limit_s: float, own: frozenset[int] = frozenset()) -> None:
    """SIGTERM to every process of the tree, and SIGKILL to what is left after `term_limit_s`.

    Adopted orphans are reaped, one by one, because other children of this process are not ours to wait for; nor are
    those of `own`, whose exit status the caller wants. Raises HostError if a process outlives SIGKILL (it hangs in the
    kernel).
    """
    await _signal_tree(mark, signal.SIGTERM, term_limit_s, own)
    for _ in range(KILL_ROUNDS):  # more than one, because a process may start another one while we look
        if not await _signal_tree(mark, signal.SIGKILL, KILL_ROUND_S, own):
            return
    left = sorted(p.pid for p in find_tree(mark))
    raise HostError(f"processes {left} of the workers outlive SIGKILL; they hang in the kernel (driver, file system)")


async def _signal_tree(mark: str, number: int, limit_s: float, own: frozenset[int]) -> set[ProcessId]:
    """Returns whom it signalled."""
    tree = find_tree(mark)
    opened = {p: fd for p in tree if (fd := open_process(p)) is not None}
    try:
        for fd in opened.values():
            try:
                signal.pidfd_send_signal(fd, number)
            except ProcessLookupError:
                pass  # ended meanwhile, which is what we want
        await ended(opened.values(), limit_s)
        for process in opened:
            if process.pid not in own:
                _reap_adopted(process.pid)
    finally:
        for fd in opened.values():
            os.close(fd)
    return tree


def _reap_adopted(pid: int) -> None:
    stat = _stat(pid)
    if stat is not None and stat.state == "Z" and stat.parent == os.getpid():
        os.waitpid(pid, os.WNOHANG)
