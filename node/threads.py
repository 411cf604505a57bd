"""Threads that give way, and work that several of them share."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, Executor, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import TypeVar

log = logging.getLogger("atoll.node")
T = TypeVar("T")
Item = TypeVar("Item")


def giving_way(num_threads: int, name: str, nice: int) -> ThreadPoolExecutor:
    """Threads that get less of busy cores than this one, the less the larger `nice` is. So do threads that these
    start. `top -H` shows their name."""
    niceness = os.getpriority(os.PRIO_PROCESS, 0) + nice  # on Linux each thread has its own

    def give_way() -> None:
        os.setpriority(os.PRIO_PROCESS, 0, niceness)
        with suppress(OSError):  # a name for people
            Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name, encoding="ascii")

    return ThreadPoolExecutor(num_threads, thread_name_prefix=name, initializer=give_way)


def pool_of(num_threads: int) -> AbstractContextManager[Executor | None]:
    """For `each`. None for one thread: the thread that has the work is enough."""
    return ThreadPoolExecutor(num_threads) if num_threads > 1 else nullcontext()


def each(work: Callable[[Item], T], items: Iterable[Item], pool: Executor | None) -> list[T]:
    """In a thread: `work` on each item, shared out to `pool`; without one it is done here, one item after the other.

    Raises what the first of them raises. None of them goes on after the end: the disk may be rolled back next.
    """
    if pool is None:
        return [work(item) for item in items]
    jobs = [pool.submit(work, item) for item in items]
    wait(jobs, return_when=FIRST_EXCEPTION)
    for job in jobs:
        job.cancel()
    wait(jobs)
    return [job.result() for job in jobs]  # in the order in which they were begun: those that were cancelled come last
